"""DBRX: a mixture of experts with layer norms, clamped queries, keys and values, one matrix for all three
(https://huggingface.co/databricks/dbrx-instruct)."""

import re
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import Family, Json, NamedTensors, read_limit, read_sizes

RENAMES = (
    (r"^wte\.", "tokens."),
    (r"^norm_f\.", "final_norm."),
    (r"\.norm_attn_norm\.norm_1\.", ".attention_norm."),
    (r"\.norm_attn_norm\.norm_2\.", ".mlp_norm."),
    (r"\.norm_attn_norm\.attn\.(query|key|value)\.", r".attention.\1."),
    (r"\.norm_attn_norm\.attn\.out_proj\.", ".attention.output."),
    (r"\.ffn\.router\.layer\.", ".mlp.router."),
    (r"\.ffn\.experts\.(\d+)\.", r".mlp.experts.\1."),
)
EXPERTS = re.compile(r"(.*\.ffn\.experts)\.mlp\.(w1|v1|w2)$")
PARTS = {"w1": "gate", "v1": "up", "w2": "down"}


def model_config(hf: Json) -> ModelConfig:
    attention, mixture = hf.get("attn_config") or {}, hf.get("ffn_config") or {}
    share = mixture.get("moe_normalize_expert_weights", 1.0)
    if share not in (None, 1):
        raise UnsupportedError(f"moe_normalize_expert_weights is {show_value(share)}; null and 1 are known")
    width = mixture.get("ffn_hidden_size", 3584)
    shape = llama.llama_config(
        {
            **hf,
            "rope_theta": attention.get("rope_theta", 10_000.0),
            "hidden_size": hf["d_model"],
            "num_hidden_layers": hf["n_layers"],
            "num_attention_heads": hf["n_heads"],
            "num_key_value_heads": attention.get("kv_n_heads", 1),
            "intermediate_size": width,
            "max_position_embeddings": hf["max_seq_len"],
            "hidden_act": (mixture.get("ffn_act_fn") or {}).get("name", "silu"),
        }
    )
    return replace(
        shape,
        norm="layer",
        norm_eps=1e-5,
        norm_bias=False,
        qkv_limit=read_limit(attention, "clip_qkv"),
        experts=ExpertConfig(
            count=mixture.get("moe_num_experts", 4),
            chosen=mixture.get("moe_top_k", 1),
            width=width,
            normalised=share is not None,
        ),
    )


def split_fused(sizes: list[int], count: int, name: str, tensor: Tensor) -> NamedTensors:
    """Queries, keys and values by `sizes`, the rows of each; and the matrices of `count` experts, which lie one below
    the other [E * I, W]."""
    if ".attn.Wqkv." in name:
        pieces = zip(("query", "key", "value"), torch.split(tensor, sizes), strict=True)
        return [(name.replace("Wqkv", part), piece) for part, piece in pieces]
    if found := EXPERTS.match(name):
        part = PARTS[found[2]]
        matrices = tensor.reshape(count, -1, tensor.size(-1))
        return [
            (f"{found[1]}.{number}.{part}.weight", matrix.t() if part == "down" else matrix)
            for number, matrix in enumerate(experts.list_experts(matrices))
        ]
    return [(name, tensor)]


def choose_variant(family: Family, hf: Json) -> Family:
    attention, mixture = hf.get("attn_config") or {}, hf.get("ffn_config") or {}
    counts = {"kv_n_heads": attention.get("kv_n_heads", 1), "moe_num_experts": mixture.get("moe_num_experts", 4)}
    width, heads, kv_heads, count = read_sizes({**hf, **counts}, "d_model", "n_heads", *counts)
    kept = kv_heads * (width // heads)
    return replace(family, convert=partial(split_fused, [width, kept, kept], count))


DBRX = Family(
    name="dbrx",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Dbrx", ()),
    drop=llama.DROP,
    variant=choose_variant,
)

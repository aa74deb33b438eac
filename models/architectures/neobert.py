"""NeoBERT: bidirectional, pre-norm with RMS norm, rotary positions in pairs side by side, gated MLP, no biases
(Le Breton et al. 2025, arXiv:2502.19587)."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from .family import (
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    check_required_values,
    deinterleave_heads,
    direct_scoring,
    read_head_count,
)

MULTIPLE = 8  # the MLP's width is a multiple of it
RENAMES = (
    (r"^encoder\.", "tokens."),
    (r"^transformer_encoder\.", "blocks."),
    (r"\.wo\.", ".attention.output."),
    (r"\.ffn_norm\.", ".mlp_norm."),
    (r"\.ffn\.w3\.", ".mlp.down."),
    (r"^layer_norm\.", "final_norm."),
)
TEXT_HEAD = ((r"^dense\.", "head.dense."), (r"^classifier\.", "head.out."))


def model_config(hf: Json) -> ModelConfig:
    """The MLP is two thirds as wide as the configuration has it, since it is gated."""
    check_required_values(hf, {"rope": True, "rms_norm": True, "hidden_act": "swiglu", "ngpt": False})
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=-(-int(2 * hf["intermediate_size"] / 3) // MULTIPLE) * MULTIPLE,
        max_positions=hf.get("max_length", 1024),
        causal=False,
        position="rotary",
        norm="rms",
        norm_eps=hf.get("norm_eps", 1e-6),
        activation="silu",
        gated_mlp=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def convert_weight(heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split the fused matrices: of each head's query, key and value, and of the MLP."""
    if ".ffn.w12." in name:
        gate, up = tensor.chunk(2)
        return [(name.replace("ffn.w12", "mlp.gate"), gate), (name.replace("ffn.w12", "mlp.up"), up)]
    if ".qkv." not in name:
        return [(name, tensor)]
    query, key, value = (part.flatten(0, 1) for part in tensor.view(heads, 3, -1, tensor.size(1)).unbind(1))
    parts = {"query": deinterleave_heads(query, heads), "key": deinterleave_heads(key, heads), "value": value}
    return [(name.replace("qkv", f"attention.{kind}"), part) for kind, part in parts.items()]


def choose_variant(family: Family, hf: Json) -> Family:
    return replace(family, convert=partial(convert_weight, read_head_count(hf)))


NEOBERT = Family(
    "neobert",
    "model",
    model_config,
    RENAMES,
    {
        "NeoBERT": HeadSpec("embed"),
        "NeoBERTForSequenceClassification": HeadSpec("classify", TEXT_HEAD),
        "NeoBERTLMHead": HeadSpec("fill", ((r"^decoder\.", "head.output."),), direct_scoring),
    },
    drop=r"^(decoder|dense|classifier)\.|freqs_cis$",
    variant=choose_variant,
)

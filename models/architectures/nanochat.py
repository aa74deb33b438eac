"""nanochat (https://github.com/karpathy/nanochat): norms without weights, also of queries and keys after their
rotation, and an MLP of squared rectified features without a gate."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, NamedTensors, read_head_counts, read_limit

RENAMES = ((r"\.mlp\.fc1\.", ".mlp.up."), (r"\.mlp\.fc2\.", ".mlp.down."), *llama.RENAMES)


def model_config(hf: Json) -> ModelConfig:
    shape = llama.llama_config({"hidden_act": "relu2", **hf})
    return replace(
        shape,
        norm_weight=False,
        embedding_norm=True,
        query_key_norm="shared",
        query_key_norm_weight=False,
        norm_after_rotation=True,
        gated_mlp=False,
        mlp_bias=False,
        logit_cap=read_limit({"final_logit_softcapping": 15.0, **hf}, "final_logit_softcapping"),
    )


def turn_back(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Queries and keys with the halves of each head exchanged: the network rotates them the other way round."""
    for part, count in (("q", heads), ("k", kv_heads)):
        if f".{part}_proj." in name:
            halves = tensor.reshape(count, 2, -1, *tensor.shape[1:])
            return [(name, halves.flip(1).reshape(tensor.shape))]
    return [(name, tensor)]


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(turn_back, heads, kv_heads))


NANOCHAT = Family(
    name="nanochat",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("NanoChat", ()),
    drop=llama.DROP,
    variant=choose_variant,
)

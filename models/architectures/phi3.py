"""Phi-3, Phi-3.5 and Phi-4: Llama with fused projections, LongRoPE and, in small ones, partial rotation."""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..network.model_config import ModelConfig
from . import llama
from .family import ORIGINAL, Family, Json, NamedTensors, read_head_counts, rope_parameters, rope_type

DEFAULT_CONTEXT = 4096  # tokens that the network was pretrained with, if the configuration does not say it
OLDER_TYPES = ("su", "yarn")  # names of LongRoPE in the first published configurations


def model_config(hf: Json) -> ModelConfig:
    """The original context outside of the rotation's parameters goes before the one inside, be it the default."""
    parameters = {**rope_parameters(hf), ORIGINAL: hf.get(ORIGINAL) or DEFAULT_CONTEXT}
    if rope_type(parameters) in OLDER_TYPES:
        parameters["rope_type"] = "longrope"
    hf = {"rms_norm_eps": 1e-5, **hf, "rope_parameters": parameters, "attention_bias": False, "mlp_bias": False}
    return replace(llama.model_config(hf), windowed=())


def split_fused(heads: int, kv_heads: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split the matrix of queries, keys and values, and that of gate and up projection."""
    if ".qkv_proj." in name:
        width = len(tensor) // (heads + 2 * kv_heads)
        sizes, names = [heads * width, kv_heads * width, kv_heads * width], ("q_proj", "k_proj", "v_proj")
        parts = torch.split(tensor, sizes)
        return [(name.replace("qkv_proj", part), piece) for part, piece in zip(names, parts, strict=True)]
    return split_gate(name, tensor)


def split_gate(name: str, tensor: Tensor) -> NamedTensors:
    """Split the matrix of gate and up projection."""
    if ".gate_up_proj." in name:
        parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
        return [(name.replace("gate_up_proj", part), piece) for part, piece in parts]
    return [(name, tensor)]


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(split_fused, heads, kv_heads))


PHI3 = Family(
    name="phi3",
    prefix="model",
    config=model_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Phi3", llama.LABELS),
    drop=llama.DROP,
    variant=choose_variant,
    rotates_share=True,
)

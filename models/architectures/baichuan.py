"""Baichuan and Baichuan 2 with 7 billion parameters: Llama with one matrix of queries, keys and values; the second
generation divides each row of the output matrix by its length."""

from dataclasses import replace

from torch import Tensor
from torch.nn import functional as F

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import llama
from .family import Family, HeadSpec, Json, NamedTensors
from .fused_matrices import split_fused

FIRST, SECOND = "BaiChuanForCausalLM", "BaichuanForCausalLM"  # classes of the two generations
RENAMES = ((r"\.self_attn\.(query|key|value)\.", r".attention.\1."), *llama.RENAMES)


def model_config(hf: Json) -> ModelConfig:
    if "max_position_embeddings" not in hf:
        raise UnsupportedError(
            "without max_position_embeddings it is Baichuan 13B, whose linear biases are not known here"
        )
    return llama.llama_config(hf)


def split_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Split the matrix of queries, keys and values: all queries, then all keys, then all values."""
    return split_fused("W_pack", 1, 1, name, tensor)


def normalise_output(name: str, tensor: Tensor) -> NamedTensors:
    return [(name, F.normalize(tensor))] if name == "lm_head.weight" else split_weight(name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    return replace(family, convert=normalise_output) if hf.get("architectures") == [SECOND] else family


BAICHUAN = Family(
    name="baichuan",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={name: HeadSpec("generate", llama.LANGUAGE_HEAD) for name in (FIRST, SECOND)},
    convert=split_weight,
    drop=llama.DROP,
    variant=choose_variant,
)

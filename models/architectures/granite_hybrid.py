"""Granite 4 with state space layers: Granite's scales, Bamba's layers, a plain MLP or experts with one that all tokens
use (https://huggingface.co/ibm-granite)."""

from dataclasses import replace

from torch import Tensor

from ..network.model_config import MixerName, ModelConfig
from . import granite_moe, llama, state_space
from .family import Family, Json, NamedTensors, read_mixers
from .granite import granite_config

RENAMES = (*state_space.RENAMES, *granite_moe.RENAMES)
DENSE_RENAMES = ((r"\.mlp\.shared\.", ".mlp."), *RENAMES)


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    [(name, tensor)] = state_space.squeeze_taps(name, tensor)
    return granite_moe.split_experts(name, tensor)


def model_config(hf: Json) -> ModelConfig:
    hf = {"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024, **hf, "mlp_bias": False}
    if is_dense(hf):
        shape = granite_config({**hf, "intermediate_size": hf["shared_intermediate_size"]})
    else:
        shape = granite_moe.model_config(hf)
    mixer: MixerName = "state_space"
    return replace(
        shape,
        position="rotary" if hf.get("position_embedding_type") == "rope" else "none",
        recurrent=state_space.read_hybrid({"rms_norm_eps": 1e-6, **hf}),
        mixers=read_mixers(hf, state_space.KINDS) if hf.get("layer_types") else (mixer,) * shape.depth,
    )


def is_dense(hf: Json) -> bool:
    return hf.get("num_local_experts") == 0


def choose_variant(family: Family, hf: Json) -> Family:
    """Without experts the one that all tokens use is the MLP."""
    return replace(family, renames=DENSE_RENAMES) if is_dense(hf) else family


GRANITE_HYBRID = Family(
    name="granitemoehybrid",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("GraniteMoeHybrid", ()),
    convert=convert_weight,
    drop=llama.DROP,
    variant=choose_variant,
)

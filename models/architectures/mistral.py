"""Ministral and Ministral 3: Mistral with windows in some layers, or with queries scaled beyond a position; and the
text part of Mistral with images."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import ORIGINAL, Json, rope_parameters
from .text_part import wrap_family

YARN: Json = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    ORIGINAL: 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # of Ministral 3, unless the configuration has its own


def ministral_config(hf: Json) -> ModelConfig:
    return llama.model_config({"sliding_window": 4096, **hf, "attention_bias": False, "mlp_bias": False})


def ministral3_config(hf: Json) -> ModelConfig:
    """Queries from the original context on are scaled; contexts end before, where that scale is one."""
    hf = {"head_dim": 128, "rms_norm_eps": 1e-5, **hf, "rope_parameters": rope_parameters(hf) or YARN}
    shape = llama.mistral_config({"sliding_window": None, **hf, "attention_bias": False, "mlp_bias": False})
    return limit_positions(shape, hf)


def limit_positions(shape: ModelConfig, hf: Json) -> ModelConfig:
    """With the context before the first position whose query is scaled."""
    parameters = rope_parameters(hf)
    if not parameters.get("llama_4_scaling_beta"):
        return shape
    return replace(shape, max_positions=min(shape.max_positions, int(parameters[ORIGINAL])))


MINISTRAL = replace(llama.MISTRAL, name="ministral", config=ministral_config, heads=llama.llama_heads("Ministral"))
MINISTRAL3 = replace(MINISTRAL, name="ministral3", config=ministral3_config, heads=llama.llama_heads("Ministral3"))
MISTRAL_IMAGES = wrap_family("mistral3", "Mistral3", (llama.MISTRAL, MINISTRAL3))

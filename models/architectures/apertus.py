"""Apertus (arXiv:2509.14233): Llama with normed queries and keys, and an activation with learned slopes."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, has_rotation
from .llama_variants import CWM_ROPE

RENAMES = (
    (r"\.attention_layernorm\.", ".attention_norm."),
    (r"\.feedforward_layernorm\.", ".mlp_norm."),
    (r"\.mlp\.act_fn\.alpha_p$", ".mlp.slopes.positive"),
    (r"\.mlp\.act_fn\.alpha_n$", ".mlp.slopes.negative"),
    (r"\.mlp\.act_fn\.beta$", ".mlp.slopes.linear"),
    (r"\.mlp\.act_fn\.eps$", ".mlp.slopes.largest"),
    *llama.RENAMES,
)
ROPE: Json = {**CWM_ROPE, "rope_theta": 12_000_000.0, "factor": 8.0}  # unless the configuration has its own


def model_config(hf: Json) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 12_000_000.0, **hf, "mlp_bias": False}
    activation = hf.get("hidden_act", "xielu")
    if activation != "xielu":
        raise UnsupportedError(f"hidden_act is {show_value(activation)}: only 'xielu' is known")
    if not has_rotation(hf):
        hf["rope_parameters"] = ROPE
    shape = llama.llama_config({**hf, "hidden_act": "silu"})
    return replace(shape, activation="xielu", gated_mlp=False, query_key_norm="shared")


APERTUS = Family(
    name="apertus",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Apertus", ("ForTokenClassification",)),
    drop=llama.DROP,
)

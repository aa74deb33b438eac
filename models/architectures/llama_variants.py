"""Decoders that differ from Llama in few points: IQuest-Coder, CWM (arXiv:2510.02387) and Jais 2."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Json, check_required_values, has_rotation, layer_numbers

CWM_ROPE: Json = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # unless the configuration has its own


def iquest_config(hf: Json) -> ModelConfig:
    check_required_values(hf, {"clip_qkv": None, "use_sliding_window": False})
    return llama.llama_config({"head_dim": 128, "rms_norm_eps": 1e-5, **hf})


def cwm_config(hf: Json) -> ModelConfig:
    """All layers but every fourth, from the first one on, have a window."""
    hf = {
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "rope_theta": 1_000_000.0,
        **hf,
        "attention_bias": False,
    }
    if not has_rotation(hf):
        hf["rope_parameters"] = CWM_ROPE
    shape = llama.model_config(hf)
    by_depth = tuple(bool(layer % 4) for layer in layer_numbers(hf["num_hidden_layers"]))
    return replace(shape, windowed=shape.windowed or by_depth)


def jais2_config(hf: Json) -> ModelConfig:
    """Biased layer norms, biases everywhere, and an MLP of squared rectified features without a gate."""
    hf = {"layer_norm_eps": 1e-5, "hidden_act": "relu2", "attention_bias": True, "mlp_bias": True, **hf}
    shape = llama.llama_config({**hf, "rms_norm_eps": hf["layer_norm_eps"]})
    return replace(shape, norm="layer", gated_mlp=False)


IQUEST_CODER = replace(llama.LLAMA, name="iquestcoder", config=iquest_config)
CWM = replace(llama.LLAMA, name="cwm", config=cwm_config, heads=llama.llama_heads("Cwm", ()))
JAIS2 = replace(llama.LLAMA, name="jais2", config=jais2_config, heads=llama.llama_heads("Jais2", ()))

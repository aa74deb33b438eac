"""Bamba: state space layers (Mamba-2) with attention in a few of them (https://huggingface.co/ibm-ai-platform)."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama, state_space
from .family import Family, Json, layer_numbers

RENAMES = (
    (r"^final_layernorm\.", "final_norm."),
    (r"\.pre_ff_layernorm\.", ".mlp_norm."),
    (r"\.feed_forward\.(up|gate|down)_proj\.", r".mlp.\1."),
    *state_space.RENAMES,
    *llama.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    """Half of the features of a head are rotated unless `rope_parameters` says so."""
    hf = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, **hf, "partial_rotary_factor": 0.5}
    attending = hf.get("attn_layer_indices") or ()
    layers = layer_numbers(hf["num_hidden_layers"])
    return replace(
        llama.llama_config(hf),
        recurrent=state_space.read_hybrid(hf),
        mixers=tuple("attention" if layer in attending else "state_space" for layer in layers),
    )


BAMBA = Family(
    name="bamba",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Bamba", ()),
    convert=state_space.squeeze_taps,
    drop=llama.DROP,
    rotates_share=True,
)

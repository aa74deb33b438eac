"""Phi-1, Phi-1.5 and Phi-2: attention and MLP of one normed input, partial rotation, biases everywhere."""

from dataclasses import replace

from torch import Tensor

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, NamedTensors

RENAMES = (
    (r"^final_layernorm\.", "final_norm."),
    (r"\.self_attn\.dense\.", ".attention.output."),
    (r"\.self_attn\.(q|k)_layernorm\.", r".self_attn.\1_norm."),
    (r"\.mlp\.fc1\.", ".mlp.up."),
    (r"\.mlp\.fc2\.", ".mlp.down."),
    *llama.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    hf = {"partial_rotary_factor": 0.5, "hidden_act": "gelu_new", **hf}
    return replace(
        llama.model_config(hf),
        window=0,
        windowed=(),
        norm="layer",
        norm_order="parallel",
        norm_eps=hf.get("layer_norm_eps", 1e-5),
        query_key_norm="shared" if hf.get("qk_layernorm") else "",
        query_key_norm_bias=True,
        gated_mlp=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        logit_bias=True,
    )


def share_norm(name: str, tensor: Tensor) -> NamedTensors:
    """Name the one norm of a layer twice: before attention and before the MLP. A second norm of the file is left out,
    as the reference does."""
    if ".input_layernorm." in name:
        return [(name, tensor), (name.replace("input", "post_attention"), tensor)]
    return [] if ".post_attention_layernorm." in name else [(name, tensor)]


PHI = Family(
    name="phi",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Phi", llama.LABELS),
    convert=share_norm,
    drop=llama.DROP,
    rotates_share=True,
)

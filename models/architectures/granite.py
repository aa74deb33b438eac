"""Granite, HyperCLOVA X and MiniCPM: Llama with scaled embeddings, residual sums and logits."""

from dataclasses import replace

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, check_required_values, layer_numbers, read_limit, read_positive, read_windowed_layers

SINK_RENAMES = ((r"\.self_attn\.sinks$", ".attention.sinks"), *llama.RENAMES)
CLOVA_RENAMES = (
    (r"\.post_norm1\.", ".attention_post_norm."),
    (r"\.post_norm2\.", ".mlp_post_norm."),
    *llama.RENAMES,
)


def granite_config(hf: Json) -> ModelConfig:
    return replace(
        llama.llama_config(hf),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        score_scale=read_positive({"attention_multiplier": 1.0, **hf}, "attention_multiplier"),
        logit_scale=1.0 / float(hf.get("logits_scaling", 1.0)),
    )


def add_windows(shape: ModelConfig, hf: Json) -> ModelConfig:
    """With windows in all layers but every fourth, from the first one on, and sinks. `layer_rope_theta` lists the
    rotary base of each layer, 0 for one without positions."""
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    windowed = read_windowed_layers(hf) or tuple(bool(layer % 4) for layer in range(depth))
    bases = hf.get("layer_rope_theta")
    window = hf.get("sliding_window", 128) or 0
    shape = replace(shape, window=window, windowed=windowed, sinks=True)
    if bases is None:
        return shape
    full, local = (
        {float(base) for base, is_windowed in zip(bases, windowed, strict=False) if base and is_windowed == kind}
        for kind in (False, True)
    )
    if len(bases) != depth or len(full) > 1 or len(local) > 1:
        raise UnsupportedError(
            f"layer_rope_theta should have a number for each of {depth} layers: one base, or 0, for those with a "
            "window, and one for the others"
        )
    base = next(iter(full or local), shape.rope_base)
    local_base = next(iter(local), base)
    if local_base != base and shape.rope_scaling is not None:
        raise UnsupportedError("layer_rope_theta with two bases: a scaling of both is not known here")
    return replace(
        shape,
        rope_base=base,
        window_rope_base=local_base if local_base != base else 0.0,
        rotated=tuple(bool(each) for each in bases),
    )


def windowed_config(hf: Json) -> ModelConfig:
    """Granite with windows and sinks (https://huggingface.co/ibm-granite)."""
    return add_windows(granite_config({"rms_norm_eps": 1e-5, **hf}), hf)


def clova_config(hf: Json) -> ModelConfig:
    """HyperCLOVA X: logits are multiplied by their scale, and each part has a norm after it."""
    shape = granite_config({**hf, "attention_multiplier": 1.0})
    return replace(
        shape,
        score_scale=read_limit(hf, "attention_multiplier"),
        logit_scale=float(hf.get("logits_scaling", 1.0)),
        norm_order="sandwich" if hf.get("use_post_norm", True) else "pre",
    )


def minicpm_config(hf: Json) -> ModelConfig:
    """MiniCPM 1 and 2: the width of a smaller network that it was tuned by, the number of layers and of features give
    the scales (Hu et al. 2024, arXiv:2404.06395)."""
    check_required_values(hf, {"num_experts": 0, "sparse_config": None})
    return replace(
        llama.llama_config(hf),
        embedding_scale=float(hf.get("scale_emb", 1)),
        residual_scale=float(hf.get("scale_depth", 1)) / hf["num_hidden_layers"] ** 0.5,
        logit_scale=float(hf.get("dim_model_base", 1)) / hf["hidden_size"],
    )


GRANITE = Family(
    name="granite",
    prefix="model",
    config=granite_config,
    renames=llama.RENAMES,
    heads=llama.llama_heads("Granite", ()),
    drop=llama.DROP,
)
GRANITE_SWA = replace(
    GRANITE,
    name="granite_swa",
    config=windowed_config,
    renames=SINK_RENAMES,
    heads=llama.llama_heads("GraniteSWA", ()),
)
HYPERCLOVA_X = replace(
    GRANITE,
    name="hyperclovax",
    config=clova_config,
    renames=CLOVA_RENAMES,
    heads=llama.llama_heads("HyperCLOVAX", ()),
)
MINICPM = replace(GRANITE, name="minicpm", config=minicpm_config, heads=llama.llama_heads("MiniCPM", ()))

"""Phi-3.5-MoE: two experts chosen one after the other, layer norms (arXiv:2404.14219)."""

from dataclasses import replace

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama, mixtral
from .family import Family, Json, check_required_values, rope_parameters, rope_type

RENAMES = (
    (r"\.mlp\.router\.", ".mlp.router."),
    (r"^norm\.", "final_norm."),
    *mixtral.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    """Within the pretrained context LongRoPE's magnitude is `short_mscale`."""
    check_required_values(hf, {"num_experts_per_tok": 2})
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **hf}
    shape = llama.model_config({**hf, "sliding_window": hf.get("sliding_window") or 0})
    scaling, parameters = shape.rope_scaling, rope_parameters(hf)
    if scaling is not None and rope_type(parameters) != "default":
        scaling = replace(scaling, magnitude=float(parameters["short_mscale"]))
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=2,
        width=hf["intermediate_size"],
        scoring="sparse_mixer",
        margin=2 * float(hf.get("router_jitter_noise", 0.01)),
    )
    return replace(
        shape,
        windowed=(),
        rope_scaling=scaling,
        norm="layer",
        logit_bias=bool(hf.get("lm_head_bias")),
        experts=mixture,
    )


PHIMOE = Family(
    name="phimoe",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Phimoe", ("ForSequenceClassification",))
    | {"PhiMoEForCausalLM": llama.llama_heads("Phimoe", ())["PhimoeForCausalLM"]},
    convert=experts.split_experts,
    drop=llama.DROP,
    published_classes=frozenset(("PhiMoEForCausalLM",)),
)

"""Mixtral: Mistral with experts in every layer (Jiang et al. 2024, arXiv:2401.04088)."""

from dataclasses import replace

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama
from .family import Family, Json

RENAMES = (
    (r"\.block_sparse_moe\.gate\.", ".mlp.router."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.experts\.(\d+)\.w1\.", r".experts.\1.gate."),
    (r"\.experts\.(\d+)\.w2\.", r".experts.\1.down."),
    (r"\.experts\.(\d+)\.w3\.", r".experts.\1.up."),
    *experts.RENAMES,
    *llama.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    mixture = ExpertConfig(
        count=experts.expert_count(hf), chosen=hf["num_experts_per_tok"], width=hf["intermediate_size"]
    )
    hf = {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, **hf}
    return replace(llama.model_config(hf), windowed=(), experts=mixture)


MIXTRAL = Family(
    name="mixtral",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("Mixtral"),
    convert=experts.split_experts,
    drop=llama.DROP,
)

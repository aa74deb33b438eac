"""Granite and MiniCPM: Llama with scaled embeddings, residual sums and logits."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import llama
from .family import Family, Json, check_required_values


def granite_config(hf: Json) -> ModelConfig:
    return replace(
        llama.llama_config(hf),
        embedding_scale=float(hf.get("embedding_multiplier", 1.0)),
        residual_scale=float(hf.get("residual_multiplier", 1.0)),
        score_scale=float(hf.get("attention_multiplier", 1.0)),
        logit_scale=1.0 / float(hf.get("logits_scaling", 1.0)),
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
MINICPM = replace(GRANITE, name="minicpm", config=minicpm_config, heads=llama.llama_heads("MiniCPM", ()))

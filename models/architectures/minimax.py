"""MiniMax-M2: logistic scores with a bias for the choice, queries and keys normed over all heads together
(https://huggingface.co/MiniMaxAI/MiniMax-M2)."""

from dataclasses import replace

from ..network.model_config import ExpertConfig, ModelConfig
from . import experts, llama, mixtral
from .family import Family, Json, check_required_values, read_sizes

RENAMES = ((r"\.(block_sparse_moe|mlp)\.e_score_correction_bias$", ".mlp.choice_bias"), *mixtral.RENAMES)
KNOWN = {"scoring_func": "sigmoid", "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0}


def model_config(hf: Json) -> ModelConfig:
    """Published configurations have `rotary_dim`, the number of rotated features, in place of their share."""
    check_required_values(hf, KNOWN)
    hf = {"head_dim": 128, "rope_theta": 5_000_000.0, **hf}
    if hf.get("rotary_dim") is not None:
        [width] = read_sizes(hf, "rotary_dim")
        hf = {"partial_rotary_factor": width / hf["head_dim"], **hf}
    shape = llama.llama_config({**hf, "attention_bias": False})
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["intermediate_size"],
        scoring="sigmoid",
        choice_bias=True,
    )
    return replace(shape, query_key_norm="joint", experts=mixture)


MINIMAX_M2 = Family(
    name="minimax_m2",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("MiniMaxM2", ()),
    convert=experts.split_experts,
    drop=llama.DROP,
    rotates_share=True,
)

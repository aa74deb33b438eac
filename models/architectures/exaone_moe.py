"""K-EXAONE: experts as in DeepSeek-V3, and positions only in layers with a window
(https://huggingface.co/LGAI-EXAONE)."""

from dataclasses import replace

from ..network.model_config import ModelConfig
from . import experts, llama
from .exaone import by_depth
from .family import Family, Json, read_windowed_layers
from .qwen_moe import routed_experts

RENAMES = ((r"\.mlp\.e_score_correction_bias$", ".mlp.choice_bias"), *experts.RENAMES, *llama.RENAMES)


def model_config(hf: Json) -> ModelConfig:
    hf = {"rms_norm_eps": 1e-5, "first_k_dense_replace": 1, "norm_topk_prob": True, "num_shared_experts": 1, **hf}
    hf = {"sliding_window": 4096, "sliding_window_pattern": 4, "routed_scaling_factor": 2.5, **hf}
    hf |= {"attention_bias": False, "mlp_bias": False}
    windowed = read_windowed_layers(hf) or by_depth(hf["num_hidden_layers"], hf["sliding_window_pattern"])
    mixture = routed_experts({**hf, "n_shared_experts": hf["num_shared_experts"]})
    if kinds := hf.get("mlp_layer_types"):
        mixture = replace(mixture, layers=tuple(kind == "sparse" for kind in kinds))
    shape = replace(llama.llama_config(hf), query_key_norm="shared", experts=mixture)
    if not hf["sliding_window"]:
        return shape
    return replace(shape, window=hf["sliding_window"], windowed=windowed, rotated=windowed)


EXAONE_MOE = Family(
    name="exaone_moe",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("ExaoneMoe", ()),
    convert=experts.split_experts,
    drop=rf"{llama.DROP}|^mtp\.",  # layers that predict further tokens in training
)

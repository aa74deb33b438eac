"""Latent attention: DeepSeek-V2 (arXiv:2405.04434) and V3 (arXiv:2412.19437), Kimi K2, GLM-4.7-Flash and MiniCPM3."""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ExpertConfig, LatentConfig, ModelConfig
from . import experts, llama
from .family import (
    Family,
    Json,
    NamedTensors,
    check_required_values,
    deinterleave_heads,
    layer_numbers,
    read_sizes,
    rope_parameters,
    rope_type,
    yarn_magnitude,
)
from .prediction_layers import drop_prediction_layers
from .qwen_moe import read_groups, routed_experts

RENAMES = (
    (r"\.self_attn\.(q_proj|q_b_proj)\.", ".attention.query."),
    (r"\.self_attn\.q_a_proj\.", ".attention.query_down."),
    (r"\.self_attn\.q_a_layernorm\.", ".attention.query_down_norm."),
    (r"\.self_attn\.kv_a_layernorm\.", ".attention.down_norm."),
    *experts.RENAMES,
    *llama.RENAMES,
)
KNOWN_V2 = {"norm_topk_prob": False, "moe_layer_freq": 1, "scoring_func": "softmax", "mlp_bias": False}
KNOWN_V3 = {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
CHOICES = ("greedy", "group_limited_greedy")


@dataclass(frozen=True)
class LatentRows:
    """The rows of the matrices of latent attention in the files: heads, the widths of a head's parts. `interleaved`:
    rotated features that form a pair are neighbours."""

    heads: int
    rank: int
    plain: int
    rotated: int
    value: int
    interleaved: bool

    def reorder_query(self, matrix: Tensor) -> Tensor:
        """[H * (plain + rotated), ...], with the rotated rows of each head before the others."""
        by_head = matrix.reshape(self.heads, -1, *matrix.shape[1:])
        plain, rotated = torch.split(by_head, [self.plain, self.rotated], dim=1)
        paired = self.pair(rotated.flatten(0, 1)).view(rotated.shape)
        return torch.cat((paired, plain), dim=1).flatten(0, 1)

    def pair(self, rotated: Tensor) -> Tensor:
        """Rotated rows of some heads [H * rotated, ...], with the rows of a pair half a head apart."""
        return deinterleave_heads(rotated, len(rotated) // self.rotated) if self.interleaved else rotated

    def split_down(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix of the narrow vector [rank, ...], and that of rotated features [rotated, ...]."""
        narrow, rotated = torch.split(matrix, [self.rank, self.rotated])
        return narrow, self.pair(rotated)

    def split_up(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The matrices of keys [H * plain, rank] and of values [H * value, rank]."""
        by_head = matrix.reshape(self.heads, -1, *matrix.shape[1:])
        keys, values = torch.split(by_head, [self.plain, self.value], dim=1)
        return keys.flatten(0, 1), values.flatten(0, 1)

    def convert(self, name: str, tensor: Tensor) -> NamedTensors:
        """The tensors of a layer's attention; others as they are, but for fused experts."""
        before, _, module = name.partition(".self_attn.")
        module, _, leaf = module.partition(".")
        before += ".attention"
        if module in ("q_proj", "q_b_proj"):
            return [(f"{before}.query.{leaf}", self.reorder_query(tensor))]
        if module == "kv_a_proj_with_mqa":
            narrow, rotated = self.split_down(tensor)
            return [(f"{before}.down.{leaf}", narrow), (f"{before}.key_rotated.{leaf}", rotated)]
        if module == "kv_b_proj":
            keys, values = self.split_up(tensor)
            return [(f"{before}.key.{leaf}", keys), (f"{before}.value.{leaf}", values)]
        return experts.split_experts(name, tensor)


def latent_config(hf: Json) -> ModelConfig:
    """Llama's configuration with latent attention. `mscale_all_dim` of YaRN scales scores, too."""
    heads = hf["num_attention_heads"]
    if (kept := hf.get("num_key_value_heads") or heads) != heads:
        raise UnsupportedError(f"num_key_value_heads is {show_value(kept)}; {heads}, the number of heads, is known")
    width, rotated = hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"], hf["qk_rope_head_dim"]
    latent = LatentConfig(rank=hf["kv_lora_rank"], query_rank=hf.get("q_lora_rank") or 0, value_width=value_width(hf))
    shape = llama.llama_config({**hf, "head_dim": width, "partial_rotary_factor": None})
    parameters = rope_parameters(hf)
    magnitude = 1.0
    if rope_type(parameters) != "default" and parameters.get("mscale_all_dim"):
        magnitude = yarn_magnitude(float(parameters["factor"]), float(parameters["mscale_all_dim"]))
    return replace(
        shape,
        latent=latent,
        rotary_width=rotated,
        score_scale=width**-0.5 * magnitude**2,
    )


def value_width(hf: Json) -> int:
    return int(hf.get("v_head_dim") or hf["hidden_size"] // hf["num_attention_heads"])


def deepseek2_config(hf: Json) -> ModelConfig:
    """Scores of experts are a softmax over all of them. What DeepSeek's own code does with `norm_topk_prob`, the
    reference does not; no published network of this version has it."""
    check_required_values(hf, KNOWN_V2)
    choice = hf.get("topk_method") or "greedy"
    if choice not in CHOICES:
        raise UnsupportedError(f"topk_method {show_value(choice)} is not one of {', '.join(CHOICES)}")
    groups, chosen_groups = read_groups(hf)
    grouped = choice == "group_limited_greedy" and groups > 1
    shared = hf.get("n_shared_experts", 2) or 0
    mixture = ExpertConfig(
        count=experts.expert_count(hf),
        chosen=hf["num_experts_per_tok"],
        width=hf["moe_intermediate_size"],
        layers=experts.layers_from(hf, hf.get("first_k_dense_replace") or 0),
        normalised=False,
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        groups=groups if grouped else 0,
        chosen_groups=chosen_groups if grouped else 0,
        shared_width=hf["moe_intermediate_size"] * shared,
    )
    return replace(latent_config(hf), experts=mixture)


def deepseek3_config(hf: Json) -> ModelConfig:
    check_required_values(hf, KNOWN_V3)
    hf = {"first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5, **hf}
    return replace(latent_config(hf), experts=routed_experts({"n_group": 8, "topk_group": 4, **hf}))


def glm4_lite_config(hf: Json) -> ModelConfig:
    """GLM-4.7-Flash: the first layer has no experts, unless `mlp_layer_types` says so."""
    check_required_values(hf, KNOWN_V3)
    hf = {"norm_topk_prob": True, "routed_scaling_factor": 1.8, "first_k_dense_replace": 1, **hf}
    mixture = routed_experts(hf)
    kinds = hf.get("mlp_layer_types")
    layers = tuple(kind == "sparse" for kind in kinds) if kinds else mixture.layers
    return replace(latent_config({"rms_norm_eps": 1e-5, **hf}), experts=replace(mixture, layers=layers))


def minicpm3_config(hf: Json) -> ModelConfig:
    """MiniCPM3 has no experts; embeddings, sums and logits are scaled (Hu et al. 2024, arXiv:2404.06395)."""
    hf = {"rms_norm_eps": 1e-5, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, **hf}
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    return replace(
        latent_config(hf),
        embedding_scale=float(hf["scale_emb"]),
        residual_scale=1.0 if hf["scale_depth"] is None else float(hf["scale_depth"]) / math.sqrt(depth),
        logit_scale=float(hf["dim_model_base"] or hf["hidden_size"]) / hf["hidden_size"],
    )


def choose_variant(interleaved: bool, family: Family, hf: Json) -> Family:
    """The family with the rows of the files' matrices. Features are in pairs, unless `rope_interleave` says no."""
    heads, rank, plain, rotated, value = read_sizes(
        {**hf, "v_head_dim": value_width(hf)},
        "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
    )  # fmt: skip
    if rotated % 2:
        raise UnsupportedError(f"qk_rope_head_dim is {rotated}, which should be even")
    rows = LatentRows(heads, rank, plain, rotated, value, interleaved and bool(hf.get("rope_interleave", True)))
    return replace(drop_prediction_layers(family, hf), convert=rows.convert)


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    prefix="model",
    config=deepseek2_config,
    renames=RENAMES,
    heads=llama.llama_heads("DeepseekV2", ("ForSequenceClassification",)),
    drop=llama.DROP,
    variant=partial(choose_variant, True),
)
DEEPSEEK_V3 = replace(
    DEEPSEEK_V2,
    name="deepseek_v3",
    config=deepseek3_config,
    heads=llama.llama_heads("DeepseekV3", ("ForSequenceClassification", "ForTokenClassification")),
)
KIMI_K2 = replace(DEEPSEEK_V3, name="kimi_k2")
GLM4_MOE_LITE = replace(
    DEEPSEEK_V2, name="glm4_moe_lite", config=glm4_lite_config, heads=llama.llama_heads("Glm4MoeLite", ())
)
MINICPM3 = replace(
    DEEPSEEK_V2,
    name="minicpm3",
    config=minicpm3_config,
    heads=llama.llama_heads("MiniCPM3", ("ForSequenceClassification",)),
    variant=partial(choose_variant, False),
)

"""GGUF files of networks with recurrent layers, written as llama.cpp's converter writes them, equal the reference."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf
from torch import Tensor

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from tests.families.classic_decoders import VOCABULARY
from tests.families.modern_decoders import shape_of
from tests.families.recurrent_decoders import EXPERTS, HYBRID, MAMBA, MAMBA2, NEMOTRON, QWEN, SCALES
from tests.families.test_decoders import assert_close, packed_logits, reference_logits, save_reference, tokenizer
from tests.support import gguf_files

Fields = dict[str, Any]
LFM2_KINDS = ["conv", "full_attention", "conv"]
ROUTED = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)


def shared_fields(config: Any) -> Fields:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
    }


def by_layer(config: Any, kind: str, count: int) -> list[int]:
    return [count if each == kind else 0 for each in config.layer_types]


def lfm2(config: Any) -> Fields:
    routed = {}
    if config.model_type == "lfm2_moe":
        routed = {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": config.num_dense_layers,
            "expert_gating_func": 2,
        }
    return {
        **shared_fields(config),
        **routed,
        "attention.head_count_kv": by_layer(config, "full_attention", config.num_key_value_heads),
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "shortconv.l_cache": config.conv_L_cache,
    }


def mamba2(config: Any) -> Fields:
    return {
        "block_count": config.num_hidden_layers,
        "context_length": 1 << 20,
        "embedding_length": config.hidden_size,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.num_heads * config.head_dim,
        "ssm.state_size": config.state_size,
        "ssm.time_step_rank": config.num_heads,
        "ssm.group_count": config.n_groups,
    }


def granite(config: Any) -> Fields:
    heads, experts = config.mamba_n_heads, config.num_local_experts
    routed = {"expert_count": experts, "expert_used_count": config.num_experts_per_tok} if experts else {}
    return {
        **shared_fields(config),
        **routed,
        "attention.head_count_kv": by_layer(config, "full_attention", config.num_key_value_heads),
        "feed_forward_length": config.intermediate_size,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
        "expert_shared_feed_forward_length": config.shared_intermediate_size,
        "rope.scaling.finetuned": config.position_embedding_type == "rope",
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": heads * config.mamba_d_head,
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def nemotron(config: Any) -> Fields:
    has_experts = "moe" in config.layer_types
    width = config.moe_intermediate_size if has_experts else config.intermediate_size
    routed = {
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_norm": config.norm_topk_prob,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_group_count": config.n_group,
    }
    return {
        **shared_fields(config),
        **(routed if has_experts else {}),
        "attention.head_count_kv": by_layer(config, "full_attention", config.num_key_value_heads),
        "feed_forward_length": by_layer(config, "moe" if has_experts else "mlp", width),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        "ssm.conv_kernel": config.conv_kernel,
        "ssm.inner_size": config.mamba_num_heads * config.mamba_head_dim,
        "ssm.state_size": config.ssm_state_size,
        "ssm.time_step_rank": config.mamba_num_heads,
        "ssm.group_count": config.n_groups,
    }


def qwen(config: Any) -> Fields:
    routed = {}
    if getattr(config, "num_experts", 0):
        routed = {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return {
        **shared_fields(config),
        **routed,
        "feed_forward_length": getattr(config, "intermediate_size", 16),
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
        "full_attention_interval": 4,
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.group_count": config.linear_num_key_heads,
    }


MOE_NEMOTRON = dict(NEMOTRON, layers_block_type=["linear_attention", "moe", "full_attention", "moe"])
Row = tuple[str, Callable[..., Any], Any, Fields, Callable[[Any], Fields]]
ROWS: dict[str, Row] = {
    "lfm2": (
        "lfm2", tf.Lfm2Config, tf.Lfm2ForCausalLM,
        shape_of(layer_types=LFM2_KINDS, block_auto_adjust_ff_dim=False), lfm2,
    ),
    "lfm2moe": (
        "lfm2moe", tf.Lfm2MoeConfig, tf.Lfm2MoeForCausalLM,
        shape_of(layer_types=LFM2_KINDS, num_dense_layers=1, **ROUTED), lfm2,
    ),
    "mamba2": ("mamba2", tf.Mamba2Config, tf.Mamba2ForCausalLM, dict(MAMBA2), mamba2),
    "granitehybrid": (
        "granitehybrid", tf.GraniteMoeHybridConfig, tf.GraniteMoeHybridForCausalLM,
        dict(MAMBA, **SCALES, layer_types=HYBRID, num_local_experts=4, shared_intermediate_size=24), granite,
    ),
    "granitehybrid dense": (
        "granitehybrid", tf.GraniteMoeHybridConfig, tf.GraniteMoeHybridForCausalLM,
        dict(
            MAMBA, **SCALES, layer_types=HYBRID, num_local_experts=0, shared_intermediate_size=48,
            position_embedding_type="rope",
        ),
        granite,
    ),
    "nemotron_h": (
        "nemotron_h", tf.NemotronHConfig, tf.NemotronHForCausalLM,
        dict(NEMOTRON, layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]), nemotron,
    ),
    "nemotron_h_moe": ("nemotron_h_moe", tf.NemotronHConfig, tf.NemotronHForCausalLM, MOE_NEMOTRON, nemotron),
    "qwen3next": ("qwen3next", tf.Qwen3NextConfig, tf.Qwen3NextForCausalLM, dict(QWEN, **EXPERTS), qwen),
    "qwen3next grouped": ("qwen3next", tf.Qwen3NextConfig, tf.Qwen3NextForCausalLM, dict(QWEN, **EXPERTS), qwen),
    "qwen35": ("qwen35", tf.Qwen3_5TextConfig, tf.Qwen3_5ForCausalLM, dict(QWEN), qwen),
    "qwen35moe": ("qwen35moe", tf.Qwen3_5MoeTextConfig, tf.Qwen3_5MoeForCausalLM, dict(QWEN, **EXPERTS), qwen),
}  # fmt: skip


def tile_heads(tensor: Tensor, config: Any) -> Tensor:
    """The value heads as ggml repeats key heads: the first of every key head, then the second."""
    groups = config.linear_num_key_heads
    shape = (groups, config.linear_num_value_heads // groups, -1, *tensor.shape[1:])
    return tensor.reshape(shape).transpose(0, 1).reshape(tensor.shape)


def convert_linear(config: Any, name: str, tensor: Tensor) -> Tensor:
    """What the converter does to the layers of Qwen3.5."""
    keys = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        return torch.cat((tensor[:keys], tile_heads(tensor[keys:], config)))
    if name.endswith("linear_attn.out_proj.weight"):
        return tile_heads(tensor.T, config).T
    is_by_head = ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")
    return tile_heads(tensor, config) if ".linear_attn." in name and name.endswith(is_by_head) else tensor


def separate_groups(config: Any, tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Of the matrix of each key head's queries, keys, values and gates: all queries, keys and values, and all gates."""
    values = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    rows = tensor.view(config.linear_num_key_heads, -1, tensor.size(1))
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, values, values]
    query, key, value, gate = (part.reshape(-1, tensor.size(1)) for part in rows.split(sizes, dim=1))
    return torch.cat((query, key, value)), gate


def converted(row: str, model: Any) -> dict[str, Tensor]:
    """The model's tensors as the converter writes them."""
    architecture, config, found = ROWS[row][0], model.config, dict[str, Tensor]()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        theirs = name.replace("model.", "backbone.") if architecture.startswith("nemotron") else name
        block = name.split(".")[2] if ".layers." in name else ""
        if architecture.startswith("qwen35"):
            tensor = convert_linear(config, name, tensor)
        if architecture.startswith("qwen") and name.endswith("norm.weight") and ".linear_attn." not in name:
            tensor = tensor + 1
        if name.endswith("A_log"):
            tensor = -tensor.exp()
        if "conv1d.weight" in name or ".conv.conv." in name:
            tensor = tensor.squeeze(1)
        if architecture in ("mamba2", "granitehybrid") or architecture.startswith("nemotron"):
            tensor = tensor[:, None] if name.endswith((".A_log", ".D")) else tensor
            groups = getattr(config, "n_groups", None) or getattr(config, "mamba_n_groups", 0)
            tensor = tensor.view(groups, -1) if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")) else tensor
        if architecture == "granitehybrid" and ".self_attn." in name and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = gguf_files.permuted(tensor, heads)
        if name.endswith("in_proj_qkvz.weight") and row == "qwen3next":
            found[f"blk.{block}.attn_qkv.weight"], found[f"blk.{block}.attn_gate.weight"] = separate_groups(
                config, tensor
            )
            continue
        if special := name_special(name, tensor):
            found |= {f"blk.{block}.{ours}": piece for ours, piece in special}
            continue
        theirs = theirs.replace("dt_bias", "dt.bias" if architecture == "nemotron_h_moe" else "dt_proj.bias")
        ours = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        assert ours, theirs
        found[ours] = tensor
    return {name: tensor.contiguous() for name, tensor in found.items()}


def name_special(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """What the converter takes apart or names by hand."""
    if name.endswith(".experts.gate_up_proj"):
        gate, up = tensor.chunk(2, dim=1)
        return [("ffn_gate_exps.weight", gate), ("ffn_up_exps.weight", up)]
    if name.endswith((".experts.up_proj", ".experts.down_proj")):
        return [(f"ffn_{name.rpartition('.')[2].removesuffix('_proj')}_exps.weight", tensor)]
    if name.endswith(".shared_mlp.input_linear.weight"):
        gate, up = tensor.chunk(2)
        suffix = "_shexp" if len(tensor) == 48 else ""  # of the row with experts
        return [(f"ffn_gate{suffix}.weight", gate), (f"ffn_up{suffix}.weight", up)]
    if name.endswith(".shared_mlp.output_linear.weight"):
        return [("ffn_down_shexp.weight" if tensor.size(1) == 24 else "ffn_down.weight", tensor)]
    if name.endswith((".expert_bias", ".e_score_correction_bias")):
        return [("exp_probs_b.bias", tensor)]
    if name.endswith((".mlp.gate.weight", ".mixer.gate.weight", ".feed_forward.gate.weight", "moe.router.weight")):
        return [("ffn_gate_inp.weight", tensor)]
    if name.endswith(".shared_expert_gate.weight"):
        return [("ffn_gate_inp_shexp.weight", tensor.squeeze())]
    return []


def write(row: str, folder: Path, **changes: Any) -> tuple[Any, Path]:
    architecture, config, kind, fields, metadata = ROWS[row]
    model = save_reference(kind, config(**{"vocab_size": VOCABULARY, **fields}), folder / "theirs")
    metadata_fields = {**metadata(model.config), **gguf_files.byte_level_metadata(tokenizer()), **changes}
    return model, gguf_files.write(folder / "a.gguf", architecture, metadata_fields, converted(row, model))


@pytest.mark.parametrize("row", ROWS)
def test_a_file_equals_the_reference(row: str, tmp_path: Path) -> None:
    model, path = write(row, tmp_path)
    assert_close(packed_logits(load(str(path))), reference_logits(model))


@pytest.mark.parametrize(
    ("row", "changes", "sentence"),
    [
        ("lfm2", {"shortconv.l_cache": 0}, "with a kernel of 1 to 63 tokens"),
        ("mamba2", {"ssm.time_step_rank": 0}, "division"),
        ("mamba2", {"ssm.group_count": 3}, "with a multiple of 3 heads"),
        ("mamba2", {"attention.head_count_kv": [1, 2]}, "attention.head_count_kv differs from layer to layer"),
        ("nemotron_h_moe", {"moe_latent_size": 8}, "moe_latent_size 8 is not known here"),
        ("lfm2moe", {"expert_gating_func": 1}, "expert_gating_func 1 is not known here; 2 is"),
        ("qwen35", {"ssm.state_size": 17}, "its shape"),
    ],
)
def test_what_is_not_known_is_refused_by_name(row: str, changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    _, path = write(row, tmp_path, **changes)
    with pytest.raises((CheckpointError, UnsupportedError), match=sentence):
        load(str(path))

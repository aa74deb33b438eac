"""Mixtures of experts and latent attention in GGUF files, as llama.cpp's converter writes them, equal the reference."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers as tf
from gguf import MODEL_TENSOR, TENSOR_NAMES
from torch import Tensor

from polyhead.models.checkpoint import describe_source, load
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints, gguf_files

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34]]
VOCABULARY = len(checkpoints.byte_level_bpe())
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=64, rms_norm_eps=1e-5,
)  # fmt: skip
ROUTED: dict[str, Any] = dict(
    SHAPE, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=32, n_shared_experts=2,
    first_k_dense_replace=1, routed_scaling_factor=1.5, norm_topk_prob=True,
)  # fmt: skip
LATENT: dict[str, Any] = dict(
    {**ROUTED, "num_key_value_heads": 4}, kv_lora_rank=32, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.7
)
OSS_YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, truncate=False, beta_fast=32.0,
    beta_slow=1.0,
)  # fmt: skip
EXPERTS = {
    "gate": MODEL_TENSOR.FFN_GATE_EXP,
    "up": MODEL_TENSOR.FFN_UP_EXP,
    "down": MODEL_TENSOR.FFN_DOWN_EXP,
}
SHARED = {"gate": MODEL_TENSOR.FFN_GATE_SHEXP, "up": MODEL_TENSOR.FFN_UP_SHEXP, "down": MODEL_TENSOR.FFN_DOWN_SHEXP}
YARN_FIELDS = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}


def counted(config: Any, **more: Any) -> dict[str, Any]:
    count = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    fields = {
        "expert_count": count or config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        **more,
    }
    theta = config.rope_parameters["rope_theta"]
    return {**gguf_files.decoder_metadata(config), "rope.freq_base": float(theta), **fields}


def routed(config: Any, **more: Any) -> dict[str, Any]:
    return counted(
        config,
        expert_feed_forward_length=config.moe_intermediate_size,
        expert_shared_count=config.n_shared_experts,
        leading_dense_block_count=config.first_k_dense_replace,
        expert_weights_scale=float(config.routed_scaling_factor),
        expert_weights_norm=True,
        expert_gating_func=2,
        **more,
    )


def latent(config: Any, **more: Any) -> dict[str, Any]:
    """Of newer files: `attention.key_length` is that of the narrow vector with the rotated features."""
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    return routed(config) | {
        "attention.head_count_kv": 1,
        "attention.key_length": config.kv_lora_rank + config.qk_rope_head_dim,
        "attention.value_length": config.kv_lora_rank,
        "attention.key_length_mla": width,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": config.kv_lora_rank,
        **({"attention.q_lora_rank": config.q_lora_rank} if config.q_lora_rank else {}),
        "rope.dimension_count": config.qk_rope_head_dim,
        **more,
    }


def older(config: Any, **more: Any) -> dict[str, Any]:
    width = config.qk_nope_head_dim + config.qk_rope_head_dim
    heads = {"attention.key_length": width, "attention.value_length": config.v_head_dim}
    fields = {key: value for key, value in latent(config, **more).items() if not key.endswith("_mla")}
    return fields | heads | {"attention.head_count_kv": config.num_attention_heads}


def granite(config: Any) -> dict[str, Any]:
    return counted(
        config,
        **{
            "attention.scale": float(config.attention_multiplier),
            "embedding_scale": float(config.embedding_multiplier),
            "residual_scale": float(config.residual_multiplier),
            "logit_scale": float(config.logits_scaling),
            "expert_shared_feed_forward_length": getattr(config, "shared_intermediate_size", 0),
        },
    )


def ernie(config: Any) -> dict[str, Any]:
    return counted(
        config,
        expert_feed_forward_length=config.moe_intermediate_size,
        expert_shared_count=config.moe_num_shared_experts,
        interleave_moe_layer_step=config.moe_layer_interval,
        leading_dense_block_count=config.moe_layer_start_index,
    )


def oss(config: Any) -> dict[str, Any]:
    return counted(
        config,
        expert_feed_forward_length=config.intermediate_size,
        **YARN_FIELDS,
        **{"attention.sliding_window": config.sliding_window},
    )


def dbrx(config: Any) -> dict[str, Any]:
    return {
        "block_count": config.n_layers,
        "context_length": config.max_seq_len,
        "embedding_length": config.d_model,
        "feed_forward_length": config.ffn_config.ffn_hidden_size,
        "attention.head_count": config.n_heads,
        "attention.head_count_kv": config.attn_config.kv_n_heads,
        "attention.clamp_kqv": config.attn_config.clip_qkv,
        "attention.layer_norm_epsilon": 1e-5,
        "rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "expert_count": config.ffn_config.moe_num_experts,
        "expert_used_count": config.ffn_config.moe_top_k,
        **gguf_files.byte_level_metadata(checkpoints.byte_level_bpe()),
    }


def glm(config: Any) -> dict[str, Any]:
    """The file counts a layer that predicts further tokens."""
    more = {"block_count": 4, "nextn_predict_layers": 1, "rope.dimension_count": 8}
    return routed(config) | more


SCALES = dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=4.0)
GRANITE = dict(SHAPE, **SCALES, num_local_experts=6, num_experts_per_tok=3)
QWEN = dict(SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=32)
V2 = {**LATENT, "norm_topk_prob": False, "routed_scaling_factor": 1.0}
SOFTMAX = {"expert_gating_func": 1, "expert_weights_norm": False}
ROWS: dict[str, tuple[str, Any, Any, Callable[..., dict[str, Any]]]] = {
    "mixtral": ("llama", tf.MixtralConfig(**SHAPE, num_local_experts=4), tf.MixtralForCausalLM, counted),
    "mixtral apart": ("llama", tf.MixtralConfig(**SHAPE, num_local_experts=4), tf.MixtralForCausalLM, counted),
    "qwen2moe": (
        "qwen2moe", tf.Qwen2MoeConfig(**QWEN, shared_expert_intermediate_size=48), tf.Qwen2MoeForCausalLM,
        lambda config: counted(config, expert_feed_forward_length=32, expert_shared_feed_forward_length=48),
    ),
    "qwen3moe": (
        "qwen3moe", tf.Qwen3MoeConfig(**QWEN, norm_topk_prob=True, head_dim=16), tf.Qwen3MoeForCausalLM,
        lambda config: counted(config, expert_feed_forward_length=32),
    ),
    "olmoe": (
        "olmoe", tf.OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, pad_token_id=0), tf.OlmoeForCausalLM,
        counted,
    ),
    "granitemoe": ("granitemoe", tf.GraniteMoeConfig(**GRANITE), tf.GraniteMoeForCausalLM, granite),
    "granitemoe shared": (
        "granitemoe", tf.GraniteMoeSharedConfig(**GRANITE, shared_intermediate_size=48),
        tf.GraniteMoeSharedForCausalLM, granite,
    ),
    "gpt-oss": (
        "gpt-oss",
        tf.GptOssConfig(
            **SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=16, sliding_window=4,
            rope_parameters=OSS_YARN, pad_token_id=0,
        ),
        tf.GptOssForCausalLM, oss,
    ),
    "deepseek2": (
        "deepseek2", tf.DeepseekV2Config(**V2, q_lora_rank=32, rope_parameters=YARN), tf.DeepseekV2ForCausalLM,
        lambda config: latent(
            config, **SOFTMAX, **YARN_FIELDS, **{"rope.scaling.yarn_log_multiplier": 0.07}
        ),
    ),
    "deepseek2 lite, older": (
        "deepseek2", tf.DeepseekV2Config(**V2, q_lora_rank=None), tf.DeepseekV2ForCausalLM,
        lambda config: older(config, **SOFTMAX),
    ),
    "deepseek2 v3": (
        "deepseek2", tf.DeepseekV3Config(**LATENT, q_lora_rank=32, n_group=4, topk_group=2), tf.DeepseekV3ForCausalLM,
        lambda config: latent(config, expert_group_count=4, expert_group_used_count=2),
    ),
    "glm4moe": (
        "glm4moe",
        tf.Glm4MoeConfig(
            **ROUTED, use_qk_norm=True, head_dim=16, attention_bias=True,
            rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5),
        ),
        tf.Glm4MoeForCausalLM, glm,
    ),
    "dbrx": (
        "dbrx",
        tf.DbrxConfig(
            vocab_size=VOCABULARY, d_model=64, n_heads=4, n_layers=3, max_seq_len=64,
            attn_config=dict(kv_n_heads=2, clip_qkv=0.4, rope_theta=1e4),
            ffn_config=dict(ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2),
        ),
        tf.DbrxForCausalLM, dbrx,
    ),
    "dots1": ("dots1", tf.Dots1Config(**ROUTED), tf.Dots1ForCausalLM, routed),
    "ernie4_5-moe": (
        "ernie4_5-moe",
        tf.Ernie4_5_MoeConfig(
            **SHAPE, moe_num_experts=6, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=1, pad_token_id=0
        ),
        tf.Ernie4_5_MoeForCausalLM, ernie,
    ),
}  # fmt: skip


def tensor_name(tensor: MODEL_TENSOR, block: int, leaf: str) -> str:
    return f"{TENSOR_NAMES[tensor].format(bid=block)}.{leaf}"


def converted(row: str, model: Any) -> dict[str, Tensor]:
    """The model's tensors as the converter writes them."""
    architecture, config, found = ROWS[row][0], model.config, dict[str, Tensor]()
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        block = int(match[1]) if (match := re.search(r"(?:layers|blocks)\.(\d+)\.", name)) else 0
        if special := convert_special(row, config, name, tensor):
            found |= {tensor_name(kind, block, leaf): piece for kind, leaf, piece in special}
            continue
        if architecture in ("llama", "granitemoe") and ".q_proj." in name:
            tensor = gguf_files.permuted(tensor, config.num_attention_heads)
        if architecture in ("llama", "granitemoe") and ".k_proj." in name:
            tensor = gguf_files.permuted(tensor, config.num_key_value_heads)
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        found[theirs] = tensor
    if row == "mixtral apart":
        found = {name: piece for whole, tensor in found.items() for name, piece in take_apart(whole, tensor)}
    if row == "glm4moe":
        found["blk.3.nextn.eh_proj.weight"] = torch.zeros(64, 128)
        found["blk.3.attn_q.weight"] = torch.zeros(64, 64)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def take_apart(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """A tensor for each expert, as in files before April 2024."""
    if "_exps" not in name:
        return [(name, tensor)]
    return [(name.replace("_exps", f".{number}"), matrix) for number, matrix in enumerate(tensor)]


def convert_special(row: str, config: Any, name: str, tensor: Tensor) -> list[tuple[MODEL_TENSOR, str, Tensor]]:
    """What the converter takes apart or names by hand."""
    leaf = "bias" if name.endswith("_bias") else "weight"
    if ".experts.gate_up_proj" in name or ".experts.down_proj" in name:
        is_down = ".down_proj" in name
        if row == "gpt-oss":
            turned = tensor if leaf == "bias" else tensor.transpose(1, 2)
            parts = {"down": turned} if is_down else {"gate": turned[:, ::2], "up": turned[:, 1::2]}
        else:
            parts = {"down": tensor} if is_down else dict(zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True))
        return [(EXPERTS[part], leaf, piece) for part, piece in parts.items()]
    if ".ffn.experts.mlp." in name:
        matrices = tensor.view(config.ffn_config.moe_num_experts, -1, config.d_model)
        part = {"w1": "gate", "v1": "up", "w2": "down"}[name[-2:]]
        return [(EXPERTS[part], leaf, matrices.transpose(1, 2) if part == "down" else matrices)]
    if ".shared_mlp.input_linear" in name:
        return [(SHARED[part], leaf, half) for part, half in zip(("gate", "up"), tensor.chunk(2), strict=True)]
    if ".shared_mlp.output_linear" in name:
        return [(SHARED["down"], leaf, tensor)]
    if name.endswith("e_score_correction_bias"):
        return [(MODEL_TENSOR.FFN_EXP_PROBS_B, "bias", tensor.flatten())]
    if ".shared_expert_gate." in name:
        return [(MODEL_TENSOR.FFN_GATE_INP_SHEXP, leaf, tensor.squeeze())]
    if "_sparse_moe.router.weight" in name or name.endswith(".mlp.gate.weight"):
        return [(MODEL_TENSOR.FFN_GATE_INP, leaf, tensor)]
    if name.endswith(".self_attn.sinks"):
        return [(MODEL_TENSOR.ATTN_SINKS, leaf, tensor)]
    if ".kv_b_proj." in name and "older" not in row:
        keys, values = tensor.view(config.num_attention_heads, -1, config.kv_lora_rank).split(
            (config.qk_nope_head_dim, config.v_head_dim), dim=1
        )
        return [(MODEL_TENSOR.ATTN_K_B, leaf, keys.transpose(1, 2)), (MODEL_TENSOR.ATTN_V_B, leaf, values)]
    return []


def make(row: str) -> Any:
    _, config, kind, _ = ROWS[row]
    config._attn_implementation = "eager"
    model = gguf_files.torch_seeded(kind(config))
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model


@pytest.mark.parametrize("row", ROWS)
@torch.no_grad()
def test_a_file_equals_the_reference(row: str, tmp_path: Path) -> None:
    model = make(row)
    architecture, config, _, fields = ROWS[row]
    path = gguf_files.write(tmp_path / "a.gguf", architecture, fields(config), converted(row, model))
    loaded = load(str(path))
    ours = loaded.head(loaded.network(RaggedBatch.of(SEQUENCES)))
    expected = torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])
    assert float((ours - expected).abs().max()) <= 1e-5 * max(1.0, float(expected.abs().max()))


def write_gpt_oss(path: Path, changes: dict[str, Any], tensors: dict[str, Tensor] | None = None) -> Path:
    _, config, _, fields = ROWS["gpt-oss"]
    tensors = converted("gpt-oss", make("gpt-oss")) if tensors is None else tensors
    return gguf_files.write(path, "gpt-oss", fields(config) | changes, tensors)


def test_experts_in_four_bits_decide_the_default_precision(tmp_path: Path) -> None:
    """As gpt-oss is published: only the experts are stored as MXFP4."""
    tensors = converted("gpt-oss", make("gpt-oss"))
    _, config, _, fields = ROWS["gpt-oss"]

    def kind_of(name: str, tensor: Tensor) -> str:
        return "MXFP4" if tensor.dim() == 3 else "F32"

    path = gguf_files.write(tmp_path / "a.gguf", "gpt-oss", fields(config), tensors, kind_of)
    chosen = describe_source(str(path)).default_precision
    assert (chosen.precision, "MXFP4" in chosen.reason) == ("int8", True)
    loaded = load(str(path))
    blocks = gguf.quants.quantize(tensors["blk.0.ffn_gate_exps.weight"].numpy(), gguf.GGMLQuantizationType.MXFP4)
    decoded = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4))
    experts: Any = loaded.network.blocks[0].mlp.experts
    assert all(torch.equal(expert.gate.weight, decoded[number]) for number, expert in enumerate(experts))


def test_another_function_of_scores_is_refused(tmp_path: Path) -> None:
    _, config, _, fields = ROWS["dots1"]
    path = gguf_files.write(
        tmp_path / "a.gguf", "dots1", fields(config) | {"expert_gating_func": 1}, converted("dots1", make("dots1"))
    )
    with pytest.raises(UnsupportedError, match="expert_gating_func 1 is not known here; 2 is"):
        load(str(path))


def test_a_tensor_of_very_many_experts_is_refused(tmp_path: Path) -> None:
    """Without numbers it takes no bytes, whatever it declares."""
    tensors = converted("gpt-oss", make("gpt-oss")) | {"blk.0.ffn_gate_exps.weight": torch.zeros(5000, 0, 64)}
    path = write_gpt_oss(tmp_path / "a.gguf", {}, tensors)
    with pytest.raises(CheckpointError, match=r"blk\.0\.ffn_gate_exps\.weight.*4096 experts at most"):
        load(str(path))

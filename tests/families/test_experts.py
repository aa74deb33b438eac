"""Mixtures of experts and latent attention equal the reference on tiny random checkpoints, as folders that the
reference writes: under the names of published files, and with one tensor for all experts of a layer."""

import json
import math
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from polyhead.models import checkpoint
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.models.network.lora import adaptable_shapes
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.parallel.share import split_problem
from tests.models.executors.test_stale_slots import fill
from tests.support.checkpoints import byte_level_bpe
from tests.support.loading import pack_by_parts

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40]]
SHAPE = dict(
    vocab_size=384, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64,
)  # fmt: skip
ROUTED = dict(SHAPE, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2)
LATENT = dict(
    {**ROUTED, "num_key_value_heads": 4}, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10
)
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16, mscale=0.7, mscale_all_dim=0.9,
    beta_fast=32, beta_slow=1,
)  # fmt: skip
LONGROPE = dict(
    rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=64, short_mscale=1.2, long_mscale=1.3,
    short_factor=[1.0, 1.5, 2.0, 3.0], long_factor=[4.0] * 4, factor=2.0,
)  # fmt: skip
SCALES = dict(embedding_multiplier=3.0, residual_multiplier=0.5, attention_multiplier=0.2, logits_scaling=4.0)
TEXT = dict(SHAPE, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2, head_dim=8)
LLAMA4 = dict(
    SHAPE, intermediate_size=24, intermediate_size_mlp=40, num_local_experts=4, num_experts_per_tok=1, head_dim=8,
    interleave_moe_layer_step=2, no_rope_layer_interval=2, attention_chunk_size=32, floor_scale=64,
)  # fmt: skip
GEMMA4 = dict(
    SHAPE, enable_moe_block=True, num_experts=6, top_k_experts=2, moe_intermediate_size=24, head_dim=8,
    global_head_dim=16, sliding_window=4, layer_types=["sliding_attention", "full_attention", "full_attention"],
    hidden_size_per_layer_input=0,
)  # fmt: skip
ROWS: dict[str, tuple[Any, Any]] = {
    "mixtral": (tf.MixtralConfig(**SHAPE, num_local_experts=4), tf.MixtralForCausalLM),
    "qwen2_moe": (
        tf.Qwen2MoeConfig(
            **SHAPE, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=40, mlp_only_layers=[1]
        ),
        tf.Qwen2MoeForCausalLM,
    ),
    "qwen3_moe": (
        tf.Qwen3MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True),
        tf.Qwen3MoeForCausalLM,
    ),
    "olmoe": (tf.OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2), tf.OlmoeForCausalLM),
    "glm4_moe": (
        tf.Glm4MoeConfig(**ROUTED, n_group=4, topk_group=2, routed_scaling_factor=1.5, use_qk_norm=True, head_dim=8),
        tf.Glm4MoeForCausalLM,
    ),
    "dots1": (tf.Dots1Config(**ROUTED, first_k_dense_replace=1, norm_topk_prob=True), tf.Dots1ForCausalLM),
    "olmoe clipped": (tf.OlmoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, clip_qkv=0.4), tf.OlmoeForCausalLM),
    "flex_olmo": (
        tf.FlexOlmoConfig(**SHAPE, num_experts=6, num_experts_per_tok=2, pad_token_id=0),
        tf.FlexOlmoForCausalLM,
    ),
    "deepseek_v2": (
        tf.DeepseekV2Config(
            **LATENT,
            q_lora_rank=20,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            routed_scaling_factor=1.7,
            rope_parameters=YARN,
        ),
        tf.DeepseekV2ForCausalLM,
    ),
    "deepseek_v2 lite": (
        tf.DeepseekV2Config(**LATENT, q_lora_rank=None, attention_bias=True),
        tf.DeepseekV2ForCausalLM,
    ),
    "deepseek_v3": (
        tf.DeepseekV3Config(
            **LATENT,
            q_lora_rank=20,
            n_group=4,
            topk_group=2,
            first_k_dense_replace=1,
            rope_parameters=YARN,
            num_nextn_predict_layers=1,
        ),
        tf.DeepseekV3ForCausalLM,
    ),
    "deepseek_v3 apart": (
        tf.DeepseekV3Config(**LATENT, q_lora_rank=20, n_group=1, topk_group=1, rope_interleave=False),
        tf.DeepseekV3ForCausalLM,
    ),
    "glm4_moe_lite": (
        tf.Glm4MoeLiteConfig(**{**LATENT, "n_shared_experts": 1, "v_head_dim": 20}, q_lora_rank=20),
        tf.Glm4MoeLiteForCausalLM,
    ),
    "minicpm3": (
        tf.MiniCPM3Config(
            **{**SHAPE, "num_key_value_heads": 4},
            kv_lora_rank=24,
            q_lora_rank=20,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            dim_model_base=16,
        ),
        tf.MiniCPM3ForCausalLM,
    ),
    "granitemoe": (
        tf.GraniteMoeConfig(**SHAPE, **SCALES, num_local_experts=6, num_experts_per_tok=3),
        tf.GraniteMoeForCausalLM,
    ),
    "granitemoeshared": (
        tf.GraniteMoeSharedConfig(
            **SHAPE, **SCALES, num_local_experts=6, num_experts_per_tok=3, shared_intermediate_size=40
        ),
        tf.GraniteMoeSharedForCausalLM,
    ),
    "ernie4_5_moe": (
        tf.Ernie4_5_MoeConfig(
            **SHAPE, moe_num_experts=6, moe_k=2, moe_intermediate_size=24, moe_layer_start_index=1, use_bias=False
        ),
        tf.Ernie4_5_MoeForCausalLM,
    ),
    "phimoe": (
        tf.PhimoeConfig(
            **SHAPE,
            num_local_experts=6,
            attention_bias=True,
            lm_head_bias=True,
            router_jitter_noise=0.3,
            rope_parameters=LONGROPE,
        ),
        tf.PhimoeForCausalLM,
    ),
    "hunyuan_v1_moe": (
        tf.HunYuanMoEV1Config(**SHAPE, num_experts=6, moe_topk=[2, 2, 2], head_dim=8),
        tf.HunYuanMoEV1ForCausalLM,
    ),
    "minimax_m2": (
        tf.MiniMaxM2Config(**SHAPE, num_local_experts=6, num_experts_per_tok=3, head_dim=8, rotary_dim=4),
        tf.MiniMaxM2ForCausalLM,
    ),
    "exaone_moe": (
        tf.ExaoneMoeConfig(
            **SHAPE,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            sliding_window=4,
            sliding_window_pattern=2,
            n_group=4,
            topk_group=2,
        ),
        tf.ExaoneMoeForCausalLM,
    ),
    "cohere2_moe": (
        tf.Cohere2MoeConfig(
            **SHAPE,
            num_experts=6,
            num_experts_per_tok=2,
            num_shared_experts=1,
            sliding_window=4,
            head_dim=8,
            sliding_window_pattern=2,
            first_k_dense_replace=1,
            prefix_dense_intermediate_size=40,
        ),
        tf.Cohere2MoeForCausalLM,
    ),
    "cohere2_moe sigmoid": (
        tf.Cohere2MoeConfig(
            **SHAPE,
            num_experts=6,
            num_experts_per_tok=2,
            num_shared_experts=2,
            sliding_window=4,
            head_dim=8,
            expert_selection_fn="sigmoid",
            shared_expert_combination_strategy="sum",
            rms_norm_eps=1e-5,
        ),
        tf.Cohere2MoeForCausalLM,
    ),
    "afmoe": (
        tf.AfmoeConfig(
            **SHAPE,
            num_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            head_dim=8,
            sliding_window=4,
            global_attn_every_n_layers=2,
            mup_enabled=True,
            route_scale=1.5,
        ),
        tf.AfmoeForCausalLM,
    ),
    "granitemoe_swa": (
        tf.GraniteMoeSWAConfig(
            **SHAPE,
            **SCALES,
            num_local_experts=6,
            num_experts_per_tok=3,
            shared_intermediate_size=40,
            sliding_window=4,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        tf.GraniteMoeSWAForCausalLM,
    ),
    "solar_open": (
        tf.SolarOpenConfig(
            **{**ROUTED, "intermediate_size": 24}, head_dim=8, attention_bias=True, n_group=4, topk_group=2
        ),
        tf.SolarOpenForCausalLM,
    ),
    "hy_v3": (
        tf.HYV3Config(**SHAPE, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=8),
        tf.HYV3ForCausalLM,
    ),
    "mellum": (
        tf.MellumConfig(
            **TEXT, sliding_window=4, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
        ),
        tf.MellumForCausalLM,
    ),
    "flint": (
        tf.FlintConfig(**TEXT, shared_expert_intermediate_size=40, sliding_window=4, mlp_only_layers=[1]),
        tf.FlintForCausalLM,
    ),
    "kolibri1": (
        tf.Kolibri1Config(
            **TEXT,
            shared_expert_intermediate_size=40,
            sliding_window=4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        tf.Kolibri1ForCausalLM,
    ),
    "dbrx": (
        tf.DbrxConfig(
            vocab_size=384,
            d_model=32,
            n_heads=4,
            n_layers=3,
            max_seq_len=64,
            attn_config=dict(kv_n_heads=2, clip_qkv=0.4, rope_theta=1e4),
            ffn_config=dict(ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2),
        ),
        tf.DbrxForCausalLM,
    ),
    "mistral4": (
        tf.Mistral4Config(
            **LATENT,
            q_lora_rank=20,
            first_k_dense_replace=1,
            rope_parameters=dict(YARN, original_max_position_embeddings=48, llama_4_scaling_beta=0.1),
        ),
        tf.Mistral4ForCausalLM,
    ),
    "youtu": (
        tf.YoutuConfig(
            **{**SHAPE, "num_key_value_heads": 4},
            kv_lora_rank=24,
            q_lora_rank=None,
            qk_nope_head_dim=12,
            qk_rope_head_dim=8,
            v_head_dim=10,
        ),
        tf.YoutuForCausalLM,
    ),
    "axk1": (tf.AXK1Config(**LATENT, q_lora_rank=20, n_group=4, topk_group=2), tf.AXK1ForCausalLM),
    "mimo_v2_flash": (
        tf.MiMoV2FlashConfig(
            **{**ROUTED, "num_key_value_heads": 1, "n_shared_experts": None},
            n_group=4,
            topk_group=2,
            head_dim=12,
            v_head_dim=10,
            sliding_window=4,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "full_attention"],
        ),
        tf.MiMoV2FlashForCausalLM,
    ),
    "llama4_text": (tf.Llama4TextConfig(**LLAMA4), tf.Llama4ForCausalLM),
    "llama4_text plain": (
        tf.Llama4TextConfig(
            **{**LLAMA4, "use_qk_norm": False, "attention_bias": True, "num_experts_per_tok": 2}, moe_layers=[0, 2]
        ),
        tf.Llama4ForCausalLM,
    ),
    "llama4": (
        tf.Llama4Config(
            text_config=LLAMA4,
            vision_config=dict(
                hidden_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                intermediate_size=16,
                vision_output_dim=16,
                image_size=8,
                patch_size=4,
                projector_input_dim=16,
                projector_output_dim=16,
            ),
        ),
        tf.Llama4ForConditionalGeneration,
    ),
    "qwen3_vl_moe": (
        tf.Qwen3VLMoeConfig(
            text_config=dict(TEXT, rope_parameters=dict(rope_type="default", rope_theta=1e4, mrope_section=[2, 1, 1])),
            vision_config=dict(depth=1, hidden_size=16, num_heads=2, intermediate_size=16, out_hidden_size=32),
        ),
        tf.Qwen3VLMoeForConditionalGeneration,
    ),
    "gemma4_text": (tf.Gemma4TextConfig(**GEMMA4, attention_k_eq_v=True), tf.Gemma4ForCausalLM),
    "gemma4_text layer embeddings": (
        tf.Gemma4TextConfig(
            **{**GEMMA4, "hidden_size_per_layer_input": 8}, vocab_size_per_layer_input=384, num_kv_shared_layers=1
        ),
        tf.Gemma4ForCausalLM,
    ),
    "gemma4 with images": (
        tf.Gemma4Config(
            text_config=GEMMA4,
            vision_config=dict(
                hidden_size=16,
                intermediate_size=16,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=2,
                head_dim=8,
                patch_size=4,
            ),
        ),
        tf.Gemma4ForConditionalGeneration,
    ),
    "gpt_oss": (
        tf.GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, head_dim=8, sliding_window=4),
        tf.GptOssForCausalLM,
    ),
}


def build(name: str, folder: Path) -> tuple[Any, checkpoint.Checkpoint]:
    """The reference with large random weights, and its folder loaded."""
    torch.manual_seed(0)
    config, kind = ROWS[name]
    config._attn_implementation = "eager"
    theirs = kind(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    for key, buffer in theirs.named_buffers():
        if key.endswith(("e_score_correction_bias", "layer_scalar")):
            torch.nn.init.normal_(buffer, float(key.endswith("layer_scalar")), 0.1)
    return theirs, save_and_load(theirs, folder)


def save_and_load(theirs: Any, folder: Path, published: bool = True) -> checkpoint.Checkpoint:
    """`published`: under published names."""
    theirs.save_pretrained(folder, save_original_format=published)
    tokenizer().save_pretrained(folder)
    return checkpoint.load(str(folder))


@cache
def tokenizer() -> tf.PreTrainedTokenizerFast:
    return byte_level_bpe(384)


@dataclass(frozen=True)
class Built:
    theirs: Any
    ours: checkpoint.Checkpoint
    folder: Path
    expected: torch.Tensor  # [T, V] the reference's logits of all sequences


@pytest.fixture(scope="module", params=ROWS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("experts")
    theirs, ours = build(request.param, folder)
    with torch.no_grad():
        expected = torch.cat([theirs(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])
    return Built(theirs, ours, folder, expected)


@pytest.mark.parametrize("published", [True, False])
@torch.no_grad()
def test_packed_sequences_and_chunks_equal_the_reference(built: Built, published: bool, tmp_path: Path) -> None:
    ours, expected = built.ours if published else save_and_load(built.theirs, tmp_path, published), built.expected
    packed = ours.head(ours.network(RaggedBatch.of(SEQUENCES)))
    scale = max(1.0, float(expected.abs().max()))
    assert float((packed - expected).abs().max()) <= 1e-5 * scale
    executor = TorchExecutor(ours.network, ours.head, block_count=8, block_size=4)
    fill(executor, math.inf)
    found = chunked_logits(executor, SEQUENCES[0])
    assert float((found - expected[: len(found)]).abs().max()) <= 1e-5 * scale


def chunked_logits(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """The logits [T, V] of a sequence that is computed in three chunks."""
    found = []
    for start, end in ((0, 4), (4, 5), (5, len(tokens))):
        span = list(range(start, end))
        rows = StepInput([tokens[p] for p in span], span, [0, len(span)], [[3, 1, 5]], list(range(len(span))))
        if not start:  # as a step is that computes the middle of a prompt alone
            assert not len(executor.step(replace(rows, output_rows=[])))
        found.append(executor.step(rows).clone())
    return torch.cat(found)


@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
@torch.no_grad()
def test_the_compiled_step_equals_the_reference(built: Built) -> None:
    if reason := unsupported_reason(built.ours.network.config):
        pytest.skip(reason)
    expected = built.expected[: len(SEQUENCES[0])]
    executor = pack_by_parts(built.folder, precision="float32", block_count=8, threads=2)
    scale = max(1.0, float(expected.abs().max()))
    assert float((chunked_logits(executor, SEQUENCES[0]) - expected).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize(
    "name",
    ["deepseek_v2 lite", "deepseek_v3", "phimoe", "olmoe clipped", "afmoe", "cohere2_moe", "gemma4_text"],
)
@torch.inference_mode()
def test_states_do_not_depend_on_the_batch_when_made_invariant(name: str, tmp_path: Path) -> None:
    _, ours = build(name, tmp_path)
    make_invariant(ours.network, ours.head)
    packed = ours.head(ours.network(RaggedBatch.of(SEQUENCES)))
    alone = torch.cat([ours.head(ours.network(RaggedBatch.of([sequence]))) for sequence in SEQUENCES])
    assert torch.equal(packed, alone)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("minicpm3", "its attention is latent"),
        ("phimoe", "sparse mixer"),
        ("olmoe clipped", "clamped"),
        ("kolibri1", "chosen by their logits"),
        ("axk1", "output of its experts is normed"),
        ("llama4_text", "inputs of its experts are weighted"),
    ],
)
def test_the_compiled_step_and_tensor_parallel_say_why_not(name: str, reason: str, tmp_path: Path) -> None:
    _, ours = build(name, tmp_path)
    config = ours.network.config
    assert reason in unsupported_reason(config)
    if config.latent is not None:
        assert "latent" in split_problem(replace(config, experts=None), 2)
        assert not adaptable_shapes(config).keys() & {"blocks.0.attention.query", "blocks.0.attention.output"}
    assert "clamped" in unsupported_reason(replace(config, experts=None, latent=None, qkv_limit=1.0))
    assert "gate" in split_problem(replace(config, experts=None, latent=None, attention_gate=True), 2)


def test_contexts_of_llama4_end_with_the_first_chunk_or_before_queries_are_scaled(tmp_path: Path) -> None:
    config, kind = ROWS["llama4_text"]
    kind(config).save_pretrained(tmp_path)
    byte_level_bpe(384).save_pretrained(tmp_path)
    assert checkpoint.load(str(tmp_path)).network.config.max_positions == config.attention_chunk_size == 32
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, "attention_chunk_size": None, "floor_scale": 24}))
    assert checkpoint.load(str(tmp_path)).network.config.max_positions == 23


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As DeepSeek-V3's file has them after its last layer."""
    config, kind = ROWS["deepseek_v3"]
    kind(config).save_pretrained(tmp_path)
    byte_level_bpe(384).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(384, 32)
    tensors["model.layers.3.self_attn.kv_b_proj.weight"] = torch.zeros(1, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level("INFO"):
        assert checkpoint.load(str(tmp_path)).network.config.depth == 3
    assert "layers from 3 on predict further tokens" in caplog.text
    fields = json.loads((tmp_path / "config.json").read_text())
    names = [name for name in ("num_nextn_predict_layers", "num_mtp_layers") if name in fields]
    for value in ("1", 10**6):
        (tmp_path / "config.json").write_text(json.dumps({**fields, **dict.fromkeys(names, value)}))
        with pytest.raises(UnsupportedError, match=r"num_nextn_predict_layers is .*a whole number up to 64"):
            checkpoint.load(str(tmp_path))


@pytest.mark.parametrize(
    ("name", "field", "value", "sentence"),
    [
        ("deepseek_v3", "kv_lora_rank", 0, "kv_lora_rank is 0, which should be a whole number from 1"),
        ("deepseek_v3", "q_lora_rank", -3, "latent is .*from 0 on as query_rank"),
        ("deepseek_v3", "qk_rope_head_dim", 7, "qk_rope_head_dim is 7, which should be even"),
        ("deepseek_v3", "v_head_dim", 64, "with values of 20 features at most, the width of a key"),
        ("deepseek_v3", "num_key_value_heads", 2, "num_key_value_heads is 2; 4, the number of heads, is known"),
        ("deepseek_v3", "scoring_func", "softmax", "scoring_func is .softmax.: only .sigmoid. is known"),
        ("deepseek_v2", "topk_method", "noaux_tc", "topk_method .noaux_tc. is not one of greedy"),
        ("deepseek_v2", "norm_topk_prob", True, "norm_topk_prob is True: only False is known"),
        ("phimoe", "num_experts_per_tok", 3, "num_experts_per_tok is 3: only 2 is known"),
        ("phimoe", "router_jitter_noise", -1.0, "with a margin that is not negative"),
        ("hunyuan_v1_moe", "moe_topk", [1, 2, 2], "moe_topk differs from layer to layer"),
        ("hunyuan_v1_moe", "moe_intermediate_size", 5, "its experts have 5 features, and 1 are shared"),
        ("cohere2_moe", "expert_selection_fn", "x", "expert_selection_fn .x. is not one of softmax, sigmoid"),
        ("cohere2_moe", "shared_expert_combination_strategy", "x", "strategy .x. is not one of sum, average"),
        ("olmoe clipped", "clip_qkv", -1.0, "clip_qkv is -1.0, which should be a positive number"),
        ("llama4_text", "num_hidden_layers", 10**9, "it describes 1000000000 layers"),
        ("mimo_v2_flash", "v_head_dim", 14, "v_head_dim is 14, which should be 12 at most"),
        ("mistral4", "n_group", 2, "n_group is 2: only 1 is known"),
        ("axk1", "num_hidden_layers", 10**9, "it describes 1000000000 layers"),
        (
            "dbrx",
            "ffn_config",
            {"moe_normalize_expert_weights": 2.0},
            "moe_normalize_expert_weights is 2.0; null and 1",
        ),
        ("minimax_m2", "qk_norm_type", "per_head", "qk_norm_type is .per_head.: only .per_layer. is known"),
    ],
)
def test_unknown_fields_are_refused_by_name(
    name: str, field: str, value: object, sentence: str, tmp_path: Path
) -> None:
    config, kind = ROWS[name]
    kind(config).save_pretrained(tmp_path)
    byte_level_bpe(384).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**fields, field: value}))
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.load(str(tmp_path))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("num_local_experts", 10**6, "experts"),
        ("num_experts_per_tok", 5, "4 at most chosen"),
        ("num_experts_per_tok", 0, "1 on"),
    ],
)
def test_wrong_numbers_of_experts_are_refused(field: str, value: int, sentence: str, tmp_path: Path) -> None:
    config, kind = ROWS["mixtral"]
    kind(config).save_pretrained(tmp_path)
    byte_level_bpe(384).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace(f'"{field}": {getattr(config, field)}', f'"{field}": {value}'))
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.load(str(tmp_path))

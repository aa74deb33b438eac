"""Mixtures of experts equal the reference on tiny random checkpoints, as folders that the reference writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from polyhead.models import checkpoint
from polyhead.models.core.errors import CheckpointError
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.network.ragged import RaggedBatch
from tests.support.checkpoints import byte_level_bpe

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40]]
SHAPE = dict(
    vocab_size=384, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64,
)  # fmt: skip
ROUTED = dict(SHAPE, n_routed_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2)
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
        if key.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.1)
    theirs.save_pretrained(folder)
    byte_level_bpe(384).save_pretrained(folder)
    return theirs, checkpoint.load(str(folder))


@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_packed_sequences_and_chunks_equal_the_reference(name: str, tmp_path: Path) -> None:
    theirs, ours = build(name, tmp_path)
    expected = torch.cat([theirs(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])
    packed = ours.head(ours.network(RaggedBatch.of(SEQUENCES)))
    scale = max(1.0, float(expected.abs().max()))
    assert float((packed - expected).abs().max()) <= 1e-5 * scale
    executor = TorchExecutor(ours.network, ours.head, block_count=8, block_size=4)
    found = chunked_logits(executor, SEQUENCES[0])
    assert float((found - expected[: len(found)]).abs().max()) <= 1e-5 * scale


def chunked_logits(executor: Executor, tokens: list[int]) -> torch.Tensor:
    """The logits [T, V] of a sequence that is computed in three chunks."""
    found = []
    for start, end in ((0, 4), (4, 5), (5, len(tokens))):
        span = list(range(start, end))
        rows = StepInput([tokens[p] for p in span], span, [0, len(span)], [[3, 1, 5]], list(range(len(span))))
        found.append(executor.step(rows).clone())
    return torch.cat(found)


@pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
@pytest.mark.parametrize("name", ROWS)
@torch.no_grad()
def test_the_compiled_step_equals_the_reference(name: str, tmp_path: Path) -> None:
    theirs, ours = build(name, tmp_path)
    expected = theirs(torch.tensor([SEQUENCES[0]])).logits[0]
    executor = NativeExecutor(ours.network, ours.head, precision="float32", block_count=8, threads=2)
    scale = max(1.0, float(expected.abs().max()))
    assert float((chunked_logits(executor, SEQUENCES[0]) - expected).abs().max()) <= 1e-5 * scale


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

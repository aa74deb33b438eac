"""ALiBi and relative position vectors (Shaw et al.) equal their formulas, packed and over the cache."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from polyhead.models.core.errors import InvarianceError, UnsupportedError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import unsupported_reason
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.positions import DistanceBias, LinearBias, sinusoids
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer
from polyhead.models.network.varlen import is_supported

SEQUENCES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31, 32, 33, 34], [40]]
SHAPE: dict[str, Any] = dict(
    vocab_size=50,
    width=24,
    depth=2,
    heads=6,
    kv_heads=6,
    head_width=8,
    mlp_width=32,
    max_positions=64,
)
CONFIGS = {
    f"{position}{sight}{name}": ModelConfig(**SHAPE | more, position=position, farthest=3, causal=not sight)
    for position in ("alibi", "relative")
    for sight in ("", "-both-ways")
    for name, more in {
        "": {},
        "-grouped": dict(kv_heads=2),
        "-windowed": dict(window=4, windowed=(True, False)),
    }.items()
}
CAUSAL = [name for name, config in CONFIGS.items() if config.causal]


def network(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    made = Transformer(config).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return made


def slope(head: int, heads: int) -> float:
    """The ALiBi slope of a head: for 2^n heads as in the paper, for other numbers as in its code."""
    full = 2 ** (heads.bit_length() - 1)
    return 2.0 ** (-8 * (head + 1) / full) if head < full else 2.0 ** (-8 * (2 * (head - full) + 1) / (2 * full))


def attention_output(attention: Any, x: Tensor, config: ModelConfig, layer: int) -> Tensor:
    """The attention output of one sequence, computed one row, head and key at a time."""
    query, key, value = (made(x).unflatten(1, (-1, 8)) for made in (attention.query, attention.key, attention.value))
    out = torch.zeros(len(x), config.heads, 8)
    for i in range(len(x)):
        window = 4 if config.is_windowed(layer) else 99
        seen = [j for j in range(len(x)) if abs(i - j) < window and (j <= i or not config.causal)]
        for h in range(config.heads):
            shared = h * config.kv_heads // config.heads
            keys, values = ([part[j, shared] for j in seen] for part in (key, value))
            bias = [0.0] * len(seen)
            if config.position == "relative":
                at = [max(-3, min(3, j - i)) + 3 for j in seen]
                keys = [k + attention.relative.keys.weight[c] for k, c in zip(keys, at, strict=True)]
                values = [v + attention.relative.values.weight[c] for v, c in zip(values, at, strict=True)]
            else:
                bias = [slope(h, config.heads) * abs(i - j) for j in seen]
            scores = [query[i, h].dot(k) / 8**0.5 - penalty for k, penalty in zip(keys, bias, strict=True)]
            out[i, h] = torch.stack(scores).softmax(0) @ torch.stack(values)
    done: Tensor = attention.output(out.flatten(1))
    return done


def dense(made: Any, sequence: list[int]) -> Tensor:
    x = made.tokens(torch.tensor(sequence))
    for layer, block in enumerate(made.blocks):
        x = x + attention_output(block.attention, block.attention_norm(x), made.config, layer)
        x = x + block.mlp.down(F.gelu(block.mlp.up(block.mlp_norm(x))))
    done: Tensor = made.final_norm(x)
    return done


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_packed_equals_the_formula_of_each_sequence_alone(name: str) -> None:
    made = network(CONFIGS[name])
    states = made(RaggedBatch.of(SEQUENCES))
    assert torch.allclose(states, torch.cat([dense(made, sequence) for sequence in SEQUENCES]), atol=1e-5)
    assert torch.allclose(made(RaggedBatch.of(SEQUENCES[:1])), states[: len(SEQUENCES[0])], atol=1e-5)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("block_size", [1, 4])
@torch.no_grad()
def test_chunks_over_the_cache_equal_the_full_pass(name: str, block_size: int) -> None:
    made = network(CONFIGS[name])
    head = LanguageHead(CONFIGS[name])
    executor = TorchExecutor(made, head, block_count=40, block_size=block_size)
    free = list(range(40))
    tables = [[free.pop() for _ in range(-(-len(s) // block_size))] for s in SEQUENCES]
    done, collected = [0] * 4, [[torch.empty(0, 50)] for _ in SEQUENCES]
    for step in ({0: 4}, {0: 1, 1: 2}, {0: 2, 1: 1, 2: 3, 3: 1}, {0: 1, 2: 1}, {0: 1, 2: 1}):
        rows = StepInput([], [], [0], [], [])
        for n, count in step.items():
            span = range(done[n], done[n] + count)
            rows.tokens.extend(SEQUENCES[n][p] for p in span)
            rows.positions.extend(span)
            rows.starts.append(len(rows.tokens))
            rows.block_tables.append(tables[n])
            done[n] += count
        rows.output_rows.extend(range(len(rows.tokens)))
        logits = executor.step(rows)
        for i, n in enumerate(step):
            collected[n].append(logits[rows.starts[i] : rows.starts[i + 1]])
    assert done == [len(sequence) for sequence in SEQUENCES]
    full = head(made(RaggedBatch.of(SEQUENCES)))
    assert torch.allclose(torch.cat([torch.cat(rows) for rows in collected]), full, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_positions_change_the_states(name: str) -> None:
    """The same tokens in another order have other states, although there is no other position information."""
    made = network(CONFIGS[name])
    states = made(RaggedBatch.of([[5, 5, 6, 7], [5, 6, 5, 7]]))
    assert float((states[3] - states[7]).abs().max()) > 1e-3


@pytest.mark.parametrize("heads", [1, 2, 6, 8, 12, 16])
def test_alibi_slopes_equal_transformers(heads: int) -> None:
    theirs = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]  # the bias of position 1
    assert torch.allclose(LinearBias(heads).rates, theirs)
    assert [round(1 / slope) for slope in LinearBias(8).rates.tolist()] == [2, 4, 8, 16, 32, 64, 128, 256]


def test_every_distance_vector_has_a_gradient() -> None:
    made = network(CONFIGS["relative-both-ways"])
    made(RaggedBatch.of(SEQUENCES)).square().sum().backward()
    for block in made.blocks:
        for table in (block.attention.relative.keys, block.attention.relative.values):  # type: ignore[union-attr]
            assert (table.weight.grad.abs().amax(1) > 0).all()  # type: ignore[union-attr]


def test_the_compiled_step_refuses_vectors_by_distance() -> None:
    config, reason = CONFIGS["relative"], "keys and values depend"
    assert reason in unsupported_reason(config)
    with pytest.raises(UnsupportedError, match=reason):
        NativeExecutor(network(config), precision="float32")


@pytest.mark.parametrize("position", ["alibi", "relative"])
def test_the_packed_kernel_refuses_scores_by_distance(position: str) -> None:
    config = CONFIGS[position]
    assert not is_supported(config)
    assert is_supported(replace(config, position="learned"))


@torch.no_grad()
def test_deterministic_mode_supports_alibi_and_refuses_vectors() -> None:
    made, plain = network(CONFIGS["alibi-grouped"]), network(CONFIGS["alibi-grouped"])
    make_invariant(made, LanguageHead(made.config))
    together = made(RaggedBatch.of(SEQUENCES))
    assert torch.allclose(together, plain(RaggedBatch.of(SEQUENCES)), atol=1e-5)
    assert torch.equal(together, torch.cat([made(RaggedBatch.of([sequence])) for sequence in SEQUENCES]))
    with pytest.raises(InvarianceError, match="products with distance vectors"):
        make_invariant(network(CONFIGS["relative"]), LanguageHead(CONFIGS["relative"]))


def test_sines_and_cosines_are_interleaved_or_in_halves() -> None:
    table = sinusoids(50, 8, halves=False)
    assert table[0].tolist() == [0, 1] * 4
    assert table[7, 4:6].tolist() == pytest.approx([0.0699428, 0.9975510], abs=1e-6)  # sin and cos of 7 / 10000^(4/8)
    assert torch.equal(sinusoids(50, 8, halves=True), torch.cat((table[:, ::2], table[:, 1::2]), dim=1))


def test_causal_distance_buckets_cover_only_earlier_positions() -> None:
    bias = DistanceBias(8, 16, 1, causal=True)
    kinds = bias.bucket(torch.tensor([-3, -1, 0, 1, 2, 3, 4, 6, 9, 15, 16, 99])).tolist()
    assert kinds == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7]
    both = DistanceBias(8, 16, 1).bucket(torch.tensor([-3, 3])).tolist()
    assert both[0] - both[1] == 4

"""Recurrent layers: a token's numbers depend neither on other sequences nor on how a sequence is cut into steps."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from polyhead.models.executors.contract import StateUse, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import MixerConfig, ModelConfig
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.recurrent_mixers import silu, softplus
from polyhead.models.network.recurrent_state import RecurrentState, state_bytes
from polyhead.models.network.transformer import Transformer

VOCABULARY, BLOCK, BLOCKS, SLOTS = 50, 4, 40, 30
SHAPE = ModelConfig(
    vocab_size=VOCABULARY, width=24, depth=3, heads=4, kv_heads=2, head_width=16, mlp_width=40, max_positions=64,
    causal=True, position="rotary", norm="rms", gated_mlp=True, activation="silu", qkv_bias=False, output_bias=False,
    mlp_bias=False,
)  # fmt: skip
HEADS = MixerConfig(kernel=4, heads=4, head_width=5, key_heads=2, key_width=7)
CONFIGS = {
    "convolution": replace(
        SHAPE, mixers=("convolution", "attention", "convolution"), recurrent=MixerConfig(kernel=3, kernel_bias=True)
    ),
    "state space": replace(
        SHAPE,
        mixers=("state_space", "attention", "state_space"),
        recurrent=replace(HEADS, kernel_bias=True, norm_groups=2, step_limits=(0.01, 2.0)),
    ),
    "gate after the norm": replace(
        SHAPE, mixers=("state_space",) * 3, recurrent=replace(HEADS, gate_first=False, kernel=1)
    ),
    "without a norm": replace(SHAPE, mixers=("state_space",) * 3, recurrent=replace(HEADS, gated_norm=False)),
    "delta": replace(SHAPE, mixers=("delta", "delta", "attention"), recurrent=HEADS),
    "delta before inner norms": replace(
        SHAPE, norm_order="inner", mixers=("attention", "delta", "delta"), recurrent=replace(HEADS, is_pre_norm=True)
    ),
    "mixers and MLPs apart": replace(
        SHAPE,
        position="none",
        mixers=("state_space", "none", "attention"),
        mlps=(False, True, False),
        recurrent=HEADS,
    ),
    "no attention": replace(
        SHAPE, position="none", mixers=("state_space",) * 3, mlps=(False,) * 3, recurrent=replace(HEADS, key_heads=4)
    ),
}  # fmt: skip


@torch.no_grad()
def build(config: ModelConfig) -> tuple[Transformer, LanguageHead]:
    torch.manual_seed(0)
    network, head = Transformer(config).eval(), LanguageHead(config)
    for parameter in (*network.parameters(), *head.parameters()):
        parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return network, head


@pytest.fixture(params=CONFIGS, scope="module")
def parts(request: pytest.FixtureRequest) -> tuple[Transformer, LanguageHead]:
    """A network that was made invariant, and its head."""
    network, head = build(CONFIGS[request.param])
    make_invariant(network, head)
    return network, head


def whole_logits(network: Transformer, head: LanguageHead, sequence: Sequence[int]) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = head(network(RaggedBatch.of([sequence])))
    return logits


class Steps:
    """Sequences that are computed in chunks over one cache and one pool of states."""

    def __init__(self, network: Transformer, head: LanguageHead, sequences: Sequence[Sequence[int]]) -> None:
        self.executor = TorchExecutor(network, head, block_count=BLOCKS, block_size=BLOCK, state_count=SLOTS)
        self.sequences = sequences
        free = iter(range(BLOCKS))
        self.tables = [[next(free) for _ in range(-(-len(sequence) // BLOCK))] for sequence in sequences]
        self.done, self.slots = [0] * len(sequences), [-1] * len(sequences)
        self.free_slots, self.borders = list(range(SLOTS)), dict[tuple[int, int], int]()
        self.logits: list[list[Tensor]] = [[] for _ in sequences]

    def step(self, chunks: dict[int, int]) -> None:
        """Compute so many tokens of each sequence. States at the last border of blocks inside of a chunk are kept."""
        rows, uses = StepInput([], [], [0], [], []), []
        for n, count in chunks.items():
            first, end = self.done[n], self.done[n] + count
            rows.tokens.extend(self.sequences[n][first:end])
            rows.positions.extend(range(first, end))
            rows.starts.append(len(rows.tokens))
            rows.block_tables.append(self.tables[n])
            last = (end - 1) // BLOCK * BLOCK
            kept = self.free_slots.pop() if last > first else -1
            if last > first:
                self.borders[n, last] = kept
            uses.append(StateUse(self.slots[n], self.free_slots.pop(), max(last - first, 0), kept))
        rows.output_rows.extend(range(len(rows.tokens)))
        logits = self.executor.step(replace(rows, states=uses))
        for index, (n, count) in enumerate(chunks.items()):
            self.logits[n].append(logits[rows.starts[index] : rows.starts[index + 1]].clone())
            self.done[n] += count
            if self.slots[n] >= 0:
                self.free_slots.append(self.slots[n])
            self.slots[n] = uses[index].write

    def remaining(self, n: int) -> int:
        return len(self.sequences[n]) - self.done[n]


def draw_sequences(seed: int, lengths: Sequence[int]) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


def test_packed_sequences_have_the_bits_of_each_alone(parts: tuple[Transformer, LanguageHead]) -> None:
    network, head = parts
    sequences = draw_sequences(1, (9, 1, 17, 3, 9))
    with torch.inference_mode():
        packed = head(network(RaggedBatch.of(sequences)))
    assert torch.equal(packed, torch.cat([whole_logits(network, head, each) for each in sequences]))


def test_chunks_beside_others_have_the_bits_of_whole_sequences(parts: tuple[Transformer, LanguageHead]) -> None:
    network, head = parts
    sequences = draw_sequences(2, (13, 6, 21, 9))
    steps, draw = Steps(network, head, sequences), random.Random(3)
    while active := [n for n in range(len(sequences)) if steps.remaining(n)]:
        taking = draw.sample(active, draw.randint(1, len(active)))
        steps.step({n: min(steps.remaining(n), draw.choice((1, 3, 4, 7))) for n in taking})
    for n, sequence in enumerate(sequences):
        assert torch.equal(torch.cat(steps.logits[n]), whole_logits(network, head, sequence))


def test_a_sequence_goes_on_from_a_kept_border_with_the_same_bits(parts: tuple[Transformer, LanguageHead]) -> None:
    """As a prefix is shared: another sequence reads the blocks and the state of the first up to a border."""
    network, head = parts
    [first, other] = draw_sequences(4, (14, 3))
    steps = Steps(network, head, [first, [*first[:8], *other]])
    steps.step({0: 2})
    steps.step({0: 9})  # 11 tokens; the state after 8 is kept
    assert [border for _, border in steps.borders] == [8]
    steps.step({0: 3})
    steps.tables[1][:2], steps.done[1], steps.slots[1] = steps.tables[0][:2], 8, steps.borders[0, 8]
    steps.step({1: 3})
    assert torch.equal(steps.logits[1][0], whole_logits(network, head, steps.sequences[1])[8:])


def test_a_step_that_is_computed_again_gives_the_same_bits(parts: tuple[Transformer, LanguageHead]) -> None:
    network, head = parts
    [sequence] = draw_sequences(5, (10,))
    steps = Steps(network, head, [sequence])
    steps.step({0: 4})
    before, slot = steps.executor.states, steps.slots[0]
    assert before is not None
    kept = [storage[slot].clone() for storage in (*before.rows.values(), *before.matrices.values())]
    steps.step({0: 6})
    steps.free_slots.remove(slot)
    steps.done[0], steps.slots[0] = 4, slot
    steps.step({0: 6})
    assert torch.equal(steps.logits[0][1], steps.logits[0][2])
    after = [storage[slot] for storage in (*before.rows.values(), *before.matrices.values())]
    assert all(torch.equal(*pair) for pair in zip(kept, after, strict=True)), "a slot that is read is not changed"


def test_only_output_rows_are_returned(parts: tuple[Transformer, LanguageHead]) -> None:
    network, head = parts
    [first, second] = draw_sequences(6, (5, 9))
    executor = TorchExecutor(network, head)
    rows = StepInput([*first, *second], [*range(5), *range(9)], [0, 5, 14], [[], []], [4, 13])
    expected = [whole_logits(network, head, sequence)[-1:] for sequence in (first, second)]
    assert torch.equal(executor.step(rows), torch.cat(expected))


def test_the_mixers_are_their_formulas() -> None:
    """In float64, token by token and head by head, without the other parts of a layer."""
    for kind in ("state_space", "delta"):
        config = replace(SHAPE, depth=1, mixers=(kind,), mlps=(False,), position="none", recurrent=HEADS)
        network, _ = build(config)
        batch = RaggedBatch.of(draw_sequences(7, (6,)))
        x, frame = network.embed(batch)
        mixer = network.blocks[0].attention
        found = mixer(x, frame)
        expected = (state_space_formula if kind == "state_space" else delta_formula)(mixer, x.double())
        assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def convolve(x: Tensor, taps: Tensor) -> Tensor:
    count = taps.size(1)
    padded = F.pad(x.T, (count - 1, 0))
    return F.silu(F.conv1d(padded[None], taps.double()[:, None], groups=len(taps))[0].T)


def state_space_formula(mixer: torch.nn.Module, x: Tensor) -> Tensor:
    mixer = mixer.double()
    gate, convolved, steps = torch.split(mixer.input(x), [20, 48, 4], dim=-1)
    values, b, c = torch.split(convolve(convolved, mixer.taps), [20, 14, 14], dim=-1)
    steps, state, out = F.softplus(steps + mixer.step_bias), torch.zeros(4, 5, 7).double(), []
    for t in range(len(x)):
        for h in range(4):
            group, value = h // 2, values[t].view(4, 5)[h]
            state[h] = torch.exp(-mixer.log_decay[h].exp() * steps[t, h]) * state[h]
            state[h] += steps[t, h] * torch.outer(value, b[t].view(2, 7)[group])
            out.append(state[h] @ c[t].view(2, 7)[group] + mixer.skip[h] * value)
    gated = torch.cat(out).view(len(x), 20) * F.silu(gate)
    return mixer.output(F.rms_norm(gated, (20,), mixer.norm_weight, 1e-5))  # type: ignore[no-any-return]


def delta_formula(mixer: torch.nn.Module, x: Tensor) -> Tensor:
    mixer = mixer.double()
    query, key, values = (
        convolve(getattr(mixer, name)(x), getattr(mixer, f"{name}_taps")) for name in ("query", "key", "value")
    )
    rates = torch.sigmoid(mixer.rate(x))
    kept = torch.exp(-mixer.log_decay.exp() * F.softplus(mixer.decay(x) + mixer.step_bias))
    state, out = torch.zeros(4, 7, 5).double(), []
    for t in range(len(x)):
        for h in range(4):
            q, k = (part[t].view(2, 7)[h // 2] for part in (query, key))
            q, k = (part / (part.square().sum() + 1e-6).sqrt() for part in (q, k))
            state[h] = kept[t, h] * state[h]
            state[h] += torch.outer(k, rates[t, h] * (values[t].view(4, 5)[h] - state[h].T @ k))
            out.append(F.rms_norm(state[h].T @ q * 7**-0.5, (5,), mixer.norm_weight, 1e-5))
    return mixer.output(torch.cat(out).view(len(x), 20) * F.silu(mixer.gate(x)))  # type: ignore[no-any-return]


def test_activations_give_an_element_the_same_bits_at_every_place() -> None:
    x = torch.randn(1001) * 10
    for function, theirs in ((silu, F.silu), (softplus, F.softplus)):
        alone = torch.cat([function(x[n : n + 1]) for n in range(len(x))])
        for start, end in ((0, 1001), (1, 500), (3, 20), (7, 1000)):
            assert torch.equal(function(x[start:end]), alone[start:end])
        assert torch.allclose(alone, theirs(x), rtol=1e-6)
    assert float(silu(torch.tensor(-200.0))) == 0.0
    assert float(softplus(torch.tensor(200.0))) == 200.0


def test_a_slot_has_the_bytes_of_the_estimate() -> None:
    for config in CONFIGS.values():
        state = RecurrentState(config, 3, torch.zeros(0))
        storages = (*state.rows.values(), *state.matrices.values())
        assert sum(storage.numel() * storage.itemsize for storage in storages) == 3 * state_bytes(config)
    assert state_bytes(SHAPE) == 0
    assert not SHAPE.is_recurrent


def test_a_state_that_is_not_finite_is_reported_for_its_blocks() -> None:
    network, head = build(CONFIGS["no attention"])
    [sequence] = draw_sequences(8, (7,))
    steps = Steps(network, head, [sequence, sequence])
    with torch.no_grad():
        network.tokens.weight[sequence[5]] = float("inf")
    steps.step({0: 4, 1: 3})
    assert not steps.executor.nonfinite_blocks
    steps.step({0: 3, 1: 1})
    assert steps.executor.nonfinite_blocks == {steps.tables[0][1]}

"""The encoder-decoder: packed equals alone, steps equal the full pass, states can be selected and joined."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.models.executors.seq2seq_executor import Seq2SeqExecutor
from polyhead.models.network.encoder_decoder import INITIAL_CAPACITY, EncoderDecoder, TransformerState
from polyhead.models.network.model_config import EncoderDecoderConfig, ModelConfig
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer
from polyhead.models.seq2seq.decoding import DecodingConfig, generate
from polyhead.models.seq2seq.protocol import Seq2Seq
from polyhead.service.core.request import BeamSearchOptions, Generate, Sampling
from polyhead.service.engine.generator_worker import GeneratorWorker
from tests.support.engine_fakes import ask, finish, turn

WORDS, START = 23, 1
SMALL = ModelConfig(
    vocab_size=WORDS, width=16, depth=2, heads=4, kv_heads=4, head_width=4, mlp_width=20, max_positions=64, causal=False
)
KINDS = {
    "post, sines": replace(SMALL, norm_order="post", position="sinusoidal", embedding_scale=4.0),
    "pre, bias by distance": replace(SMALL, position="bias", distances=8, farthest=12, norm="rms", score_scale=1.0),
    "grouped, rotary": replace(SMALL, position="rotary", kv_heads=2, gated_mlp=True, activation="silu"),
    "two streams": replace(SMALL, norm_order="post", embedding_norm=True, distances=8, farthest=12, two_streams=True),
}
SOURCES = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20]]
TARGETS = [[1, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [1, 9], [1, 20, 21]]


def random_network(half: ModelConfig, **options: object) -> EncoderDecoder:
    decoder = replace(half, causal=True, depth=3)
    half = replace(half, two_streams=False)
    config = EncoderDecoderConfig(encoder=half, decoder=decoder, start=START, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    network = EncoderDecoder(Transformer(half), config).eval()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network


def close(some: torch.Tensor, other: torch.Tensor) -> bool:
    return some.shape == other.shape and bool(((some - other).abs() <= 1e-5 * max(1, float(other.abs().max()))).all())


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_packed_batch_equals_each_sequence_alone(kind: str) -> None:
    network = random_network(KINDS[kind])
    together = network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS))
    alone = [network(RaggedBatch.of([s]), RaggedBatch.of([t])) for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert close(together, torch.cat(alone))
    other = network(RaggedBatch.of([[3, 4, 5, 6, 8]]), RaggedBatch.of(TARGETS[:1]))
    assert not close(alone[0], other), "the output depends on the source"


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_decoder_is_causal(kind: str) -> None:
    network = random_network(KINDS[kind])
    some, other = (network(RaggedBatch.of([[3, 4]]), RaggedBatch.of([[1, 5, 6, last]])) for last in (7, 8))
    assert close(some[:3], other[:3])
    assert not close(some[3:], other[3:])


@dataclass
class RunningSequence:
    """A running sequence for reference: its source and its target tokens so far."""

    source: list[int]
    target: list[int] = field(default_factory=list)


def checked_step(
    network: EncoderDecoder, state: TransformerState, running: list[RunningSequence], tokens: list[int]
) -> TransformerState:
    """Runs a step. Asserts that the logits of every sequence equal those of a full pass."""
    logits, state = network.step(torch.tensor(tokens), state)
    for each, token in zip(running, tokens, strict=True):
        each.target.append(token)
    with torch.no_grad():
        full = network(
            RaggedBatch.of([each.source for each in running]), RaggedBatch.of([each.target for each in running])
        )
    ends = [sum(len(each.target) for each in running[: n + 1]) - 1 for n in range(len(running))]
    assert close(logits, full[ends])
    assert [len(weights) for weights in network.attention_weights(state)] == [len(each.source) for each in running]
    return state


def test_steps_equal_the_full_pass_beyond_the_initial_capacity() -> None:
    network, running = (
        random_network(KINDS["pre, bias by distance"]),
        [RunningSequence(source) for source in SOURCES[:2]],
    )
    state = network.initial_state(RaggedBatch.of(SOURCES[:2]))
    for step in range(INITIAL_CAPACITY + 2):
        state = checked_step(network, state, running, [(7 * step + n) % WORDS for n in range(2)])


PARTS = st.lists(st.lists(st.integers(2, WORDS - 1), min_size=1, max_size=7), min_size=1, max_size=3)
MOVES = st.lists(st.one_of(PARTS, st.lists(st.integers(0, 99), min_size=1, max_size=5), st.integers(0, 99)), max_size=7)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(first=PARTS, moves=MOVES)
def test_selected_and_joined_sequences_equal_each_alone(
    kind: str, first: list[list[int]], moves: list[list[list[int]] | list[int] | int]
) -> None:
    """Each move joins new sources, selects rows, or runs a step."""
    network, running = NETWORKS[kind], [RunningSequence(source) for source in first]
    state = network.initial_state(RaggedBatch.of(first))
    for move in [*moves, 3]:
        if isinstance(move, int):
            state = checked_step(network, state, running, [(move + n) % WORDS for n in range(len(running))])
        elif isinstance(move[0], int):
            rows = [row % len(running) for row in move]  # type: ignore[operator]
            state = network.select_rows(state, torch.tensor(rows))
            running = [RunningSequence(running[row].source, list(running[row].target)) for row in rows]
        else:
            state = network.join_states([state, network.initial_state(RaggedBatch.of(move))])  # type: ignore[arg-type]
            running += [RunningSequence(source) for source in move]  # type: ignore[arg-type]


NETWORKS = {kind: random_network(half) for kind, half in KINDS.items()}


def test_a_state_is_not_changed_by_steps_from_it() -> None:
    network = random_network(KINDS["post, sines"])
    _, state = network.step(torch.tensor([START] * 4), network.initial_state(RaggedBatch.of(SOURCES)))
    some, after = network.step(torch.tensor([5, 6, 7, 8]), state)
    other, _ = network.step(torch.tensor([9, 10, 11, 12]), state)
    on, _ = network.step(torch.tensor([2, 3, 4, 5]), after)
    again, _ = network.step(torch.tensor([5, 6, 7, 8]), state)
    with torch.no_grad():
        full = network(RaggedBatch.of(SOURCES), RaggedBatch.of([[START, n, n - 3] for n in (5, 6, 7, 8)]))
        full_other = network(RaggedBatch.of(SOURCES), RaggedBatch.of([[START, n] for n in (9, 10, 11, 12)]))
    assert close(on, full[2::3])
    assert close(other, full_other[1::2])
    assert torch.equal(some, again)


def test_beams_share_encoder_states_which_are_freed_with_them() -> None:
    network = random_network(KINDS["post, sines"])
    initial = network.initial_state(RaggedBatch.of(SOURCES))
    beams = network.select_rows(initial, torch.tensor([0, 0, 0, 1, 1, 2, 3]))
    assert beams.memories[0] is initial.memories[0]
    assert network.select_rows(beams, torch.arange(7)) is beams
    last = network.select_rows(beams, torch.tensor([6, 3]))
    assert [sorted(memory.lengths) for memory in last.memories] == [[1, 2]]
    small = network.initial_state(RaggedBatch.of([[4, 5, 6, 7, 8]]))
    joined = network.join_states([initial, small])
    assert joined.memories == (initial.memories[0], small.memories[0]), "the encoder states were copied"
    assert len(network.join_states([joined, small]).memories) == 2
    assert network.select_rows(joined, torch.tensor([4])).memories == (small.memories[0],)


def test_attention_weights_are_over_each_source() -> None:
    network = random_network(KINDS["post, sines"])
    state = network.initial_state(RaggedBatch.of(SOURCES))
    assert [weights.tolist() for weights in network.attention_weights(state)][3] == [1.0]
    assert network.attention_weights(state)[1].tolist() == [0.5, 0.5]
    _, state = network.step(torch.tensor([START] * 4), state)
    found = network.attention_weights(state)
    assert all(float(weights.sum()) == pytest.approx(1.0) for weights in found)
    assert float(found[0].max() - found[0].min()) > 1e-3
    _, alone = network.step(torch.tensor([START]), network.initial_state(RaggedBatch.of(SOURCES[2:3])))
    assert close(found[2], network.attention_weights(alone)[0])
    assert torch.equal(network.attention_weights(network.select_rows(state, torch.tensor([2])))[0], found[2])


def test_every_parameter_has_a_gradient_and_the_output_is_tied_by_default() -> None:
    for kind in ("two streams", "pre, bias by distance"):
        tied = random_network(KINDS[kind], output_scale=0.25, output_bias=True)
        tied(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)).square().sum().backward()
        assert {name for name, parameter in tied.named_parameters() if parameter.grad is None} == set()
    assert tied.output.weight is tied.encoder.tokens.weight is tied.decoder.tokens.weight
    untied = random_network(KINDS["pre, bias by distance"], tied=False)
    assert untied.output.weight is not untied.encoder.tokens.weight
    assert untied.bias is None


def test_the_first_transformer_has_about_65_million_parameters() -> None:
    """Vaswani et al. 2017, table 3: the base model, with its vocabulary of 37,000 tokens for English and German."""
    half = ModelConfig(
        vocab_size=37_000, width=512, depth=6, heads=8, kv_heads=8, head_width=64, mlp_width=2048, max_positions=512,
        causal=False, position="sinusoidal", norm_order="post", embedding_scale=512**0.5, activation="relu",
    )  # fmt: skip
    config = EncoderDecoderConfig(encoder=half, decoder=replace(half, causal=True), start=0)
    with torch.device("meta"):
        network = EncoderDecoder(Transformer(half), config)
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(65e6, rel=0.04)


@pytest.mark.parametrize("kind", ["grouped, rotary", "two streams"])
@pytest.mark.parametrize("beams", [1, 3])
def test_the_engine_s_answers_equal_those_of_generate(beams: int, kind: str) -> None:
    """States are selected, joined and kept as requests start and end, in few blocks."""
    network, stop = NETWORKS[kind], frozenset((0,))
    executor = Seq2SeqExecutor(
        network, torch.device("cpu"), vocabulary=network.config.decoder.vocab_size, block_count=24, block_size=4
    )
    worker = GeneratorWorker(executor, model="translator")
    options = {"sampling": Sampling(temperature=0)} if beams == 1 else {"beams": BeamSearchOptions(beams)}
    requests = [Generate("t", (START,), 10, stop, source=tuple(source), **options) for source in SOURCES]  # type: ignore[arg-type]
    tickets = ask(worker, *requests[:2])
    turn(worker)
    tickets += ask(worker, *requests[2:])
    finish(worker)
    answers = generate(network, RaggedBatch.of(SOURCES), DecodingConfig(stop_tokens=stop, max_tokens=10, beams=beams))
    assert [ticket.tokens for ticket in tickets] == [list(answer.tokens) for answer in answers]


def test_it_fulfils_the_seq2seq_protocol() -> None:
    network: Seq2Seq = random_network(SMALL)
    assert network.start_token == START

"""The Transformer of two halves: packed equals alone, steps equal the whole, states are picked and joined at will."""

from dataclasses import dataclass, field, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.models.executors.seq2seq_executor import Seq2SeqExecutor
from polyhead.models.network.encoder_decoder import INITIAL_CAPACITY, EncoderDecoder, TransformerState
from polyhead.models.network.model_config import EncoderDecoderConfig, ModelConfig
from polyhead.models.network.positions import DistanceBias, sinusoids
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
}
SOURCES = [[3, 4, 5, 6, 7], [8, 9], [10, 11, 12, 13, 14, 15, 16, 17, 18], [20]]
TARGETS = [[1, 5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [1, 9], [1, 20, 21]]


def built(half: ModelConfig, **options: object) -> EncoderDecoder:
    decoder = replace(half, causal=True, depth=3)
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
def test_a_batch_without_padding_gives_what_each_gives_alone(kind: str) -> None:
    network = built(KINDS[kind])
    together = network(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS))
    alone = [network(RaggedBatch.of([s]), RaggedBatch.of([t])) for s, t in zip(SOURCES, TARGETS, strict=True)]
    assert close(together, torch.cat(alone))
    other = network(RaggedBatch.of([[3, 4, 5, 6, 8]]), RaggedBatch.of(TARGETS[:1]))
    assert not close(alone[0], other), "what is written does not depend on what was read"


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_no_row_sees_what_stands_behind_it(kind: str) -> None:
    network = built(KINDS[kind])
    some, other = (network(RaggedBatch.of([[3, 4]]), RaggedBatch.of([[1, 5, 6, last]])) for last in (7, 8))
    assert close(some[:3], other[:3])
    assert not close(some[3:], other[3:])


@dataclass
class Under:
    """A sequence under way as it should be: its source and what was given."""

    source: list[int]
    given: list[int] = field(default_factory=list)


def stepped(
    network: EncoderDecoder, state: TransformerState, under: list[Under], tokens: list[int]
) -> TransformerState:
    """A step, after which every sequence's logits are those that it has on its own."""
    logits, state = network.step(torch.tensor(tokens), state)
    for each, token in zip(under, tokens, strict=True):
        each.given.append(token)
    with torch.no_grad():
        whole = network(RaggedBatch.of([each.source for each in under]), RaggedBatch.of([each.given for each in under]))
    ends = [sum(len(each.given) for each in under[: n + 1]) - 1 for n in range(len(under))]
    assert close(logits, whole[ends])
    assert [len(weights) for weights in network.attention_weights(state)] == [len(each.source) for each in under]
    return state


def test_steps_give_what_the_whole_gives_for_longer_than_a_cache_begins_with() -> None:
    network, under = built(KINDS["pre, bias by distance"]), [Under(source) for source in SOURCES[:2]]
    state = network.initial_state(RaggedBatch.of(SOURCES[:2]))
    for step in range(INITIAL_CAPACITY + 2):
        state = stepped(network, state, under, [(7 * step + n) % WORDS for n in range(2)])


PARTS = st.lists(st.lists(st.integers(2, WORDS - 1), min_size=1, max_size=7), min_size=1, max_size=3)
MOVES = st.lists(st.one_of(PARTS, st.lists(st.integers(0, 99), min_size=1, max_size=5), st.integers(0, 99)), max_size=7)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(first=PARTS, moves=MOVES)
def test_whatever_is_picked_and_joined_goes_on_as_if_it_were_alone(
    kind: str, first: list[list[int]], moves: list[list[list[int]] | list[int] | int]
) -> None:
    """Sources to begin and join, rows to pick, or a token to step with."""
    network, under = NETWORKS[kind], [Under(source) for source in first]
    state = network.initial_state(RaggedBatch.of(first))
    for move in [*moves, 3]:
        if isinstance(move, int):
            state = stepped(network, state, under, [(move + n) % WORDS for n in range(len(under))])
        elif isinstance(move[0], int):
            rows = [row % len(under) for row in move]  # type: ignore[operator]
            state = network.select_rows(state, torch.tensor(rows))
            under = [Under(under[row].source, list(under[row].given)) for row in rows]
        else:
            state = network.join_states([state, network.initial_state(RaggedBatch.of(move))])  # type: ignore[arg-type]
            under += [Under(source) for source in move]  # type: ignore[arg-type]


NETWORKS = {kind: built(half) for kind, half in KINDS.items()}


def test_a_state_stays_good_when_others_follow_from_it() -> None:
    network = built(KINDS["post, sines"])
    _, state = network.step(torch.tensor([START] * 4), network.initial_state(RaggedBatch.of(SOURCES)))
    some, after = network.step(torch.tensor([5, 6, 7, 8]), state)
    other, _ = network.step(torch.tensor([9, 10, 11, 12]), state)
    on, _ = network.step(torch.tensor([2, 3, 4, 5]), after)
    again, _ = network.step(torch.tensor([5, 6, 7, 8]), state)
    with torch.no_grad():
        whole = network(RaggedBatch.of(SOURCES), RaggedBatch.of([[START, n, n - 3] for n in (5, 6, 7, 8)]))
        beside = network(RaggedBatch.of(SOURCES), RaggedBatch.of([[START, n] for n in (9, 10, 11, 12)]))
    assert close(on, whole[2::3])
    assert close(other, beside[1::2])
    assert torch.equal(some, again)


def test_beams_share_what_was_read_and_it_is_let_go_of_when_most_are_over() -> None:
    network = built(KINDS["post, sines"])
    begun = network.initial_state(RaggedBatch.of(SOURCES))
    beams = network.select_rows(begun, torch.tensor([0, 0, 0, 1, 1, 2, 3]))
    assert beams.memories[0] is begun.memories[0]
    assert network.select_rows(beams, torch.arange(7)) is beams
    last = network.select_rows(beams, torch.tensor([6, 3]))
    assert [sorted(memory.lengths) for memory in last.memories] == [[1, 2]]
    small = network.initial_state(RaggedBatch.of([[4, 5, 6, 7, 8]]))
    joined = network.join_states([begun, small])
    assert joined.memories == (begun.memories[0], small.memories[0]), "what was read was copied"
    assert len(network.join_states([joined, small]).memories) == 2
    assert network.select_rows(joined, torch.tensor([4])).memories == (small.memories[0],)


def test_what_was_looked_at_is_told_in_weights_of_the_source() -> None:
    network = built(KINDS["post, sines"])
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


def test_every_parameter_learns_and_the_output_is_that_of_the_embeddings_unless_it_is_not() -> None:
    tied = built(KINDS["pre, bias by distance"], output_scale=0.25, output_bias=True)
    tied(RaggedBatch.of(SOURCES), RaggedBatch.of(TARGETS)).square().sum().backward()
    assert {name for name, parameter in tied.named_parameters() if parameter.grad is None} == set()
    assert tied.output.weight is tied.encoder.tokens.weight is tied.decoder.tokens.weight
    free = built(KINDS["pre, bias by distance"], tied=False)
    assert free.output.weight is not free.encoder.tokens.weight
    assert free.bias is None


def test_the_first_transformer_has_about_65_million_parameters() -> None:
    """Vaswani et al. 2017, table 3: the base model, with the 37,000 tokens of its English and German."""
    half = ModelConfig(
        vocab_size=37_000, width=512, depth=6, heads=8, kv_heads=8, head_width=64, mlp_width=2048, max_positions=512,
        causal=False, position="sinusoidal", norm_order="post", embedding_scale=512**0.5, activation="relu",
    )  # fmt: skip
    config = EncoderDecoderConfig(encoder=half, decoder=replace(half, causal=True), start=0)
    with torch.device("meta"):
        network = EncoderDecoder(Transformer(half), config)
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(65e6, rel=0.04)


def test_sines_stand_beside_their_cosines_or_before_all_of_them() -> None:
    table = sinusoids(50, 8, halves=False)
    assert table[0].tolist() == [0, 1] * 4
    assert table[7, 4:6].tolist() == pytest.approx([0.0699428, 0.9975510], abs=1e-6)  # sin and cos of 7 / 10000^(4/8)
    assert torch.equal(sinusoids(50, 8, halves=True), torch.cat((table[:, ::2], table[:, 1::2]), dim=1))


def test_all_kinds_of_distance_are_for_what_was_before_where_nothing_else_is_seen() -> None:
    bias = DistanceBias(8, 16, 1, causal=True)
    kinds = bias.bucket(torch.tensor([-3, -1, 0, 1, 2, 3, 4, 6, 9, 15, 16, 99])).tolist()
    assert kinds == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7]
    both = DistanceBias(8, 16, 1).bucket(torch.tensor([-3, 3])).tolist()
    assert both[0] - both[1] == 4


@pytest.mark.parametrize("beams", [1, 3])
def test_the_engine_writes_what_is_written_without_it(beams: int) -> None:
    """Over states that are picked, joined and kept as requests come and go, in few blocks."""
    network, stop = NETWORKS["grouped, rotary"], frozenset((0,))
    executor = Seq2SeqExecutor(
        network, torch.device("cpu"), vocabulary=network.config.decoder.vocab_size, block_count=24, block_size=4
    )
    worker = GeneratorWorker(executor, model="translator")
    how = {"sampling": Sampling(temperature=0)} if beams == 1 else {"beams": BeamSearchOptions(beams)}
    requests = [Generate("t", (START,), 10, stop, source=tuple(source), **how) for source in SOURCES]  # type: ignore[arg-type]
    tickets = ask(worker, *requests[:2])
    turn(worker)
    tickets += ask(worker, *requests[2:])
    finish(worker)
    answers = generate(network, RaggedBatch.of(SOURCES), DecodingConfig(stop_tokens=stop, max_tokens=10, beams=beams))
    assert [ticket.tokens for ticket in tickets] == [list(answer.tokens) for answer in answers]


def test_it_is_one_of_those_that_read_one_sequence_and_write_another() -> None:
    network: Seq2Seq = built(SMALL)
    assert network.start_token == START

"""The generator worker with encoder-decoders: with a fake network that makes every mistake visible."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from threading import Semaphore
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.seq2seq_executor import MAX_SOURCE_TOKENS, Seq2SeqExecutor
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.work_pieces import Pieces
from polyhead.service.core.errors import BadRequest, StepFailed
from polyhead.service.core.request import BeamSearchOptions, Done, Failed, Generate, Sampling, Terms
from polyhead.service.engine import generator_worker
from polyhead.service.engine.generator_worker import GeneratorWorker
from tests.service.engine.test_batch_sampling import SlowGuide
from tests.support.engine_fakes import RecordingTicket, ask, finish, finish_with_failures, turn

WORDS, START, END = 23, 1, 0
LONG = Sampling(temperature=0, bias=((END, -100.0),))
PIECES = 3  # of work in which sources are encoded
Known = tuple[tuple[int, ...], tuple[int, ...]]  # the source tokens, and the target tokens


def logits(known: Known) -> Tensor:
    return torch.randn(WORDS, generator=torch.Generator().manual_seed(hash(known) % (1 << 60)))


class FakeSeq2Seq:
    """A fake network whose states contain the tokens they were computed from, so that a mixed-up state is visible."""

    start_token = START

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []
        self.steps = 0
        self.pieces: list[int] = []  # tokens of the sources of which a piece was encoded
        self.broken: tuple[int, ...] = ()
        self.unreadable: tuple[int, ...] = ()

    def __call__(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        raise NotImplementedError

    def initial_state(self, sources: RaggedBatch) -> list[Known]:
        tokens = sources.tokens.tolist()
        read = [tuple(tokens[a:b]) for a, b in zip(sources.starts, sources.starts[1:], strict=False)]
        if self.unreadable in read:
            raise RuntimeError
        self.read += read
        return [(source, ()) for source in read]

    def initial_state_in_pieces(self, sources: RaggedBatch) -> Pieces[list[Known]]:
        for _ in range(PIECES):
            self.pieces.append(len(sources.tokens))
            yield
        return self.initial_state(sources)

    def step(self, tokens: Tensor, state: list[Known]) -> tuple[Tensor, list[Known]]:
        assert len(tokens) == len(state)
        self.steps += 1
        after = [(source, (*written, token)) for (source, written), token in zip(state, tokens.tolist(), strict=True)]
        if any(source == self.broken for source, _ in after):
            raise RuntimeError
        return torch.stack([logits(known) for known in after]), after

    def select_rows(self, state: list[Known], rows: Tensor) -> list[Known]:
        return [state[row] for row in rows.tolist()]

    def join_states(self, states: Sequence[list[Known]]) -> list[Known]:
        return [known for state in states for known in state]

    def attention_weights(self, state: list[Known]) -> list[Tensor]:
        return []


def translator(network: FakeSeq2Seq, blocks: int = 64, **budgets: int) -> GeneratorWorker:
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=blocks, block_size=4)
    return GeneratorWorker(executor, model="translator", **budgets)


def request_of(source: Sequence[int], most: int, **more: object) -> Generate:
    greedy = {"sampling": Sampling(temperature=0)} if "sampling" not in more else {}
    return Generate("t", (START,), most, frozenset({END}), source=tuple(source), **greedy, **more)  # type: ignore[arg-type]


def alone(source: Sequence[int], most: int) -> list[int]:
    written: tuple[int, ...] = (START,)
    while len(written) <= most and (token := int(logits((tuple(source), written)).argmax())) != END:
        written = (*written, token)
    return list(written[1:])


def many(count: int, seed: int) -> list[Generate]:
    dice = random.Random(seed)
    return [request_of(dice.choices(range(2, WORDS), k=dice.randint(1, 9)), dice.randint(1, 30)) for _ in range(count)]


@pytest.mark.parametrize(
    ("blocks", "budgets"), [(64, {}), (12, {}), (64, {"token_budget": 3}), (12, {"prefill_chunk": 2})]
)
def test_a_batch_is_answered_as_its_requests_alone(blocks: int, budgets: dict[str, int]) -> None:
    """With enough memory, with preemption, and with steps in which some sequences take no part."""
    requests = many(40, seed=blocks)
    worker = translator(FakeSeq2Seq(), blocks, **budgets)
    tickets = ask(worker, *requests)
    finish(worker)
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.tokens == alone(request.source, request.max_tokens)
        assert isinstance(done := ticket.events[-1], Done)
        assert done.prompt_tokens == len(request.source)
    worker.check_invariants()


def test_a_source_is_encoded_once() -> None:
    network = FakeSeq2Seq()
    worker = translator(network)
    ask(worker, request_of([5, 6, 7], 20), request_of([8, 9], 3))
    finish(worker)
    assert sorted(network.read) == [(5, 6, 7), (8, 9)]
    assert network.steps <= 21


def test_requests_that_come_later_change_no_answer() -> None:
    worker, requests, tickets = translator(FakeSeq2Seq()), many(30, seed=7), list[RecordingTicket]()
    for request in requests:
        tickets += ask(worker, request)
        turn(worker)
    finish(worker)
    assert [ticket.tokens for ticket in tickets] == [alone(each.source, each.max_tokens) for each in requests]


def test_a_paused_request_continues_where_it_was() -> None:
    worker = translator(FakeSeq2Seq())
    first, second = ask(worker, request_of([3, 4], 25), request_of([4, 3], 25))
    for _ in range(4):
        turn(worker)
    worker.pause(first)
    for _ in range(8):
        turn(worker)
    worker.resume(first)
    finish(worker)
    assert [first.tokens, second.tokens] == [alone([3, 4], 25), alone([4, 3], 25)]


def test_a_request_that_is_recomputed_alone_needs_only_the_last_logits() -> None:
    worker = translator(FakeSeq2Seq(), prefill_chunk=1)
    (ticket,) = ask(worker, request_of([9, 9], 25))
    for _ in range(9):
        turn(worker)
    worker.pause(ticket)
    worker.resume(ticket)
    finish(worker)
    assert ticket.tokens == alone([9, 9], 25)


def beam_search_of(source: tuple[int, ...], most: int, width: int) -> list[int]:
    """All sums of log-probabilities, one after the other (length-normalised as in transformers)."""
    beams: list[tuple[float, tuple[int, ...]]] = [(0.0, (START,))]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, most + 1):
        found = [
            (score + float(each), (*written, token))
            for score, written in beams
            for token, each in enumerate(logits((source, written)).log_softmax(-1))
        ]
        found.sort(reverse=True)
        over = [one[1][-1] == END or length == most for one in found]
        ended += [(one[0] / length, one[1]) for one, done in list(zip(found, over, strict=True))[:width] if done]
        ended = sorted(ended, reverse=True)[:width]
        beams = [one for one, done in zip(found, over, strict=True) if not done][:width]
        if not beams or (len(ended) == width and beams[0][0] / length <= ended[-1][0]):
            break
    return [token for token in ended[0][1][1:] if token != END]


def test_beam_search_finds_the_most_likely_answer() -> None:
    requests = [
        request_of(each.source, min(each.max_tokens, 8), beams=BeamSearchOptions(3)) for each in many(12, seed=3)
    ]
    worker = translator(FakeSeq2Seq())
    tickets = ask(worker, *requests)
    finish(worker)
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.tokens == beam_search_of(request.source, request.max_tokens, 3)


def test_a_request_that_makes_a_step_fail_fails_alone() -> None:
    network = FakeSeq2Seq()
    network.broken = (13, 13)
    worker = translator(network)
    requests = [*many(6, seed=11), request_of([13, 13], 9)]
    tickets = ask(worker, *requests)
    finish_with_failures(worker)
    *others, broken = tickets
    assert isinstance(broken.events[-1], Failed)
    assert isinstance(broken.events[-1].error, StepFailed)
    assert [ticket.tokens for ticket in others] == [alone(each.source, each.max_tokens) for each in requests[:-1]]


def test_states_of_dropped_beams_are_freed() -> None:
    network = FakeSeq2Seq()
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=64, block_size=4)
    worker = GeneratorWorker(executor, model="translator")
    ask(worker, *many(30, seed=5))
    finish(worker)
    ask(worker, request_of([2], 12))
    finish(worker)
    assert len(executor._states) <= 2


def test_the_recovery_probe_needs_no_source() -> None:
    translator(FakeSeq2Seq()).self_test()
    rows = StepInput([START], [0], [0, 1], [[0]], [0])
    executor = Seq2SeqExecutor(FakeSeq2Seq(), torch.device("cpu"), vocabulary=WORDS, block_count=2, block_size=4)
    assert executor.step(rows).shape == (1, WORDS)


def test_a_source_takes_cache_blocks() -> None:
    worker = translator(FakeSeq2Seq(), blocks=4)
    worker.validate(request_of([2] * 10, 5))
    with pytest.raises(BadRequest, match="11 prompt tokens and max_tokens 6 make 17, more than the 16 tokens"):
        worker.validate(request_of([2] * 10, 6))
    ask(worker, request_of([2] * 7, 2))
    assert turn(worker).blocks_used == 2
    assert turn(worker).blocks_used == 0


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tokens": [WORDS]}, "tokens"),
        ({"sources": [(2, WORDS)]}, "sources"),
        ({"sources": [(-1,)]}, "sources"),
        ({"block_tables": [[2]]}, "tables"),
        ({"positions": [4]}, "its blocks hold 4"),
        ({"output_rows": [1]}, "output_rows|wanted"),
    ],
)
def test_numbers_out_of_range_are_refused(changes: dict[str, Any], said: str) -> None:
    network = FakeSeq2Seq()
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=2, block_size=4)
    with pytest.raises(StepInputError, match=said):
        executor.step(replace(StepInput([START], [0], [0, 1], [[0]], [0]), **changes))
    assert network.read == []


def test_a_copy_overwrites_what_is_not_finite_and_takes_it_along() -> None:
    executor = Seq2SeqExecutor(FakeSeq2Seq(), torch.device("cpu"), vocabulary=WORDS, block_count=8, block_size=4)
    executor._nonfinite_blocks |= {5}
    executor.copy([(5, 6), (2, 5)])
    assert executor.nonfinite_blocks == {6}


def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a step prepare one piece."""
    monkeypatch.setattr(generator_worker, "PREPARING_TURN_S", 0.0)


def test_a_step_encodes_a_piece_of_some_sources_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences that are prepared go on beside them, and no answer changes."""
    untimed(monkeypatch)
    network = FakeSeq2Seq()
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=4096, block_size=4)
    worker = GeneratorWorker(executor, model="translator")
    requests = [request_of([2 + number, *[5] * 199], 4) for number in range(10)]
    tickets = ask(worker, *requests)
    most_steps = 0
    while worker.has_work:
        pieces, steps = len(network.pieces), network.steps
        turn(worker)
        assert len(network.pieces) - pieces <= 1
        most_steps = max(most_steps, network.steps - steps)
    assert most_steps == 1, "a token a step"
    assert max(network.pieces) <= MAX_SOURCE_TOKENS
    assert len(network.pieces) == PIECES * 5, "two sources at a time"
    assert [ticket.tokens for ticket in tickets] == [alone(each.source, 4) for each in requests]
    assert not executor._encoded
    worker.check_invariants()


def test_a_long_answer_is_computed_again_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is gone when its reader is there again, or when it was preempted."""
    untimed(monkeypatch)
    network = FakeSeq2Seq()
    worker = translator(network, prefill_chunk=1)
    first, second = ask(worker, request_of([3, 4], 25, sampling=LONG), request_of([4, 3], 60, sampling=LONG))
    while len(first.tokens) < 20:
        turn(worker)
    worker.pause(first)
    for _ in range(8):
        turn(worker)
    written = len(second.tokens)
    worker.resume(first)
    while len(first.tokens) == 20:
        steps = network.steps
        turn(worker)
        assert network.steps - steps <= 2, "a token that is computed again, and the next ones"
    assert len(second.tokens) > written + 10, "another answer goes on meanwhile"
    finish(worker)
    assert len(first.tokens) == 25
    worker.check_invariants()


def test_the_source_of_an_aborted_request_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    untimed(monkeypatch)
    network = FakeSeq2Seq()
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=64, block_size=4)
    worker = GeneratorWorker(executor, model="translator")
    (gone,) = ask(worker, request_of([7, 8], 3))
    turn(worker)
    assert executor._encoding is not None
    worker.abort(gone)
    (kept,) = ask(worker, request_of([9], 3))
    finish(worker)
    assert network.read == [(9,)]
    assert kept.tokens == alone([9], 3)
    assert executor._encoding is None
    assert not executor._encoded


def test_a_source_that_cannot_be_encoded_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its encoding takes several turns, and fails in the last."""
    untimed(monkeypatch)
    network = FakeSeq2Seq()
    network.unreadable = (13, 13)
    worker = translator(network)
    requests = [*many(6, seed=11), request_of([13, 13], 9)]
    tickets = ask(worker, *requests)
    finish_with_failures(worker)
    *others, broken = tickets
    assert isinstance(broken.events[-1], Failed)
    assert [ticket.tokens for ticket in others] == [alone(each.source, each.max_tokens) for each in requests[:-1]]


def test_the_sources_of_the_owner_that_was_served_least_are_encoded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    untimed(monkeypatch)
    network = FakeSeq2Seq()
    worker = translator(network, blocks=4096)
    many_sources = [request_of([2 + number, *[5] * 499], 2, terms=Terms(owner="a")) for number in range(6)]
    ask(worker, *many_sources)
    turn(worker)
    ask(worker, request_of([3] * 400, 2, terms=Terms(owner="b")))
    finish(worker)
    assert network.read.index((3,) * 400) <= 2


@dataclass
class Translations:
    """Owners that each have some sources at a time, of random lengths, on a worker that encodes one piece in a step.

    The owner "a" gives up each source before the last piece of its encoding.
    """

    lengths: dict[str, tuple[int, int]]  # of the sources of each owner
    network: FakeSeq2Seq = field(default_factory=FakeSeq2Seq)
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    open_since: dict[RecordingTicket, int] = field(default_factory=dict)  # by request, the step in which it was sent
    pieces: Counter[str] = field(default_factory=Counter)  # tokens of which a piece was encoded, by owner
    longest_wait: Counter[str] = field(default_factory=Counter)  # in steps, by owner

    def __post_init__(self) -> None:
        self.worker = translator(self.network, 4096)
        self.begun: Counter[Sequence[int]] = Counter()  # pieces of each source

    def run(self, steps: int) -> None:
        for step in range(steps):
            counts = Counter(owner_of(ticket) for ticket in self.open_since)
            for owner, (least, most) in self.lengths.items():
                for _ in range(3 - counts[owner]):
                    source = self.draw.choices(range(2, WORDS), k=self.draw.randint(least, most))
                    [ticket] = ask(self.worker, request_of(source, 2, sampling=LONG, terms=Terms(owner)))
                    self.open_since[ticket] = step
            before = len(self.network.pieces)
            turn(self.worker)
            self.count_pieces(before)
            for ticket, since in list(self.open_since.items()):
                self.longest_wait[owner_of(ticket)] = max(self.longest_wait[owner_of(ticket)], step - since)
                is_last = self.begun[ticket.request.source] == PIECES - 1  # type: ignore[union-attr]
                if owner_of(ticket) == "a" and is_last:
                    self.worker.abort(ticket)
                if ticket.ended or (owner_of(ticket) == "a" and is_last):
                    del self.open_since[ticket]

    def count_pieces(self, before: int) -> None:
        executor = self.worker._executor
        assert isinstance(executor, Seq2SeqExecutor)
        if len(self.network.pieces) > before and executor._encoding is not None:
            for ticket in self.open_since:
                source = ticket.request.source  # type: ignore[union-attr]
                if source in executor._encoding.sources:
                    self.begun[source] += 1
                    self.pieces[owner_of(ticket)] += len(source)


def owner_of(ticket: RecordingTicket) -> str:
    return ticket.request.terms.owner


def test_an_owner_that_gives_up_its_sources_before_they_are_encoded_has_its_share_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was encoded of a source is charged, although no token is computed after it."""
    untimed(monkeypatch)
    play = Translations({"a": (600, 700), "b": (5, 40), "c": (100, 400), "d": (513, 800)})
    play.run(300)
    assert max(play.longest_wait[owner] for owner in "bcd") <= 100
    assert play.pieces["a"] < play.pieces["d"]


def test_an_answer_that_waits_for_its_mask_is_not_computed_again_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state is dropped while others have their steps; it is needed when the mask is there, and not before."""
    monkeypatch.setattr(generator_worker, "MASK_WAIT_S", 0.001)
    network, filled = FakeSeq2Seq(), Semaphore(10)
    worker = translator(network, prefill_chunk=1, blocks=256)
    try:
        sampling = replace(LONG, temperature=2.0, seed=1)
        [guided] = ask(worker, request_of([3, 4], 30, sampling=sampling, guide=SlowGuide(30, filled)))
        while len(guided.tokens) < 10:
            turn(worker)
        [other] = ask(worker, request_of([9, 9], 60, sampling=LONG))
        before = network.steps
        while not other.ended:
            turn(worker)
        assert len(guided.tokens) == 10
        assert network.steps - before <= 62
    finally:
        filled.release(100)


def test_a_step_in_which_all_answers_wait_for_their_masks_fails_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_worker, "MASK_WAIT_S", 0.001)
    filled = Semaphore(0)
    worker = translator(FakeSeq2Seq(), blocks=256)
    guided = ask(worker, *(request_of([3, n], 6, sampling=LONG, guide=SlowGuide(6, filled)) for n in range(3)))
    try:
        for _ in range(20):
            turn(worker)
    finally:
        filled.release(100)
    finish(worker)
    assert [ticket.events[-1] for ticket in guided if isinstance(ticket.events[-1], Failed)] == []
    assert all(len(ticket.tokens) == 6 for ticket in guided)

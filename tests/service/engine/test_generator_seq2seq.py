"""The generator over what reads one sequence and writes another: a pretended network that shows every mistake."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.core.errors import StepInputError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.seq2seq_executor import Seq2SeqExecutor
from polyhead.models.network.ragged import RaggedBatch
from polyhead.service.core.errors import BadRequest, StepFailed
from polyhead.service.core.request import BeamSearchOptions, Done, Failed, Generate, Sampling
from polyhead.service.engine.generator_worker import GeneratorWorker
from tests.support.engine_fakes import Ask, ask, finish, turn

WORDS, START, END = 23, 1, 0
Known = tuple[tuple[int, ...], tuple[int, ...]]  # what was read, and what was written


def logits(known: Known) -> Tensor:
    return torch.randn(WORDS, generator=torch.Generator().manual_seed(hash(known) % (1 << 60)))


class Pretended:
    """Its states say what they are of, so that none can be taken for another."""

    start_token = START

    def __init__(self) -> None:
        self.read: list[tuple[int, ...]] = []
        self.steps = 0
        self.broken: tuple[int, ...] = ()

    def __call__(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        raise NotImplementedError

    def initial_state(self, sources: RaggedBatch) -> list[Known]:
        tokens = sources.tokens.tolist()
        read = [tuple(tokens[a:b]) for a, b in zip(sources.starts, sources.starts[1:], strict=False)]
        self.read += read
        return [(source, ()) for source in read]

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


def translator(network: Pretended, blocks: int = 64, **budgets: int) -> GeneratorWorker:
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=blocks, block_size=4)
    return GeneratorWorker(executor, model="translator", **budgets)


def asked(source: Sequence[int], most: int, **more: object) -> Generate:
    greedy = {"sampling": Sampling(temperature=0)} if "sampling" not in more else {}
    return Generate("t", (START,), most, frozenset({END}), source=tuple(source), **greedy, **more)  # type: ignore[arg-type]


def alone(source: Sequence[int], most: int) -> list[int]:
    written: tuple[int, ...] = (START,)
    while len(written) <= most and (token := int(logits((tuple(source), written)).argmax())) != END:
        written = (*written, token)
    return list(written[1:])


def many(count: int, seed: int) -> list[Generate]:
    dice = random.Random(seed)
    return [asked(dice.choices(range(2, WORDS), k=dice.randint(1, 9)), dice.randint(1, 30)) for _ in range(count)]


@pytest.mark.parametrize(
    ("blocks", "budgets"), [(64, {}), (12, {}), (64, {"token_budget": 3}), (12, {"prefill_chunk": 2})]
)
def test_a_batch_is_answered_as_its_requests_alone(blocks: int, budgets: dict[str, int]) -> None:
    """Where all have room, where some are preempted, where not all take part in a step."""
    requests = many(40, seed=blocks)
    worker = translator(Pretended(), blocks, **budgets)
    tickets = ask(worker, *requests)
    finish(worker)
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.tokens == alone(request.source, request.max_tokens)
        assert isinstance(done := ticket.events[-1], Done)
        assert done.prompt_tokens == len(request.source)
    worker.check_invariants()


def test_a_source_is_read_once() -> None:
    network = Pretended()
    worker = translator(network)
    ask(worker, asked([5, 6, 7], 20), asked([8, 9], 3))
    finish(worker)
    assert sorted(network.read) == [(5, 6, 7), (8, 9)]
    assert network.steps <= 21


def test_those_who_enter_later_change_nobody() -> None:
    worker, requests, tickets = translator(Pretended()), many(30, seed=7), list[Ask]()
    for request in requests:
        tickets += ask(worker, request)
        turn(worker)
    finish(worker)
    assert [ticket.tokens for ticket in tickets] == [alone(each.source, each.max_tokens) for each in requests]


def test_who_is_held_goes_on_where_it_was() -> None:
    worker = translator(Pretended())
    first, second = ask(worker, asked([3, 4], 25), asked([4, 3], 25))
    for _ in range(4):
        turn(worker)
    worker.pause(first)
    for _ in range(8):
        turn(worker)
    worker.resume(first)
    finish(worker)
    assert [first.tokens, second.tokens] == [alone([3, 4], 25), alone([4, 3], 25)]


def test_who_catches_up_alone_asks_for_no_logits_on_the_way() -> None:
    worker = translator(Pretended(), prefill_chunk=1)
    (ticket,) = ask(worker, asked([9, 9], 25))
    for _ in range(9):
        turn(worker)
    worker.pause(ticket)
    worker.resume(ticket)
    finish(worker)
    assert ticket.tokens == alone([9, 9], 25)


def searched(source: tuple[int, ...], most: int, width: int) -> list[int]:
    """By all sums of log-probabilities, one after the other (length-normalised, as transformers does)."""
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


def test_beams_come_to_the_likeliest() -> None:
    requests = [asked(each.source, min(each.max_tokens, 8), beams=BeamSearchOptions(3)) for each in many(12, seed=3)]
    worker = translator(Pretended())
    tickets = ask(worker, *requests)
    finish(worker)
    for ticket, request in zip(tickets, requests, strict=True):
        assert ticket.tokens == searched(request.source, request.max_tokens, 3)


def test_who_spoils_a_step_fails_alone() -> None:
    network = Pretended()
    network.broken = (13, 13)
    worker, tickets = translator(network), list[Ask]()
    requests = [*many(6, seed=11), asked([13, 13], 9)]
    tickets = ask(worker, *requests)
    while worker.has_work:
        try:
            turn(worker)
        except RuntimeError:
            for ticket, event in worker.blame_failed_step():
                ticket.receive(event)
    *others, broken = tickets
    assert isinstance(broken.events[-1], Failed)
    assert isinstance(broken.events[-1].error, StepFailed)
    assert [ticket.tokens for ticket in others] == [alone(each.source, each.max_tokens) for each in requests[:-1]]


def test_states_that_nobody_goes_on_from_are_let_go() -> None:
    network = Pretended()
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=64, block_size=4)
    worker = GeneratorWorker(executor, model="translator")
    ask(worker, *many(30, seed=5))
    finish(worker)
    ask(worker, asked([2], 12))
    finish(worker)
    assert len(executor._states) <= 2


def test_a_proof_needs_no_source() -> None:
    translator(Pretended()).self_test()
    rows = StepInput([START], [0], [0, 1], [[0]], [0])
    executor = Seq2SeqExecutor(Pretended(), torch.device("cpu"), vocabulary=WORDS, block_count=2, block_size=4)
    assert executor.step(rows).shape == (1, WORDS)


def test_what_is_read_takes_room() -> None:
    worker = translator(Pretended(), blocks=4)
    worker.validate(asked([2] * 10, 5))
    with pytest.raises(BadRequest, match="11 prompt tokens and max_tokens 6 make 17, more than the 16 tokens"):
        worker.validate(asked([2] * 10, 6))
    ask(worker, asked([2] * 7, 2))
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
    network = Pretended()
    executor = Seq2SeqExecutor(network, torch.device("cpu"), vocabulary=WORDS, block_count=2, block_size=4)
    with pytest.raises(StepInputError, match=said):
        executor.step(replace(StepInput([START], [0], [0, 1], [[0]], [0]), **changes))
    assert network.read == []

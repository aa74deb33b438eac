"""The generator worker with a tiny network of windowed and other layers, on the compiled step: whatever happens to a
sequence, its answer has the same tokens and probabilities to the bit as with one table of blocks for all layers."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.service.core.request import BeamSearchOptions, Done, Generate, Sampling
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.speculation import DraftRequest, Speculation
from polyhead.service.engine.window_blocks import held_limit
from tests.models.native.test_step import LLAMA, head, network
from tests.support.engine_fakes import answer_scores, ask, finish, generate, scores, turn

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="no compiled library for this processor")
WINDOW, WORDS = 20, 77
CONFIG = replace(LLAMA, depth=3, window=WINDOW, windowed=(True, False, True))
NETWORK, HEAD = network(CONFIG), head(CONFIG)


class RaisingExecutor(NativeExecutor):
    """Raises after some steps were computed."""

    often = 0.0
    choice = random.Random(3)

    def step(self, rows: StepInput) -> Tensor:
        logits = super().step(rows)
        if self.choice.random() < self.often:
            raise RuntimeError("the device is on fire")
        return logits


class Repeating(Speculation):
    """Always drafts the tokens that came six tokens before."""

    def draft(self, requests: Sequence[DraftRequest], rows: int) -> list[list[int]]:
        return [list(request.state.tokens[-6:-2])[: max(request.max_tokens, 0)] for request in requests]


def talker(blocks: int = 400, own: int = 60, **budgets: int) -> GeneratorWorker:
    executor = RaisingExecutor(NETWORK, HEAD, block_count=blocks, window_blocks=own)
    return GeneratorWorker(executor, model="talker", **{"sequence_budget": 8, "prefill_chunk": 64, **budgets})


def mixed(count: int = 6) -> list[Generate]:
    """Answers of several windows, after prompts shorter and longer than one."""
    choice, ways = random.Random(1), [Sampling(0.0), Sampling(seed=3), Sampling(0.7, top_p=0.9, seed=4)]
    prompts = [[choice.randrange(WORDS) for _ in range(choice.randint(1, 90))] for _ in range(count)]
    return [generate(prompt, 50, sampling=ways[n % 3], logprobs=2) for n, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def alone() -> list[list[object]]:
    """The answers to `mixed`, computed with one table of blocks."""
    return [answer_scores(talker(own=0), request)[0] for request in mixed()]


def test_alone_with_neighbours_and_in_chunks(alone: list[list[object]]) -> None:
    assert answer_scores(talker(), *mixed()) == alone
    assert answer_scores(talker(token_budget=24, prefill_chunk=7), *mixed()) == alone


def test_with_blocks_for_one_window_and_preemptions(alone: list[list[object]]) -> None:
    assert answer_scores(talker(own=held_limit(WINDOW, 24, 16), prefill_chunk=24), *mixed()) == alone
    worker = talker(blocks=11, own=11, token_budget=32)
    tickets = ask(worker, *mixed())
    assert sum(report.preemptions for report in finish(worker))
    assert [scores(ticket.events) for ticket in tickets] == alone


def test_a_failed_step_is_computed_again(alone: list[list[object]]) -> None:
    worker = talker(own=20)
    executor = worker._executor
    assert isinstance(executor, RaisingExecutor)
    executor.often = 0.1
    tickets = ask(worker, *mixed())
    while worker.has_work:
        try:
            turn(worker)
        except RuntimeError:
            executor.often = 0.0
            for ticket, event in worker.blame_failed_step():
                ticket.receive(event)
        worker.check_invariants()
    answers = [scores(ticket.events) for ticket in tickets]
    ended = [isinstance(ticket.events[-1], Done) for ticket in tickets]
    assert sum(ended) >= 5, "at most the one that failed alone"
    assert all(found == wanted for found, wanted, done in zip(answers, alone, ended, strict=True) if done)


def test_a_cached_prefix_gives_the_same_answer() -> None:
    opening = [(7 * index) % WORDS for index in range(100)]
    requests = [generate([*opening, *last], 50, logprobs=2) for last in ([1, 2] * 30, [4] * 40, [5, 6], [])]
    wanted = [answer_scores(talker(own=0), request)[0] for request in requests]
    worker, cached = talker(own=8, sequence_budget=2), []
    for request, fresh in zip(requests, wanted, strict=True):
        (ticket,) = ask(worker, request)
        finish(worker)
        assert scores(ticket.events) == fresh
        end = ticket.events[-1]
        assert isinstance(end, Done)
        cached.append(end.cached_tokens)
    assert cached == [0, 0, 96, 96], "the second finds where the two branch; from then on its window stays cached"


def test_answers_of_one_prompt_and_beams(alone: list[list[object]]) -> None:
    ways = [Sampling(temperature=1.5, seed=seed) for seed in range(4)]
    one = generate([*range(50)], 40, logprobs=2)
    wanted = [answer_scores(talker(own=0), replace(one, sampling=way))[0] for way in ways]
    assert answer_scores(talker(), *(replace(one, sampling=way, group="g") for way in ways)) == wanted
    search = replace(generate([*range(50)], 40, logprobs=1), beams=BeamSearchOptions(4), group="s")
    (found,) = answer_scores(talker(own=0), search)
    for own in (60, 9):
        *others, beams = answer_scores(talker(blocks=60, own=own, token_budget=40), *mixed(3), search)
        assert (others, beams) == (alone[:3], found)


def test_drafts_change_no_answer() -> None:
    request = generate([1, 2, 3, 4, 5, 6] * 8, 60, logprobs=2)
    (wanted,) = answer_scores(talker(own=0), request)
    worker = talker(own=9, prefill_chunk=16)
    worker.speculation = Repeating(8, 512)
    tickets = ask(worker, request)
    assert sum(report.drafted for report in finish(worker))
    assert scores(tickets[0].events) == wanted


def test_a_sequence_holds_its_window_however_long_it_is() -> None:
    worker = talker()
    ask(worker, generate([5] * 200, 50))
    most = 0
    while worker.has_work:
        report = worker.step().report
        assert report.window_blocks_total == 60
        most = max(most, report.window_blocks_used)
    assert 3 < most <= held_limit(WINDOW, 64, 16) == 7, "of 16 blocks of other layers"
    worker.self_test()
    assert worker._groups.scheduler.windows.used_count == 0

"""Short steps of several models are computed together: which, at whose cost, and what happens when one fails."""

import asyncio
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.service.core.errors import StepFailed
from polyhead.service.core.request import Encode, Event, Failed, HeadOutput
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.engine import Engine, Stream
from polyhead.service.engine.joint_steps import (
    EFFICIENCY,
    SHORT_TOKENS,
    STEPS_A_THREAD,
    JointStep,
    JointSteps,
    choose_joint,
    longest_share,
)
from polyhead.service.engine.worker import StepResult
from tests.support.engine_fakes import FakeEncoder, FakeHead, RecordingObserver, ask, finish, turn

THREADS = 2


class JointEncoder(FakeEncoder):
    """A fake whose steps can be computed together.  `together` has the number of steps of each time that they were."""

    threads, product_bytes = THREADS, 1000

    def __init__(self, together: list[int]) -> None:
        super().__init__()
        self.together, self.has_memory = together, True

    def step_in_turns(self, rows: StepInput, turn_s: float) -> Iterator[Tensor | None]:
        assert turn_s > 0
        yield self.step(rows)

    def begin_together(self, steps: Sequence[Iterator[Tensor | None]]) -> None:
        if not self.has_memory:
            raise MemoryError("no memory for the steps")
        self.together.append(len(steps))


def encoders(count: int) -> tuple[list[EncoderWorker], list[int]]:
    together: list[int] = []
    made = [
        EncoderWorker(JointEncoder(together), FakeHead(), model=f"reader {number}", task="embed")
        for number in range(count)
    ]
    return made, together


def joint(workers: Sequence[EncoderWorker]) -> JointSteps:
    steps = JointSteps()
    for worker in workers:
        steps.add(worker)
    return steps


def encode(*tokens: int) -> Encode:
    return Encode("a", tokens, raw=True)


def answers(step: object) -> list[list[float]]:
    assert isinstance(step, StepResult)
    return [event.values for _, event in step.events if isinstance(event, HeadOutput)]


def test_which_steps_are_computed_together() -> None:
    for costs, threads, count in (
        ([1, 1], 2, 2),
        ([1] * 9, 2, 4),
        ([10, 1], 2, 1),  # the second thread would wait
        ([10, 1, 1, 1], 2, 1),
        ([3, 2, 1], 2, 3),
        ([2, 2, 1], 2, 2),  # with the third one a thread would wait
        ([1], 2, 1),
        ([1, 1], 1, 2),
    ):
        assert choose_joint(costs, threads) == count, (costs, threads)


def test_together_is_never_slower_than_one_by_one() -> None:
    choice = random.Random(1)
    for _ in range(500):
        threads = choice.randint(1, 16)
        costs = [choice.choice([1.0, 5.0, 30.0]) * choice.random() for _ in range(choice.randint(1, 40))]
        count = choose_joint(costs, threads)
        if count > 1:
            assert longest_share(costs[:count], threads) <= sum(costs[:count]) / (threads * EFFICIENCY) + 1e-9


def test_a_step_that_was_begun_is_the_step_alone() -> None:
    [worker, alone], together = encoders(2)
    texts = [encode(1, 2), encode(3, 4, 5), encode(6)]
    tickets = ask(worker, *texts)
    expected = turn_answers(alone, texts)
    workers = joint([worker])
    begun = worker.begin_short_step()
    assert begun.cost == 6 * JointEncoder.product_bytes
    report = turn(worker)
    assert (report.sequences, report.tokens) == (3, 6)
    assert [ticket.events[0].values for ticket in tickets if isinstance(ticket.events[0], HeadOutput)] == expected
    assert not worker.has_work
    assert workers.choose([worker]) == [worker]
    assert together == []


def turn_answers(worker: EncoderWorker, texts: Sequence[Encode]) -> list[list[float]]:
    tickets = ask(worker, *texts)
    finish(worker)
    return [ticket.events[0].values for ticket in tickets if isinstance(ticket.events[0], HeadOutput)]


def test_only_texts_that_wait_and_are_short_count() -> None:
    [worker], _ = encoders(1)
    assert worker.short_step_cost() == 0
    first, second = ask(worker, encode(*[1] * 50), encode(*[2] * 30))
    assert worker.short_step_cost() == 80 * JointEncoder.product_bytes
    worker.abort(first)
    assert worker.short_step_cost() == 30 * JointEncoder.product_bytes
    ask(worker, *[encode(*[3] * 60)] * 3)
    assert worker.short_step_cost() == SHORT_TOKENS * JointEncoder.product_bytes
    worker.begin_short_step()
    assert turn(worker).tokens == 30 + 60, "a third text would be too many tokens"
    worker.abort(second)
    finish(worker)
    ask(worker, encode(*[1] * (SHORT_TOKENS + 1)))
    assert worker.short_step_cost() == 0
    finish(worker)
    assert worker.short_step_cost() == 0


def test_a_short_step_has_no_more_tokens_than_any_step() -> None:
    worker = EncoderWorker(JointEncoder([]), FakeHead(), model="reader", task="embed", token_budget=10)
    ask(worker, *[encode(1, 2, 3)] * 5)
    assert worker.short_step_cost() == 10 * JointEncoder.product_bytes
    worker.begin_short_step()
    assert turn(worker).tokens == 9
    finish(worker)
    ask(worker, encode(*[1] * 11))
    assert worker.short_step_cost() == 0


def test_a_step_costs_the_tokens_that_it_has() -> None:
    [worker], _ = encoders(1)
    ask(worker, encode(1, 2), encode(*[1] * SHORT_TOKENS))
    assert worker.begin_short_step().cost == 2 * JointEncoder.product_bytes


class CostlyHead(FakeHead):
    """A head that takes a second of the clock for a text."""

    def __init__(self, clock: "Clock") -> None:
        self.clock = clock

    def __call__(self, states: Tensor, starts: list[int]) -> Tensor:
        self.clock.now += 1
        return super().__call__(states, starts)


def test_steps_together_read_answers_for_as_long_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("polyhead.service.engine.encoder_worker.perf_counter", clock)
    monkeypatch.setattr("polyhead.service.engine.head_outputs.SLICE_SIZE", 1)
    workers = [
        EncoderWorker(JointEncoder([]), CostlyHead(clock), model=f"reader {number}", task="embed")
        for number in range(STEPS_A_THREAD * THREADS)
    ]
    for worker in workers:
        worker.reading_turn_s = 8.0
        ask(worker, *[encode(1)] * 20)
    joint(workers).step(workers)
    assert clock.now == 8, "two pieces of each"
    for worker in workers:
        turn(worker)
    assert clock.now == 8 + 8 * len(workers)


def test_steps_of_several_workers_have_the_answers_of_each_alone() -> None:
    workers, together = encoders(5)
    steps = joint(workers)
    for number, worker in enumerate(workers):
        ask(worker, encode(number, 2))
    chosen = steps.choose(workers)
    assert chosen == workers[:4]
    results = [step for step, _ in steps.step(chosen)]
    assert [answers(step) for step in results] == [[[number + 2.0, 1.0, 0.0]] for number in range(4)]
    assert together == [4]
    assert all(isinstance(step, StepResult) and step.report.tokens == 2 for step in results)


def test_a_failing_step_fails_no_other() -> None:
    workers, together = encoders(3)
    steps = joint(workers)
    executor = workers[1]._executor
    assert isinstance(executor, JointEncoder)
    executor.failing_tokens = {99}
    for worker in workers:
        ask(worker, encode(99, 1))
    first, failed, last = (step for step, _ in steps.step(workers))
    assert answers(first) == answers(last) == [[100.0, 1.0, 0.0]]
    assert not isinstance(failed, StepResult)
    [(_, event)] = workers[1].blame_failed_step()
    assert isinstance(event, Failed)
    assert not workers[1].has_work
    assert together == [3]


def test_steps_that_cannot_be_begun_together_are_computed_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    workers, together = encoders(2)
    executor = workers[0]._executor
    assert isinstance(executor, JointEncoder)
    executor.has_memory = False
    for worker in workers:
        ask(worker, encode(1, 2))
    assert [answers(step) for step, _ in joint(workers).step(workers)] == [[[3.0, 1.0, 0.0]]] * 2
    assert together == []
    assert "no memory for the steps" in caplog.text


def test_an_engine_answers_requests_to_many_models() -> None:
    """Every third text fails its step: it fails alone, and nothing is held by the others."""

    async def scene() -> None:
        workers, together = encoders(5)
        engine = Engine(RecordingObserver())
        for worker in workers:
            assert isinstance(worker._executor, JointEncoder)
            worker._executor.failing_tokens = {99}
            engine.add_worker(worker)
        streams: list[tuple[int, Stream]] = []
        for number in range(60):
            token = 99 if number % 3 == 2 else 20 + number
            streams += ((token, stream) for stream in engine.submit(workers[number % 5], [encode(token, 1)]))
        engine.start()
        for token, stream in streams:
            found: list[Event] = [event async for event in stream]
            if token == 99:
                assert isinstance(found[-1], Failed)
                assert isinstance(found[-1].error, StepFailed)
            else:
                assert isinstance(found[0], HeadOutput)
                assert found[0].values == [token + 1.0, 1.0, 0.0]
        while not engine.idle:
            await asyncio.sleep(0.001)
        assert together, "no steps were computed together"
        await engine.close(0)

    asyncio.run(asyncio.wait_for(scene(), 300))


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class CostlyWorker(EncoderWorker):
    """A worker that always has work.  A step takes `seconds` of the clock on one thread, `reading_s` for its answers;
    `used` is its part of the clock's time.
    """

    has_work = True

    def __init__(
        self, model: str, clock: Clock, seconds: float, *, reading_s: float = 0.0, is_short: bool = True
    ) -> None:
        super().__init__(JointEncoder([]), FakeHead(), model=model, task="embed")
        self.clock, self.seconds, self.reading_s, self.is_short = clock, seconds, reading_s, is_short
        self.used, self.is_begun = 0.0, False

    def short_step_cost(self) -> float:
        return self.seconds if self.is_short else 0.0

    def begin_short_step(self) -> JointStep:
        self.is_begun = True
        return JointStep(JointEncoder([]), iter(()), self.seconds)

    def step(self) -> StepResult:
        took = self.seconds / THREADS if self.is_begun else self.seconds / (THREADS * EFFICIENCY)
        took += self.reading_s
        self.is_begun = False
        self.clock.now += took
        self.used += took
        return StepResult([], self._report(), (), self.clock.now)


class InlineLoop:
    """Runs at once what is sent to the event loop."""

    def call_soon_threadsafe(self, function: Callable[[], None]) -> None:
        function()

    def is_closed(self) -> bool:
        return False


@pytest.mark.parametrize("seed", range(4))
def test_shares_of_time_are_those_of_the_weights(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of unequal weights, steps and heads, one of which has no short steps, all of them always busy."""
    clock, choice = Clock(), random.Random(seed)
    for module in ("engine", "joint_steps"):
        monkeypatch.setattr(f"polyhead.service.engine.{module}.perf_counter", clock)
    engine = Engine(RecordingObserver())
    engine._loop = InlineLoop()  # type: ignore[assignment]
    weights = {
        CostlyWorker(
            f"short {number}",
            clock,
            choice.choice([0.001, 0.002, 0.004]),
            reading_s=choice.choice([0.0, 0.0, 0.01]),
        ): choice.choice([1.0, 1.0, 4.0])
        for number in range(6)
    }
    weights[CostlyWorker("long", clock, 0.02, is_short=False)] = 2.0
    for worker, weight in weights.items():
        engine._add_worker(worker, weight)
    while clock.now < 30:
        assert engine._run_step()
    whole = sum(weights.values())
    for worker, weight in weights.items():
        assert worker.used == pytest.approx(clock.now * weight / whole, rel=0.02), worker.model

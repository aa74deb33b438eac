"""The worker of explanations and its networks: turns, ends, failures, memory, and which network is released."""

import asyncio
import shutil
import threading
from collections.abc import Callable, Generator
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import pytest
import transformers as tf

from polyhead.models import checkpoint
from polyhead.models.explain import METHODS, Explanation, InstrumentedNetwork, explain
from polyhead.service.core.errors import (
    AnswerTooLarge,
    BadRequest,
    Conflict,
    Expired,
    InsufficientMemory,
    StepFailed,
    Unavailable,
)
from polyhead.service.core.request import (
    Done,
    ExplainMethod,
    ExplainTextRequest,
    ExplanationProgress,
    ExplanationResult,
    Failed,
    Terms,
)
from polyhead.service.engine import explain_worker as explainer
from polyhead.service.engine.explain_worker import MAX_ACTIVE_JOBS, MAX_JOBS, ExplainWorker
from polyhead.service.runtime.registry import ModelRegistry
from tests.models.checkpoint.test_merged_adapter import adapted
from tests.service.runtime.test_registry import serving
from tests.support import label_models
from tests.support.engine_fakes import ask, finish, turn

TOKENS = tuple(range(5, 15))


@pytest.fixture
def worker(tiny_classifier: Path) -> ExplainWorker:
    loaded: Any = checkpoint.load(str(tiny_classifier))
    return ExplainWorker(
        InstrumentedNetwork(loaded.network, loaded.head), loaded.head, model="judge", answers="classify", piece=10
    )


def why(method: ExplainMethod = "integrated_gradients", **asked: Any) -> ExplainTextRequest:
    return ExplainTextRequest("why", TOKENS, method, goals=(((0, 1),),), steps=6, **asked)


def test_explanations_take_turns(worker: ExplainWorker) -> None:
    long, short = ask(worker, why(), why("attention"))
    while not short.ended:
        turn(worker)
    assert not long.ended
    finish(worker)
    explained, done = long.events
    assert isinstance(explained, ExplanationResult)
    assert explained.head_rows == (0,)
    assert done == Done("explained", len(TOKENS))


def test_a_limited_number_of_explanations_is_begun_at_once(worker: ExplainWorker) -> None:
    tickets = ask(worker, *(why() for _ in range(MAX_ACTIVE_JOBS + 2)))
    report = turn(worker)
    assert (report.running, report.waiting, len(report.queue_s)) == (MAX_ACTIVE_JOBS, 2, MAX_ACTIVE_JOBS)
    finish(worker)
    assert all(isinstance(ticket.events[-1], Done) for ticket in tickets)


def test_another_owners_explanation_does_not_wait_for_the_end_of_one(worker: ExplainWorker) -> None:
    greedy, modest, late = Terms("greedy"), Terms("modest"), Terms("late")
    many = ask(worker, *(why(terms=greedy) for _ in range(MAX_ACTIVE_JOBS + 2)))
    turn(worker)
    tickets = ask(worker, *(why("attention", terms=terms) for terms in (modest, modest, late)))
    report = turn(worker)
    assert (report.running, report.waiting) == (MAX_JOBS, 3)
    while not all(ticket.ended for ticket in tickets):
        turn(worker)
    assert not any(ticket.ended for ticket in many)
    finish(worker)


def test_turns_are_shared_by_owners_in_time_not_in_explanations(
    worker: ExplainWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pieces of one owner take ten times as long as those of the other, so the other gets ten for each."""
    now, had = [0.0], {"slow": 0, "quick": 0}
    monkeypatch.setattr(explainer, "perf_counter", lambda: now[0])

    def pieces(_: Any, asked: Any, **others: Any) -> Generator[None, None, Explanation]:
        owner = "slow" if asked.steps == 3 else "quick"
        while True:
            now[0] += 10.0 if owner == "slow" else 1.0
            had[owner] += 1
            yield

    monkeypatch.setattr(explainer, "explain", pieces)
    slow = ExplainTextRequest("slow", TOKENS, "attention", steps=3, terms=Terms("slow"))
    tickets = ask(worker, *[slow] * 3, why(terms=Terms("quick")))
    for _ in range(110):
        turn(worker)
    assert had["slow"] == pytest.approx(10, abs=2)
    for ticket in tickets:
        worker.abort(ticket)
    worker.check_invariants()


def test_an_aborted_explanation_is_not_continued(worker: ExplainWorker) -> None:
    leaving, staying = ask(worker, why(), why())
    turn(worker)
    worker.abort(leaving)
    worker.abort(leaving)
    finish(worker)
    assert not leaving.events
    assert staying.ended


@pytest.mark.parametrize("method", ["integrated_gradients", "occlusion", "attention_flow"])
def test_a_client_that_asks_for_it_receives_how_much_is_done(worker: ExplainWorker, method: ExplainMethod) -> None:
    plain, reporting = ask(worker, why(method, baseline=0), why(method, baseline=0, reports_progress=True))
    finish(worker)
    *reports, result, done = reporting.events
    shares = [event.share for event in reports if isinstance(event, ExplanationProgress)]
    assert len(shares) == len(reports) > 2
    assert shares == sorted(set(shares))
    assert 0 < shares[0] < 0.5
    assert 0.8 < shares[-1] <= 1
    assert [type(event) for event in plain.events] == [type(result), type(done)] == [ExplanationResult, Done]


def test_progress_is_reported_a_hundred_times_at_most(worker: ExplainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def many_pieces(*_: Any, **__: Any) -> Generator[float | None, None, Explanation]:
        for number in range(5000):
            yield number / 5000
            yield None
        return Explanation()

    monkeypatch.setattr(explainer, "explain", many_pieces)
    [reporting] = ask(worker, why(reports_progress=True))
    finish(worker)
    assert 90 < len(reporting.events) - 2 <= 100


def test_an_explanation_past_its_deadline_expires(worker: ExplainWorker) -> None:
    late, _ = ask(worker, why(terms=Terms(deadline=perf_counter() - 1)), why())
    turn(worker)
    [(ticket, event)] = worker.expire(perf_counter())
    assert ticket is late
    assert isinstance(event, Failed)
    assert isinstance(event.error, Expired)
    finish(worker)


def test_a_failed_explanation_fails_alone(worker: ExplainWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any, **others: Any) -> Generator[None, None, Explanation]:
        if given[1].steps == 3:
            raise RuntimeError("of this one")
        return (yield from explain(*given, **others))

    monkeypatch.setattr(explainer, "explain", failing)
    good, bad = ask(worker, why(), ExplainTextRequest("bad", TOKENS, "attention", steps=3))
    turn(worker)
    with pytest.raises(RuntimeError, match="of this one"):
        turn(worker)
    [(ticket, event)] = worker.blame_failed_step()
    assert ticket is bad
    assert isinstance(event, Failed)
    assert isinstance(event.error, StepFailed)
    assert worker.blame_failed_step() == []
    finish(worker)
    assert good.ended


def test_rows_of_labels_are_checked(worker: ExplainWorker, tmp_path: Path) -> None:
    """A head that reads labels needs them, and no other head has them."""
    loaded: Any = checkpoint.load(str(label_models.gliclass(tmp_path / "texts")))
    network = InstrumentedNetwork(loaded.network, loaded.head)
    labelled = ExplainWorker(network, loaded.head, model="texts", answers="label_texts", piece=10)
    labelled.validate(why(label_rows=(1, 3), text_rows=(5,)))
    labelled.validate(ExplainTextRequest("why", TOKENS, "attention"))
    for rows in ((), (3, 1), (len(TOKENS),), (-1,)):
        with pytest.raises(BadRequest, match="label_rows: must be ascending and below the 10 tokens, and not empty"):
            labelled.validate(why(label_rows=rows, text_rows=(5,)))
        with pytest.raises(BadRequest, match="text_rows: must be"):
            labelled.validate(why(label_rows=(1,), text_rows=rows))
    with pytest.raises(BadRequest, match="the model reads no labels beside a text"):
        worker.validate(why(label_rows=(1,)))


def test_nan_attributions_are_an_error(worker: ExplainWorker, tiny_classifier: Path) -> None:
    loaded: Any = checkpoint.load(str(tiny_classifier))
    loaded.head.out.weight.data.fill_(float("inf"))
    broken = ExplainWorker(
        InstrumentedNetwork(loaded.network, loaded.head), loaded.head, model="judge", answers="classify", piece=10
    )
    [ticket] = ask(broken, why("gradient_x_input"))
    finish(broken)
    [event] = ticket.events
    assert isinstance(event, Failed)
    assert "not finite" in event.error.message


# Networks


def test_memory_is_claimed_at_the_first_request_and_freed_with_the_model(
    tiny_classifier: Path, tiny_embedder: Path
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        _, before = served.memory_budget()
        assert await served.load_explainer(judge) == {"self": (2, 4)}
        _, during = served.memory_budget()
        assert during < before
        await served.load_explainer(judge)
        assert served.memory_budget()[1] == during
        [stream] = served.submit(judge, [why()])
        assert [type(event) async for event in stream] == [ExplanationResult, Done]
        await served.unload("judge", 0).wait_and_raise()
        assert served.memory_budget()[1] > before, "its own memory is free, too"

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


def test_without_free_memory_the_least_recently_used_network_is_released(
    tiny_classifier: Path, tiny_embedder: Path
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge, vectors = served.resolve("judge", ["classify"]), served.resolve("vectors", ["embed"])
        await served.load_explainer(judge)
        _, free = served.memory_budget()
        served._loader.budget.limit -= free  # as if this were all memory
        await served.load_explainer(vectors)
        assert served._explainers.find_worker(judge) is None
        served._loader.budget.limit -= 1 << 30
        with pytest.raises(InsufficientMemory, match=r"to explain judge takes [0-9]+ MiB more, and 0 of"):
            await served.load_explainer(judge)

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


def test_a_source_that_was_removed_is_an_error_message(tiny_classifier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    shutil.copytree(tiny_classifier, folder)

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        _, free = served.memory_budget()
        shutil.rmtree(folder)
        with pytest.raises(Conflict, match="judge cannot be read again to be explained: "):
            await served.load_explainer(judge)
        assert served.memory_budget()[1] == free

    serving({"judge": folder}, act)


def test_two_first_requests_load_the_network_once(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        _, before = served.memory_budget()
        await served.load_explainer(judge)
        one = before - served.memory_budget()[1]
        await served._explainers.unload(judge)
        assert served.memory_budget()[1] == before
        await asyncio.gather(served.load_explainer(judge), served.load_explainer(judge))
        assert before - served.memory_budget()[1] == one

    serving({"judge": tiny_classifier}, act)


def test_a_loaded_network_does_not_wait_for_the_load_of_another(
    tiny_classifier: Path, tiny_embedder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge, vectors = served.resolve("judge", ["classify"]), served.resolve("vectors", ["embed"])
        await served.load_explainer(judge)
        began, go_on, read = asyncio.Event(), asyncio.Event(), served._explainers._read_explainer

        async def slow(*given: Any) -> None:
            began.set()
            await go_on.wait()
            await read(*given)

        monkeypatch.setattr(served._explainers, "_read_explainer", slow)
        reading = asyncio.create_task(served.load_explainer(vectors))
        await began.wait()
        assert await asyncio.wait_for(served.load_explainer(judge), 60) == {"self": (2, 4)}
        go_on.set()
        await reading

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


# Idle networks


class ManualTimers:
    """In place of a clock: it stores the calls that are due later, and the test makes them."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def __call__(self, seconds: float, function: Callable[[], None]) -> "Timer":
        self.due.append((seconds, function))
        return Timer(self, (seconds, function))

    async def fire_timers(self, served: ModelRegistry) -> None:
        """Make all calls that are due, and wait until the tasks that they start have ended."""
        self.fire()
        await asyncio.gather(*served._explainers._unload_tasks)

    def fire(self) -> None:
        due, self.due = self.due, []
        for _, function in due:
            function()


class Timer:
    def __init__(self, timers: ManualTimers, entry: tuple[float, Callable[[], None]]) -> None:
        self.timers, self.entry = timers, entry

    def cancel(self) -> None:
        self.timers.due.remove(self.entry)


async def judge_with_timers(served: ModelRegistry) -> tuple[Any, ManualTimers, int]:
    """A model, its clock, and the memory that is free before its network is loaded."""
    served._explainers.call_later = timers = ManualTimers()
    await served.load_all()
    judge, free = served.resolve("judge", ["classify"]), served.memory_budget()[1]
    await served.load_explainer(judge)
    return judge, timers, free


def test_an_idle_network_is_released_and_loaded_again(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        judge, timers, free = await judge_with_timers(served)
        first = served._explainers.find_worker(judge)
        assert first is not None
        assert [seconds for seconds, _ in timers.due] == [7.0]
        await served.load_explainer(judge)
        assert len(timers.due) == 1, "its time begins anew with each request"
        [known] = served.model_statuses()
        assert known.explain_memory == free - served.memory_budget()[1] > 0
        await timers.fire_timers(served)
        assert served.memory_budget()[1] == free
        assert served.model_statuses()[0].explain_memory == 0
        assert all(not each.numel() for each in first._network.network.parameters()), "its weights are still in memory"
        with pytest.raises(Unavailable, match="the explainer of judge was unloaded"):
            served.submit(judge, [why()])
        await served.load_explainer(judge)
        assert served._explainers.find_worker(judge) is not first
        [stream] = served.submit(judge, [why()])
        assert [type(event) async for event in stream] == [ExplanationResult, Done]
        assert free - served.memory_budget()[1] == known.explain_memory

    serving({"judge": tiny_classifier}, act, explain_idle_seconds=7)


def test_without_a_time_limit_a_network_is_kept(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        _, timers, _ = await judge_with_timers(served)
        assert timers.due == []

    serving({"judge": tiny_classifier}, act, explain_idle_seconds=0)


def test_a_network_that_explains_is_not_idle(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        judge, timers, free = await judge_with_timers(served)
        [stream] = served.submit(judge, [why()])
        await timers.fire_timers(served)
        assert served.memory_budget()[1] < free
        assert len(timers.due) == 1, "its time begins anew"
        assert [type(event) async for event in stream] == [ExplanationResult, Done]
        await timers.fire_timers(served)
        assert served.memory_budget()[1] == free

    serving({"judge": tiny_classifier}, act)


def test_a_request_that_comes_before_the_release_keeps_the_network(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        judge, timers, _ = await judge_with_timers(served)
        kept = served._explainers.find_worker(judge)
        timers.fire()  # the release is a task that has not begun
        await served.load_explainer(judge)
        [stream] = served.submit(judge, [why()])
        await asyncio.gather(*served._explainers._unload_tasks)
        assert served._explainers.find_worker(judge) is kept
        assert [type(event) async for event in stream] == [ExplanationResult, Done]

    serving({"judge": tiny_classifier}, act)


def test_a_request_that_comes_during_the_release_waits_and_is_counted_once(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        judge, timers, free = await judge_with_timers(served)
        one, go_on, held = free - served.memory_budget()[1], threading.Event(), threading.Event()
        busy = asyncio.create_task(served._engine.call(lambda: (held.set(), go_on.wait())))
        await asyncio.to_thread(held.wait)
        timers.fire()
        while served._explainers.find_worker(judge) is not None:
            await asyncio.sleep(0)
        asking = asyncio.create_task(served.load_explainer(judge))
        for _ in range(10):
            await asyncio.sleep(0)
        assert not asking.done()
        assert free - served.memory_budget()[1] == one, "the budget is returned before the memory is free"
        go_on.set()
        await asyncio.gather(asking, busy)
        [stream] = served.submit(judge, [why()])
        assert [type(event) async for event in stream] == [ExplanationResult, Done]
        assert free - served.memory_budget()[1] == one
        await timers.fire_timers(served)
        assert served.memory_budget()[1] == free

    serving({"judge": tiny_classifier}, act)


def test_a_model_that_is_unloaded_while_its_network_loads_leaves_nothing(
    tiny_classifier: Path, tiny_embedder: Path
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        reading = asyncio.create_task(served.load_explainer(judge))
        await asyncio.sleep(0)  # it has begun
        await served._explainers.unload(judge)
        await reading
        assert served._explainers.find_worker(judge) is None
        assert served.model_statuses()[0].explain_memory == 0

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


def test_an_unloaded_model_cannot_be_explained(tiny_classifier: Path, tiny_embedder: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge, (_, free) = served.resolve("judge", ["classify"]), served.memory_budget()
        await served.unload("judge", 0.0).wait_and_raise()
        _, freed = served.memory_budget()
        assert freed > free
        with pytest.raises(Unavailable, match="judge was removed while the request was read; send it again"):
            await served.load_explainer(judge)
        assert served.memory_budget()[1] == freed

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


def test_an_adapter_of_an_unloaded_base_cannot_be_explained(
    tmp_path: Path, tiny_classifier: Path, tiny_embedder: Path
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        tuned = served.resolve("vectors:tuned", ["classify"])
        await served.unload("vectors:tuned", 0.0).wait_and_raise()
        await served.unload("vectors", 0.0).wait_and_raise()
        with pytest.raises(Unavailable, match="vectors:tuned was removed"):
            await served.load_explainer(tuned)

    base: Any = tf.BertForSequenceClassification.from_pretrained(tiny_embedder, num_labels=2)
    adapted(base, tmp_path / "tuned", task_type="SEQ_CLS", base=str(tiny_embedder))
    models = {"judge": tiny_classifier, "vectors": tiny_embedder, "vectors:tuned": tmp_path / "tuned"}
    serving(models, act)


# Limits of work


@pytest.mark.parametrize("method", get_args(ExplainMethod))
@pytest.mark.parametrize("end", ["abort", "deadline"])
def test_work_ends_with_the_piece_that_is_computed(
    worker: ExplainWorker, method: ExplainMethod, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces, closed = list[int](), list[bool]()

    def counted(*given: Any, **named: Any) -> Generator[None, None, Explanation]:
        try:
            for number in range(1000):
                pieces.append(number)
                yield
            return (yield from METHODS[given[1].method](given[0], given[1], named["piece"]))
        finally:
            closed.append(True)

    monkeypatch.setattr(explainer, "explain", counted)
    goals = () if method.startswith("attention") else (((0, 1),),)
    leaving, staying = ask(
        worker,
        ExplainTextRequest("left", TOKENS, method, goals=goals, terms=Terms(deadline=perf_counter() + 3600)),
        ExplainTextRequest("stays", TOKENS, "attention"),
    )
    turn(worker)
    turn(worker)
    assert len(pieces) == 2, "one piece each"
    if end == "abort":
        worker.abort(leaving)
    else:
        [(ticket, event)] = worker.expire(perf_counter() + 7200)
        assert ticket is leaving
        assert isinstance(event, Failed)
        assert isinstance(event.error, Expired)
    assert closed == [True]
    turn(worker)
    assert pieces == [0, 0, 1], "only the other explanation goes on"
    worker.abort(staying)
    assert not worker.has_work


def test_too_much_work_is_rejected_before_anything_is_computed(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        judge, _, _ = await judge_with_timers(served)
        steps = served._engine.steps
        much = ExplainTextRequest("much", TOKENS * 3, "integrated_gradients", goals=(((0, 1),),), steps=1000)
        with pytest.raises(
            AnswerTooLarge, match=r"at most 1 are computed \(the server's setting explain_gflop\); ask for "
        ):
            served.submit(judge, [much])
        assert served._engine.steps == steps
        [stream] = served.submit(judge, [why()])
        assert [type(event) async for event in stream] == [ExplanationResult, Done]

    serving({"judge": tiny_classifier}, act, explain_gflop=1)

"""The worker of explanations, and the network it has: turns, ends, blame, memory, and who goes with whom."""

import asyncio
import shutil
from collections.abc import Generator
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from engine_fakes import ask, finish, turn
from test_registry import serving

from models import checkpoint
from models.explain import Explanation, Watched, explain
from service.engine import explainer
from service.engine.explainer import AT_ONCE, Explainer
from service.errors import Conflict, Expired, NoRoom, StepFailed
from service.registry import Registry
from service.request import Done, Explain, Explained, Failed, Method, Terms

TOKENS = tuple(range(5, 15))


@pytest.fixture
def worker(tiny_classifier: Path) -> Explainer:
    loaded: Any = checkpoint.load(str(tiny_classifier))
    return Explainer(Watched(loaded.network, loaded.head), loaded.head, model="judge", reads=False, piece=10)


def why(method: Method = "integrated_gradients", **asked: Any) -> Explain:
    return Explain("why", TOKENS, method, goals=(((0, 1),),), steps=6, **asked)


def test_explanations_take_turns(worker: Explainer) -> None:
    long, short = ask(worker, why(), why("attention"))
    while not short.ended:
        turn(worker)
    assert not long.ended
    finish(worker)
    explained, done = long.events
    assert isinstance(explained, Explained)
    assert explained.answering == (0,)
    assert done == Done("explained", len(TOKENS))


def test_so_many_are_begun_at_once(worker: Explainer) -> None:
    tickets = ask(worker, *(why() for _ in range(AT_ONCE + 2)))
    report = turn(worker)
    assert (report.running, report.waiting, len(report.queue_s)) == (AT_ONCE, 2, AT_ONCE)
    finish(worker)
    assert all(isinstance(ticket.events[-1], Done) for ticket in tickets)


def test_who_leaves_is_explained_no_further(worker: Explainer) -> None:
    leaving, staying = ask(worker, why(), why())
    turn(worker)
    worker.abort(leaving)
    worker.abort(leaving)
    finish(worker)
    assert not leaving.events
    assert staying.ended


def test_who_is_too_late_is_told_so(worker: Explainer) -> None:
    late, _ = ask(worker, why(terms=Terms(deadline=perf_counter() - 1)), why())
    turn(worker)
    [(ticket, event)] = worker.expire(perf_counter())
    assert ticket is late
    assert isinstance(event, Failed)
    assert isinstance(event.error, Expired)
    finish(worker)


def test_what_fails_is_the_fault_of_one(worker: Explainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*given: Any, **others: Any) -> Generator[None, None, Explanation]:
        if given[1].steps == 3:
            raise RuntimeError("of this one")
        return (yield from explain(*given, **others))

    monkeypatch.setattr(explainer, "explain", failing)
    good, bad = ask(worker, why(), Explain("bad", TOKENS, "attention", steps=3))
    turn(worker)
    with pytest.raises(RuntimeError, match="of this one"):
        turn(worker)
    [(ticket, event)] = worker.fail()
    assert ticket is bad
    assert isinstance(event, Failed)
    assert isinstance(event.error, StepFailed)
    assert worker.fail() == []
    finish(worker)
    assert good.ended


def test_numbers_that_are_none_are_an_error(worker: Explainer, tiny_classifier: Path) -> None:
    loaded: Any = checkpoint.load(str(tiny_classifier))
    loaded.head.out.weight.data.fill_(float("inf"))
    broken = Explainer(Watched(loaded.network, loaded.head), loaded.head, model="judge", reads=False, piece=10)
    [ticket] = ask(broken, why("gradient_x_input"))
    finish(broken)
    [event] = ticket.events
    assert isinstance(event, Failed)
    assert "not finite" in event.error.message


# ---- the networks


def test_memory_is_taken_when_somebody_asks_and_given_back_with_the_model(
    tiny_classifier: Path, tiny_embedder: Path
) -> None:
    async def act(served: Registry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        _, before = served.memory()
        assert await served.watch(judge) == {"self": (2, 4)}
        _, during = served.memory()
        assert during < before
        await served.watch(judge)
        assert served.memory()[1] == during
        [stream] = served.submit(judge, [why()])
        assert [type(event) async for event in stream] == [Explained, Done]
        await served.unload("judge", 0).end()
        assert served.memory()[1] > before, "its own is free, too"

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


def test_where_there_is_no_room_who_was_asked_longest_ago_goes(tiny_classifier: Path, tiny_embedder: Path) -> None:
    async def act(served: Registry) -> None:
        await served.load_all()
        judge, vectors = served.resolve("judge", ["classify"]), served.resolve("vectors", ["embed"])
        await served.watch(judge)
        _, free = served.memory()
        served._loader.budget.limit -= free  # as if it were all
        await served.watch(vectors)
        assert served._watching.worker(judge) is None
        served._loader.budget.limit -= 1 << 30
        with pytest.raises(NoRoom, match=r"to explain judge takes [0-9]+ MiB more, and 0 of"):
            await served.watch(judge)

    serving({"judge": tiny_classifier, "vectors": tiny_embedder}, act)


def test_a_source_that_is_gone_is_a_sentence(tiny_classifier: Path, tmp_path: Path) -> None:
    folder = tmp_path / "judge"
    shutil.copytree(tiny_classifier, folder)

    async def act(served: Registry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        _, free = served.memory()
        shutil.rmtree(folder)
        with pytest.raises(Conflict, match="judge cannot be read again to be explained: "):
            await served.watch(judge)
        assert served.memory()[1] == free

    serving({"judge": folder}, act)


def test_two_who_ask_first_read_once(tiny_classifier: Path) -> None:
    async def act(served: Registry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        _, before = served.memory()
        await served.watch(judge)
        one = before - served.memory()[1]
        await served._watching.forget(judge)
        assert served.memory()[1] == before
        await asyncio.gather(served.watch(judge), served.watch(judge))
        assert before - served.memory()[1] == one

    serving({"judge": tiny_classifier}, act)

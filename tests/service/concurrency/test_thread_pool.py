"""Threads for work that may never return: they are replaced, and no caller waits for ever."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.concurrency import thread_pool as threads
from polyhead.service.concurrency.thread_pool import ThreadPool, WorkInfo
from polyhead.service.core.errors import TooComplex, Unavailable
from polyhead.service.text import tokenization as text
from tests.service.api.operations.test_admin import Client, serving
from tests.support.scripted import until
from tests.support.threads import no_new_threads

PATIENCE_S = 60.0


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Work that hangs waits for this event; it is set after the test."""
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "CHECK_INTERVAL_S", 0.005)


def test_a_thread_that_waits_keeps_no_result() -> None:
    class Large:
        """A large result."""

    async def run() -> None:
        pool = ThreadPool(1, "few", PATIENCE_S)
        kept = weakref.ref(await pool.run(Large, WorkInfo("work", "source")))
        await until(lambda: kept() is None)
        pool.close()

    asyncio.run(run())


def test_work_comes_back_in_its_context_from_few_threads() -> None:
    async def run() -> None:
        pool, names = ThreadPool(2, "few", PATIENCE_S), set[str]()

        def work(number: int) -> int:
            names.add(threading.current_thread().name)
            if number == 3:
                raise KeyError(number)
            return number

        outcomes = await asyncio.gather(
            *(pool.run(lambda number=number: work(number), WorkInfo("it", "m")) for number in range(20)),  # type: ignore[misc]
            return_exceptions=True,
        )
        assert outcomes[:3] + outcomes[4:] == [number for number in range(20) if number != 3]
        assert isinstance(outcomes[3], KeyError)
        assert names <= {"few_0", "few_1"}
        pool.close()

    asyncio.run(run())


def test_a_thread_that_does_not_return_is_replaced(stuck: threading.Event) -> None:
    async def run() -> None:
        pool = ThreadPool(1, "one", 0.05)
        with pytest.raises(TooComplex, match="reading it has taken longer than"):
            await pool.run(stuck.wait, WorkInfo("reading it", "hostile"))
        async with asyncio.timeout(PATIENCE_S):
            assert await pool.run(lambda: threading.current_thread().name, WorkInfo("it", "other")) == "one_1"
            with pytest.raises(Unavailable, match="another of the same model has not returned"):
                await pool.run(lambda: 5, WorkInfo("reading it", "hostile"))
            stuck.set()
            while True:  # until it has returned
                try:
                    assert await pool.run(lambda: 5, WorkInfo("reading it", "hostile")) == 5
                    break
                except Unavailable:
                    await asyncio.sleep(0.001)
        pool.close()

    asyncio.run(run())


def test_a_thread_is_replaced_after_its_caller_was_cancelled(stuck: threading.Event) -> None:
    async def run() -> None:
        pool = ThreadPool(1, "one", 0.05)
        task = asyncio.create_task(pool.run(stuck.wait, WorkInfo("reading it", "hostile")))
        while not pool._running:
            await asyncio.sleep(0.001)
        task.cancel()
        async with asyncio.timeout(PATIENCE_S):
            assert await pool.run(lambda: 5, WorkInfo("it", "other")) == 5
        pool.close()

    asyncio.run(run())


def test_a_pool_that_can_start_no_thread_refuses_work_and_recovers() -> None:
    """It counted threads that were not started: when it had counted all, everything waited for ever."""

    async def run() -> None:
        pool, begun = ThreadPool(2, "few", PATIENCE_S), list[int]()
        with no_new_threads():
            for number in range(5):
                with pytest.raises(Unavailable, match="no thread can be started for this now: can't start new thread"):
                    await pool.run(lambda number=number: begun.append(number), WorkInfo("it", "m"))  # type: ignore[misc]
        async with asyncio.timeout(PATIENCE_S):
            assert [await pool.run(lambda: 5, WorkInfo("it", "m")) for _ in range(20)] == [5] * 20
        assert pool._thread_count == 2
        assert not begun  # what was refused is not done later
        pool.close()

    asyncio.run(run())


def test_work_waits_for_the_threads_that_a_pool_has_where_no_more_can_be_started(stuck: threading.Event) -> None:
    async def run() -> None:
        pool = ThreadPool(3, "few", PATIENCE_S)
        held = asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "m")))
        await until(lambda: bool(pool._running))
        with no_new_threads():
            waiting = [
                asyncio.create_task(pool.run(lambda: threading.current_thread().name, WorkInfo("it", "m")))
                for _ in range(5)
            ]
            await asyncio.sleep(0)
            stuck.set()
            async with asyncio.timeout(PATIENCE_S):
                assert {await each for each in waiting} == {"few_0"}
        assert await held
        assert pool._thread_count == 1
        pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("abandon_after", [PATIENCE_S, 0.05])
def test_a_thread_with_slow_work_goes_on_where_none_can_take_its_place(
    stuck: threading.Event, abandon_after: float
) -> None:
    """It ended after the work, since the pool took the other thread for started: no work was done any more."""

    async def run() -> None:
        pool = ThreadPool(2, "few", abandon_after, replace_after=0.01)
        attempts, start = list[str](), pool._start_thread

        def count() -> None:
            attempts.append("attempt")
            start()

        pool._start_thread = count  # type: ignore[method-assign]
        slow = [asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "m", owner))) for owner in "ab"]
        await until(lambda: len(pool._running) == 2)
        async with asyncio.timeout(PATIENCE_S):
            with no_new_threads():
                await until(lambda: len(attempts) > 4)  # two began them, the others cannot replace those
                assert not any(work.replaced for work in pool._running)
                stuck.set()
                await asyncio.gather(*slow, return_exceptions=True)
                assert await pool.run(lambda: 5, WorkInfo("it", "m", "c")) == 5
            assert await pool.run(lambda: 5, WorkInfo("it", "m", "c")) == 5
        assert pool._thread_count == 2
        pool.close()

    asyncio.run(run())


def test_a_thread_with_slow_work_is_replaced_once_threads_can_be_started_again(stuck: threading.Event) -> None:
    async def run() -> None:
        pool = ThreadPool(1, "one", PATIENCE_S, replace_after=0.01)
        slow = asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "m", "slow")))
        await until(lambda: bool(pool._running))
        with no_new_threads():
            waiting = asyncio.create_task(pool.run(lambda: threading.current_thread().name, WorkInfo("it", "m", "b")))
            await asyncio.sleep(0.05)
            assert not waiting.done()
        async with asyncio.timeout(PATIENCE_S):
            assert await waiting != "one_0"
        stuck.set()
        assert await slow
        pool.close()

    asyncio.run(run())


def test_slow_work_of_one_source_holds_up_no_other_source(stuck: threading.Event) -> None:
    """The work is not cancelled: it ends with its result, and so does what waits for it."""

    async def run() -> None:
        pool, most = ThreadPool(2, "few", PATIENCE_S, replace_after=0.05), 0
        at_work, lock = list[int](), threading.Lock()

        def slow(number: int) -> int:
            with lock:
                at_work.append(number)
            stuck.wait()
            return number

        pieces = [
            asyncio.create_task(pool.run(lambda number=number: slow(number), WorkInfo("it", "hostile")))  # type: ignore[misc]
            for number in range(20)
        ]
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(20):
                assert await pool.run(lambda: 5, WorkInfo("it", "other")) == 5
            await until(lambda: ("hostile", "") in pool._blocked)
            most = len(at_work)
            dropped = pieces.pop()
            dropped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropped
            stuck.set()
            assert await asyncio.gather(*pieces) == list(range(19))
        assert most <= 4 < len(at_work)
        assert len(at_work) == 19  # work without a waiter was not begun
        pool.close()

    asyncio.run(run())


@pytest.mark.parametrize("threads_there_are", [1, 2])
def test_slow_work_of_one_owner_holds_up_no_other_owner_of_its_source(
    stuck: threading.Event, threads_there_are: int
) -> None:
    """Others have their turn however much of one owner's work waits, and may have slow work themselves."""

    async def run() -> None:
        pool = ThreadPool(threads_there_are, "few", PATIENCE_S, replace_after=0.05)

        def hold(owner: str) -> list[asyncio.Task[bool]]:
            return [asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "model", owner))) for _ in range(20)]

        slow = hold("evil")
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(pool._blocked.get(("model", "evil"), ())) == 20 - threads_there_are)
            for _ in range(20):
                assert await pool.run(lambda: 5, WorkInfo("it", "model", "good")) == 5
            slow += hold("slow")
            await until(lambda: len(pool._blocked.get(("model", "slow"), ())) == 20 - threads_there_are)
            assert await pool.run(lambda: 5, WorkInfo("it", "model", "good")) == 5
            await until(lambda: len(pool._running) == 2 * threads_there_are)  # the last thread has let go of its work
            stuck.set()
            assert await asyncio.gather(*slow) == [True] * 40
        assert not pool._blocked
        pool.close()

    asyncio.run(run())


def test_work_whose_caller_leaves_is_not_begun_while_what_it_waits_for_ends(
    stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found in a review: the slow work ended just when the caller had looked for its own in the queue."""

    async def run() -> None:
        pool, dropped_begun = ThreadPool(1, "few", PATIENCE_S, replace_after=0.05), threading.Event()
        discard = pool._waiting.discard

        def discard_late(work: Any) -> None:
            discard(work)
            if not pool._lock.locked():  # other threads may come in between
                stuck.set()
                dropped_begun.wait()

        async with asyncio.timeout(PATIENCE_S):
            slow = asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "model")))
            await until(lambda: any(work.replaced for work in pool._running))
            dropped = asyncio.create_task(pool.run(dropped_begun.set, WorkInfo("it", "model")))
            await until(lambda: len(pool._blocked.get(("model", ""), ())) == 1)
            monkeypatch.setattr(pool._waiting, "discard", discard_late)
            dropped.cancel()
            with pytest.raises(asyncio.CancelledError):
                await dropped
            stuck.set()
            assert await slow
            assert await pool.run(lambda: 5, WorkInfo("it", "model")) == 5
        assert not dropped_begun.is_set()
        pool.close()

    asyncio.run(run())


def test_an_owner_with_slow_work_leaves_a_thread_to_others(stuck: threading.Event) -> None:
    """Its next pieces do not take all threads again until they are slow, too."""

    async def run() -> None:
        pool = ThreadPool(2, "few", PATIENCE_S, replace_after=0.05)
        begun, first_ends = list[int](), threading.Event()

        def work(number: int) -> None:
            begun.append(number)
            (stuck if number else first_ends).wait()

        def start(number: int) -> asyncio.Task[None]:
            return asyncio.create_task(pool.run(lambda: work(number), WorkInfo("it", "model", "evil")))

        pieces = [start(0), start(1)]
        async with asyncio.timeout(PATIENCE_S):
            await until(lambda: len(pool._running) == 2 and all(work.replaced for work in pool._running))
            pieces += [start(number) for number in range(2, 9)]
            await until(lambda: len(pool._blocked.get(("model", "evil"), ())) == 7)
            cancelled = pieces.pop(2)
            first_ends.set()  # another begins, also if the one whose turn it is is not waited for any more
            cancelled.cancel()
            await until(lambda: len(begun) == 3)
            for _ in range(20):
                assert await pool.run(lambda: 5, WorkInfo("it", "model", "good")) == 5
            assert len(begun) == 3
            stuck.set()
            await asyncio.gather(*pieces)
        assert len(begun) >= 8
        pool.close()

    asyncio.run(run())


def test_abandoned_work_of_one_owner_refuses_no_other_owner(stuck: threading.Event) -> None:
    async def run() -> None:
        pool = ThreadPool(1, "one", 0.05)
        with pytest.raises(TooComplex):
            await pool.run(stuck.wait, WorkInfo("reading it", "model", "evil"))
        async with asyncio.timeout(PATIENCE_S):
            assert await pool.run(lambda: 5, WorkInfo("reading it", "model", "good")) == 5
            with pytest.raises(Unavailable, match="another of the same model has not returned"):
                await pool.run(lambda: 5, WorkInfo("reading it", "model", "evil"))
        pool.close()

    asyncio.run(run())


def test_work_without_a_waiter_is_not_begun(stuck: threading.Event) -> None:
    async def run() -> None:
        pool, begun = ThreadPool(1, "one", PATIENCE_S), list[str]()
        first = asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "m")))
        second = asyncio.create_task(pool.run(lambda: begun.append("second"), WorkInfo("it", "m")))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        stuck.set()
        assert await first is True
        await pool.run(lambda: begun.append("third"), WorkInfo("it", "m"))
        assert begun == ["third"]
        pool.close()

    asyncio.run(run())


def test_one_owner_s_work_does_not_hold_up_another_s(stuck: threading.Event) -> None:
    """One thread, with much waiting work of one owner; the last piece is small and of another owner."""

    async def run() -> None:
        pool, order = ThreadPool(1, "one", PATIENCE_S), list[str]()
        blocking = asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "m", "evil", 250_000)))
        while not pool._running:
            await asyncio.sleep(0.001)
        hanging = [pool.run(lambda: order.append("evil"), WorkInfo("it", "m", "evil", 250_000)) for _ in range(60)]
        good = [pool.run(lambda: order.append("good"), WorkInfo("it", "m", "good", size)) for size in (300_000, 5)]
        everything = asyncio.gather(*hanging, *good)
        await asyncio.sleep(0)  # all of it waits now
        stuck.set()
        await asyncio.gather(blocking, everything)
        assert [index for index, owner in enumerate(order) if owner == "good"][-1] <= 3
        pool.close()

    asyncio.run(run())


def test_work_that_has_not_begun_at_the_end_is_rejected(stuck: threading.Event) -> None:
    async def run() -> None:
        pool = ThreadPool(1, "one", PATIENCE_S)
        first = asyncio.create_task(pool.run(stuck.wait, WorkInfo("it", "m")))
        while not pool._running:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(pool.run(lambda: 5, WorkInfo("reading it", "m")))
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(Unavailable, match="reading it is not begun: the server is shutting down"):
            await second
        stuck.set()
        assert await first is True

    asyncio.run(run())


@pytest.mark.parametrize("threads_there_are", [1, 2])
def test_a_tokenizer_that_hangs_takes_no_other_model_s_threads(
    tiny_classifier: Path,
    tiny_embedder: Path,
    monkeypatch: pytest.MonkeyPatch,
    stuck: threading.Event,
    threads_there_are: int,
) -> None:
    """Requests with and without a deadline hang in the tokenizer of one model; the other model answers."""
    real: Callable[..., Any] = Tokenizer.encode_batch

    def encode_batch(self: Tokenizer, texts: Any, **options: Any) -> Any:
        if "hang" in str(texts):
            stuck.wait()
        return real(self, texts, **options)

    async def act(client: Client) -> None:
        monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
        async with asyncio.timeout(PATIENCE_S):
            hung = [
                asyncio.create_task(client.ask("POST", "/predict", {"inputs": "hang"}))
                for _ in range(2 * threads_there_are)
            ]
            answers = await asyncio.gather(*(client.ask("POST", "/embed", {"inputs": "a fox"}) for _ in range(4)))
            assert [answer.status_code for answer in answers] == [200] * 4
            said = [await each for each in hung]
        assert {each.status_code for each in said} <= {413, 422, 400, 424, 429, 503}
        assert any("has taken longer than" in each.text for each in said)

    monkeypatch.setattr(text, "CALL_SECONDS", 0.2)
    serving(act, {"judge": tiny_classifier, "vec": tiny_embedder}, tokenizer_threads=threads_there_are)

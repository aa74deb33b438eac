"""The engine: threads, turns, ends. Every request ends once, whatever happens, and frees everything it held."""

import asyncio
import gc
import itertools
import threading
import time
import weakref
from collections.abc import Awaitable, Callable

import pytest
import torch

from polyhead.service.core.errors import BadRequest, Expired, StepFailed, Stopped, Unavailable
from polyhead.service.core.request import Done, Encode, Event, Failed, GeneratedToken, HeadOutput, Request, Terms
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.engine import Engine, RequestCounts, Stream
from polyhead.service.engine.event_stream import MAX_STEPS_AHEAD
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.inbox import INBOX_LIMIT
from polyhead.service.engine.worker import StepResult
from tests.support.engine_fakes import FakeEncoder, FakeGenerator, FakeHead, RecordingObserver, generate, greedy


class EngineFixture:
    """An engine with a generator `talker` and an encoder `reader` with fake networks."""

    def __init__(self, **options: int) -> None:
        self.observer = RecordingObserver()
        self.engine = Engine(self.observer, threads=options.pop("threads", 0))
        self.executor = FakeGenerator(options.pop("blocks", 64), 4)
        self.generator = GeneratorWorker(self.executor, model="talker", **options)
        self.texts = FakeEncoder()
        self.encoder = EncoderWorker(self.texts, FakeHead(), model="reader", task="embed", token_budget=20)
        self.engine.add_worker(self.generator)
        self.engine.add_worker(self.encoder)

    def generate_with(self, *requests: Request) -> list[Stream]:
        return self.engine.submit(self.generator, requests)

    def encode_with(self, *requests: Request) -> list[Stream]:
        return self.engine.submit(self.encoder, requests)

    def pause(self) -> threading.Event:
        """Hold the engine thread until the event is set."""
        gate = threading.Event()
        self.executor.raises = lambda rows: not gate.wait(120)
        return gate

    async def wait_until_idle(self) -> None:
        """Wait until the engine is idle; then nothing must be held."""
        await self.until(lambda: self.engine.idle)
        assert self.generator._blocks.used_count == 0
        assert not self.generator.has_work
        assert not self.encoder.has_work

    async def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError("waited in vain")


def run_scene(scene: Callable[[EngineFixture], Awaitable[None]], **options: int) -> EngineFixture:
    async def run() -> EngineFixture:
        stage = EngineFixture(**options)
        stage.engine.start()
        try:
            await scene(stage)
        finally:
            await stage.engine.close(0)
        assert not stage.engine.alive
        return stage

    return asyncio.run(asyncio.wait_for(run(), 300))


async def events(stream: Stream) -> list[Event]:
    return [event async for event in stream]


def token_ids(found: list[Event]) -> list[int]:
    return [event.id for event in found if isinstance(event, GeneratedToken)]


def failure(found: list[Event]) -> Exception:
    assert isinstance(found[-1], Failed)
    return found[-1].error


def test_requests_are_answered_in_order_and_counted_once() -> None:
    async def scene(stage: EngineFixture) -> None:
        streams = stage.generate_with(*[generate([index, 2, 3]) for index in range(6)])
        reading = stage.encode_with(Encode("a", (1, 2)), Encode("b", (3,)))
        for index, stream in enumerate(streams):
            found = await events(stream)
            assert token_ids(found) == greedy([index, 2, 3], 8)
            assert found[-1] == Done("length", 3, 8, 0)
        for stream in reading:
            encoded, done = await events(stream)
            assert isinstance(encoded, HeadOutput)
            assert isinstance(done, Done)
        assert await events(streams[0]) == [], "an ended stream has no further events"
        await stage.wait_until_idle()

    stage = run_scene(scene)
    assert stage.observer.outcomes == ["done"] * 8
    assert {(end.model, end.task) for end in stage.observer.ends} == {("talker", "generate"), ("reader", "embed")}
    assert sum(end.completion_tokens for end in stage.observer.ends) == 6 * 8
    assert all(end.seconds > 0 for end in stage.observer.ends)
    assert len(stage.observer.steps) == stage.engine.steps
    assert sum(report.tokens for report in stage.observer.steps if report.model == "talker") == 6 * (3 + 7)


def test_the_loop_is_woken_once_for_each_step_and_once_when_idle() -> None:
    async def scene(stage: EngineFixture) -> None:
        posted: list[object] = []
        loop = asyncio.get_running_loop()
        original = loop.call_soon_threadsafe

        def counted(*given: object) -> object:
            posted.append(given)
            return original(*given)  # type: ignore[arg-type]

        loop.call_soon_threadsafe = counted  # type: ignore[assignment, method-assign]
        for stream in stage.generate_with(*[generate([index]) for index in range(16)]):
            await events(stream)
        await stage.wait_until_idle()
        assert len(posted) == stage.engine.steps + len(stage.observer.rests) == stage.engine.steps + 1


def test_the_engine_is_not_far_ahead_of_the_loop() -> None:
    """Otherwise other work of the event loop would wait behind all answers that were computed before it."""

    async def scene(stage: EngineFixture) -> None:
        stream = stage.generate_with(generate([1], max_tokens=40))[0]
        received = 0
        async for _ in stream:
            received += 1
            time.sleep(0.005)  # the loop is busy for longer than a step
            assert (
                stage.engine.steps <= received + 3 * MAX_STEPS_AHEAD
            )  # steps not yet delivered, steps delivered together, and steps computed meanwhile
        assert received == 41
        await stage.wait_until_idle()

    run_scene(scene)


def test_an_engine_ends_when_its_loop_is_closed() -> None:
    async def scene() -> EngineFixture:
        stage = EngineFixture()
        stage.engine.start()
        stage.generate_with(generate([1], max_tokens=200))
        return stage

    loop = asyncio.new_event_loop()
    stage = loop.run_until_complete(scene())
    time.sleep(0.1)  # it waits for the loop
    loop.close()
    stage.engine._thread.join(120)
    assert not stage.engine._thread.is_alive()


def test_an_idle_worker_is_reported() -> None:
    """Otherwise the gauges of the last step would stay if all remaining requests were aborted after it."""

    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        stream = stage.generate_with(generate([1]))[0]
        stream.close()
        gate.set()
        await stage.wait_until_idle()
        await asyncio.sleep(0)
        assert stage.observer.rests

    run_scene(scene)


def test_an_idle_engine_sleeps() -> None:
    async def scene(stage: EngineFixture) -> None:
        await events(stage.generate_with(generate([1]))[0])
        await stage.wait_until_idle()
        before = time.thread_time(), time.process_time()
        await asyncio.sleep(0.3)
        assert time.process_time() - before[1] < 0.1
        assert stage.engine.idle

    run_scene(scene)


def test_an_invalid_call_is_rejected_at_once_and_as_a_whole() -> None:
    async def scene(stage: EngineFixture) -> None:
        with pytest.raises(BadRequest, match="256 tokens"):
            stage.generate_with(generate([1]), generate([1] * 250, 10))
        with pytest.raises(Unavailable, match="'stranger' is being unloaded"):
            stage.engine.submit(GeneratorWorker(FakeGenerator(), model="stranger"), [generate([1])])
        assert stage.generate_with() == []
        await stage.wait_until_idle()

    assert run_scene(scene).observer.ends == []


@pytest.mark.parametrize("when", ["queued", "running"])
def test_closing_a_stream_aborts_and_frees(when: str) -> None:
    async def scene(stage: EngineFixture) -> None:
        first = stage.generate_with(generate([1], 200))[0]
        await anext(first)
        gate = stage.pause()
        stream = stage.generate_with(generate([2], 200))[0] if when == "queued" else first
        stream.close()
        stream.close()
        assert await events(stream) == []
        assert stage.observer.outcomes == ["aborted"]
        first.close()
        gate.set()
        await stage.wait_until_idle()
        assert stage.engine.steps < 100

    stage = run_scene(scene, sequence_budget=1)
    assert stage.observer.outcomes == ["aborted"] * len(stage.observer.ends)
    assert stage.observer.ends[-1].completion_tokens >= 1


def test_closing_an_ended_stream_does_nothing() -> None:
    async def scene(stage: EngineFixture) -> None:
        stream = stage.generate_with(generate([1]))[0]
        await events(stream)
        stream.close()
        waiting = stage.generate_with(generate([1]))[0]
        await stage.wait_until_idle()
        waiting.close()
        assert len(await events(waiting)) == 9, "events that have come can still be read"

    assert run_scene(scene).observer.outcomes == ["done", "done"]


def test_an_answered_stream_counts_as_done() -> None:
    async def scene(stage: EngineFixture) -> None:
        stream = stage.generate_with(generate([1], 200))[0]
        await anext(stream)
        stream.close(answered=True)
        await stage.wait_until_idle()

    (end,) = run_scene(scene).observer.ends
    assert (end.outcome, end.prompt_tokens) == ("done", 1)
    assert 1 <= end.completion_tokens < 200


def test_closing_ends_a_waiting_reader() -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        stream = stage.generate_with(generate([1]))[0]
        reader = asyncio.create_task(events(stream))
        await asyncio.sleep(0.01)
        stream.close()
        assert await asyncio.wait_for(reader, 120) == []
        gate.set()

    run_scene(scene)


def test_a_cancelled_reader_loses_nothing() -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        stream = stage.generate_with(generate([1]))[0]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
        gate.set()
        assert token_ids(await events(stream)) == greedy([1], 8)

    run_scene(scene)


def test_a_failing_step_fails_its_requests_and_the_engine_goes_on() -> None:
    async def scene(stage: EngineFixture) -> None:
        stage.executor.raises = lambda rows: True
        streams = stage.generate_with(generate([1]), generate([2]))
        for stream in streams:
            assert isinstance(failure(await events(stream)), StepFailed)
        assert stage.engine.failing() == ["talker"]
        stage.executor.raises = lambda rows: False
        assert token_ids(await events(stage.generate_with(generate([3]))[0])) == greedy([3], 8)
        assert stage.engine.failing() == []
        assert stage.engine.alive
        await stage.wait_until_idle()

    assert run_scene(scene).observer.outcomes == ["failed", "failed", "done"]


def test_a_request_that_makes_its_step_fail_fails_alone_and_the_model_stays_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene(stage: EngineFixture) -> None:
        stage.executor.raises = lambda rows: 99 in rows.tokens
        good, bad, other = stage.generate_with(generate([1]), generate([99]), generate([2]))
        assert isinstance(failure(await events(bad)), StepFailed)
        assert token_ids(await events(good)) == greedy([1], 8)
        assert token_ids(await events(other)) == greedy([2], 8)
        assert stage.engine.failing() == []
        await stage.wait_until_idle()

    assert sorted(run_scene(scene).observer.outcomes) == ["done", "done", "failed"]
    assert "on fire" in caplog.text


def test_a_failing_model_is_probed_while_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhead.service.engine.engine.SELF_TEST_INTERVAL_S", 0.02)

    async def scene(stage: EngineFixture) -> None:
        stage.executor.raises = lambda rows: True
        await events(stage.generate_with(generate([1]))[0])
        assert stage.engine.failing() == ["talker"]
        await asyncio.sleep(0.1)
        assert stage.engine.failing() == ["talker"]
        stage.executor.raises = lambda rows: False
        await stage.until(lambda: stage.engine.failing() == [])

    run_scene(scene)


def test_a_step_that_hangs_is_a_stall_and_an_idle_engine_is_not() -> None:
    async def scene(stage: EngineFixture) -> None:
        await asyncio.sleep(1)
        assert stage.engine.stalled_seconds() == 0
        gate = stage.pause()
        (stream,) = stage.generate_with(generate([1]))
        assert stage.engine.stalled_seconds() < 1, "the time before the request came does not count"
        await stage.until(lambda: stage.engine.stalled_seconds() > 0.1)
        gate.set()
        assert token_ids(await events(stream)) == greedy([1], 8)
        assert stage.engine.stalled_seconds() < 1
        await stage.wait_until_idle()
        assert stage.engine.stalled_seconds() == 0

    run_scene(scene)


def test_open_requests_and_their_tokens_are_counted_at_any_moment() -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        mine = stage.generate_with(generate([1, 2, 3], 100, terms=Terms(owner="me")), generate([4], 100))
        texts = stage.encode_with(Encode("a", (1, 2, 3, 4)))
        assert stage.engine.counts() == {
            ("talker", "generate"): RequestCounts(2, 0),
            ("reader", "embed"): RequestCounts(1, 0),
        }
        assert (stage.engine.tokens, stage.engine.tokens_of("me")) == (8, 3)
        gate.set()
        await anext(mine[1])
        assert stage.engine.counts()["talker", "generate"] == RequestCounts(0, 2)
        for stream in (*mine, *texts):
            stream.close()
        assert stage.engine.tokens == 0
        assert stage.engine.counts() == {
            ("talker", "generate"): RequestCounts(0, 0),
            ("reader", "embed"): RequestCounts(0, 0),
        }

    run_scene(scene, sequence_budget=2)


def test_a_deadline_ends_a_request_even_while_a_step_hangs() -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        blocked = stage.generate_with(generate([1]))[0]
        await stage.until(lambda: bool(stage.executor.seen))
        began = time.perf_counter()
        late, early = stage.generate_with(
            generate([2], terms=Terms(deadline=began + 0.1)), generate([3], terms=Terms(deadline=began + 99))
        )
        error = failure(await events(late))
        assert isinstance(error, Expired)
        assert time.perf_counter() - began > 0.09
        gate.set()
        assert token_ids(await events(blocked)) == greedy([1], 8)
        assert token_ids(await events(early)) == greedy([3], 8)
        assert not any(
            rows.positions[start] == 0 and rows.tokens[start] == 2
            for rows in stage.executor.seen
            for start in rows.starts[:-1]
        )
        await stage.wait_until_idle()

    assert run_scene(scene).observer.outcomes == ["expired", "done", "done"]


def test_steps_run_between_the_parts_of_a_long_function() -> None:
    async def scene(stage: EngineFixture) -> None:
        released = threading.Event()

        def load() -> int:
            breaths = 0
            while not released.is_set():
                stage.engine.yield_turn()
                breaths += 1
            return breaths

        loading = asyncio.create_task(stage.engine.call(load))
        await asyncio.sleep(0.01)
        assert token_ids(await events(stage.generate_with(generate([1], 30))[0])) == greedy([1], 30)
        released.set()
        assert await loading >= 30

    run_scene(scene)


def test_what_runs_between_the_parts_of_a_function_is_not_in_its_inference_mode() -> None:
    """It may load weights, of which gradients are computed later."""

    async def scene(stage: EngineFixture) -> None:
        began, ended, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

        @torch.inference_mode()
        def load() -> None:
            loop.call_soon_threadsafe(began.set)
            while not ended.is_set():
                stage.engine.yield_turn()
            assert torch.is_inference_mode_enabled()

        loading = asyncio.create_task(stage.engine.call(load))
        await began.wait()
        mode = await stage.engine.call(torch.is_inference_mode_enabled)
        ended.set()
        await loading
        assert not mode

    run_scene(scene)


def test_a_long_function_in_parts_ends_with_the_engine() -> None:
    async def scene(stage: EngineFixture) -> None:
        def load() -> None:
            while True:
                stage.engine.yield_turn()

        loading = asyncio.create_task(stage.engine.call(load))
        await asyncio.sleep(0.01)
        await stage.engine.close(0)
        with pytest.raises(Stopped):
            await loading

    run_scene(scene)


def test_the_thread_is_shared_by_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = itertools.count(), list[str]()
    monkeypatch.setattr("polyhead.service.engine.engine.perf_counter", lambda: next(clock) / 1000)  # all steps alike

    def worker(name: str) -> EncoderWorker:
        made = EncoderWorker(FakeEncoder(), FakeHead(), model=name, task="embed", token_budget=1)
        step = made.step

        def noted() -> StepResult:
            order.append(name)
            return step()

        monkeypatch.setattr(made, "step", noted)
        return made

    async def scene(stage: EngineFixture) -> None:
        heavy, light = worker("heavy"), worker("light")
        stage.engine.add_worker(heavy, 4.0)
        stage.engine.add_worker(light)
        gate = stage.pause()
        blocked = stage.generate_with(generate([1]))
        reading = [stage.engine.submit(worker, [Encode("a", (1,))] * 400) for worker in (heavy, light)]
        gate.set()
        await events(reading[0][-1])
        shared = order[: len(order) - order[::-1].index("heavy")]
        assert 80 < shared.count("light") < 120, "a quarter of 400"
        for stream in (*blocked, *reading[1]):
            stream.close()

    run_scene(scene)


def test_an_unread_answer_is_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhead.service.engine.event_stream.MAX_UNREAD_EVENTS", 50)

    async def scene(stage: EngineFixture) -> None:
        stage.executor.raises = lambda rows: bool(time.sleep(0.002))  # so that a reader can keep up
        unread, encode_with = stage.generate_with(generate([1], 200), generate([2], 200))
        assert token_ids(await events(encode_with)) == greedy([2], 200)
        await stage.until(lambda: stage.engine.idle)
        assert unread.is_open
        assert 50 <= unread.tokens < 70
        assert stage.engine.counts()["talker", "generate"] == RequestCounts(waiting=1, running=0)
        assert not stage.engine.stalled_seconds()
        assert stage.engine.tokens == 0, "its tokens take no room while it is paused"
        first = [await anext(unread) for _ in range(40)]
        assert stage.engine.tokens == 1
        assert token_ids([*first, *await events(unread)]) == greedy([1], 200), "it continues where it was"
        await stage.wait_until_idle()
        assert stage.engine.tokens == 0

    assert run_scene(scene).observer.outcomes == ["done", "done"]


def test_a_paused_answer_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhead.service.engine.event_stream.MAX_UNREAD_EVENTS", 10)

    async def scene(stage: EngineFixture) -> None:
        unread = stage.generate_with(generate([1], 200))[0]
        await stage.until(lambda: stage.engine.idle and unread.is_paused)
        unread.close()
        await stage.wait_until_idle()
        assert stage.engine.tokens == 0

    assert run_scene(scene).observer.outcomes == ["aborted"]


def test_the_rest_of_an_answer_that_ended_while_paused_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polyhead.service.engine.event_stream.MAX_UNREAD_EVENTS", 10)

    async def scene(stage: EngineFixture) -> None:
        unread = stage.generate_with(generate([1], 200))[0]
        await stage.until(lambda: stage.engine.idle and unread.is_paused)
        unread.abort(Stopped("over"))
        assert len(await events(unread)) >= 10
        await stage.wait_until_idle()
        assert stage.engine.tokens == 0

    assert run_scene(scene).observer.outcomes == ["failed"]


def test_call_runs_between_steps_on_the_engine_thread() -> None:
    async def scene(stage: EngineFixture) -> None:
        stream = stage.generate_with(generate([1], 100))[0]
        await anext(stream)
        assert (await stage.engine.call(threading.current_thread)).name == "engine-cpu"
        assert await stage.engine.call(torch.get_num_threads) == 1
        assert len(await events(stream)) == 100
        with pytest.raises(ZeroDivisionError):
            await stage.engine.call(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="StopIteration"):
            await stage.engine.call(lambda: next(iter([])))
        value = ValueError("returned, not raised")
        assert await stage.engine.call(lambda: value) is value

    before = torch.get_num_threads()
    run_scene(scene, threads=1)
    torch.set_num_threads(before)


def test_an_encoder_does_not_wait_for_a_long_generation() -> None:
    async def scene(stage: EngineFixture) -> None:
        generate_with = stage.generate_with(generate([1], 200))[0]
        await anext(generate_with)
        for index in range(3):
            (stream,) = stage.encode_with(Encode("a", (index + 1,)))
            assert len(await events(stream)) == 2
        assert generate_with.is_open
        generate_with.close()

    run_scene(scene)


def test_a_retired_worker_finishes_what_it_has() -> None:
    async def scene(stage: EngineFixture) -> None:
        stream = stage.generate_with(generate([1], 30))[0]
        retiring = asyncio.create_task(stage.engine.remove_worker(stage.generator, 20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="'talker' is being unloaded"):
            stage.generate_with(generate([1]))
        successor = GeneratorWorker(FakeGenerator(), model="talker")
        stage.engine.add_worker(successor)
        (other,) = stage.engine.submit(successor, [generate([2])])
        assert token_ids(await events(stream)) == greedy([1], 30)
        assert token_ids(await events(other)) == greedy([2], 8)
        await retiring
        assert list(stage.engine.counts()) == [("reader", "embed"), ("talker", "generate")]

    assert run_scene(scene).observer.outcomes == ["done", "done"]


def test_a_retired_worker_fails_what_it_cannot_finish() -> None:
    async def scene(stage: EngineFixture) -> None:
        stream = stage.generate_with(generate([1], 200))[0]
        await anext(stream)
        await stage.engine.remove_worker(stage.generator, 0)
        error = failure(await events(stream))
        assert isinstance(error, Stopped)
        assert "talker" in error.message
        gone = weakref.ref(stage.generator)
        del stage.generator, stream
        await asyncio.sleep(0.01)
        gc.collect()
        assert gone() is None, "its memory is free"

    assert run_scene(scene).observer.outcomes == ["failed"]


def test_what_is_called_does_not_wait_for_the_requests_of_a_key() -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        await anext(stage.encode_with(Encode("a", (1, 2)))[0])
        first = stage.generate_with(generate([1]))
        await stage.until(lambda: stage.generator.has_work)
        many = [stage.encode_with(Encode("a", (1,), terms=Terms(owner="many"))) for _ in range(3 * INBOX_LIMIT)]
        waiting = asyncio.create_task(stage.engine.call(lambda: len(stage.encoder._requests)))
        await asyncio.sleep(0)
        (other,) = stage.encode_with(Encode("a", (2,), terms=Terms(owner="other")))
        gate.set()
        assert await waiting == 0, "it runs before those that were sent before it are accepted"
        await events(other)
        assert sum(stream.is_open for (stream,) in many) > INBOX_LIMIT, "nothing sent after it waits for them"
        for stream in (*first, *(stream for (stream,) in many)):
            await events(stream)
        await stage.wait_until_idle()

    run_scene(scene)


def test_a_worker_is_retired_beside_what_its_owner_asks_of_another() -> None:
    """Its requests, whose acceptance and aborts wait behind others of their owner, do not register it again."""

    async def scene(stage: EngineFixture) -> None:
        gate, terms = stage.pause(), Terms(owner="many")
        first = stage.generate_with(generate([1], 100, terms=terms))
        await stage.until(lambda: stage.generator.has_work)
        first[0].close()
        others = [stage.encode_with(Encode("a", (1,), terms=terms)) for _ in range(3 * INBOX_LIMIT)]
        late = stage.generate_with(generate([2], 100, terms=terms), generate([3], 100, terms=terms))
        late[0].close()
        retiring = asyncio.create_task(stage.engine.remove_worker(stage.generator, 0))
        await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match="'talker' is being unloaded"):
            stage.generate_with(generate([4]))
        gate.set()
        await retiring
        assert sum(stream.is_open for (stream,) in others) > INBOX_LIMIT, "it does not wait for all of them"
        assert isinstance(failure(await events(late[1])), Stopped)
        for (stream,) in others:
            assert isinstance((await events(stream))[-1], Done)
        await stage.until(lambda: stage.engine.idle)
        assert list(stage.engine._fair_scheduler.parties()) == [stage.encoder]

    stage = run_scene(scene)
    assert sorted(stage.observer.outcomes) == ["aborted", "aborted", *["done"] * 3 * INBOX_LIMIT, "failed"]


def test_an_adapter_is_detached_after_its_requests_have_left_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[tuple[int, bool]] = []

    async def scene(stage: EngineFixture) -> None:
        detach = lambda number: found.append((number, bool(stage.generator._groups.states)))  # noqa: E731
        monkeypatch.setattr(stage.generator, "detach", detach)
        stage.engine.add_adapter(stage.generator, 1, "tuned", "generate")
        gate, terms = stage.pause(), Terms(owner="many")
        running = stage.generate_with(generate([1], 100, terms=terms, adapter=1))
        await stage.until(lambda: stage.generator.has_work)
        others = [stage.encode_with(Encode("a", (1,), terms=terms)) for _ in range(3 * INBOX_LIMIT)]
        running[0].close()
        (late,) = stage.generate_with(generate([2], 100, terms=terms, adapter=1))
        removing = asyncio.create_task(stage.engine.remove_adapter(stage.generator, 1, 0))
        await asyncio.sleep(0.01)
        gate.set()
        await removing
        assert found == [(1, False)]
        assert sum(stream.is_open for (stream,) in others) > INBOX_LIMIT, "it does not wait for all of them"
        assert isinstance(failure(await events(late)), Stopped)
        for (stream,) in others:
            await events(stream)
        await stage.wait_until_idle()

    run_scene(scene)


def test_close_drains_what_can_finish() -> None:
    async def scene(stage: EngineFixture) -> None:
        streams = stage.generate_with(*[generate([index], 20) for index in range(4)])
        closing = asyncio.create_task(stage.engine.close(20))
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="shutting down"):
            stage.generate_with(generate([1]))
        with pytest.raises(Unavailable, match="shutting down"):
            await stage.engine.call(lambda: 1)
        for index, stream in enumerate(streams):
            assert token_ids(await events(stream)) == greedy([index], 20)
        await closing
        assert not stage.engine.alive

    assert run_scene(scene).observer.outcomes == ["done"] * 4


def test_close_fails_what_cannot() -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        streams = stage.generate_with(generate([1], 200), generate([2], 200))
        pending = asyncio.create_task(stage.engine.call(lambda: 1))
        asyncio.get_running_loop().call_later(0.1, gate.set)
        await stage.engine.close(0.02)
        for stream in streams:
            assert isinstance(failure(await events(stream)), Stopped)
        with pytest.raises(Unavailable):
            await pending
        await stage.engine.close(0)

    assert run_scene(scene).observer.outcomes == ["failed", "failed"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_when_the_engine_thread_ends_every_request_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scene(stage: EngineFixture) -> None:
        gate = threading.Event()
        stage.executor.raises = lambda rows: gate.wait(120)
        monkeypatch.setattr(stage.generator, "blame_failed_step", lambda: 1 / 0)
        streams = stage.generate_with(generate([1]), generate([2]))
        await asyncio.sleep(0.01)
        pending = asyncio.create_task(stage.engine.call(lambda: 1))
        await asyncio.sleep(0.01)
        assert stage.engine.alive
        gate.set()
        for stream in streams:
            error = failure(await events(stream))
            assert isinstance(error, Stopped)
            assert "stopped" in error.message
        with pytest.raises(Stopped, match="stopped"):
            await pending
        assert not stage.engine.alive
        with pytest.raises(Unavailable, match="stopped"):
            stage.generate_with(generate([1]))

    assert run_scene(scene).observer.outcomes == ["failed", "failed"]


def test_a_leak_is_found_and_logged_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    """The invariants of one model are broken; the others are still served."""

    async def scene(stage: EngineFixture) -> None:
        await stage.engine.call(lambda: stage.generator._blocks.allocate([], 4))
        await events(stage.generate_with(generate([1]))[0])
        await stage.until(lambda: "model 'talker' violates an invariant" in caplog.text)
        assert len(await events(stage.encode_with(Encode("a", (1, 2)))[0])) == 2

    run_scene(scene)


def test_the_engine_goes_on_after_a_command_that_fails() -> None:
    async def scene(stage: EngineFixture) -> None:
        stage.engine._send_for_all(lambda: 1 / 0)  # type: ignore[arg-type,return-value]
        assert len(await events(stage.encode_with(Encode("a", (1, 2)))[0])) == 2

    run_scene(scene)


def test_an_idle_worker_is_reported_while_another_is_busy() -> None:
    async def scene(stage: EngineFixture) -> None:
        long = stage.generate_with(generate([1], 200))[0]
        await anext(long)
        await events(stage.encode_with(Encode("a", (1, 2)))[0])
        await stage.until(lambda: "reader" in stage.observer.rests)
        assert "talker" not in stage.observer.rests
        long.close()
        await stage.wait_until_idle()

    run_scene(scene)


def test_many_requests_and_aborts_leave_nothing_allocated() -> None:
    async def client(stage: EngineFixture, index: int) -> None:
        for turn in range(6):
            number = index * 6 + turn
            if number % 5 == 0:
                streams = stage.encode_with(*[Encode("a", (number % 12, text)) for text in range(4)])
                assert all([len(await events(stream)) == 2 for stream in streams])
                continue
            (stream,) = stage.generate_with(generate([number % 7, index], 10))
            if number % 3 == 0:
                if number % 2:
                    await anext(stream)
                stream.close()
            else:
                assert token_ids(await events(stream)) == greedy([number % 7, index], 10)

    async def scene(stage: EngineFixture) -> None:
        await asyncio.gather(*[client(stage, index) for index in range(20)])
        await stage.wait_until_idle()

    stage = run_scene(scene, blocks=12, sequence_budget=6, token_budget=16, prefill_chunk=4)
    streams = sum(4 if number % 5 == 0 else 1 for number in range(120))
    assert len(stage.observer.ends) == streams
    assert set(stage.observer.outcomes) == {"done", "aborted"}


def test_requests_fail_when_the_engine_is_declared_unusable() -> None:
    """Waiting requests fail at once, with the cause, although the engine thread hangs in a step."""
    why = "a device is gone: the server must be restarted"

    async def scene(stage: EngineFixture) -> None:
        gate = stage.pause()
        [stream] = stage.generate_with(generate([1, 2]))
        await stage.until(lambda: bool(stage.executor.seen))
        await asyncio.to_thread(stage.engine.fail_permanently, "a device is gone")
        assert str(failure(await events(stream))) == why
        assert not stage.engine.alive
        with pytest.raises(Unavailable, match=why):
            stage.generate_with(generate([1]))
        gate.set()

    assert run_scene(scene).observer.outcomes == ["failed"]

"""A load always ends: at its deadline, when it is cancelled, and when a thread of it hangs for ever."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from polyhead.models.checkpoint import hub
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core.errors import Cancelled, Expired, Unavailable
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.runtime import executor_choice as executors
from polyhead.service.runtime import explain_models as watching
from polyhead.service.runtime import loader, registry
from polyhead.service.runtime.load_task import LoadTask
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.self_test import SelfTest
from tests.service.api.operations.test_admin import KEY, Client, serving
from tests.service.runtime.test_registry import serving as registered

PATIENCE_S = 60.0


class Hold:
    """Blocks the patched function in the load of `source` while it is set; `entered` is set when that happens."""

    def __init__(self) -> None:
        self.on, self.entered, self.released = True, threading.Event(), threading.Event()

    def hang(self) -> None:
        """Block like a library call that never returns."""
        if self.on:
            self.entered.set()
            self.released.wait()

    def part_by_part(self, check: Callable[[], object]) -> None:
        """Block like work of many parts, each of which returns."""
        while self.on and not self.released.is_set():
            self.entered.set()
            check()
            time.sleep(0.001)

    async def reached(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.entered.is_set():
                await asyncio.sleep(0.002)

    def again(self) -> None:
        self.on = False
        self.entered.clear()


Patch = Callable[[pytest.MonkeyPatch, Hold], None]


def before(owner: Any, name: str) -> Patch:
    """Block before a function is called, on whichever thread."""

    def patch(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
        real = getattr(owner, name)

        def held(*given: Any, **named: Any) -> Any:
            hold.hang()
            return real(*given, **named)

        monkeypatch.setattr(owner, name, staticmethod(held) if isinstance(owner, type) else held)

    return patch


def reading(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    real = loader.checkpoint.prepare

    def begin(*given: Any, progress: Callable[[int, int], None], **named: Any) -> Any:
        hold.part_by_part(lambda: progress(1, 2))
        return real(*given, progress=progress, **named)

    monkeypatch.setattr(loader.checkpoint, "prepare", begin)


def packing(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    real = executors.NativeExecutor

    def pack(network: Any, head: Any, *, load_part: Any, **named: Any) -> Any:
        def a_part() -> None:
            with load_part(network.final_norm):
                pass

        hold.part_by_part(a_part)
        return real(network, head, load_part=load_part, **named)

    monkeypatch.setattr(executors, "NativeExecutor", pack)


def packing_a_block(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    real = executors.NativeExecutor

    def pack(network: Any, head: Any, *, yield_turn: Any, **named: Any) -> Any:
        hold.part_by_part(yield_turn)
        return real(network, head, yield_turn=yield_turn, **named)

    monkeypatch.setattr(executors, "NativeExecutor", pack)


def testing(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    real = SelfTest.compute_reference

    def expect(self: SelfTest, weights: WeightReader, progress: Callable[[int, int], None]) -> None:
        hold.part_by_part(lambda: progress(1, 2))
        real(self, weights, progress)

    monkeypatch.setattr(SelfTest, "compute_reference", expect)


def warming(monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    for kind in (EncoderWorker, GeneratorWorker):

        def warm_up(self: Any, breathe: Callable[[], None], real: Any = kind.warm_up) -> None:
            hold.part_by_part(breathe)
            real(self, breathe)

        monkeypatch.setattr(kind, "warm_up", warm_up)


STAGES: dict[str, tuple[Patch, str]] = {
    "describing": (before(loader.checkpoint, "describe_source"), "was being described"),
    "tokenizer": (before(Tokenizer, "from_folder"), "was being described"),
    "testing": (testing, "was being tested for what its precision costs"),
    "reading": (reading, "was being read and packed"),
    "packing": (packing, "was being read and packed"),
    "packing a block": (packing_a_block, "was being read and packed"),
    "warming": (warming, "was being warmed up"),
}


# A cancelled load and one at its deadline end at the same checks: at its deadline one of each kind of work is enough.
AGAIN = ("tokenizer", "reading", "packing a block")


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest) -> tuple[Patch, str]:
    return STAGES[request.param]


@pytest.fixture
def hold() -> Iterator[Hold]:
    hold = Hold()
    yield hold
    hold.released.set()


def load(client: Client, source: Path, name: str = "new") -> Coroutine[Any, Any, Any]:
    return client.ask("POST", "/admin/models", {"name": name, "source": str(source)})


async def free(client: Client) -> int:
    found: int = (await client.ask("GET", "/admin/models")).json()["memory"]["free_bytes"]
    return found


def test_a_load_is_cancelled_in_any_stage_and_the_next_one_works(
    tiny_generator: Path,
    tiny_classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Hold,
    stage: tuple[Patch, str],
) -> None:
    patch, said = stage

    async def act(client: Client) -> None:
        expected = (await client.says("chat")).json()["choices"][0]["text"]
        before = await free(client)
        patch(monkeypatch, hold)
        task = asyncio.create_task(load(client, tiny_generator))
        await hold.reached()
        cancelled = await client.ask("DELETE", "/admin/models/new")
        assert (cancelled.status_code, cancelled.json()) == (200, {"name": "new", "state": "unloaded"})
        answer = await task
        assert answer.status_code == 409
        message = f"the load of new was cancelled while it {said}"
        assert (answer.json()["error"]["code"], answer.json()["error"]["message"]) == ("cancelled", message)
        assert await free(client) == before
        assert (await client.ask("DELETE", "/admin/models/new")).status_code == 404
        assert (await client.ask("POST", "/predict", {"inputs": "good"})).status_code == 200
        hold.again()  # the work that hung goes on hanging
        assert (await load(client, tiny_generator)).status_code == 200
        assert (await client.says("new")).json()["choices"][0]["text"] == expected

    models = {"chat": tiny_generator, "judge": tiny_classifier}
    serving(act, models, precision="int8", model_dir=tmp_path, memory_mib=4096)


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.thorough] if name in AGAIN else []) for name in STAGES])
def ended_stage(request: pytest.FixtureRequest) -> tuple[Patch, str]:
    return STAGES[request.param]


def limited(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """The loads of these sources have almost no time."""

    def made(name: str, seconds: float, *rest: Any) -> LoadTask:
        assert seconds == 3600.0
        return LoadTask(name, 0.05 if name in names else seconds, *rest)

    monkeypatch.setattr(registry, "LoadTask", made)
    monkeypatch.setattr(watching, "LoadTask", made)


def test_at_its_deadline_a_load_ends_in_any_stage(
    tiny_generator: Path,
    tiny_classifier: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hold: Hold,
    ended_stage: tuple[Patch, str],
) -> None:
    patch, said = ended_stage

    async def act(client: Client) -> None:
        before = await free(client)
        patch(monkeypatch, hold)
        with monkeypatch.context() as short:
            limited(short, "new")
            answer = await load(client, tiny_generator)
        assert answer.status_code == 504
        message = answer.json()["error"]["message"]
        assert message.startswith("the load of new has taken longer than load_seconds, which is 0.05: it was being ")
        assert not hold.entered.is_set() or said in message  # otherwise a slow machine would not reach the stage
        assert await free(client) == before
        hold.again()
        assert (await load(client, tiny_generator)).status_code == 200
        assert (await client.says("new")).status_code == 200

    serving(act, {"judge": tiny_classifier}, precision="int8", model_dir=tmp_path, memory_mib=4096)


def test_a_model_of_the_settings_that_takes_too_long_is_broken_and_the_others_are_served(
    tiny_ranker: Path, tiny_classifier: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    real = loader.checkpoint.describe_source

    def describe(source: str, *rest: Any) -> Any:
        if source == str(tiny_ranker):
            hold.hang()
        return real(source, *rest)

    async def act(served: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await served.load_all()
        states = served.states()
        assert [states[name].phase for name in ("slow", "judge", "chat")] == ["broken", "ready", "ready"]
        assert "longer than load_seconds, which is 0.05: it was being described" in states["slow"].reason

    monkeypatch.setattr(loader.checkpoint, "describe_source", describe)
    limited(monkeypatch, "slow")
    registered({"slow": tiny_ranker, "judge": tiny_classifier, "chat": tiny_generator}, act)


def test_loads_of_the_start_are_cancelled_while_they_wait_and_while_they_go_on(
    tiny_ranker: Path, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    async def act(served: ModelRegistry) -> None:
        reading(monkeypatch, hold)
        task = asyncio.create_task(served.load_all())
        await hold.reached()
        async with asyncio.timeout(PATIENCE_S):
            await served.unload("last", 0).wait_and_raise()  # which waits
            assert list(served.states()) == ["slow", "judge"]
            await served.unload("slow", 0).wait_and_raise()
            assert list(served.states()) == ["judge"]
            hold.released.set()
            await task
        assert [model.name for model in served.models()] == ["judge"]
        assert served.memory_budget()[1] == served.memory_budget()[0] - served.model_statuses()[0].memory

    registered({"slow": tiny_ranker, "judge": tiny_classifier, "last": tiny_ranker}, act)


def test_a_cancelled_load_ends_the_thread_that_waits_for_the_hub(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    """Else each load of a model whose hub hangs would keep a thread, and the lock of a file."""
    ended = threading.Event()

    def ask(url: str, check_wanted: Callable[[], None]) -> dict[str, Any]:
        try:
            hold.part_by_part(check_wanted)
        finally:
            ended.set()
        return {}

    async def act(served: ModelRegistry) -> None:
        task = asyncio.create_task(served.load_all())
        await hold.reached()
        async with asyncio.timeout(PATIENCE_S):
            await served.unload("far", 0).wait_and_raise()
            await task
        assert await asyncio.to_thread(ended.wait, PATIENCE_S)
        assert list(served.states()) == ["judge"]

    monkeypatch.setattr(hub, "read_description", ask)
    registered({"far": Path("org/name"), "judge": tiny_classifier}, act)


def test_a_cancelled_reload_leaves_the_old_one_serving(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    async def act(client: Client) -> None:
        expected, before = (await client.says("chat")).json()["choices"], await free(client)
        reading(monkeypatch, hold)
        task = asyncio.create_task(client.ask("POST", "/admin/models/chat/reload"))
        await hold.reached()
        twice = await asyncio.gather(*[client.ask("DELETE", "/admin/models/chat") for _ in range(2)])
        assert [(each.status_code, each.json()["state"]) for each in twice] == [(200, "ready")] * 2
        assert (await task).status_code == 409
        assert await free(client) == before
        assert (await client.says("chat")).json()["choices"] == expected
        hold.again()
        assert (await client.ask("POST", "/admin/models/chat/reload")).status_code == 200
        assert (await client.ask("DELETE", "/admin/models/chat")).json()["state"] == "unloaded"

    serving(act, {"chat": tiny_generator}, memory_mib=4096)


def test_an_unload_of_kserve_cancels_a_load(tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold) -> None:
    async def act(client: Client) -> None:
        reading(monkeypatch, hold)
        asked = {"parameters": {"source": str(tiny_classifier)}}
        task = asyncio.create_task(client.ask("POST", "/v2/repository/models/new/load", asked, headers=KEY))
        await hold.reached()
        done = await client.ask("POST", "/v2/repository/models/new/unload", headers=KEY)
        assert (done.status_code, done.json()) == (200, {})
        assert (await task).status_code == 409
        assert await client.names() == ["judge"]

    serving(act, {"judge": tiny_classifier})


def test_a_cancelled_adapter_leaves_nothing_with_its_model() -> None:
    """What the engine's thread had built already is undone."""

    async def run() -> None:
        detached, went, through = list[int](), asyncio.Event(), asyncio.Event()

        async def call(function: Callable[[], Any]) -> Any:
            made = function()
            went.set()
            await through.wait()
            return made

        loading = LoadTask("a", 0)
        engine: Any = SimpleNamespace(call=call)
        task = asyncio.create_task(loading.run(loading.on_engine(engine, lambda: 7, undo=detached.append)))
        await went.wait()
        loading.cancel()
        asyncio.get_running_loop().call_later(0.01, through.set)
        with pytest.raises(Cancelled):
            await task
        assert detached == [7]

    asyncio.run(run())


def test_an_engine_that_hangs_in_a_load_delays_only_calls_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operation ends; its memory is released when the thread has finished."""

    async def run() -> None:
        through, given_back = asyncio.Event(), list[str]()

        async def work(loading: LoadTask) -> None:
            try:
                await loading.on_engine(engine, lambda: None)
            finally:
                given_back.append("memory")

        async def call(function: Callable[[], Any]) -> Any:
            await through.wait()
            return function()

        engine: Any = SimpleNamespace(call=call)
        loading = LoadTask("a", 0.01)
        with pytest.raises(Expired, match=r"load_seconds, which is 0\.01"):
            await loading.run(work(loading))
        assert given_back == []
        through.set()
        async with asyncio.timeout(PATIENCE_S):
            while not given_back:
                await asyncio.sleep(0.001)

    monkeypatch.setattr("polyhead.service.runtime.load_task.GRACE_S", 0.01)
    asyncio.run(run())


def test_the_deadline_of_a_load_covers_all_its_parts() -> None:
    async def run() -> None:
        loading = LoadTask("a", 0.05)

        async def parts() -> None:
            for _ in range(1000):
                await loading.run(asyncio.sleep(0.005))

        with pytest.raises(Expired):
            await parts()

    asyncio.run(run())


def test_an_explainer_has_the_same_load_deadline(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        [model], free = served.models(), served.memory_budget()
        with monkeypatch.context() as patched:
            before(watching, "build_and_measure")(patched, hold)
            limited(patched, "the explainer of judge")
            with pytest.raises(Expired, match="the load of the explainer of judge has taken longer than load_seconds"):
                await served.load_explainer(model)
        assert served.memory_budget() == free
        assert await served.load_explainer(model)

    registered({"judge": tiny_classifier}, act)


def test_a_request_for_a_cancelled_model_gets_404(
    tiny_ranker: Path, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, hold: Hold
) -> None:
    async def act(served: ModelRegistry) -> None:
        reading(monkeypatch, hold)
        task = asyncio.create_task(served.load_all())
        await hold.reached()
        with pytest.raises(Unavailable, match="not ready yet"):
            served.resolve("slow", ["rank"])
        await served.unload("slow", 0).wait_and_raise()
        hold.released.set()
        await task
        assert served.names() == ["judge"]

    registered({"slow": tiny_ranker, "judge": tiny_classifier}, act)

"""Models that are loaded, reloaded, renamed and unloaded through /admin, while others serve."""

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.models.checkpoint import hub
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.service.config.settings import Settings
from polyhead.service.runtime import loader
from polyhead.service.runtime.registry import MAX_ALIASES
from polyhead.service.server.assembly import assemble
from tests.support import checkpoints

KEY = {"Authorization": "Bearer boss"}
Act = Callable[["Client"], Coroutine[Any, Any, None]]


class Client:
    """Sends requests with the admin key under /admin, and without a key elsewhere."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def ask(self, method: str, path: str, content: Any = None, **options: Any) -> httpx.Response:
        headers = KEY if path.startswith("/admin") else {}
        return await self.http.request(method, path, json=content, **({"headers": headers} | options))

    async def says(self, model: str, tokens: int = 3) -> httpx.Response:
        asked = {"model": model, "prompt": "The fox", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        return await self.ask("POST", "/v1/completions", asked)

    async def names(self) -> list[str]:
        return [model["name"] for model in (await self.ask("GET", "/admin/models")).json()["models"]]

    async def changing(self) -> None:
        """Wait until an operation is half way."""
        change = None
        while not change or not change.get("progress", 1):
            await asyncio.sleep(0.005)
            change = (await self.ask("GET", "/admin/models")).json()["change"]

    async def received(self, count: int) -> None:
        """Wait until the engine has received so many requests for `chat`."""
        while float(await self.metric('polyhead_requests_received_total{model="chat"') or 0) < count:
            await asyncio.sleep(0.005)

    async def metric(self, sample: str) -> str:
        page = (await self.ask("GET", "/metrics")).text
        return next((line.rpartition(" ")[2] for line in page.splitlines() if line.startswith(sample)), "")


def serving(act: Act, models: dict[str, Path], **settings: Any) -> None:
    """Run `act` on a server whose models are loaded."""

    async def run() -> None:
        settled = asyncio.Event()
        known = Settings(
            models={name: str(source) for name, source in models.items()},
            **({"admin_key": "boss", "drain_seconds": 1, "model_root": "/"} | settings),
        )
        app = assemble(known, lambda _: settled.set())
        async with app.router.lifespan_context(app):
            await settled.wait()
            transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://testserver", timeout=60) as http:
                await act(Client(http))

    asyncio.run(run())


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Callable[[], threading.Event]:
    """After this call, a load stops half way until the event is set; the engine's thread goes on."""
    real = loader.checkpoint.prepare

    def hold() -> threading.Event:
        go_on = threading.Event()

        def read(*given: Any, progress: Callable[[int, int], None], **named: Any) -> Any:
            while not go_on.is_set():
                progress(42, 100)
                time.sleep(0.001)
            return real(*given, progress=progress, **named)

        monkeypatch.setattr(loader.checkpoint, "prepare", read)
        return go_on

    return hold


@asynccontextmanager
async def during(client: Client, asked: Coroutine[Any, Any, httpx.Response]) -> AsyncIterator[asyncio.Task[Any]]:
    """While a requested operation runs."""
    task = asyncio.create_task(asked)
    await client.changing()
    yield task
    await task


# Authorization


def test_without_an_admin_key_there_are_no_admin_routes(tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        for method in ("GET", "POST", "DELETE"):
            there, nowhere = [await client.ask(method, path) for path in ("/admin/models", "/nowhere/models")]
            assert there.status_code == nowhere.status_code == 404
            assert there.text.replace("admin", "nowhere") == nowhere.text
        assert "/admin/models" not in (await client.ask("GET", "/openapi.json")).json()["paths"]

    serving(act, {"judge": tiny_classifier}, admin_key="")


def test_admin_keys_and_api_keys_are_separate(tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        for path, key, status in (
            ("/admin/models", "boss", 200),
            ("/admin/models", "client", 403),
            ("/admin/models", "", 401),
            ("/admin/nowhere", "client", 403),
            ("/v1/models", "boss", 403),
            ("/v1/models", "client", 200),
        ):
            answer = await client.http.get(path, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == status, (path, key)
            assert "judge" not in answer.text or status == 200

    serving(act, {"judge": tiny_classifier}, api_key="client")


# Loading


def test_a_model_is_loaded_and_unloaded(tiny_generator: Path, tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        assert (await client.says("chat")).status_code == 404
        answer = await client.ask("POST", "/admin/models", {"name": "chat", "source": str(tiny_generator)})
        assert answer.status_code == 200, answer.text
        known = answer.json()
        assert known.items() >= {"name": "chat", "source": str(tiny_generator), "state": "ready"}.items()
        assert known["task"] == "generate"
        before = (await client.ask("GET", "/admin/models")).json()["memory"]
        assert before["free_bytes"] + known["memory_bytes"] < before["limit_bytes"]
        assert (await client.says("chat")).status_code == 200
        assert await client.metric('polyhead_model_ready{model="chat"}') == "1.0"
        assert await client.metric('polyhead_requests_total{model="chat",outcome="done"') == "1.0"

        answer = await client.ask("DELETE", "/admin/models/chat", params={"drain_seconds": 0})
        assert answer.json() == {"name": "chat", "state": "unloaded"}
        gone = await client.says("chat")
        assert (gone.status_code, gone.json()["error"]["message"]) == (
            404,
            "no model is called 'chat'; there are: judge",
        )
        assert await client.metric('polyhead_model_ready{model="chat"}') == "0.0"
        assert await client.metric('polyhead_model_info{dtype="float32",family="llama",model="chat"') == ""
        after = (await client.ask("GET", "/admin/models")).json()
        assert after["memory"]["free_bytes"] == before["free_bytes"] + known["memory_bytes"]
        assert await client.names() == ["judge"]
        again = await client.ask("POST", "/admin/models", {"name": "chat", "source": str(tiny_generator)})
        assert again.status_code == 200

    serving(act, {"judge": tiny_classifier})


FAILED_LOADS: list[tuple[dict[str, Any], int, str]] = [
    ({"name": "new", "source": "/nowhere"}, 400, "loading new from nowhere failed: nowhere: there is no such"),
    ({"name": "judge", "source": "/nowhere"}, 409, "judge is served already; reload it, or unload it first"),
    ({"name": "critic", "source": "/nowhere"}, 409, "critic is an alias of judge; remove it first"),
    ({"name": "a b", "source": "/nowhere"}, 400, "name: 'a b' is no name"),
    ({"name": "new"}, 400, "source: is required"),
    ({"name": "new", "source": "x", "sourc": 1}, 400, "sourc: is not a known field; did you mean source?"),
]


def test_a_failed_load_leaves_no_trace(tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        await client.ask("PUT", "/admin/aliases/critic", {"model": "judge"})
        before = (await client.ask("GET", "/admin/models")).json()
        for asked, status, message in FAILED_LOADS:
            answer = await client.ask("POST", "/admin/models", asked)
            assert answer.status_code == status, answer.text
            assert message in answer.json()["error"]["message"]
            assert (await client.ask("GET", "/admin/models")).json() == before, asked
            assert 'model="new"' not in (await client.ask("GET", "/metrics")).text, asked
            assert (await client.ask("GET", "/readyz")).json()["models"].keys() == {"judge"}, asked

    serving(act, {"judge": tiny_classifier})


@pytest.mark.parametrize(
    ("error", "status"),
    [(MemoryError("no more"), 400), (RuntimeError("the file\nwent bad"), 500)],
    ids=["memory", "bug"],
)
def test_a_load_that_fails_in_the_middle_leaves_no_trace(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, status: int
) -> None:
    def read(*given: Any, progress: Callable[[int, int], None], **named: Any) -> Any:
        progress(1, 2)
        raise error

    async def act(client: Client) -> None:
        before = (await client.ask("GET", "/admin/models")).json()
        monkeypatch.setattr(loader.checkpoint, "prepare", read)
        answer = await client.ask("POST", "/admin/models", {"name": "new", "source": str(tiny_classifier)})
        assert answer.status_code == status
        message = f"loading new from {tiny_classifier.name} failed: {str(error).splitlines()[0]}"
        assert answer.json()["error"]["message"] == message
        assert (await client.ask("GET", "/admin/models")).json() == before

    serving(act, {"judge": tiny_classifier})


def test_a_model_that_does_not_fit_is_rejected_with_its_memory(tiny_classifier: Path, tiny_generator: Path) -> None:
    async def act(client: Client) -> None:
        asked = {"name": "chat", "source": str(tiny_generator)}
        answer = await client.ask("POST", "/admin/models", asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (507, "insufficient_memory")
        message = answer.json()["error"]["message"]
        for part in ("chat needs", "weights 1, cache", "(100000 tokens), workspace", "are free", "cache_tokens"):
            assert part in message

    serving(act, {"judge": tiny_classifier}, memory_mib=28, cache_tokens=100_000, step_tokens=80)


def test_while_a_model_loads(tiny_classifier: Path, tiny_generator: Path, held: Any) -> None:
    """The other models serve, the server stays ready, and no other operation is accepted."""

    async def act(client: Client) -> None:
        go_on = held()
        asked = {"name": "chat", "source": str(tiny_generator)}
        async with during(client, client.ask("POST", "/admin/models", asked)):
            assert (await client.ask("GET", "/admin/models")).json()["change"] == {
                "what": f"loading chat from {tiny_generator}",
                "state": "loading",
                "progress": 0.42,
            }
            waiting = await client.says("chat")
            assert (waiting.status_code, waiting.headers["retry-after"]) == (503, "1")
            assert "chat is not ready yet, 42% is read" in waiting.text
            assert (await client.ask("POST", "/predict", {"inputs": "good"})).status_code == 200
            for probe in ("/readyz", "/startupz", "/livez"):
                assert (await client.ask("GET", probe)).status_code == 200
            for change in (
                client.ask("POST", "/admin/models", {"name": "other", "source": "/nowhere"}),
                client.ask("POST", "/admin/models/judge/reload"),
                client.ask("DELETE", "/admin/models/judge"),
            ):
                answer = await change
                assert answer.status_code == 409
                assert "loading chat from" in answer.text
                assert "is going on, 42% is read" in answer.text
            taken = await client.ask("PUT", "/admin/aliases/chat", {"model": "judge"})
            assert taken.status_code == 409
            go_on.set()
        assert (await client.says("chat")).status_code == 200

    serving(act, {"judge": tiny_classifier})


def test_while_a_model_is_downloaded(
    tiny_classifier: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, entered = threading.Event(), threading.Event()

    def download(_: str, options: hub.DownloadOptions) -> Path:
        options.progress(42, 100)
        entered.set()
        go_on.wait()
        options.progress(100, 100)
        return tiny_generator

    monkeypatch.setattr(hub, "download", download)

    async def act(client: Client) -> None:
        async with during(client, client.ask("POST", "/admin/models", {"name": "chat", "source": "org/name:Q8_0"})):
            await asyncio.to_thread(entered.wait)
            assert (await client.ask("GET", "/admin/models")).json()["change"] == {
                "what": "loading chat from org/name:Q8_0",
                "state": "downloading",
                "progress": 0.42,
            }
            assert "chat is not ready yet, 42% is downloaded" in (await client.says("chat")).text
            go_on.set()
        assert (await client.says("chat")).status_code == 200

    serving(act, {"judge": tiny_classifier})


def test_progress_as_events(tiny_classifier: Path, tiny_generator: Path, held: Any) -> None:
    async def act(client: Client) -> None:
        go_on = held()
        asked = {"name": "chat", "source": str(tiny_generator), "stream": True}
        async with during(client, client.ask("POST", "/admin/models", asked)) as task:
            await asyncio.sleep(1)  # the state is read ten times
            go_on.set()
        answer = task.result()
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [orjson.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
        assert {"state": "loading", "progress": 0.42} in events
        assert (events[-1]["name"], events[-1]["state"]) == ("chat", "ready")

        wished = KEY | {"Accept": "text/event-stream"}
        failed = await client.ask("POST", "/admin/models", {"name": "x", "source": "/nowhere"}, headers=wished)
        last = orjson.loads(failed.text.strip().split("\n\n")[-1].removeprefix("data: "))
        assert "loading x from nowhere failed" in last["error"]["message"]

    serving(act, {"judge": tiny_classifier})


def test_a_client_that_disconnects_does_not_stop_a_load(tiny_classifier: Path, tiny_generator: Path, held: Any) -> None:
    async def act(client: Client) -> None:
        go_on = held()
        asked = {"name": "chat", "source": str(tiny_generator)}
        task = asyncio.create_task(client.ask("POST", "/admin/models", asked))
        await client.changing()
        task.cancel()
        go_on.set()
        while await client.names() != ["judge", "chat"]:
            await asyncio.sleep(0.01)
        assert (await client.says("chat")).status_code == 200

    serving(act, {"judge": tiny_classifier})


# Reloading


@pytest.fixture
def other_generator(tmp_path: Path) -> Path:
    return checkpoints.generator(tmp_path / "other", seed=7)


def test_a_reload_under_load_loses_no_request(tiny_generator: Path, other_generator: Path) -> None:
    async def act(client: Client) -> None:
        old = (await client.says("chat", 8)).json()["choices"][0]["text"]
        answers: list[httpx.Response] = []
        done = asyncio.Event()

        async def keep_asking() -> None:
            while not done.is_set():
                answers.append(await client.says("chat", 8))

        long = asyncio.create_task(client.says("chat", 200))
        asking = [asyncio.create_task(keep_asking()) for _ in range(3)]
        await asyncio.sleep(0.05)
        given = {"source": str(other_generator), "drain_seconds": 60}
        answer = await client.ask("POST", "/admin/models/chat/reload", given)
        assert answer.json().items() >= {"state": "ready", "source": str(other_generator)}.items()
        done.set()
        await asyncio.gather(*asking)
        assert {answer.status_code for answer in answers} == {200}
        new = (await client.says("chat", 8)).json()["choices"][0]["text"]
        assert new != old
        assert {answer.json()["choices"][0]["text"] for answer in answers} == {old, new}
        assert (await long).json()["usage"]["completion_tokens"] == 200
        assert await client.metric("polyhead_kv_blocks_used{") == "0.0"

    serving(act, {"chat": tiny_generator})


def test_a_failed_reload_leaves_the_old_one_serving(tiny_generator: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_generator, folder)

    async def act(client: Client) -> None:
        before = (await client.ask("GET", "/admin/models")).json()
        message = (await client.says("chat")).json()["choices"]
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        answer = await client.ask("POST", "/admin/models/chat/reload")
        assert answer.status_code == 400
        assert f"reloading chat from {folder.name} failed: {weights.name}" in answer.json()["error"]["message"]
        assert (await client.ask("GET", "/admin/models")).json() == before
        assert (await client.says("chat")).json()["choices"] == message
        assert (await client.ask("GET", "/readyz")).status_code == 200

    serving(act, {"chat": folder})


def test_a_reload_needs_room_for_both(tiny_generator: Path) -> None:
    async def act(client: Client) -> None:
        answer = await client.ask("POST", "/admin/models/chat/reload")
        assert answer.status_code == 507
        assert "chat unloaded" in answer.text
        assert (await client.says("chat")).status_code == 200

    serving(act, {"chat": tiny_generator}, memory_mib=38, cache_tokens=80_000, executor="torch")


def test_a_broken_model_can_be_reloaded(tiny_generator: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    missing = tmp_path / "later"

    async def act(client: Client) -> None:
        assert (await client.ask("GET", "/readyz")).status_code == 503
        shutil.copytree(tiny_generator, missing)
        assert (await client.ask("POST", "/admin/models/chat/reload")).json()["state"] == "ready"
        assert (await client.ask("GET", "/readyz")).status_code == 200
        assert (await client.says("chat")).status_code == 200

    serving(act, {"chat": missing, "judge": tiny_classifier})


# Unloading


def test_unloading_waits_for_running_requests(tiny_generator: Path, tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        running = asyncio.create_task(client.says("chat", 240))
        await client.received(1)
        leaving = asyncio.create_task(client.ask("DELETE", "/admin/models/chat", params={"drain_seconds": 60}))
        await asyncio.sleep(0.02)
        assert (await client.says("chat")).status_code == 404
        assert (await running).json()["usage"]["completion_tokens"] == 240
        assert (await leaving).status_code == 200

    serving(act, {"chat": tiny_generator, "judge": tiny_classifier})


def slow_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A generator that takes so long for a token."""
    for executor in (NativeExecutor, TorchExecutor):
        real = executor.step

        def step(self: Any, rows: StepInput, real: Any = real) -> Any:
            time.sleep(seconds)
            return real(self, rows)

        monkeypatch.setattr(executor, "step", step)


def test_unloading_does_not_wait_for_ever(
    tiny_generator: Path, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(client: Client) -> None:
        slow_steps(monkeypatch, 0.05)
        running = [asyncio.create_task(client.says("chat", 250)) for _ in range(20)]
        await client.received(20)
        answer = await client.ask("DELETE", "/admin/models/chat", params={"drain_seconds": 0})
        assert answer.status_code == 200
        cut = [await task for task in running]
        assert {answer.status_code for answer in cut} == {503}
        assert "model 'chat' was unloaded" in cut[0].text

    serving(act, {"chat": tiny_generator, "judge": tiny_classifier})


def test_an_invalid_drain_time_is_rejected(tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        for given in ("-1", "soon", "3601", "1.5", "9" * 5000, "\u0661"):
            answer = await client.ask("DELETE", "/admin/models/judge", params={"drain_seconds": given})
            assert answer.status_code == 400, given
            assert answer.json()["error"]["param"] == "drain_seconds", given
            assert await client.names() == ["judge"], given

    serving(act, {"judge": tiny_classifier})


INVALID_SOURCES = [
    (
        "org/name@",
        "loading x from org/name@ failed: 'org/name@' is no id on the hub; its form is ORGANIZATION/NAME, "
        "or with @REVISION, :QUANTISATION or the name of a GGUF file after it",
    ),
    (
        "http://127.0.0.1:1/x",
        "loading x from a URL failed: a URL is not read; give a folder, a file or an id on the hub, ORGANIZATION/NAME",
    ),
    (
        "org/a/b",
        "loading x from org/a/b failed: b: there is no such folder or file, and it is no id on the hub "
        "(ORGANIZATION/NAME, or with @REVISION, :QUANTISATION or the name of a GGUF file after it)",
    ),
]


def test_an_invalid_source_is_named_in_the_error(tiny_classifier: Path) -> None:
    async def act(client: Client) -> None:
        for source, message in INVALID_SOURCES:
            answer = await client.ask("POST", "/admin/models", {"name": "x", "source": source})
            assert answer.status_code == 400, source
            assert answer.json()["error"]["message"] == message

    serving(act, {"judge": tiny_classifier})


# Aliases


def test_aliases(tiny_generator: Path, other_generator: Path) -> None:
    async def act(client: Client) -> None:
        for alias, model, status in (
            ("main", "one", 200),
            ("main", "two", 200),  # now for another model
            ("org/best", "one", 200),
            ("one", "two", 409),
            ("x", "nobody", 404),
            ("x", "main", 404),  # an alias is no model
            ("a b", "one", 400),
        ):
            answer = await client.ask("PUT", f"/admin/aliases/{alias}", {"model": model})
            assert answer.status_code == status, (alias, model, answer.text)
        texts = [(await client.says(name)).json() for name in ("main", "two")]
        for number in range(MAX_ALIASES - 2):
            assert (await client.ask("PUT", f"/admin/aliases/a{number}", {"model": "two"})).status_code == 200
        full = await client.ask("PUT", "/admin/aliases/more", {"model": "two"})
        assert full.status_code == 409
        assert "there are 256 aliases, more are not kept; remove one first" in full.text
        assert (await client.ask("PUT", "/admin/aliases/main", {"model": "two"})).status_code == 200
        unknown = (await client.says("nobody")).json()["error"]["message"]
        assert unknown.startswith("no model is called 'nobody'; there are: one, two, main, org/best, a0")
        assert unknown.endswith(f"a15 and {MAX_ALIASES - 18} more")
        for number in range(MAX_ALIASES - 2):
            assert (await client.ask("DELETE", f"/admin/aliases/a{number}")).status_code == 200
        assert texts[0]["choices"] == texts[1]["choices"]
        assert texts[0]["model"] == "main"
        kept = await client.ask("DELETE", "/admin/models/two")
        assert kept.status_code == 409
        assert "two has aliases: main; remove them first" in kept.text
        listed = (await client.ask("GET", "/admin/models")).json()["models"]
        assert [model["aliases"] for model in listed] == [["org/best"], ["main"]]
        assert (await client.ask("DELETE", "/admin/aliases/main")).status_code == 200
        assert (await client.ask("DELETE", "/admin/aliases/main")).status_code == 404
        assert (await client.says("main")).status_code == 404
        page = (await client.ask("GET", "/metrics")).text
        assert 'model="main"' not in page  # a label is a model's name

    serving(act, {"one": tiny_generator, "two": other_generator})


# Streams during a load


@pytest.fixture
def large_generator(tmp_path: Path) -> Path:
    """A generator of 100 MiB in float32."""
    tokenizer = checkpoints.byte_level_bpe()
    config = LlamaConfig(
        vocab_size=50_000,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    return checkpoints.save(LlamaForCausalLM(config), tokenizer, tmp_path / "large")


def slow_reading(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """A disk that takes so many seconds for a MiB."""
    real = TensorEntry._read_piece

    def piece(entry: TensorEntry, *given: Any) -> Any:
        time.sleep(seconds)
        return real(entry, *given)

    monkeypatch.setattr(TensorEntry, "_read_piece", piece)


def test_streams_go_on_while_100_mib_are_read(
    tiny_generator: Path, large_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest wait for a token is a step of the new model's warm-up, not the three seconds of reading."""
    gaps: list[float] = []
    took: list[float] = []

    async def act(client: Client) -> None:
        slow_reading(monkeypatch, 0.03)
        asked = {"name": "large", "source": str(large_generator)}
        loading, began = asyncio.create_task(client.ask("POST", "/admin/models", asked)), time.perf_counter()
        while not loading.done():
            last = time.perf_counter()
            assert (await client.says("chat", 1)).status_code == 200
            gaps.append(time.perf_counter() - last)
        assert loading.result().status_code == 200, loading.result().text
        took.append(time.perf_counter() - began)

    serving(act, {"chat": tiny_generator}, cache_tokens=512)
    assert len(gaps) > 20
    assert took[0] > 3
    assert max(gaps) < took[0] / 2


def test_the_end_of_the_server_does_not_wait_for_a_load(
    tiny_classifier: Path, large_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 0.0

    async def act(client: Client) -> None:
        nonlocal left
        slow_reading(monkeypatch, 0.5)  # 50 s of it
        loading = asyncio.create_task(
            client.ask("POST", "/admin/models", {"name": "x", "source": str(large_generator)})
        )
        await asyncio.sleep(0.5)
        left = time.perf_counter()
        assert not loading.done()

    serving(act, {"judge": tiny_classifier})
    assert 0 < time.perf_counter() - left < 25

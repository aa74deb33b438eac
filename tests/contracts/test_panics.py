"""A panic of a Rust library is an error of the request or model that caused it, and of nothing else."""

import asyncio
import re
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from polyhead.models.core.errors import CheckpointError
from polyhead.models.parallel import StepCommand
from polyhead.models.tokenizer import Tokenizer, TokenizerError
from polyhead.models.tokenizer.panics import run_library, text_failure
from polyhead.service.cli.main import app
from polyhead.service.concurrency.outcome import attempt, run_on_daemon_thread, run_on_thread
from polyhead.service.core.errors import PolyheadError
from polyhead.service.core.request import DEFAULT_TERMS
from polyhead.service.engine.batch_sampling import MaskBuilder
from polyhead.service.metrics import Metrics
from polyhead.service.runtime import explain_models, follower, loader
from polyhead.service.runtime.registry import ModelRegistry
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served
from tests.service.runtime.test_registry import serving
from tests.support import hostile
from tests.support.places import ROOT

PATIENCE_S = 20.0
PANICS = {"normalizer": hostile.panicking_normalizer, "template": hostile.panicking_template}
SENTENCE = r"tokenizer\.json: the tokenizers library fails on the tokenizer: "


class PanicException(BaseException):
    """Named like the exception of the library."""


def panic(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds\nnote: and so on")


@pytest.fixture(params=PANICS)
def panicking(request: pytest.FixtureRequest, tiny_classifier: Path, tmp_path: Path) -> Path:
    """A checkpoint with a tokenizer that makes the library panic."""
    folder = tmp_path / "panicking"
    shutil.copytree(tiny_classifier, folder)
    hostile.vocabulary(folder, PANICS[request.param])
    return folder


def test_a_tokenizer_that_makes_the_library_panic_is_rejected(panicking: Path) -> None:
    with pytest.raises(CheckpointError, match=SENTENCE):
        Tokenizer.from_folder(panicking)


def test_such_a_tokenizer_is_rejected_when_a_replica_sends_it(panicking: Path) -> None:
    with pytest.raises(CheckpointError, match="the tokenizers library fails on the tokenizer: "):
        Tokenizer.from_parts((panicking / "tokenizer.json").read_text("utf-8"), *[""] * 5)


class Panicking:
    """A tokenizer backend that panics on every text."""

    encode_batch = encode_batch_fast = decode = panic


def test_a_panic_on_a_text_is_a_tokenizer_error(tiny_classifier: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_classifier)
    tokenizer._backend = Panicking()
    with pytest.raises(TokenizerError, match=r"library fails on this text: index out of bounds$"):
        tokenizer.encode("a fox")


def test_polyhead_check_reports_such_a_tokenizer(panicking: Path, tiny_classifier: Path) -> None:
    result = CliRunner().invoke(app, ["check", f"sick={panicking}", f"well={tiny_classifier}"])
    assert result.exit_code == 1
    assert "polyhead: sick: " in result.output
    assert "the tokenizers library fails on the tokenizer" in result.output
    assert "well" in result.output
    assert "Traceback" not in result.output


def test_the_other_models_of_a_server_are_loaded(panicking: Path, tiny_classifier: Path) -> None:
    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
        states = registry.states()
        assert states["sick"].phase == "broken"
        assert "the tokenizers library fails" in states["sick"].reason
        assert states["well"].phase == "ready"

    serving({"sick": panicking, "well": tiny_classifier}, act)


def test_a_load_of_such_a_tokenizer_fails_and_the_next_load_works(
    panicking: Path, tiny_classifier: Path, tiny_ranker: Path
) -> None:
    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            refused = await client.ask("POST", "/admin/models", {"name": "sick", "source": str(panicking)})
            assert refused.status_code == 400
            assert "the tokenizers library fails" in refused.text
            loaded = await client.ask("POST", "/admin/models", {"name": "rank", "source": str(tiny_ranker)})
            assert loaded.is_success
        assert await client.names() == ["judge", "rank"]

    served(act, {"judge": tiny_classifier})


def test_a_panic_on_the_text_of_a_request_fails_that_request(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            real, threads = Tokenizer.encode_batch, set[str]()

            def encode_batch(self: Tokenizer, texts: Sequence[str], **options: Any) -> Any:
                threads.add(threading.current_thread().name)
                if "panic" in texts[0]:
                    return run_library(panic, text_failure)
                return panic() if "raw" in texts[0] else real(self, texts, **options)

            monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)

            def tokenize(text: str) -> Any:
                return client.ask("POST", "/tokenize", {"inputs": text})

            for text, message in (("panic", "the tokenizers library fails on this text"), ("raw", "a library failed")):
                answers = await asyncio.gather(*map(tokenize, ("a fox", text, "a dog")))
                assert [answer.status_code for answer in answers] == [200, 500, 200]
                assert message in answers[1].text
            assert threads == {"text_0"}

    served(act, {"judge": tiny_classifier}, tokenizer_threads=1)


# Exceptions of work on threads


def test_what_a_thread_raises_comes_back_as_an_exception() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            for raised in (PanicException("x"), SystemExit(3), KeyboardInterrupt(), StopIteration(), ValueError("x")):

                def fail(raised: BaseException = raised) -> None:
                    raise raised

                for work in (run_on_thread(fail), run_on_thread(fail, pool), run_on_daemon_thread(fail)):
                    with pytest.raises((PolyheadError, ValueError, RuntimeError)):
                        await asyncio.wait_for(work, PATIENCE_S)
            assert await run_on_thread(lambda: 5, pool) == 5

    asyncio.run(run())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_exceptions_that_end_the_process_are_raised(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind

    with pytest.raises(kind):
        attempt(fail)


def test_a_panic_on_the_engine_thread_fails_that_call() -> None:
    async def act(registry: ModelRegistry) -> None:
        engine = registry._engine
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(PolyheadError, match="index out of bounds"):
                await engine.call(panic)
            assert await engine.call(lambda: 5) == 5

    serving({}, act)


@pytest.mark.parametrize("stage", ["describe_source", "prepare"])
def test_a_panic_while_a_model_is_described_or_read_breaks_that_model(
    tiny_classifier: Path, tiny_ranker: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    real = getattr(loader.checkpoint, stage)

    def stages(source: str, *rest: Any, **options: Any) -> Any:
        return panic() if source == str(tiny_ranker) else real(source, *rest, **options)

    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
        assert [state.phase for state in registry.states().values()] == ["broken", "ready"]
        assert "a library failed: PanicException: index out of bounds" in registry.states()["sick"].reason

    monkeypatch.setattr(loader.checkpoint, stage, stages)
    serving({"sick": tiny_ranker, "well": tiny_classifier}, act)


def test_a_panic_while_the_explainer_is_loaded_fails_that_load(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
            model = registry.models()[0]
            with monkeypatch.context() as patched:
                patched.setattr(explain_models, "build_and_measure", panic)
                with pytest.raises(PolyheadError, match="a library failed"):
                    await registry.load_explainer(model)
            assert await registry.load_explainer(model)

    serving({"judge": tiny_classifier}, act)


def test_a_panic_in_one_mask_fails_that_answer_alone() -> None:
    guide_states = [SimpleNamespace(fill_mask=lambda _: True), SimpleNamespace(fill_mask=panic)]
    states_with_guides: list[Any] = [GuidedState(guide_state) for guide_state in guide_states]
    builder = MaskBuilder()
    builder.start(states_with_guides, 40)
    made = builder.wait(states_with_guides, PATIENCE_S)
    assert list(made.row_of) == states_with_guides[:1]
    assert "a library failed" in str(made.failed[states_with_guides[1]])


class GuidedState:
    def __init__(self, guide_state: Any) -> None:
        self.guide_state, self.request = guide_state, SimpleNamespace(terms=DEFAULT_TERMS)


def test_a_panic_in_a_follower_is_reported_to_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    confirmed: list[bool] = []
    messages: list[list[Any]] = [[StepCommand.LOAD, 1], [StepCommand.READY, 1]]
    group = SimpleNamespace(
        receive_message=lambda: messages.pop(0), all_confirm=confirmed.append, share=SimpleNamespace(rank=1)
    )
    monkeypatch.setattr(follower, "load_share", panic)
    monkeypatch.setattr(follower.ShareRequest, "decode", lambda _: None)
    following = follower.FollowerLoop(group)  # type: ignore[arg-type]
    following.handle_message()
    following.handle_message()
    assert confirmed == [False]
    following._read_pool.shutdown()


def test_a_panic_while_metrics_are_written_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics({})
    monkeypatch.setattr(metrics._series, "render", panic)
    with pytest.raises(PolyheadError, match="a library failed"):
        asyncio.run(metrics.render_on_thread(""))


def test_work_is_given_to_threads_by_one_module_only() -> None:
    direct = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "service").rglob("*.py")
        if re.search(r"asyncio\.to_thread|run_in_executor", path.read_text("utf-8"))
    ]
    assert direct == ["service/concurrency/outcome.py"]


def test_work_of_requests_takes_turns_by_key() -> None:
    """The threads of the event loop are first come, first served; what requests cause takes turns elsewhere."""
    rooms = ("api", "text", "decisions", "explain", "structured")
    unshared = [
        path.relative_to(ROOT).as_posix()
        for room in rooms
        for path in sorted((ROOT / "service" / room).rglob("*.py"))
        if re.search(r"run_on_thread\(|run_in_threadpool|anyio\.", path.read_text("utf-8"))
    ]
    assert unshared == [
        "service/api/access/auth.py",  # reads the keys file now and then
        "service/api/operations/web_pages.py",  # makes each page once
    ]

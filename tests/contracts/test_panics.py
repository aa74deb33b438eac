"""A panic of a library written in Rust is an error of what was asked for, and of nothing else."""

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
from polyhead.service.runtime import follower, loader
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
    """As the library names its own."""


def panic(*_: Any, **__: Any) -> Any:
    raise PanicException("index out of bounds\nnote: and so on")


@pytest.fixture(params=PANICS)
def panicking(request: pytest.FixtureRequest, tiny_classifier: Path, tmp_path: Path) -> Path:
    """A checkpoint whose tokenizer makes the library panic."""
    folder = tmp_path / "panicking"
    shutil.copytree(tiny_classifier, folder)
    hostile.vocabulary(folder, PANICS[request.param])
    return folder


def test_a_tokenizer_on_which_the_library_panics_is_refused(panicking: Path) -> None:
    with pytest.raises(CheckpointError, match=SENTENCE):
        Tokenizer.from_folder(panicking)


def test_one_that_a_replica_tells_of_is_refused_too(panicking: Path) -> None:
    with pytest.raises(CheckpointError, match="the tokenizers library fails on the tokenizer: "):
        Tokenizer.from_parts((panicking / "tokenizer.json").read_text("utf-8"), *[""] * 5)


class Panicking:
    """A backend that panics on every text."""

    encode_batch = encode_batch_fast = decode = panic


def test_a_panic_over_a_text_says_so(tiny_classifier: Path) -> None:
    tokenizer = Tokenizer.from_folder(tiny_classifier)
    tokenizer._backend = Panicking()
    with pytest.raises(TokenizerError, match=r"library fails on this text: index out of bounds$"):
        tokenizer.encode("a fox")


def test_a_check_of_it_says_so(panicking: Path, tiny_classifier: Path) -> None:
    result = CliRunner().invoke(app, ["check", f"sick={panicking}", f"well={tiny_classifier}"])
    assert result.exit_code == 1
    assert "polyhead: sick: " in result.output
    assert "the tokenizers library fails on the tokenizer" in result.output
    assert "well" in result.output
    assert "Traceback" not in result.output


def test_a_server_has_the_others(panicking: Path, tiny_classifier: Path) -> None:
    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
        states = registry.states()
        assert states["sick"].phase == "broken"
        assert "the tokenizers library fails" in states["sick"].reason
        assert states["well"].phase == "ready"

    serving({"sick": panicking, "well": tiny_classifier}, act)


def test_a_load_of_it_fails_and_the_next_one_works(panicking: Path, tiny_classifier: Path, tiny_ranker: Path) -> None:
    async def act(client: Client) -> None:
        async with asyncio.timeout(PATIENCE_S):
            refused = await client.ask("POST", "/admin/models", {"name": "sick", "source": str(panicking)})
            assert refused.status_code == 400
            assert "the tokenizers library fails" in refused.text
            loaded = await client.ask("POST", "/admin/models", {"name": "rank", "source": str(tiny_ranker)})
            assert loaded.is_success
        assert await client.names() == ["judge", "rank"]

    served(act, {"judge": tiny_classifier})


def test_a_panic_over_a_request_s_text_is_that_request_s_error(
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

            for text, said in (("panic", "the tokenizers library fails on this text"), ("raw", "a library failed")):
                answers = await asyncio.gather(*map(tokenize, ("a fox", text, "a dog")))
                assert [answer.status_code for answer in answers] == [200, 500, 200]
                assert said in answers[1].text
            assert threads == {"text_0"}

    served(act, {"judge": tiny_classifier}, tokenizer_threads=1)


# Wherever work is given to a thread, what it raises comes back


def test_what_a_thread_raises_comes_back_as_an_exception() -> None:
    async def run() -> None:
        with ThreadPoolExecutor(1) as pool:
            for raised in (PanicException("x"), SystemExit(3), KeyboardInterrupt(), StopIteration(), ValueError("x")):

                def fail(raised: BaseException = raised) -> None:
                    raise raised

                for hand in (run_on_thread(fail), run_on_thread(fail, pool), run_on_daemon_thread(fail)):
                    with pytest.raises((PolyheadError, ValueError, RuntimeError)):
                        await asyncio.wait_for(hand, PATIENCE_S)
            assert await run_on_thread(lambda: 5, pool) == 5

    asyncio.run(run())


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_the_process_goes_through(kind: type[BaseException]) -> None:
    def fail() -> None:
        raise kind

    with pytest.raises(kind):
        attempt(fail)


def test_a_panic_on_the_engine_s_thread_is_that_call_s_error() -> None:
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


def test_a_panic_while_an_explanation_s_network_is_read(tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(registry: ModelRegistry) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await registry.load_all()
            model = registry.models()[0]
            with monkeypatch.context() as patched:
                patched.setattr(loader.checkpoint, "describe_source", panic)
                with pytest.raises(PolyheadError, match="a library failed"):
                    await registry.load_explainer(model)
            assert await registry.load_explainer(model)

    serving({"judge": tiny_classifier}, act)


def test_a_panic_over_one_mask_fails_that_answer_alone() -> None:
    walks = [SimpleNamespace(fill_mask=lambda _: True), SimpleNamespace(fill_mask=panic)]
    talks: list[Any] = [Talked(walk) for walk in walks]
    builder = MaskBuilder()
    builder.start(talks, 40)
    made = builder.wait(talks, PATIENCE_S)
    assert list(made.row_of) == talks[:1]
    assert "a library failed" in str(made.failed[talks[1]])


class Talked:
    def __init__(self, walk: Any) -> None:
        self.guide_state, self.request = walk, SimpleNamespace(terms=DEFAULT_TERMS)


def test_a_panic_over_a_share_is_told_to_the_leader(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    words: list[list[Any]] = [[StepCommand.LOAD, 1], [StepCommand.READY, 1]]
    group = SimpleNamespace(
        receive_message=lambda: words.pop(0), all_confirm=told.append, share=SimpleNamespace(rank=1)
    )
    monkeypatch.setattr(follower, "load_share", panic)
    monkeypatch.setattr(follower.ShareRequest, "decode", lambda _: None)
    following = follower.FollowerLoop(group)  # type: ignore[arg-type]
    following.handle_message()
    following.handle_message()
    assert told == [False]
    following._read_pool.shutdown()


def test_a_panic_over_the_metrics_page(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics({})
    monkeypatch.setattr(metrics._series, "render", panic)
    with pytest.raises(PolyheadError, match="a library failed"):
        asyncio.run(metrics.render_on_thread(""))


def test_no_thread_is_given_work_by_another_way() -> None:
    direct = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "service").rglob("*.py")
        if re.search(r"asyncio\.to_thread|run_in_executor", path.read_text("utf-8"))
    ]
    assert direct == ["service/concurrency/outcome.py"]

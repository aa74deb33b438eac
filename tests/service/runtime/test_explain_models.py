"""Loads of explainers: requests share one, it goes on without them, and it reads the files of the served model."""

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core.errors import Conflict
from polyhead.service.runtime import explain_models, tokenizer_check
from polyhead.service.runtime.registry import ModelRegistry
from tests.service.runtime.test_load_task import Hold, before
from tests.service.runtime.test_registry import serving

PATIENCE_S = 60.0
REQUESTS = 50


class Calls:
    """Counts the calls of a function of a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count, real = 0, getattr(owner, name)

        def counted(*given: Any, **named: Any) -> Any:
            self.count += 1
            return real(*given, **named)

        monkeypatch.setattr(owner, name, counted)


@pytest.fixture
def folder(tiny_classifier: Path, tmp_path: Path) -> Path:
    """A checkpoint whose files a test may change."""
    return Path(shutil.copytree(tiny_classifier, tmp_path / "judge"))


def test_requests_that_are_cancelled_share_one_load_and_one_thread(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold = Hold()

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        before(explain_models, "build_and_measure")(monkeypatch, hold)
        built = Calls(monkeypatch, explain_models, "build_and_measure")
        threads = threading.active_count()
        for _ in range(REQUESTS):
            request = asyncio.create_task(served.load_explainer(judge))
            await hold.reached()
            request.cancel()
            await asyncio.wait({request})
            assert threading.active_count() <= threads + 1
        waiting = asyncio.create_task(served.load_explainer(judge))
        hold.released.set()
        assert await waiting == {"self": (2, 4)}
        assert built.count == 1
        assert served._explainers._load_tasks == {}
        assert served._explainers._waiting.total() == 0

    try:
        serving({"judge": tiny_classifier}, act)
    finally:
        hold.released.set()


def test_a_load_without_requests_is_completed_and_its_explainer_becomes_idle(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge, due = served.resolve("judge", ["classify"]), list[float]()

        def call_later(seconds: float, function: Any) -> asyncio.TimerHandle:
            due.append(seconds)
            return asyncio.get_running_loop().call_later(seconds, function)

        served._explainers.call_later = call_later
        request = asyncio.create_task(served.load_explainer(judge))
        await asyncio.sleep(0)
        request.cancel()
        async with asyncio.timeout(PATIENCE_S):
            while served._explainers.find_worker(judge) is None:
                await asyncio.sleep(0.002)
        await asyncio.wait(served._explainers._load_tasks.values() or {asyncio.create_task(asyncio.sleep(0))})
        assert due == [7]

    serving({"judge": tiny_classifier}, act, explain_idle_seconds=7)


def test_a_load_that_fails_fails_every_request_that_waits_for_it(folder: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        shutil.rmtree(folder)
        requests = [served.load_explainer(judge) for _ in range(3)]
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Conflict] * 3

    serving({"judge": folder}, act)


def test_an_explainer_has_the_tokenizer_of_its_model(tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second one could take a gigabyte, which no budget counts."""

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        made = Calls(monkeypatch, Tokenizer, "__init__")
        checks = Calls(monkeypatch, tokenizer_check.TokenizerCheck, "_ask_child")
        await served.load_explainer(served.resolve("judge", ["classify"]))
        assert (made.count, checks.count) == (0, 0)

    serving({"judge": tiny_classifier}, act)


def test_a_model_whose_files_were_replaced_is_not_explained_by_others(folder: Path) -> None:
    """The explanation would be of another model than the answer."""

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes())
        with pytest.raises(Conflict, match="was changed or replaced after the model was described"):
            await served.load_explainer(judge)

    serving({"judge": folder}, act)


def test_the_thread_of_a_cancelled_load_does_not_wait_for_its_turn(
    tiny_classifier: Path, tiny_ranker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of threads would not show it: others begin and end meanwhile."""
    checking, real = list[threading.Thread](), tokenizer_check.TokenizerCheck.check_folder

    def check_folder(*given: Any, **named: Any) -> int:
        checking.append(threading.current_thread())
        return real(*given, **named)

    monkeypatch.setattr(tokenizer_check.TokenizerCheck, "check_folder", check_folder)

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        checking.clear()
        with served._loader.tokenizer_check._lock:  # as if another tokenizer were checked
            for number in range(10):
                operation = served.load(f"new{number}", str(tiny_ranker))
                async with asyncio.timeout(PATIENCE_S):
                    while not checking:
                        await asyncio.sleep(0.002)
                    thread = checking.pop()
                    assert thread is not threading.current_thread()
                    await served.unload(f"new{number}", 0).wait()
                    await operation.wait()
                    while thread.is_alive():
                        await asyncio.sleep(0.002)

    serving({"judge": tiny_classifier}, act, model_root=str(tiny_ranker.parent))

"""Loads of explainers: requests share one, it goes on without them, and what is read is what is served."""

import asyncio
import json
import math
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core.errors import Conflict, InsufficientMemory
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, ExplainTextRequest, ExplanationResult
from polyhead.service.runtime import explain_models, loader, tokenizer_check
from polyhead.service.runtime.load_task import LoadTask
from polyhead.service.runtime.loader import DescribedModel, LoadedModel
from polyhead.service.runtime.memory_budget import MemoryNeed, smallest_need
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.tokenizer_check import TokenizerMemory
from tests.models.checkpoint.test_merged_adapter import adapted
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


CHANGED = "judge cannot be read again to be explained: .*was changed or replaced after .* load the model again"


@pytest.mark.parametrize("other", ["of its kind", "a generator", "with fewer labels"])
def test_a_folder_whose_weights_were_replaced_explains_nothing_until_it_is_reloaded(
    other: str, folder: Path, tiny_generator: Path, tmp_path: Path
) -> None:
    """Its network would explain another model's answers; a file is the same inode after a copy over it."""
    second = tmp_path / "second"
    if other == "a generator":
        shutil.copytree(tiny_generator, second)
    else:
        torch.manual_seed(1)
        labels = 3 if other == "of its kind" else 2
        config = tf.BertConfig.from_pretrained(folder, num_labels=labels)
        tf.BertForSequenceClassification(config).save_pretrained(second)

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge, free = served.resolve("judge", ["classify"]), served.memory_budget()
        shutil.copytree(second, folder, dirs_exist_ok=True)
        for _ in range(2):
            with pytest.raises(Conflict, match=CHANGED) as raised:
                await served.load_explainer(judge)
            assert str(tmp_path) not in raised.value.message
        assert served.memory_budget() == free
        if other != "a generator":
            await served.reload("judge", "", 0.0).wait_and_raise()
            assert await served.load_explainer(served.resolve("judge", ["classify"])) == {"self": (2, 4)}

    serving({"judge": folder}, act)


def test_what_was_read_when_the_model_was_loaded_is_not_read_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer, labels and sizes are those that are served, also where their files say something else now."""

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = served.resolve("judge", ["classify"])
        checks = Calls(monkeypatch, tokenizer_check.TokenizerCheck, "_ask_child")
        described = Calls(monkeypatch, explain_models.checkpoint, "describe_source")
        for name in ("tokenizer.json", "config.json"):
            (folder / name).write_text("{}")
        assert await served.load_explainer(judge) == {"self": (2, 4)}
        assert (checks.count, described.count) == (0, 0)

    serving({"judge": folder}, act)


def test_an_adapter_is_explained_as_it_was_attached(tiny_embedder: Path, tmp_path: Path) -> None:
    """Its scale is not read again, and matrices that were replaced are refused."""
    base: Any = tf.BertForSequenceClassification.from_pretrained(tiny_embedder, num_labels=2)
    tuned = tmp_path / "tuned"
    adapted(base, tuned, task_type="SEQ_CLS", base=str(tiny_embedder))

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        model = served.resolve("vectors:tuned", ["classify"])

        async def read_weights() -> list[torch.Tensor]:
            await served.load_explainer(model)
            worker = served._explainers.find_worker(model)
            assert worker is not None
            read = [each.clone() for each in worker._network.network.parameters()]
            await served._explainers.unload(model)
            return read

        first, settings = await read_weights(), tuned / "adapter_config.json"
        settings.write_text(json.dumps(json.loads(settings.read_text()) | {"lora_alpha": 4096}))
        assert all(map(torch.equal, first, await read_weights()))
        matrices = tuned / "adapter_model.safetensors"
        tensors = {name: each + 1 for name, each in load_file(matrices).items()}
        save_file(tensors, matrices, {"format": "pt"})
        with pytest.raises(Conflict, match=CHANGED.replace("judge", "vectors:tuned")):
            await served.load_explainer(model)

    serving({"vectors": tiny_embedder, "vectors:tuned": tuned}, act)


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


async def explain_with_free_memory(served: ModelRegistry, free: int) -> Model:
    """Load the explainer of the first model, and limit the memory so that `free` bytes are left beside it."""
    model, budget = served.models()[0], served._loader.budget
    budget.limit = 4 << 30
    await served.load_explainer(model)
    budget.limit -= budget.free - free
    return model


def test_a_model_that_is_loaded_has_the_memory_of_explainers(
    tiny_classifier: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also at the start of the server, where a model that does not fit is broken for good; and explanations in progress
    end before.
    """
    explanations = list[type]()

    async def act(served: ModelRegistry) -> None:
        real = served._loader.load

        async def load(loading: LoadTask, described: DescribedModel, *given: Any) -> LoadedModel:
            if not served.models():
                return await real(loading, described, *given)
            useful = served._loader.budget.useful_bytes(described.size)
            judge = await explain_with_free_memory(served, useful - 1)
            [stream] = served.submit(judge, [ExplainTextRequest("why", (5, 6, 7), "attention")])
            loaded = await real(loading, described, *given)
            assert loaded.need.total == useful
            assert served._explainers.find_worker(judge) is None
            explanations.extend([type(event) async for event in stream])
            return loaded

        monkeypatch.setattr(served._loader, "load", load)
        await served.load_all()
        assert [model.name for model in served.models()] == ["judge", "chat"]
        await served.load("second", str(tiny_generator)).wait_and_raise()
        assert explanations == [ExplanationResult, Done] * 2

    models = {"judge": tiny_classifier, "chat": tiny_generator}
    serving(models, act, memory_mib=4096, model_root=str(tiny_generator.parent))


def test_a_tokenizer_that_is_read_has_the_memory_of_explainers(
    tiny_classifier: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        judge = await explain_with_free_memory(served, 1 << 20)
        taken = TokenizerMemory(kept=0, most=2 << 20)
        monkeypatch.setattr(tokenizer_check.TokenizerCheck, "_ask_child", lambda *_: taken)
        described = await served._loader.describe(LoadTask("chat", 0), str(tiny_generator))
        assert described.size.name == "chat"
        assert served._explainers.find_worker(judge) is None

    serving({"judge": tiny_classifier}, act, memory_mib=4096, model_root=str(tiny_generator.parent))


def test_an_adapter_that_is_loaded_has_the_memory_of_explainers(tiny_embedder: Path, tmp_path: Path) -> None:
    base: Any = tf.BertForSequenceClassification.from_pretrained(tiny_embedder, num_labels=2)
    adapted(base, tmp_path / "tuned", task_type="SEQ_CLS", base=str(tiny_embedder))

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        vectors = await explain_with_free_memory(served, 0)
        await served.load("vectors:tuned", str(tmp_path / "tuned")).wait_and_raise()
        assert served._explainers.find_worker(vectors) is None

    serving({"vectors": tiny_embedder}, act, memory_mib=4096, model_root=str(tmp_path))


def test_a_load_that_is_cancelled_while_an_explainer_is_unloaded_keeps_no_memory(tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        _, free = served.memory_budget()
        judge = served.resolve("judge", ["classify"])
        await served.load_explainer(judge)
        room = asyncio.create_task(served._explainers.make_room(0, math.inf))
        while served._explainers.find_worker(judge) is not None:
            await asyncio.sleep(0)
        room.cancel()
        await asyncio.wait({room, *served._explainers._unload_tasks})
        assert room.cancelled()
        assert served.memory_budget()[1] == free

    serving({"judge": tiny_classifier}, act)


def test_explanations_in_progress_end_beside_each_other(
    tiny_classifier: Path, tiny_embedder: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model waits `drain_seconds` for them, and not once for each explainer."""

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        _, vectors = served.models()
        await served.load_explainer(vectors)
        judge = await explain_with_free_memory(served, 1 << 20)
        real, ending = served._engine.remove_worker, asyncio.Barrier(2)

        async def remove_worker(*given: Any) -> None:
            async with asyncio.timeout(PATIENCE_S):
                await ending.wait()
            await real(*given)

        monkeypatch.setattr(served._engine, "remove_worker", remove_worker)
        await served.load("chat", str(tiny_generator)).wait_and_raise()
        assert [served._explainers.find_worker(model) for model in (judge, vectors)] == [None, None]

    models = {"judge": tiny_classifier, "vectors": tiny_embedder}
    serving(models, act, memory_mib=4096, model_root=str(tiny_generator.parent))


@pytest.mark.parametrize("is_short", [False, True])
def test_a_model_waits_for_one_load_of_an_explainer_where_memory_is_short_else_for_none(
    is_short: bool, tiny_classifier: Path, tiny_embedder: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hold, built, waiting = Hold(), list[int](), asyncio.Event()

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        before(explain_models, "build_and_measure")(monkeypatch, hold)
        loads = Calls(monkeypatch, explain_models, "build_and_measure")
        requests = [asyncio.create_task(served.load_explainer(model)) for model in served.models()]
        await hold.reached()
        budget = served._loader.budget
        real = budget.plan

        def plan(*given: Any) -> MemoryNeed:
            built.append(loads.count)
            return real(*given)

        def useful_bytes(*_: Any) -> int:
            asyncio.get_running_loop().call_soon(waiting.set)  # in its next turn the load of the model waits
            return useful

        monkeypatch.setattr(budget, "plan", plan)
        described = await served._loader.describe(LoadTask("chat", 0), str(tiny_generator))
        useful = budget.useful_bytes(described.size)
        budget.limit -= budget.free - useful + is_short
        monkeypatch.setattr(budget, "useful_bytes", useful_bytes)
        chat = served.load("chat", str(tiny_generator))
        if is_short:
            await waiting.wait()
            hold.released.set()
        async with asyncio.timeout(PATIENCE_S):
            await chat.wait_and_raise()
        hold.released.set()
        await asyncio.gather(*requests, return_exceptions=True)
        assert built == [1]

    try:
        models = {"judge": tiny_classifier, "vectors": tiny_embedder}
        serving(models, act, memory_mib=4096, model_root=str(tiny_generator.parent))
    finally:
        hold.released.set()


def test_a_model_that_does_not_fit_leaves_explainers_where_they_are(
    tiny_classifier: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        monkeypatch.setattr(loader, "check_tokenizer_fits", lambda *_: None)
        described = await served._loader.describe(LoadTask("chat", 0), str(tiny_generator))
        needed = smallest_need(described.size, served._settings).total
        judge = await explain_with_free_memory(served, 0)
        served._loader.budget.limit += needed - served._explainers.held_bytes("judge") - 1
        with pytest.raises(InsufficientMemory):
            await served.load("chat", str(tiny_generator)).wait_and_raise()
        assert served._explainers.find_worker(judge) is not None

    serving({"judge": tiny_classifier}, act, memory_mib=4096, model_root=str(tiny_generator.parent))

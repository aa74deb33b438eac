"""Served models: loading beside broken ones, the messages meanwhile, which model answers, and the cache's size."""

import asyncio
import re
import shutil
import time
from collections.abc import Callable, Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.seq2seq_executor import Seq2SeqExecutor
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.core.errors import BadRequest, NotFound, Unavailable, WrongTask
from polyhead.service.core.model import LoadState
from polyhead.service.core.request import Done, Encode, Generate, HeadOutput
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.resources import capacity, machine
from polyhead.service.runtime import loader, registry
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.runtime.tokenizer_check import TokenizerCheck, TokenizerMemory
from tests.support import translators


def serving(models: dict[str, Any], act: Callable[[ModelRegistry], Coroutine[Any, Any, Any]], **settings: Any) -> Any:
    """Return what `act` returns, given a registry with a running engine and no loaded models."""

    async def run() -> Any:
        known = Settings(models={name: str(source) for name, source in models.items()}, **settings)
        metrics = Metrics(known.models)
        engine = Engine(metrics)
        engine.start()
        try:
            return await act(ModelRegistry(engine, known, observer=metrics))
        finally:
            await engine.close(0)

    return asyncio.run(run())


@pytest.fixture
def truncated(tiny_classifier: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "truncated"
    shutil.copytree(tiny_classifier, folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return folder


def test_broken_models_say_why_and_the_others_are_served(
    tiny_generator: Path, tiny_classifier: Path, truncated: Path
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        assert [model.name for model in served.models()] == ["chat", "judge"]
        states = served.states()
        assert states["chat"] == states["judge"] == LoadState("ready", 1.0)
        assert states["cut"].phase == states["gone"].phase == "broken"
        assert "model.safetensors" in states["cut"].reason
        assert "nowhere: there is no such folder" in states["gone"].reason
        with pytest.raises(Unavailable, match=r"cut could not be loaded: .*model\.safetensors"):
            served.resolve("cut", ["classify"])

    models = {"gone": "/nowhere", "cut": truncated, "chat": tiny_generator, "judge": tiny_classifier}
    serving(models, act)


def test_descriptions_of_models(
    tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path
) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        chat, judge, vectors, ranker = served.models()
        assert (chat.task, judge.task, vectors.task, ranker.task) == ("generate", "classify", "embed", "rank")
        assert judge.labels == ("negative", "neutral", "positive")
        assert vectors.width == 32
        assert chat.max_tokens == judge.max_tokens == 256
        assert chat.chat is not None
        assert chat.dtype == "float32"

    serving({"chat": tiny_generator, "judge": tiny_classifier, "vec": tiny_embedder, "rank": tiny_ranker}, act)


def test_loaded_models_answer(tiny_generator: Path, tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        chat, judge = served.models()
        [stream] = served.submit(chat, [Generate("g", (5, 6, 7), max_tokens=4)])
        [read] = served.submit(judge, [Encode("e", (2, 9, 3))])
        events = [event async for event in stream]
        assert events[-1] == Done("length", 3, 4)
        scores, end = [event async for event in read]
        assert isinstance(scores, HeadOutput)
        assert sum(scores.values) == pytest.approx(1.0)
        assert end == Done("encoded", 3)

    serving({"chat": tiny_generator, "judge": tiny_classifier}, act)


@pytest.mark.parametrize("follows", [True, False])
def test_a_model_has_the_sampling_options_that_its_checkpoint_suggests(
    follows: bool, tiny_generator: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "suggesting"
    shutil.copytree(tiny_generator, folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7, "max_new_tokens": 9}')

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        [chat] = served.models()
        assert chat.sampling == ({"temperature": 0.5, "top_k": 7} if follows else {})

    serving({"chat": folder}, act, generation_config=follows)


def test_messages_during_a_load(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is visible from the event loop, and clients get a time to retry."""
    seen: list[str] = []
    real = loader.checkpoint.prepare

    def watched(source: str, what: Any, **options: Any) -> Any:
        options["progress"](3, 4)
        with pytest.raises(Unavailable, match="chat is not ready yet, 75% is read") as caught:
            served_by[0].resolve("chat", ["generate"])
        assert 1 <= caught.value.retry_after <= registry.MAX_RETRY_S
        with pytest.raises(Unavailable, match="next is not ready yet, others are loaded first"):
            served_by[0].resolve("next", ["generate"])
        with pytest.raises(Unavailable):
            served_by[0].resolve_only(["generate"])
        seen.append(source)
        monkeypatch.setattr(loader.checkpoint, "prepare", real)
        return real(source, what, **options)

    served_by: list[ModelRegistry] = []

    async def act(served: ModelRegistry) -> None:
        served_by.append(served)
        assert served.states()["chat"] == LoadState("waiting")
        monkeypatch.setattr(loader.checkpoint, "prepare", watched)
        await served.load_all()
        assert [model.name for model in served.models()] == ["chat", "next"]

    serving({"chat": tiny_generator, "next": tiny_generator}, act)
    assert seen


def test_names_and_tasks_that_do_not_fit(tiny_generator: Path, tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        assert served.resolve("chat", ["generate"]).name == "chat"
        with pytest.raises(NotFound, match="no model is called 'gpt-4'; there are: chat, judge") as unknown:
            served.resolve("gpt-4", ["generate"])
        assert unknown.value.param == "model"
        said = "judge can classify, it cannot generate text; models that can: chat"
        with pytest.raises(BadRequest, match=said):
            served.resolve("judge", ["generate"])
        with pytest.raises(BadRequest, match="models that can: none"):
            served.resolve("judge", ["embed"])

    serving({"chat": tiny_generator, "judge": tiny_classifier}, act)


def test_routes_that_name_no_model(tiny_classifier: Path, tiny_generator: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        assert served.resolve_only(["generate"]).name == "chat"
        with pytest.raises(NotFound, match="no model here can embed or rank"):
            served.resolve_only(["rank", "embed"])
        with pytest.raises(BadRequest, match=r"/models/NAME/\.\.\.: one, two"):
            served.resolve_only(["classify"])

    serving({"one": tiny_classifier, "two": tiny_classifier, "chat": tiny_generator}, act)


def test_a_model_that_does_not_fit_is_broken_and_names_remedies(tiny_generator: Path, tiny_classifier: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        assert [model.name for model in served.models()] == ["judge"]
        assert re.search(
            r"chat needs \d+ MiB .*26 of 26 MiB are free.* with cache_tokens \d+;", served.states()["chat"].reason
        )

    serving({"chat": tiny_generator, "judge": tiny_classifier}, act, memory_mib=26, cache_tokens=100_000)


def test_a_model_serves_no_longer_texts_than_its_cache_holds(tiny_generator: Path) -> None:
    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        [model] = served.models()
        assert model.max_tokens == 112
        with pytest.raises(BadRequest, match="more than the 112 tokens"):
            served.submit(model, [Generate("g", (1,), max_tokens=112)])

    serving({"chat": tiny_generator}, act, cache_tokens=100)


def test_a_stop_during_a_load_marks_no_model_as_broken(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Endless reading of a checkpoint ends with the engine."""

    def endless(*given: Any, progress: Callable[[int, int], None], **named: Any) -> Any:
        while True:
            progress(1, 2)
            time.sleep(0.001)

    async def run() -> None:
        known = Settings(models={"chat": str(tiny_generator), "next": str(tiny_generator)})
        engine = Engine(Metrics([]))
        engine.start()
        served = ModelRegistry(engine, known, observer=Metrics([]))
        loading = asyncio.create_task(served.load_all())
        while served.states()["chat"].fraction == 0:
            await asyncio.sleep(0.01)
        await engine.close(0)
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert "broken" not in {state.phase for state in served.states().values()}

    monkeypatch.setattr(loader.checkpoint, "prepare", endless)
    asyncio.run(run())


def test_a_resolved_model_answers_although_it_is_unloaded(tiny_generator: Path) -> None:
    """Between resolving a model and submitting, the request is tokenised with that model's tokenizer."""

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        [old] = served.models()
        change = served.reload("chat", "", 1.0)
        while served.models()[0] is old:
            await asyncio.sleep(0.001)
        [late] = served.submit(old, [Generate("g", (5, 6, 7), max_tokens=4)])
        assert [event async for event in late][-1] == Done("length", 3, 4)
        await change.wait_and_raise()
        with pytest.raises(Unavailable, match="chat was removed while the request was read; send it again"):
            served.submit(old, [Generate("g", (5, 6, 7), max_tokens=4)])

    serving({"chat": tiny_generator}, act)


def test_weights_are_for_models_that_are_served(tiny_generator: Path) -> None:
    known = Settings(models={"chat": str(tiny_generator)}, weights={"caht": 2})
    with pytest.raises(SettingsError, match="weights: no model is called 'caht'; there are: chat"):
        ModelRegistry(Engine(Metrics([])), known, observer=Metrics([]))


def test_scheduling_weights_reach_the_engine_and_executors_are_wrapped(
    tiny_generator: Path, tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: dict[str, float] = {}
    seen: list[int] = []
    real = Engine.add_worker

    def add(engine: Engine, worker: Any, weight: float = 1.0) -> None:
        added[worker.model] = weight
        real(engine, worker, weight)

    def executed(executor: Executor) -> Executor:
        seen.append(executor.block_count)
        return executor

    async def run() -> None:
        models = {"chat": str(tiny_generator), "judge": str(tiny_classifier)}
        engine = Engine(Metrics([]))
        engine.start()
        known = Settings(models=models, weights={"chat": 3}, cache_tokens=512)
        await ModelRegistry(engine, known, observer=Metrics([]), executor_hook=executed).load_all()
        await engine.close(0)

    monkeypatch.setattr(Engine, "add_worker", add)
    asyncio.run(run())
    assert added == {"chat": 3, "judge": 1}
    assert seen == [32, 0]


def test_an_encoder_decoder_reads_one_token_of_each_prompt_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computes them one after the other, so a step of many would take as long as so many steps."""
    translators.translator(tmp_path, "t5")
    most = 0
    step = Seq2SeqExecutor.step

    def counted(executor: Seq2SeqExecutor, rows: StepInput) -> torch.Tensor:
        nonlocal most
        most = max(most, *(end - start for start, end in pairwise(rows.starts)))
        return step(executor, rows)

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        [model] = served.models()
        [stream] = served.submit(model, [Generate("t", (1, 5, 6, 7, 8), 3, source=(9, 10))])
        assert isinstance([event async for event in stream][-1], Done)

    monkeypatch.setattr(Seq2SeqExecutor, "step", counted)
    serving({"translator": tmp_path}, act, device="cpu", explain=False)
    assert most == 1


def test_metrics_contain_ready_models_only(tiny_generator: Path) -> None:
    async def run() -> dict[str, float]:
        settings = Settings(models={"chat": str(tiny_generator), "gone": "/nowhere"})
        metrics = Metrics(settings.models)
        engine = Engine(metrics)
        engine.start()
        try:
            await ModelRegistry(engine, settings, observer=metrics).load_all()
        finally:
            await engine.close(0)
        families = text_string_to_metric_families(metrics.render("")[0].decode())
        ready = next(family for family in families if family.name == "polyhead_model_ready")
        return {sample.labels["model"]: sample.value for sample in ready.samples}

    assert asyncio.run(run()) == {"chat": 1.0, "gone": 0.0}


def test_the_executor_of_each_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_placement(Settings()).dtype == torch.float32
    assert choose_placement(Settings(precision="bfloat16")).dtype == torch.bfloat16
    with pytest.raises(SettingsError, match="device: cuda is asked for"):
        choose_placement(Settings(device="cuda"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (choose_placement(Settings()).device.type, choose_placement(Settings()).dtype) == ("cuda", torch.bfloat16)
    assert choose_placement(Settings(device="cpu")).device.type == "cpu"


def test_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(capacity, "CGROUP_ROOT", tmp_path)
    assert machine.free_memory(torch.device("cpu")) == machine.ASSUMED_MEMORY
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   4096 kB\n")
    assert machine.free_memory(torch.device("cpu")) == 4096 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert machine.free_memory(torch.device("cpu")) == 4096 * 1024
    (tmp_path / "memory.max").write_text("5000\n")
    assert machine.free_memory(torch.device("cpu")) == 4000
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 700\nactive_file 9\n")
    assert machine.free_memory(torch.device("cpu")) == 4700  # the page cache is freed on demand
    monkeypatch.setattr(machine, "PHYSICAL_CORES", 8)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # set by the compiled step: not a value of the machine
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    assert machine.compute_threads() == 5
    (tmp_path / "cpu.max").write_text("150000 100000")
    assert machine.compute_threads() == 2


def test_placeholders_name_the_only_model(tiny_classifier: Path, tiny_ranker: Path) -> None:
    names = ("dummy", "tgi", "tei", "default", "", "http://127.0.0.1:8000/v1")

    async def alone(served: ModelRegistry) -> None:
        await served.load_all()
        assert {served.resolve(name, ["classify"]).name for name in names} == {"judge"}
        with pytest.raises(NotFound, match=r"no model is called 'judge2'; there are: judge$"):
            served.resolve("judge2", ["classify"])
        with pytest.raises(NotFound, match="no model is called 'http://aaa"):  # each part of an answer would repeat it
            served.resolve(f"http://{'a' * 2048}", ["classify"])

    async def together(served: ModelRegistry) -> None:
        await served.load_all()
        for name in names:
            assert served.resolve(name, ["classify"]).name == "judge"
            with pytest.raises(
                NotFound,
                match=rf"'{name}' stands for the only model that can classify or rank; there are: judge, ranker$",
            ):
                served.resolve(name, ["classify", "rank"])
            with pytest.raises(NotFound, match=r"stands for the only model that can embed; there are: none$"):
                served.resolve(name, ["embed"])
        served.alias("dummy", "ranker")
        assert served.resolve("dummy", ["rank"]).name == "ranker"
        with pytest.raises(WrongTask, match="ranker can rank, it cannot classify"):
            served.resolve("dummy", ["classify"])

    serving({"judge": tiny_classifier}, alone)
    serving({"judge": tiny_classifier, "ranker": tiny_ranker}, together)


def test_a_tokenizer_without_room_in_the_budget_is_not_read(
    tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read before the model's memory is reserved, so what the child process measured is compared first."""
    read, real = list[Path](), Tokenizer.from_folder

    def from_folder(path: Path, measured_bytes: int = 0) -> Tokenizer:
        read.append(path)
        return real(path, measured_bytes)

    monkeypatch.setattr(Tokenizer, "from_folder", from_folder)
    taken = TokenizerMemory(kept=60 << 20, most=110 << 20)
    monkeypatch.setattr(TokenizerCheck, "_ask_child", lambda *_: taken)

    async def act(served: ModelRegistry) -> None:
        await served.load_all()
        read.clear()
        operation = served.load("more", str(tiny_classifier))
        await operation.wait()
        assert operation.error is not None
        assert "to read the tokenizer of more takes 110 MiB, and 6" in operation.error.message
        assert read == []

    serving({"judge": tiny_classifier}, act, memory_mib=130, model_root=str(tiny_classifier.parent))
    reason = "to read the tokenizer of second takes 110 MiB, and "

    async def first(served: ModelRegistry) -> None:
        """Neither is loaded yet when the second is described."""
        await served.load_all()
        assert [name for name, state in served.states().items() if state.reason.startswith(reason)] == ["second"]

    serving({"judge": tiny_classifier, "second": tiny_classifier}, first, memory_mib=130)


def test_what_a_tokenizer_takes_is_reserved(tiny_classifier: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(served: ModelRegistry) -> int:
        await served.load_all()
        return served._loader.budget.limit - served._loader.budget.free

    assert serving({"judge": tiny_classifier}, act, memory_mib=800) < 30 << 20
    taken = TokenizerMemory(kept=300 << 20, most=300 << 20)
    monkeypatch.setattr(TokenizerCheck, "_ask_child", lambda *_: taken)
    assert serving({"judge": tiny_classifier}, act, memory_mib=800) >= 300 << 20

"""Memory: a model takes what is predicted, and a model that does not fit is rejected with changes that work."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertForTokenClassification,
    LlamaConfig,
    LlamaForCausalLM,
)
from typer.testing import CliRunner

from polyhead.models import checkpoint
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.service.cli import main as cli
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import InsufficientMemory
from polyhead.service.resources import machine
from polyhead.service.runtime.executor_choice import build_executor, encoder_step_tokens
from polyhead.service.runtime.explain_cost import explainer_memory_need
from polyhead.service.runtime.memory_budget import (
    MIB,
    CachePlan,
    MemoryBudget,
    ModelSize,
    ceil_mib,
    largest_step,
    measure_model,
    memory_need,
    smallest_need,
    torch_parts,
)
from polyhead.service.runtime.placement import choose_placement
from tests.support import checkpoints, decision_models, gguf_files, retrieval_models
from tests.support.places import ROOT

GROWTH = ROOT / "tests" / "support" / "growth.py"
linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux what is resident")


def settings(**given: Any) -> Settings:
    return Settings(device="cpu", **given)


def described(folder: Path, name: str = "chat") -> ModelSize:
    return measure_model(name, checkpoint.describe_source(str(folder)))


# Prediction


def test_a_network_of_its_own_for_queries_is_counted(tmp_path: Path) -> None:
    folder = str(retrieval_models.asymmetric(tmp_path / "a"))
    what, known = checkpoint.describe_source(folder), settings(models={"a": folder})
    assert what.queries is not None
    parts = [smallest_need(measure_model("a", each), known) for each in (what, what.queries)]
    both = smallest_need(measure_model("a", what, what.queries), known)
    assert both.weights == parts[0].weights + parts[1].weights
    assert both.workspace == parts[0].workspace + parts[1].workspace
    row = run_check(f"a={folder}").stdout.splitlines()[1].split()
    assert [row[0], row[1], row[4]] == ["a", str(ceil_mib(both.weights)), str(ceil_mib(both.total))]


@pytest.fixture(scope="session")
def middling_generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 MiB in float32, more than half of it the vocabulary's; grouped-query attention."""
    return generator(tmp_path_factory.mktemp("middling"), layers=4)


@pytest.fixture(scope="session")
def middling_shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with one layer and a smaller vocabulary, for precisions that this processor may not support."""
    return generator(tmp_path_factory.mktemp("middling"), layers=1, positions=320)


def generator(folder: Path, layers: int, positions: int = 1024) -> Path:
    tokenizer = checkpoints.byte_level_bpe()
    config = LlamaConfig(
        vocab_size=24_000,
        hidden_size=384,
        intermediate_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    return checkpoints.save(LlamaForCausalLM(config), tokenizer, folder)


@pytest.fixture(scope="session")
def middling_classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """50 MiB in float32."""
    tokenizer = checkpoints.word_piece()
    config = BertConfig(
        vocab_size=20_000,
        hidden_size=384,
        num_hidden_layers=3,
        num_attention_heads=12,
        intermediate_size=1536,
        max_position_embeddings=256,
    )
    return checkpoints.save(BertForSequenceClassification(config), tokenizer, tmp_path_factory.mktemp("middling"))


@pytest.fixture(scope="session")
def middling_filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 MiB in float32, nearly all of it a matrix that it shares with its head."""
    tokenizer = checkpoints.word_piece()
    config = BertConfig(
        vocab_size=60_000,
        hidden_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=128,
    )
    return checkpoints.save(BertForMaskedLM(config), tokenizer, tmp_path_factory.mktemp("middling"))


@pytest.fixture(scope="session")
def middling_tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small, except for the scores of 3,000 labels for each token."""
    tokenizer = checkpoints.word_piece()
    config = BertConfig(
        vocab_size=2000,
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=256,
        num_labels=3000,
    )
    return checkpoints.save(BertForTokenClassification(config), tokenizer, tmp_path_factory.mktemp("middling"))


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., dict[str, float]]]:
    """Return what tests/support/growth.py reports of a warm-up and a measured checkpoint with these settings."""
    log = tmp_path_factory.mktemp("growth") / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, str(GROWTH)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        asked, said = child.stdin, child.stdout

        def ask(warm: Path, source: Path, given: dict[str, Any]) -> dict[str, float]:
            asked.write(f"{json.dumps([str(warm), str(source), given])}\n")
            asked.flush()
            found: dict[str, float] | None = json.loads(said.readline() or "null")
            assert found, log.read_text()
            return found

        yield ask


@linux
@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("generator", {"cache_tokens": 2048, "max_running": 12, "step_tokens": 256}),
        ("generator", {"cache_tokens": 2048, "max_running": 12, "step_tokens": 256, "precision": "int8"}),
        pytest.param(
            "shallow", {"cache_tokens": 2048, "max_running": 24, "precision": "bfloat16"}, marks=pytest.mark.thorough
        ),
        ("classifier", {"encoder_step_tokens": 2048}),
        pytest.param("tagger", {"encoder_step_tokens": 2048}, marks=pytest.mark.thorough),
        ("filler", {"encoder_step_tokens": 512}),
        pytest.param("filler", {"encoder_step_tokens": 512, "executor": "torch"}, marks=pytest.mark.thorough),
    ],
    ids=["generator", "bytes", "half", "encoder", "for each token", "words", "words by torch"],
)
def test_predicted_memory_equals_measured_memory(
    request: pytest.FixtureRequest, grown: Callable[..., dict[str, float]], kind: str, given: dict[str, Any]
) -> None:
    """The prediction is within 20 % of the memory at the highest load, and all but a tenth is released by unloading."""
    source = request.getfixturevalue(f"middling_{kind}")
    model, known = described(source), settings(**given)
    predicted = MemoryBudget(1 << 50, known).plan(model)
    warm = "tiny_generator" if kind in ("generator", "shallow") else "tiny_classifier"
    seen = grown(request.getfixturevalue(warm), source, given)
    assert max(seen["peak"], seen["loading"]) == pytest.approx(predicted.total / MIB, rel=0.2), (predicted, seen)
    warmed = predicted.total if kind == "filler" else predicted.weights + predicted.loading  # one part is as any other
    assert seen["loading"] <= warmed / MIB * 1.2
    assert seen["gone"] < 0.1 * seen["peak"] + 4


@pytest.mark.parametrize("kind", ["generator", "classifier", "ranker", "embedder"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_counted_before_they_are_read(
    request: pytest.FixtureRequest, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = str(request.getfixturevalue(f"tiny_{kind}"))
    loaded = checkpoint.load(source, dtype=dtype)
    expected = loaded.weight_bytes + sum(buffer.nbytes for buffer in loaded.network.buffers())
    monkeypatch.setattr(TensorEntry, "read", None)
    assert estimate_load(checkpoint.describe_source(source)).weight_bytes(dtype) == expected


KINDS = {
    **{kind: lambda name, tensor, kind=kind: kind for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K")},
    "vocabulary in eight": lambda name, tensor: "Q8_0" if "token" in name else "Q4_1",
    "vocabulary in five": lambda name, tensor: "Q5_1" if "token" in name else "Q4_0",
    "mixed": lambda name, tensor: {"attn_v": "Q8_0", "ffn_up": "Q4_0"}.get(name.split(".")[-2], "Q4_1"),
    "mixed of several scales": lambda name, tensor: "Q6_K" if "attn_v" in name or "down" in name else "Q4_K",
    "floats": lambda name, tensor: "F32",
    "floats of four": lambda name, tensor: "F32" if "token" in name else "Q4_0",
}


def stored(path: Path, kind: str, tied: bool) -> Path:
    """A generator whose matrices are stored in this format; "floats of four" have only four-bit values."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    tensors = gguf_files.converted("llama", LlamaForCausalLM(config))
    if kind == "floats of four":
        tensors["token_embd.weight"] = (tensors["token_embd.weight"] * 50).round().clamp(-8, 7) / 64
    kinds = lambda name, tensor: KINDS[kind](name, tensor) if tensor.ndim == 2 else "F32"  # noqa: E731
    tensors = {
        name: torch.from_numpy(gguf_files.random_blocks(kinds(name, tensor), *tensor.shape))
        if kinds(name, tensor).endswith("_K")
        else tensor
        for name, tensor in tensors.items()
    }
    return gguf_files.write(path / "model.gguf", "llama", gguf_files.decoder_metadata(config), tensors, kinds)


@pytest.mark.skipif(not runnable_targets(), reason="nothing is compiled here")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "of its own"])
def test_packed_sizes_are_known_before_loading(tmp_path: Path, kind: str, tied: bool) -> None:
    """Exact except for biases and padding, unless it depends on the values: then never too low."""
    source = stored(tmp_path, kind, tied)
    for precision in ("int8", "int4"):
        known = settings(precision=precision)
        predicted = smallest_need(described(source), known).weights
        executor = build_executor(checkpoint.load(str(source)), known, choose_placement(known))
        taken = cast(NativeExecutor, executor).weight_bytes
        assert taken <= predicted, precision
        of_values = (kind, precision) in (("floats of four", "int4"), ("floats", "int4"))
        assert predicted <= 1.04 * taken or of_values, precision


# The plan


@pytest.fixture
def chat(tiny_generator: Path) -> ModelSize:
    return described(tiny_generator)


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        ({"cache_tokens": 100}, 112),  # the requested size, in whole blocks of 16
        ({}, 16_384),  # enough memory: no more than is useful
        ({"max_running": 2}, 512),  # two contexts of 256
    ],
    ids=["asked", "useful", "running"],
)
def test_a_cache_has_the_requested_or_a_useful_size(chat: ModelSize, given: dict[str, Any], tokens: int) -> None:
    assert MemoryBudget(1 << 50, settings(**given)).plan(chat).cache_tokens == tokens


def test_with_little_memory_the_cache_shrinks_to_one_context(chat: ModelSize) -> None:
    smallest = smallest_need(chat, settings())
    assert smallest.cache_tokens == 256
    roomy = memory_need(chat, settings(), 100)
    assert MemoryBudget(roomy.total, settings()).plan(chat).blocks == 100
    tight = MemoryBudget(smallest.total, settings()).plan(chat)
    assert tight.total == smallest.total  # memory of the load that serving does not need is left for a larger cache
    assert smallest.blocks <= tight.blocks < 100
    with pytest.raises(InsufficientMemory):
        MemoryBudget(smallest.total - 1, settings()).plan(chat)


def test_memory_of_models_to_come_is_reserved(chat: ModelSize, tiny_classifier: Path) -> None:
    other, judge = replace(chat, name="other"), described(tiny_classifier, "judge")
    known = settings()
    limit = (
        smallest_need(chat, known).total
        + smallest_need(other, known).total
        + smallest_need(judge, known).total
        + 2 * 256 * 1000
    )
    plans = MemoryBudget(limit, known)
    for model, later in ((chat, [judge, other]), (judge, [other]), (other, [])):
        plans.reserve(plans.plan(model, later))
    assert 0 <= plans.free < 16384  # four blocks
    first, _, last = plans._reserved
    assert abs(first.blocks - last.blocks) <= 2  # generators share what is left


def test_no_more_memory_is_useful_than_makes_the_largest_cache(chat: ModelSize, tiny_classifier: Path) -> None:
    later, known = [replace(chat, name="other"), described(tiny_classifier, "judge")], settings(cache_tokens=0)
    largest = MemoryBudget(1 << 50, known).plan(chat)
    useful = MemoryBudget(0, known).useful_bytes(chat, later, kept=1000)
    assert MemoryBudget(useful, known).plan(chat, later, kept=1000) == largest
    assert MemoryBudget(useful - 2, known).plan(chat, later, kept=1000).total < largest.total
    assert MemoryBudget(0, known).useful_bytes(later[1]) == smallest_need(later[1], known).total


def test_loaded_models_count_until_they_are_released(chat: ModelSize) -> None:
    smallest = smallest_need(chat, settings())
    plans = MemoryBudget(2 * smallest.total - 1, settings(cache_tokens=256))
    plans.reserve(plans.plan(chat))
    assert plans.free == smallest.total - 1
    with pytest.raises(InsufficientMemory):
        plans.plan(chat)
    plans.release(smallest)
    assert plans.plan(chat) == smallest


def test_reading_may_take_more_than_serving(tiny_classifier: Path) -> None:
    """The copy of a large tensor exists beside the weights before there is a step."""
    judge = described(tiny_classifier, "judge")
    turned = replace(judge, checkpoint_size=replace(judge.checkpoint_size, rearranged=10**8))
    assert smallest_need(judge, settings()).total < smallest_need(turned, settings()).total > 4 * 10**8


# Refusals


def remedies(message: str) -> dict[str, str]:
    """Return the setting and the value that "It would fit with" lists."""
    _, _, listed = message.partition("It would fit with ")
    return {way.split()[0]: way.split()[1].rstrip(",") for way in listed.split("; or ")}


def test_a_model_that_does_not_fit_is_rejected_with_remedies_that_work(middling_generator: Path) -> None:
    chat, given = described(middling_generator), {"max_running": 64, "step_tokens": 512}
    plans = MemoryBudget(smallest_need(chat, settings(**given)).total - 4 * MIB, settings(**given))
    with pytest.raises(InsufficientMemory) as caught:
        plans.plan(chat)
    said = caught.value.message
    assert re.match(r"chat needs \d+ MiB \(weights \d+, cache \d+ \(1024 tokens\), workspace \d+\), and \d+ of", said)
    found = remedies(said)
    assert found.keys() >= {"max_running", "precision", "memory_mib"}
    for name, value in found.items():
        changed = settings(**(given | {name: value}))
        limit = changed.memory_mib * MIB or plans.limit
        MemoryBudget(limit, changed).plan(chat)
        if value.isdecimal() and name != "memory_mib":  # and it is the largest that does
            with pytest.raises(InsufficientMemory):
                MemoryBudget(limit, settings(**(given | {name: int(value) + 1}))).plan(chat)


def test_smaller_steps_are_a_remedy_for_an_encoder(middling_classifier: Path) -> None:
    judge = described(middling_classifier, "judge")
    most, least = (smallest_need(judge, each).total for each in (settings(), settings(encoder_step_tokens=1)))
    plans = MemoryBudget((most + least) // 2, settings())
    with pytest.raises(InsufficientMemory) as caught:
        plans.plan(judge)
    assert remedies(caught.value.message).keys() == {"encoder_step_tokens", "precision", "memory_mib"}


def test_layers_of_a_decision_head_are_counted_for_each_token(tmp_path: Path) -> None:
    """The vectors of a token that exist in a layer at once, of which the longest sequence has as many."""
    marks = described(decision_models.laya(tmp_path / "marks", head_layers=1))
    schema = described(decision_models.gliner2(tmp_path / "schema"))
    known = settings(executor="torch", encoder_step_tokens=512)
    plain = memory_need(replace(marks, columns=2), known, 0)
    assert (marks.columns, schema.columns) == (16 * decision_models.WIDTH, 2)
    assert memory_need(marks, known, 0).workspace > max(plain.workspace, 512 * 16 * decision_models.WIDTH * 4)


def test_a_model_that_could_be_unloaded_is_named(tiny_classifier: Path, middling_classifier: Path) -> None:
    small, large = described(tiny_classifier, "small"), described(middling_classifier, "large")
    plans = MemoryBudget(smallest_need(large, settings()).total + smallest_need(small, settings()).total, settings())
    for model in (small, large):
        plans.reserve(plans.plan(model))
    with pytest.raises(InsufficientMemory, match="large unloaded; or memory_mib"):
        plans.plan(replace(large, name="third"))


# Available memory


def test_some_of_the_free_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for free, left in ((1 << 30, 128 << 20), (10 << 30, 1 << 30), (1 << 20, 1 << 20)):
        monkeypatch.setattr(machine, "free_memory", lambda device, free=free: free)
        assert machine.spendable_memory(cpu) == free - left


HOLES = """
import asyncio
from polyhead.service.resources import process_info as upkeep

upkeep.TRIM_GROWTH, upkeep.TRIM_INTERVAL_S = 8 << 20, 0.02

async def run():
    watching = asyncio.create_task(upkeep.trim_heap_forever())
    await asyncio.sleep(0.1)
    kept = [bytearray(100_000) for _ in range(600)]  # too small to be mapped
    del kept[1::2]
    before = upkeep.resident_memory()
    await asyncio.sleep(0.3)
    print(before - upkeep.resident_memory())
    watching.cancel()

asyncio.run(run())
"""


@linux
def test_free_memory_of_the_allocator_is_returned() -> None:
    """Freed memory between blocks in use stays resident until it is returned explicitly; in a process of its own."""
    done = subprocess.run([sys.executable, "-c", HOLES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 15 * MIB


LOADING = """
import asyncio, sys
import torch
from tests.support.growth import forget, resident
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.config.settings import Settings

async def run(warm, *sources):
    torch.set_num_threads(1)
    engine = Engine(Metrics([]), threads=1)
    engine.start()
    known = Settings(device="cpu", model_root="/", threads=1, cache_tokens=512, max_running=4, step_tokens=64)
    registry = ModelRegistry(engine, known, observer=Metrics([]))
    await registry.load("warm", warm).wait_and_raise()
    forget()
    base = resident("VmRSS")
    for number, source in enumerate(sources):
        await registry.load(f"model-{number}", source).wait_and_raise()
    print(resident("VmHWM") - base)
    await engine.close(0)

asyncio.run(run(*sys.argv[1:]))
"""
DEEP = LlamaConfig(
    vocab_size=384, hidden_size=512, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8,
    intermediate_size=1536, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def deep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of 16 layers of 13 MiB each as float32, which are packed to a quarter."""
    with torch.device("meta"):
        model = LlamaForCausalLM(DEEP)
    shapes = gguf_files.converted("llama", model)
    weights = {
        name: torch.ones(each.shape) if each.dim() == 1 else torch.zeros(len(each), each.size(1) // 32 * 34).byte()
        for name, each in shapes.items()
    }
    kinds = lambda name, tensor: "Q8_0" if tensor.dtype == torch.uint8 else "F32"  # noqa: E731
    path = tmp_path_factory.mktemp("deep") / "deep.gguf"
    return gguf_files.write(path, "llama", gguf_files.decoder_metadata(DEEP), weights, kinds)


@linux
@pytest.mark.skipif(not runnable_targets(), reason="nothing is compiled here")
def test_loading_two_files_takes_what_is_packed_and_one_part(tiny_generator: Path, deep_file: Path) -> None:
    """In a process that is set up like a server, the allocator does not keep the memory of layers that were read."""
    known = settings(threads=1, cache_tokens=512, max_running=4, step_tokens=64)
    needed = MemoryBudget(1 << 50, known).plan(described(deep_file))
    command = [sys.executable, "-c", LOADING, str(tiny_generator), str(deep_file), str(deep_file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert 2 * needed.weights < float(done.stdout) * MIB < 1.15 * 2 * needed.total, (done.stdout, needed)


# polyhead check


def run_check(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["check", *arguments, "--device", "cpu"])


def test_check_prints_the_plan(tiny_generator: Path, tiny_classifier: Path) -> None:
    sources = (f"chat={tiny_generator}", str(tiny_classifier))
    result = run_check("--cache-tokens", "512", *sources, "--memory-mib", "100", "--explain", "false")
    assert result.exit_code == 0, result.output
    header, chat, judge, together, limit = result.stdout.splitlines()
    assert header.split() == ["model", "weights", "cache", "workspace", "total"]
    assert re.fullmatch(r"chat +1 +1 \(512 tokens, 32 blocks\) +\d+ +\d+", chat)
    assert re.fullmatch(r"model-2 +1 +- +\d+ +\d+", judge)
    assert together.split()[0] == "together"
    assert limit == "100 MiB are set for models"


def test_check_has_a_column_of_what_explanations_take(tiny_generator: Path, tiny_classifier: Path) -> None:
    sources = (f"chat={tiny_generator}", str(tiny_classifier))
    result = run_check("--cache-tokens", "512", *sources, "--memory-mib", "4000")
    assert result.exit_code == 0, result.output
    header, *rows, limit = result.stdout.splitlines()
    assert header.endswith("total  to explain")
    own = [explainer_memory_need(described(folder), settings()).total for folder in (tiny_generator, tiny_classifier)]
    assert [int(row.split()[-1]) for row in rows] == [*map(ceil_mib, own), sum(map(ceil_mib, own))]
    assert limit == "4000 MiB are set for models"
    small = run_check("--cache-tokens", "512", *sources, "--memory-mib", "100")
    assert small.exit_code == 0, small.output
    named = ", ".join(f"{name} ({ceil_mib(need)})" for name, need in zip(("chat", "model-2"), own, strict=True))
    assert re.fullmatch(
        rf"\d+ MiB are left for explanations: too few for {re.escape(named)}", small.stdout.splitlines()[-1]
    )


def test_check_suggests_changes(middling_generator: Path) -> None:
    result = run_check(str(middling_generator), "--executor", "torch", "--memory-mib", "90")
    assert result.exit_code == 1
    value = remedies(result.stdout)["max_running"]
    assert (
        run_check(
            str(middling_generator), "--executor", "torch", "--memory-mib", "90", "--max-running", value
        ).exit_code
        == 0
    )


def test_check_reads_no_weights_and_is_quick(middling_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorEntry, "read", None)
    began = time.process_time()
    assert run_check(str(middling_generator)).exit_code == 0
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 2, "name a model to check"),
        (["/nowhere"], 1, "/nowhere: there is no such folder"),
        (["/nowhere", "--prot", "1"], 2, "no setting is called 'prot'"),
    ],
)
def test_check_of_invalid_sources(arguments: list[str], code: int, said: str) -> None:
    result = run_check(*arguments)
    assert result.exit_code == code
    assert said in result.stderr


def test_check_goes_on_after_a_refused_source(tiny_generator: Path, tiny_classifier: Path, tmp_path: Path) -> None:
    """Each rejected model has its reason, and so does an adapter of it; the others have their rows."""
    cut = shutil.copytree(tiny_classifier, tmp_path / "cut")
    (cut / "model.safetensors").write_bytes(b"")
    sources = ("/nowhere", f"chat={tiny_generator}", f"cut={cut}", f"cut:spam={tmp_path}", f"judge={tiny_classifier}")
    result = run_check(*sources, "--cache-tokens", "512", "--memory-mib", "900")
    assert result.exit_code == 1
    header, *rows, limit = result.stdout.splitlines()
    assert header.split()[0] == "model"
    assert [row.split()[0] for row in rows] == ["chat", "judge", "together"]
    assert limit == "900 MiB are set for models"
    nowhere, broken, spam = result.stderr.splitlines()
    assert nowhere.startswith("polyhead: model: /nowhere: there is no such folder")
    assert broken.startswith(f"polyhead: cut: {cut / 'model.safetensors'}: ")
    assert spam == "polyhead: cut:spam: cut, its base model, cannot be loaded"


def test_torch_on_a_cpu_reads_few_tokens_of_layers_in_a_step(tiny_classifier: Path) -> None:
    """What is predicted for a text that is longer than a step has room for the steps beside it."""
    model = described(tiny_classifier)
    for given, expected in (({"executor": "torch"}, 512), ({"executor": "torch", "encoder_step_tokens": 64}, 64)):
        known = settings(**given)
        placement = choose_placement(known, model.default_precision, model.config)
        assert not placement.instructions
        assert encoder_step_tokens(known, placement, model.config) == expected
        long = replace(model, context=expected + 1)
        largest = largest_step(long, known, placement, CachePlan(0, 0))
        assert (largest.rows, largest.beside) == (expected + 1, expected // 4)
        alone = torch_parts(long, known, placement, replace(largest, beside=0)).computing
        assert torch_parts(long, known, placement, largest).computing > alone
    known, static = settings(executor="torch"), replace(model.config, static=True)
    assert encoder_step_tokens(known, placement, static) == known.encoder_step_tokens

"""Networks with windowed layers from checkpoint to worker: memory for their windows, and answers."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from typer.testing import CliRunner

from polyhead.models import checkpoint
from polyhead.models.executors.workspace import block_bytes
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.step_memory import native_block_bytes
from polyhead.service.cli import main as cli
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import InsufficientMemory
from polyhead.service.core.model import Model
from polyhead.service.core.request import Generate, GeneratedToken, Sampling
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.window_blocks import held_limit
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.memory_budget import (
    CPU_CACHE_TOKENS,
    MemoryBudget,
    MemoryPrediction,
    measure_model,
    smallest_need,
)
from polyhead.service.runtime.registry import ModelRegistry
from tests.service.runtime.test_draft_choice import run_requests
from tests.service.runtime.test_registry import serving
from tests.support import checkpoints

WINDOW, CONTEXT, BLOCK = 48, 32_768, 16


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five windowed layers and one that is not."""
    tokenizer = checkpoints.byte_level_bpe()
    config = Gemma3TextConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=6,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
        eos_token_id=tokenizer.eos_token_id,
    )
    return checkpoints.save(Gemma3ForCausalLM(config), tokenizer, tmp_path_factory.mktemp("windowed"))


def settings(**given: Any) -> Settings:
    return Settings(device="cpu", executor="torch", **given)


def test_windowed_layers_have_blocks_for_the_sequences_that_run(windowed: Path) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(windowed)))
    known = settings(cache_tokens=100_000, precision="float32")
    need = MemoryBudget(1 << 40, known).plan(model)
    dtype = MemoryPrediction(model, known).placement.dtype
    each, own = (block_bytes(model.config, BLOCK, dtype, windowed=only) for only in (False, True))
    assert own * 6 == each * 5
    assert (need.blocks, need.window_blocks) == (6250, 64 * held_limit(WINDOW, 1, BLOCK) + 512 // BLOCK)
    assert need.cache == need.blocks * each // 6 + need.window_blocks * own
    if runnable_targets():
        packed = MemoryBudget(1 << 40, known.model_copy(update={"executor": "native"})).plan(model)
        each, own = (native_block_bytes(model.config, "float32", windowed=only) for only in (False, True))
        assert packed.cache == packed.blocks * each // 6 + packed.window_blocks * own


def test_by_default_windows_have_no_more_than_the_cache_of_other_networks(windowed: Path) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(windowed)))
    need = MemoryBudget(1 << 40, settings(max_running=1024, step_tokens=2048)).plan(model)
    assert (need.cache_tokens, need.window_blocks * BLOCK) == (CONTEXT, CPU_CACHE_TOKENS)


def test_with_little_memory_one_sequence_has_its_context_and_its_window(windowed: Path) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(windowed)))
    smallest = smallest_need(model, settings())
    assert smallest.cache_tokens == CONTEXT
    assert smallest.window_blocks == held_limit(WINDOW, 256, BLOCK) == 20
    with pytest.raises(InsufficientMemory, match=r"cache \d+ \(32768 tokens, 320 in windows\)"):
        MemoryBudget(smallest.total - 1, settings()).plan(model)
    assert MemoryBudget(smallest.total, settings()).plan(model).window_blocks == 20
    more = MemoryBudget(smallest.total + (1 << 20), settings()).plan(model)
    assert more.window_blocks > 20
    assert more.blocks >= smallest.blocks


@pytest.mark.parametrize(
    "change", [{"window": CONTEXT}, {"window": 0}], ids=["a window as long as a context", "no window"]
)
def test_layers_without_gain_use_the_same_blocks(windowed: Path, change: dict[str, Any]) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(windowed)))
    need = MemoryBudget(1 << 40, settings()).plan(replace(model, config=replace(model.config, **change)))
    assert not need.window_blocks


def test_a_draft_model_uses_the_numbers_of_other_layers(windowed: Path) -> None:
    what = checkpoint.describe_source(str(windowed))
    alone, draft = measure_model("chat", what), measure_model("chat", what, what)
    need, both = (MemoryBudget(1 << 40, settings()).plan(model) for model in (alone, draft))
    dtype = MemoryPrediction(alone, settings()).placement.dtype
    assert both.cache == need.cache + need.blocks * block_bytes(alone.config, BLOCK, dtype)


@pytest.mark.parametrize("executor", ["native", pytest.param("torch", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("draft", ["tiny_generator", "windowed"])
def test_a_windowed_model_has_drafts(
    windowed: Path, draft: str, executor: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """The draft model has blocks of one kind, whether its layers are windowed or not."""
    if executor == "native" and not runnable_targets():
        pytest.skip("no compiled library for this processor")
    drafts = {"chat": str(request.getfixturevalue(draft))}
    plain, _, _ = run_requests(windowed, draft_tokens=0, executor=executor)
    answers, counts, broken = run_requests(windowed, draft_tokens=4, drafts=drafts, executor=executor)
    assert broken == {}
    assert answers == plain
    assert counts.drafted > 0
    assert "the draft model failed" not in caplog.text


def test_a_draft_for_only_windows_has_the_cache_of_other_networks(windowed: Path) -> None:
    """The model's own blocks beside its windows take no memory, and the draft's of the same number do."""
    what = checkpoint.describe_source(str(windowed))
    model = measure_model("chat", what, what)
    need = MemoryBudget(1 << 40, settings()).plan(replace(model, config=replace(model.config, windowed=())))
    assert need.cache_tokens == max(CONTEXT, CPU_CACHE_TOKENS)


def test_only_windows_leave_the_other_blocks_without_memory(windowed: Path) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(windowed)))
    need = MemoryBudget(1 << 40, settings()).plan(replace(model, config=replace(model.config, windowed=())))
    dtype = MemoryPrediction(model, settings()).placement.dtype
    assert need.cache_tokens == 64 * CONTEXT, "as many tokens as may be asked for"
    assert need.cache == need.window_blocks * block_bytes(model.config, BLOCK, dtype)


def test_check_shows_the_windows(windowed: Path) -> None:
    arguments = ("check", f"chat={windowed}", "--cache-tokens", "65536", "--memory-mib", "1000", "--max-running", "8")
    result = CliRunner().invoke(cli.app, [*arguments, "--device", "cpu", "--explain", "false"])
    assert result.exit_code == 0, result.output
    blocks = 8 * held_limit(WINDOW, 1, BLOCK) + 512 // BLOCK
    assert f"(65536 tokens, {blocks * BLOCK} in windows, 4096 + {blocks} blocks)" in result.stdout


@pytest.mark.parametrize("executor", ["native", pytest.param("torch", marks=pytest.mark.thorough)])
def test_a_long_answer_is_the_same_with_and_without_own_blocks(
    windowed: Path, executor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of a server whose windowed layers use the blocks of the others."""
    if executor == "native" and not runnable_targets():
        pytest.skip("no compiled library for this processor")

    async def answers() -> tuple[list[list[int]], int]:
        sizes = {"max_running": 2 if executor == "native" else 1, "prefill_chunk": 32}
        known = Settings(device="cpu", executor=executor, precision="float32", models={"chat": str(windowed)}, **sizes)
        engine = Engine(Metrics(known.models))
        engine.start()
        try:
            registry = ModelRegistry(engine, known, observer=Metrics(known.models))
            await registry.load_all()
            (model,) = registry.models()
            prompts = [tuple((7 * n + place) % 90 for place in range(150)) for n in range(3)]
            requests = [Generate(str(n), prompt, 40, sampling=Sampling(0.0)) for n, prompt in enumerate(prompts)]
            streams = registry.submit(model, requests)
            found = [[event.id async for event in stream if isinstance(event, GeneratedToken)] for stream in streams]
            return found, registry._loaded_models["chat"].need.window_blocks
        finally:
            await engine.close(0)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryPrediction, "_window_limit", 0)
        expected, none = asyncio.run(answers())
    found, some = asyncio.run(answers())
    assert (found, none) == (expected, 0)
    assert some > 0


@pytest.mark.skipif(not runnable_targets(), reason="no compiled library for this processor")
@pytest.mark.parametrize("sizes", [{"max_running": 8}, {"max_running": 1, "prefill_chunk": 1}], ids=["many", "few"])
def test_what_a_precision_costs_is_measured_with_windows(windowed: Path, sizes: dict[str, int], tmp_path: Path) -> None:
    """In a cache where windowed layers have blocks of their own, also few of them."""

    async def load(registry: ModelRegistry) -> tuple[Model, int]:
        await registry.load_all()
        (model,) = registry.models()
        return model, registry._loaded_models["m"].need.window_blocks

    model, blocks = serving({"m": windowed}, load, model_dir=tmp_path, executor="native", precision="int8", **sizes)
    assert (model.dtype, blocks > 0) == ("int8", True)

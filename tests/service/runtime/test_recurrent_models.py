"""Networks with recurrent layers from checkpoint to worker: memory for their states, drafts refused, answers."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM
from typer.testing import CliRunner

from polyhead.models import checkpoint
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.step_memory import native_state_bytes
from polyhead.models.network.recurrent_state import state_bytes
from polyhead.service.cli import main as cli
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import InsufficientMemory
from polyhead.service.core.request import Generate, GeneratedToken, Sampling
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.state_slots import smallest_slot_count
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.draft_choice import choose_draft_model
from polyhead.service.runtime.memory_budget import (
    CHECKPOINT_STATES,
    CachePlan,
    MemoryBudget,
    MemoryPrediction,
    describe_state_shortage,
    measure_model,
    smallest_need,
)
from polyhead.service.runtime.registry import ModelRegistry
from tests.support import checkpoints


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with short convolutions beside one with attention."""
    tokenizer = checkpoints.byte_level_bpe()
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        layer_types=["conv", "full_attention", "conv"],
        eos_token_id=tokenizer.eos_token_id,
    )
    return checkpoints.save(Lfm2ForCausalLM(config), tokenizer, tmp_path_factory.mktemp("hybrid"))


def settings(**given: Any) -> Settings:
    return Settings(device="cpu", **given)


def test_memory_holds_two_states_for_each_sequence_and_some_more(hybrid: Path) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(hybrid)))
    slot = state_bytes(model.config)
    assert slot == 2 * 64 * 2 * 4, "two layers, 64 channels, two rows before a token"
    need = MemoryBudget(1 << 40, settings(executor="torch")).plan(model)
    assert (need.sequences, need.state_count) == (64, smallest_slot_count(64) + CHECKPOINT_STATES)
    assert need.states == need.state_count * slot
    assert need.total >= need.weights + need.cache + need.states
    assert not describe_state_shortage(model, need, settings())
    if runnable_targets():
        packed = MemoryBudget(1 << 40, settings(executor="native")).plan(model)
        assert packed.states == packed.state_count * native_state_bytes(model.config)


def test_sequences_come_before_blocks_and_these_before_cached_states(hybrid: Path) -> None:
    model = measure_model("chat", checkpoint.describe_source(str(hybrid)))
    known = settings(max_running=8, cache_tokens=256, executor="torch")
    smallest = smallest_need(model, known)
    assert (smallest.sequences, smallest.state_count) == (1, smallest_slot_count(1))
    with pytest.raises(InsufficientMemory, match=r"states 1 \(4 slots\)"):
        MemoryBudget(smallest.total - 1, known).plan(model)
    prediction = MemoryPrediction(model, known)
    for count in (1, 3, 8):
        limit = prediction.need(CachePlan(smallest.blocks, count)).total
        assert MemoryBudget(limit, known).plan(model).sequences == count
    enough = prediction.need(CachePlan(smallest.blocks, 8)).total
    assert MemoryBudget(enough + 3 * state_bytes(model.config), known).plan(model).state_count == 2 * 8 + 2 + 3
    few = MemoryBudget(prediction.need(CachePlan(smallest.blocks, 3)).total, known).plan(model)
    shortage = "chat: 3 of its sequences run at once, not the 8 of max_running, since a state has 1 MiB"
    assert describe_state_shortage(model, few, known) == shortage


def test_check_shows_the_states(hybrid: Path, tiny_generator: Path) -> None:
    arguments = ("check", f"chat={hybrid}", f"plain={tiny_generator}", "--cache-tokens", "512", "--memory-mib", "100")
    result = CliRunner().invoke(cli.app, [*arguments, "--device", "cpu", "--explain", "false"])
    assert result.exit_code == 0, result.output
    header, chat, plain, *_ = result.stdout.splitlines()
    assert header.split() == ["model", "weights", "cache", "states", "workspace", "total"]
    assert f"1 ({smallest_slot_count(64) + CHECKPOINT_STATES} slots)" in chat
    assert " - " in plain


@pytest.mark.parametrize("role", ["the model", "the draft"])
def test_a_recurrent_network_neither_drafts_nor_gets_drafts(hybrid: Path, tiny_generator: Path, role: str) -> None:
    model, draft = (hybrid, tiny_generator) if role == "the model" else (tiny_generator, hybrid)
    known = settings(models={"chat": str(model)}, drafts={"chat": str(draft)})
    with pytest.raises(UnsupportedError, match=rf"cannot draft for chat: {role} is recurrent, and the states"):
        choose_draft_model("chat", checkpoint.describe_source(str(model)), known)


def ask(folder: Path, prompts: list[tuple[int, ...]], **given: Any) -> list[list[int]]:
    """The answers to prompts that are submitted at once."""

    async def run() -> list[list[int]]:
        known = settings(models={"chat": str(folder)}, cache_tokens=1024, deterministic=True, **given)
        engine = Engine(Metrics(known.models))
        engine.start()
        try:
            registry = ModelRegistry(engine, known, observer=Metrics(known.models))
            await registry.load_all()
            (model,) = registry.models()
            asked = [
                Generate(str(number), prompt, 12, sampling=Sampling(seed=number))
                for number, prompt in enumerate(prompts)
            ]
            streams = registry.submit(model, asked)
            return [[event.id async for event in stream if isinstance(event, GeneratedToken)] for stream in streams]
        finally:
            await engine.close(0)

    return asyncio.run(run())


def test_a_hybrid_model_is_loaded_and_answers_the_same_beside_others(
    hybrid: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [tuple(range(5, 5 + length)) for length in (3, 40, 17, 40)]
    with caplog.at_level(logging.INFO, "polyhead.loader"):
        together = ask(hybrid, prompts)
    assert "chat: nothing is drafted for it: the states of recurrent layers cannot go back" in caplog.text
    assert all(together)
    assert ask(hybrid, prompts, max_running=1, prefill_chunk=16) == together

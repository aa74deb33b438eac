"""Draft models: the checks of a draft model, its memory, its load; and answers with it are the same as without."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.models import checkpoint
from polyhead.service.config.settings import Settings, SettingsError, read_settings
from polyhead.service.core.request import Generate, GeneratedToken, Sampling, Task
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.worker import RequestEnd, StepReport
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.draft_choice import choose_draft_model
from polyhead.service.runtime.memory_budget import measure_model, memory_need
from polyhead.service.runtime.registry import ModelRegistry
from tests.support import checkpoints


@pytest.fixture(scope="module")
def other_vocabulary_generator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generator with another vocabulary."""
    tokenizer = checkpoints.byte_level_bpe(320)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes))
    return checkpoints.save(model, tokenizer, tmp_path_factory.mktemp("stranger"))


class Counts:
    def __init__(self) -> None:
        self.drafted = self.accepted = self.steps = 0

    def record_step(self, report: StepReport) -> None:
        self.steps += 1
        self.drafted += report.drafted
        self.accepted += report.accepted

    def record_end(self, ended: RequestEnd) -> None:
        pass

    def record_idle(self, model: str, task: Task) -> None:
        pass


def run_requests(folder: Path, **settings: Any) -> tuple[list[list[int]], Counts, dict[str, str]]:
    """Return eight concurrent answers of 60 tokens, the counts of drafted tokens, and the broken models."""

    async def run() -> tuple[list[list[int]], Counts, dict[str, str]]:
        known = Settings(models={"chat": str(folder)}, cache_tokens=1024, **settings)
        counts = Counts()
        engine = Engine(counts)
        engine.start()
        try:
            registry = ModelRegistry(engine, known, observer=Metrics(known.models))
            await registry.load_all()
            broken = {name: state.reason for name, state in registry.states().items() if state.reason}
            if broken:
                return [], counts, broken
            counts.drafted = counts.accepted = counts.steps = 0
            sampling = [Sampling(temperature=0), Sampling(seed=3), Sampling(top_p=0.5, seed=4), Sampling(0.2, seed=5)]
            asked = [
                Generate(str(number), (5 + number, 6, 7, 8, 9), 60, sampling=sampling[number % 4])
                for number in range(8)
            ]
            streams = registry.submit(registry.models()[0], asked)
            answers = [[event.id async for event in stream if isinstance(event, GeneratedToken)] for stream in streams]
            return answers, counts, broken
        finally:
            await engine.close(0)

    return asyncio.run(run())


@pytest.mark.parametrize("executor", ["torch", "native"])
def test_a_draft_model_changes_no_answer(tiny_generator: Path, executor: str) -> None:
    plain, without, _ = run_requests(tiny_generator, draft_tokens=0, executor=executor)
    drafts = {"chat": str(tiny_generator)}
    drafted_answers, with_draft, _ = run_requests(tiny_generator, draft_tokens=4, drafts=drafts, executor=executor)
    assert drafted_answers == plain
    assert without.drafted == 0
    assert with_draft.accepted <= with_draft.drafted
    assert with_draft.drafted > 0


def test_another_vocabulary_is_refused_with_both_names(tiny_generator: Path, other_vocabulary_generator: Path) -> None:
    _, _, broken = run_requests(tiny_generator, drafts={"chat": str(other_vocabulary_generator)})
    assert broken["chat"].startswith(other_vocabulary_generator.name)
    assert "cannot draft for chat: its vocabulary (320 tokens, the model has 384) is another one" in broken["chat"]


def test_a_classifier_cannot_be_a_draft_model(tiny_generator: Path, tiny_classifier: Path) -> None:
    _, _, broken = run_requests(tiny_generator, drafts={"chat": str(tiny_classifier)})
    assert "the draft has a head for 'classify'; both must generate text" in broken["chat"]


def test_a_draft_is_counted_in_the_budget(tiny_generator: Path) -> None:
    known = Settings(models={"chat": str(tiny_generator)}, drafts={"chat": str(tiny_generator)})
    what = checkpoint.describe_source(str(tiny_generator))
    alone = memory_need(measure_model("chat", what), known, 10)
    both = memory_need(measure_model("chat", what, choose_draft_model("chat", what, known)), known, 10)
    assert (both.weights, both.cache, both.blocks) == (2 * alone.weights, 2 * alone.cache, 10)


def test_drafts_are_for_models_that_are_served() -> None:
    assert read_settings({"models": ["a=x"], "drafts": "a=y"}).drafts == {"a": "y"}
    with pytest.raises(SettingsError, match="drafts: no model is called 'b'; there are: a"):
        ModelRegistry(Engine(Metrics([])), read_settings({"models": ["a=x"], "drafts": "b=y"}), observer=Metrics([]))
    with pytest.raises(SettingsError, match="drafts: with draft_tokens 0 nothing is drafted"):
        read_settings({"models": ["a=x"], "drafts": "a=y", "draft_tokens": 0})

"""Models that answer questions about a text, from folder to engine: logits are those of the packages laya and gliner2,
which are recorded in decision_answers.json."""

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest

from polyhead.models.native.library import runnable_targets
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import WrongTask
from polyhead.service.core.request import DEFAULT_TERMS, HeadOutput
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.text.decision_prompts import QuestionedText, read_decision
from tests.support import decision_models

TOLERANCE = 2e-5  # of a logit
Logits = list[list[float]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    made = tmp_path_factory.mktemp("decisions")
    return {name: str(decision_models.make_variant(name, made / name)) for name in decision_models.VARIANTS}


def decide(folders: dict[str, str], asked: Sequence[QuestionedText], **options: str) -> dict[str, list[Logits]]:
    """By model, the logits of each decision; those of one model are computed in one step."""

    async def answers() -> dict[str, list[Logits]]:
        known = Settings(device="cpu", explain=False, models=folders, **options)
        engine = Engine(Metrics(known.models))
        engine.start()
        try:
            registry = ModelRegistry(engine, known, observer=Metrics(known.models))
            await registry.load_all()
            found = dict[str, list[Logits]]()
            for model in registry.models():
                assert model.task == "decide"
                read = [read_decision(model, each, f"call-{n}", DEFAULT_TERMS) for n, each in enumerate(asked)]
                streams = iter(registry.submit(model, [request for each in read for request in each.requests]))
                found[model.name] = []
                for each in read:
                    outputs = []
                    for _ in each.requests:
                        outputs += [event.values async for event in next(streams) if isinstance(event, HeadOutput)]
                    found[model.name].append(each.read_logits(outputs))
            with pytest.raises(WrongTask, match=re.escape("marks can answer questions about a text, it cannot embed")):
                registry.resolve("marks", ("embed",))
            return found
        finally:
            await engine.close(0)

    return asyncio.run(answers())


def compiled(folders: dict[str, str]) -> dict[str, str]:
    """Those whose network the compiled step computes; the scores of the other one have a bias by distance."""
    if not runnable_targets():
        pytest.skip("no compiled library for this processor")
    return {name: folder for name, folder in folders.items() if name != "schema"}


def check(found: Sequence[Logits], expected: Sequence[Logits], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for question, own, wanted in zip(decision_models.QUESTIONS, mine, theirs, strict=True):
            assert own == pytest.approx(wanted, abs=tolerance), question.instructions


ASKED = [decision_models.ask(text) for text in decision_models.TEXTS]


@pytest.mark.parametrize("executor", ["native", "torch"])
def test_logits_are_those_of_the_packages(folders: dict[str, str], executor: str) -> None:
    if executor == "native":
        folders = compiled(folders)
    found, expected = decide(folders, ASKED, executor=executor, precision="float32"), decision_models.read_answers()
    assert found.keys() == folders.keys() <= expected.keys() == set(decision_models.VARIANTS)
    for name in found:
        check(found[name], expected[name], TOLERANCE)


def test_int8_is_near_and_answers_do_not_depend_on_others(folders: dict[str, str]) -> None:
    folders = compiled(folders)
    options = {"executor": "native", "precision": "int8"}
    together, expected = decide(folders, ASKED, **options), decision_models.read_answers()
    alone = decide({"marks": folders["marks"]}, [replace(ASKED[1], questions=ASKED[1].questions[2:3])], **options)
    assert alone["marks"][0] == [together["marks"][1][2]], "each question is a sequence of its own"
    for name in folders:
        check(together[name], expected[name], 0.1)

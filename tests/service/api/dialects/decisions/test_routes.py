"""GET /v1/decisions/calibration: what the file of a calibration says of a served model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyhead.service.api.dialects.decisions.write import count_numbers
from polyhead.service.core.calibration import Calibration
from polyhead.service.core.model import Model
from polyhead.service.resources.request_memory import BYTES_PER_NUMBER, Headroom
from tests.support.calibrations import HIGH_BINS, LOW_BIN, MEASURES, served_map
from tests.support.scripted import Registry, application, ask, echo, model

PATH = "/v1/decisions/calibration"
ASKED = {"name": "refund?", "digest": "a" * 32}


@pytest.fixture(scope="module")
def judge(tiny_classifier: Path) -> Model:
    maps = served_map(), served_map(kind="predicate", question=ASKED)
    return model(tiny_classifier, "judge", "classify", labels=("a", "b"), calibration=Calibration(maps))


@pytest.fixture(scope="module")
def plain(judge: Model) -> Model:
    return replace(judge, name="plain", calibration=Calibration())


def get(path: str, *served: Model, **settings: Any) -> Any:
    [answer] = ask(application(Registry(served, echo), **settings), (path, None))
    return answer


def test_the_measures_of_every_map_are_answered(judge: Model) -> None:
    for path in (PATH, f"/models/judge{PATH}"):
        answer = get(path, judge)
        assert answer.status_code == 200
        found = answer.json()
        assert (found["object"], found["model"]) == ("calibration", "judge")
        kind, question = found["maps"]
        assert kind == {
            "name": judge.calibration.maps[0].name,
            "kind": "choice",
            "question": None,
            "method": "temperature",
            "fitted_answers": 50,
            "held_out_answers": 50,
            "before": MEASURES | {"bins": HIGH_BINS},
            "after": MEASURES | {"bins": [LOW_BIN, {"confidence": 0.62, "accuracy": 0.6, "answers": 30}]},
        }
        assert (question["kind"], question["question"]) == ("predicate", ASKED)


def test_without_a_calibration_there_are_no_maps(judge: Model, plain: Model) -> None:
    assert get(f"/models/plain{PATH}", judge, plain).json()["maps"] == []


def test_a_model_is_named_where_several_answer_questions(judge: Model, plain: Model, tiny_embedder: Path) -> None:
    assert "/models/NAME/...: judge, plain" in get(PATH, judge, plain).json()["error"]["message"]
    vectors = model(tiny_embedder, "vectors", "embed")
    assert get(PATH, judge, vectors).json()["model"] == "judge"
    assert "models that can: judge" in get(f"/models/vectors{PATH}", judge, vectors).json()["error"]["message"]
    assert get(f"/models/unknown{PATH}", judge).status_code == 404


def test_its_memory_is_claimed_before_it_is_taken(judge: Model) -> None:
    headroom = Headroom(free=0)
    headroom.reserve(int(headroom.total) - count_numbers(judge.calibration) * BYTES_PER_NUMBER, "another answer")
    app = application(Registry([judge], echo), headroom)
    assert [answer.status_code for answer in ask(app, (PATH, None), (PATH, None))] == [200, 200]
    headroom.reserve(1, "one byte more")
    [refused] = ask(app, (PATH, None))
    assert refused.status_code == 429
    assert "the calibration takes about" in refused.json()["error"]["message"]


def test_the_numbers_are_counted_as_they_are_written(judge: Model) -> None:
    def count(value: Any) -> int:
        match value:
            case dict():
                return sum(map(count, value.values()))
            case list():
                return sum(map(count, value))
            case _:
                return isinstance(value, int | float)

    assert count(get(PATH, judge).json()) == count_numbers(judge.calibration)

"""Moderations by scripted classifiers."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, HeadOutput
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, Headroom
from tests.support.scripted import Registry, application, ask, model

SCORES = {"toxic": 0.75, "spam": 0.25}


def score(model: Model, request: Any) -> Any:
    yield HeadOutput(list(SCORES.values()))
    yield Done("encoded", len(request.tokens))


@pytest.fixture
def app(tiny_classifier: Path) -> FastAPI:
    return application(Registry([model(tiny_classifier, "judge", "classify", labels=tuple(SCORES))], score))


def results(app: FastAPI, **body: Any) -> list[Any]:
    (answer,) = ask(app, ("/v1/moderations", body))
    assert answer.status_code == 200, answer.text
    found: list[Any] = answer.json()["results"]
    return found


def test_labels_are_flagged_at_one_half_or_at_their_thresholds(app: FastAPI) -> None:
    (one,) = results(app, input="a")
    assert one["category_scores"] == SCORES
    assert (one["flagged"], one["categories"]) == (True, {"toxic": True, "spam": False})
    (one,) = results(app, input="a", thresholds={"toxic": 0.8})
    assert (one["flagged"], one["categories"]) == (False, {"toxic": False, "spam": False})
    (one,) = results(app, input="a", thresholds={"spam": 0.25})
    assert one["categories"] == {"toxic": False, "spam": True}


def test_strings_are_inputs_and_parts_are_one_input(app: FastAPI) -> None:
    assert len(results(app, model="judge", input=["a", "b"])) == 2
    assert len(results(app, input=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])) == 1


def test_an_unknown_label_is_named(app: FastAPI) -> None:
    (answer,) = ask(app, ("/v1/moderations", {"input": "a", "thresholds": {"bad": 0.5}}))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "thresholds: the model has no label 'bad'; it has toxic, spam"


def test_the_memory_of_all_results_is_claimed_before_the_first_is_computed(tiny_classifier: Path) -> None:
    """A label stands three times in each result."""
    labels, begun = tuple(f"label {number}" for number in range(300)), list[Any]()

    def score_all(model: Model, request: Any) -> Any:
        begun.append(request)
        yield HeadOutput([0.25] * len(labels))
        yield Done("encoded", len(request.tokens))

    registry = Registry([model(tiny_classifier, "judge", "classify", labels=labels)], score_all)
    app = application(registry, Headroom(free=ALLOCATOR_BYTES + (40 << 20)))
    assert [len(one["categories"]) for one in results(app, input=["a"] * 10)] == [300] * 10
    begun.clear()
    (answer,) = ask(app, ("/v1/moderations", {"input": ["a"] * 1000}))
    assert answer.status_code == 413
    assert "the answer takes about" in answer.json()["error"]["message"]
    assert not begun

"""The description of a model for clients, and the tests of a checkpoint with very many labels."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from polyhead.service.api.shared.task_names import (
    MAX_LISTED_CHARACTERS,
    MAX_LISTED_LABELS,
    describe_model,
    shorten_labels,
)
from polyhead.service.core.model import Model
from tests.support.scripted import Registry, application, ask, model

COUNT = 20_000


class CountedLabels(tuple[str, ...]):
    """Labels that count how many of them are looked at."""

    seen = 0

    def __iter__(self) -> Iterator[str]:
        for label in super().__iter__():
            CountedLabels.seen += 1
            yield label


@pytest.fixture
def served(tiny_classifier: Path) -> Model:
    return model(tiny_classifier, "judge", "classify", labels=tuple(f"label {index}" for index in range(COUNT)))


def test_a_description_in_a_list_has_the_first_labels_and_their_number(served: Model) -> None:
    described = describe_model(served, explained=True, whole=False)
    assert len(described["labels"]) == MAX_LISTED_LABELS
    assert described["label_count"] == COUNT
    assert shorten_labels(("a",)) == ("a",)
    assert shorten_labels(("a" * MAX_LISTED_CHARACTERS, "b")) == ("a" * MAX_LISTED_CHARACTERS,)
    assert shorten_labels(("a" * (MAX_LISTED_CHARACTERS + 1),)) == ()


def test_labels_are_looked_at_once_and_not_for_each_call(served: Model) -> None:
    served = replace(served, labels=CountedLabels(served.labels))
    describe_model(served, explained=True, whole=False)
    CountedLabels.seen = 0
    describe_model(served, explained=True, whole=False)
    assert CountedLabels.seen <= MAX_LISTED_LABELS


def test_a_list_is_short_and_a_path_of_one_model_has_all_labels(served: Model) -> None:
    app = application(Registry([served], lambda *_: ()))
    listed, one, info, tensors = ask(
        app, ("/v1/models", None), ("/v1/models/judge", None), ("/models/judge/info", None), ("/v2/models/judge", None)
    )
    assert len(listed.content) < 16_384
    assert listed.json()["data"][0]["labels"] == list(served.labels[:MAX_LISTED_LABELS])
    assert one.json()["labels"] == list(served.labels) == tensors.json()["parameters"]["labels"]
    assert len(info.json()["model_type"]["classifier"]["id2label"]) == COUNT

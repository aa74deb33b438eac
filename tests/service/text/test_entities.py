"""Labelled tokens merged into entities as the pipeline of transformers does it, with real tokenizers and
tiny networks.
"""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers as tf

from polyhead.models.tokenizer import Encoding, Tokenizer
from polyhead.service.text.entities import Aggregation, Entity, TaggingSettings, find_entities, merge_windows
from tests.service.engine.test_head_outputs import answered, read, worker
from tests.support import checkpoints

TEXTS = [
    "The quick brown fox, in Paris: unbelievable jumping!",
    "Größere naïve café   (schöner) 日本語 テキスト...",
    "lovers",
    " \n spaced  out\ttabs 12345 a1b2-c3 🙂 ok",
    "\u1e9e\u0307 unknown \u4e2d\u6587 \U0001f9d1\u200d\U0001f680 signs \u00ad end",
]
ALL = " ".join(TEXTS)


class Case:
    """A checkpoint, with the entities that transformers finds and those that we find."""

    def __init__(self, folder: Path, kind: Any) -> None:
        model, tokenizer = kind.from_pretrained(folder), tf.PreTrainedTokenizerFast.from_pretrained(folder)
        with torch.no_grad():  # so that the tokens have different labels
            model.classifier.bias -= model(**tokenizer(TEXTS[0], return_tensors="pt")).logits[0].mean(dim=0)
        model.save_pretrained(folder)
        self.theirs = tf.pipeline("token-classification", model=model, tokenizer=tokenizer)
        self.reader, self.tokenizer = worker(folder), Tokenizer.from_folder(folder)

    def tagging(self, aggregation: Aggregation, ignored: tuple[str, ...] = ()) -> TaggingSettings:
        return TaggingSettings(
            tokenizer=self.tokenizer,
            labels=checkpoints.ENTITIES,
            aggregation=aggregation,
            ignored_labels=frozenset(ignored),
        )

    def ours(self, text: str, tagging: TaggingSettings, encoding: Encoding | None = None) -> list[Entity]:
        encoding = encoding or self.tokenizer.encode(text)
        [event] = answered(self.reader, read(encoding.ids))
        return find_entities(tagging, text, encoding, np.asarray(event.scores))


@pytest.fixture(scope="module", params=[tf.BertForTokenClassification, tf.RobertaForTokenClassification])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(checkpoints.encoder(tmp_path_factory.mktemp("tagger"), request.param), request.param)


def same(found: list[Entity], expected: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        label = theirs.get("entity", theirs.get("entity_group"))
        assert (ours.label, ours.word, ours.start, ours.end) == (
            label,
            *(theirs[key] for key in ("word", "start", "end")),
        )
        assert ours.index == theirs.get("index", -1)
        assert ours.score == pytest.approx(theirs["score"], abs=1e-5)


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
@pytest.mark.parametrize("aggregation", get_args(Aggregation))
def test_as_the_pipeline_does(case: Case, aggregation: Aggregation) -> None:
    tagging = case.tagging(aggregation)
    for text in (*TEXTS, ALL[:150]):
        expected = case.theirs(text, aggregation_strategy=aggregation, ignore_labels=[])
        same(case.ours(text, tagging), expected)
        kept = case.theirs(text, aggregation_strategy=aggregation)
        same(case.ours(text, case.tagging(aggregation, ("O",))), kept)
    assert len(expected) > 3


@pytest.mark.filterwarnings("ignore:Tokenizer does not support real words")
def test_entities_of_overlapping_windows(case: Case) -> None:
    """A text cut into windows as transformers does it."""
    tokenizer, tagging = case.theirs.tokenizer, case.tagging("first", ("O",))
    before = tokenizer.model_max_length
    tokenizer.model_max_length = 32
    try:
        expected = case.theirs(ALL, aggregation_strategy="first", stride=10)
        cut = tokenizer(ALL, truncation=True, return_overflowing_tokens=True, stride=10)
    finally:
        tokenizer.model_max_length = before
    windows = [Encoding(each) for each in cut.encodings]
    assert len(windows) > 3
    same(merge_windows(entity for window in windows for entity in case.ours(ALL, tagging, window)), expected)


def scored(*labels: tuple[str, float]) -> np.ndarray[Any, Any]:
    """Rows in which the given label has the given probability, and the first other label the rest."""
    rows = np.zeros((len(labels) + 2, len(checkpoints.ENTITIES)), np.float32)
    for row, (label, score) in enumerate(labels, 1):
        at = checkpoints.ENTITIES.index(label)
        rows[row, at] = score
        rows[row, 0 if at else 1] += 1 - score
    return rows


@pytest.mark.parametrize(
    ("aggregation", "found"),
    [
        ("none", ["B-PER 0-3", "I-LOC 3-4", "B-PER 5-9"]),
        ("simple", ["PER 0-3", "LOC 3-4", "PER 5-9"]),
        ("first", ["PER 0-4", "PER 5-9"]),
        ("max", ["LOC 0-4", "PER 5-9"]),
        ("average", ["LOC 0-4", "PER 5-9"]),
    ],
)
def test_words_and_groups(tmp_path: Path, aggregation: Aggregation, found: list[str]) -> None:
    """Two pieces of a word that disagree, and a word that begins an entity of its own."""
    checkpoints.word_piece().save_pretrained(tmp_path)
    tokenizer = Tokenizer.from_folder(tmp_path)
    encoding = tokenizer.encode("foxe lazy")
    assert encoding.pieces == ["[CLS]", "fox", "##e", "lazy", "[SEP]"]
    tagging = TaggingSettings(tokenizer=tokenizer, labels=checkpoints.ENTITIES, aggregation=aggregation)
    got = find_entities(tagging, "foxe lazy", encoding, scored(("B-PER", 0.6), ("I-LOC", 0.9), ("B-PER", 0.8)))
    assert [f"{entity.label} {entity.start}-{entity.end}" for entity in got] == found

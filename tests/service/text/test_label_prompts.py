"""Prompts with labels: the rows of labels and words, cut texts, errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core.errors import EncodingError
from polyhead.models.core.label_prompt import LabelPrompt
from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core.errors import BadRequest, EmptyInput, TooLong
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS
from polyhead.service.text.encoder_inputs import EncodedInput, EncodingRequest, WindowOptions
from polyhead.service.text.label_prompts import read_labelled_inputs
from tests.support import label_models
from tests.support.scripted import model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    label_models.tokenizer("<<ENT>>", "<<LABEL>>", "<<SEP>>").save_pretrained(path)
    return path


def spans(folder: Path, **prompt: Any) -> Model:
    label = Tokenizer.from_folder(folder).token_id("<<ENT>>")
    known = {"label": "<<ENT>>", "separator": "<<SEP>>", "label_id": label, "max_words": 6, "max_width": 2, **prompt}
    return model(folder, "finder", "label_spans", label_prompt=LabelPrompt(**known))


def texts(folder: Path, **prompt: Any) -> Model:
    label = Tokenizer.from_folder(folder).token_id("<<LABEL>>")
    known = {"label": "<<LABEL>>", "separator": "<<SEP>>", "label_id": label, **prompt}
    return model(folder, "classifier", "label_texts", label_prompt=LabelPrompt(**known), max_tokens=16)


def read(served: Model, *inputs: str, **options: Any) -> list[EncodedInput | BadRequest]:
    request = EncodingRequest(field="inputs", inputs=inputs, **{"labels": ("person", "new film"), **options})
    return read_labelled_inputs(served, request, "call", DEFAULT_TERMS)


def one(served: Model, text: str, **options: Any) -> EncodedInput:
    [found] = read(served, text, **options)
    assert isinstance(found, EncodedInput)
    return found


def pieces(served: Model, found: EncodedInput) -> list[str]:
    return [served.tokenizer.piece(id) for id in found.requests[0].tokens]


def test_words_are_read_after_labels(folder: Path) -> None:
    served = spans(folder)
    found = one(served, "the fox, born")
    assert [piece.replace("\u2581", "_") for piece in pieces(served, found)] == [
        *("[CLS]", "<<ENT>>", "_person", "<<ENT>>", "_new", "_film", "<<SEP>>"),
        *("_the", "_fox", "_", ",", "_born", "[SEP]"),
    ]
    assert (found.requests[0].label_rows, found.requests[0].text_rows) == ((1, 3), (7, 8, 9, 11))
    assert found.words == ((0, 3), (4, 7), (7, 8), (9, 13))
    last = one(spans(folder, uses_last_piece=True), "the fox, born")
    assert last.requests[0].text_rows == (7, 8, 10, 11)


def test_texts_are_cut_by_words(folder: Path) -> None:
    served, text = spans(folder), "the a fox dog runs over jumps"
    with pytest.raises(
        TooLong, match=r"inputs: the input has 7 words and, with the labels, 16 tokens; the model takes 6"
    ):
        read(served, text)
    cut = one(served, text, truncate="right")
    assert cut.words == tuple(label_models_words(text)[:6])
    assert one(served, text, truncate="left").words == tuple(label_models_words(text)[1:])
    short = replace(served, max_tokens=11)
    cut = one(short, text, truncate="right")
    assert (len(cut.words), len(cut.requests[0].tokens)) == (2, 11)
    assert pieces(short, cut)[-3:] == ["\u2581", "a", "[SEP]"]
    assert cut.requests[0].text_rows == (7, 8)
    with pytest.raises(TooLong, match=r"parameters.candidate_labels: have 8 tokens, the model takes 8"):
        read(replace(served, max_tokens=8), text, truncate="right")


def label_models_words(text: str) -> list[tuple[int, int]]:
    found, start = [], 0
    for word in text.split():
        found.append((start, start + len(word)))
        start += len(word) + 1
    return found


@pytest.mark.parametrize(("is_first", "side", "kept"), [(True, "right", "the"), (False, "left", "jumps")])
def test_whole_texts_are_cut_and_labels_are_not(folder: Path, is_first: bool, side: Any, kept: str) -> None:
    served = texts(folder, is_first=is_first, starts_at_separator=True)
    whole = one(served, "the fox")
    start = 6 if is_first else 8
    assert whole.requests[0].text_rows == tuple(range(start, len(whole.requests[0].tokens)))
    text = "the a fox dog runs over jumps the a fox dog runs over jumps"
    with pytest.raises(TooLong, match=r"inputs: the input has \d+ tokens with the labels, the model takes 16"):
        read(served, text)
    cut = one(served, text, truncate=side)
    assert len(cut.requests[0].tokens) == 16
    assert f"\u2581{kept}" in pieces(served, cut)
    assert len(cut.requests[0].label_rows) == 2
    with pytest.raises(TooLong, match=r"parameters\.candidate_labels: have"):
        read(replace(served, max_tokens=6), text, truncate=side)


def test_errors_name_the_field(folder: Path) -> None:
    with pytest.raises(BadRequest, match="no label may have <<SEP>> in it"):
        read(spans(folder), "a", labels=("a <<SEP>>",))
    with pytest.raises(BadRequest, match="finder needs labels to look for"):
        read(spans(folder), "a", labels=())
    with pytest.raises(BadRequest, match="finder reads no windows"):
        read(spans(folder), "a", windows=WindowOptions())
    with pytest.raises(EmptyInput, match="inputs: is empty"):
        read(spans(folder), "  ")
    with pytest.raises(BadRequest, match="inputs: must be a text, finder reads it beside labels"):
        read(spans(folder), ("a", "b"))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"inputs: must not have <<LABEL>> in it"):
        read(texts(folder), "a <<LABEL>> b")
    with pytest.raises(EncodingError, match="lone surrogate"):
        read(spans(folder), "a \ud800")
    good, empty = read(spans(folder), "a fox", " ", partial=True)
    assert isinstance(good, EncodedInput)
    assert isinstance(empty, EmptyInput)

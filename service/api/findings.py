"""What heads find, as plain values of the form that transformers' pipelines give them.

Knows no dialect, no wire object and no engine.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

from service.answers import Word
from service.entities import Entity
from service.spans import Answer

Function = Literal["", "sigmoid", "softmax", "none"]


def label(name: str, score: float) -> dict[str, Any]:
    return {"label": name, "score": score}


def ranked(names: Sequence[str], scores: Sequence[float]) -> list[dict[str, Any]]:
    """The best first; of equals the earlier."""
    return sorted(map(label, names, scores), key=lambda one: -one["score"])


def applied(function: Function, raw: list[float]) -> list[float]:
    """A function over a classifier's scores; no name leaves them as the head made them."""
    match function:
        case "sigmoid":
            return [sigmoid(score) for score in raw]
        case "softmax":
            powers = [math.exp(score - max(raw)) for score in raw]
            return [power / sum(powers) for power in powers]
        case _:
            return raw


def sigmoid(score: float) -> float:
    return 1 / (1 + math.exp(-score)) if score >= 0 else 1 - sigmoid(-score)


def entity(found: Entity) -> dict[str, Any]:
    """A token has its index; what is put together of several is a group."""
    place = {"word": found.word, "start": found.start, "end": found.end}
    if found.index < 0:
        return {"entity_group": found.label, "score": found.score, **place}
    return {"entity": found.label, "score": found.score, "index": found.index, **place}


def span(found: Answer) -> dict[str, Any]:
    return {"score": found.score, "start": found.start, "end": found.end, "answer": found.text}


def words(masks: Sequence[Sequence[Word]]) -> list[Any]:
    """The words for each mask; for a text with a single one these alone."""
    each = [[word(one) for one in mask] for mask in masks]
    return each[0] if len(each) == 1 else each


def word(guess: Word) -> dict[str, Any]:
    return {"score": guess.score, "token": guess.token, "token_str": guess.text, "sequence": guess.sequence}

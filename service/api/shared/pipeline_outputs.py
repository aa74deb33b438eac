"""What heads find, as plain values of the form that transformers' pipelines give them.

Knows no dialect, no wire object and no engine.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...text.answer_spans import SpanAnswer
from ...text.encoder_outputs import MaskCandidate
from ...text.entities import Entity
from ...text.zero_shot import softmax

ScoreFunction = Literal["", "sigmoid", "softmax", "none"]


def write_label(name: str, score: float) -> dict[str, Any]:
    return {"label": name, "score": score}


def rank_labels(
    names: Sequence[str], scores: Sequence[float], most: int = 0, threshold: float = -np.inf
) -> Iterator[dict[str, Any]]:
    """The best first; of equals the earlier.  At most `most` of them unless it is 0, and none below `threshold`.

    One at a time: a dict for each label of each text would take far more memory than they have as JSON.
    """
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")[: most or None]
    return (write_label(names[index], scores[index]) for index in order.tolist() if scores[index] >= threshold)


def apply_function(function: ScoreFunction, raw: list[float]) -> list[float]:
    """A function over a classifier's scores; no name leaves them as the head made them."""
    match function:
        case "sigmoid":
            return list(map(float, sigmoid(np.asarray(raw, np.float64))))
        case "softmax":
            return list(map(float, softmax(np.asarray(raw, np.float64))))
        case _:
            return raw


def sigmoid(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = 1 / (1 + np.exp(-np.abs(scores)))
    return np.where(scores >= 0, shares, 1 - shares)


def write_entity(found: Entity) -> dict[str, Any]:
    """A token has its index; what is put together of several is a group."""
    place = {"word": found.word, "start": found.start, "end": found.end}
    if found.index < 0:
        return {"entity_group": found.label, "score": found.score, **place}
    return {"entity": found.label, "score": found.score, "index": found.index, **place}


def write_span(found: SpanAnswer) -> dict[str, Any]:
    return {"score": found.score, "start": found.start, "end": found.end, "answer": found.text}


def write_masks(masks: Sequence[Sequence[MaskCandidate]]) -> list[Any]:
    """The words for each mask; for a text with a single one these alone."""
    each = [[write_word(one) for one in mask] for mask in masks]
    return each[0] if len(each) == 1 else each


def write_word(guess: MaskCandidate) -> dict[str, Any]:
    return {"score": guess.score, "token": guess.token, "token_str": guess.text, "sequence": guess.filled_text}

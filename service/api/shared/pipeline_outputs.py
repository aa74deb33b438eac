"""Results of heads as JSON values, in the format of transformers' pipelines."""

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
    names: Sequence[str], scores: Sequence[float], limit: int = 0, threshold: float = -np.inf
) -> Iterator[dict[str, Any]]:
    """The best labels first; equal scores keep their order.

    At most `limit` of them unless it is 0, and none below `threshold`.  An iterator: a dict for each label of each text
    would take far more memory than its JSON.
    """
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")[: limit or None]
    return (write_label(names[index], scores[index]) for index in order.tolist() if scores[index] >= threshold)


def rank_choices(scores: Sequence[float]) -> Iterator[dict[str, Any]]:
    """The best choices first, by their index; equal scores keep their order."""
    order = np.argsort(-np.asarray(scores, np.float64), kind="stable")
    return ({"index": index, "score": scores[index]} for index in order.tolist())


def apply_function(function: ScoreFunction, raw: list[float]) -> list[float]:
    """Apply `function` to a classifier's scores; without a name they stay as the head computed them."""
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
    """A single token has its index; several aggregated tokens are a group."""
    place = {"word": found.word, "start": found.start, "end": found.end}
    if found.index < 0:
        return {"entity_group": found.label, "score": found.score, **place}
    return {"entity": found.label, "score": found.score, "index": found.index, **place}


def write_span(found: SpanAnswer) -> dict[str, Any]:
    return {"score": found.score, "start": found.start, "end": found.end, "answer": found.text}


def write_masks(masks: Sequence[Sequence[MaskCandidate]]) -> list[Any]:
    """The candidates for each mask; for a text with one mask its list alone."""
    each = [[write_word(one) for one in mask] for mask in masks]
    return each[0] if len(each) == 1 else each


def write_word(guess: MaskCandidate) -> dict[str, Any]:
    return {"score": guess.score, "token": guess.token, "token_str": guess.text, "sequence": guess.filled_text}

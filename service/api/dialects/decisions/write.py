"""Answers of OpenAI's decisions API."""

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ....core.calibration import Calibration, CalibrationMap
from ....core.model import Model
from ....decisions.question import OptionScores
from ....text.answer_delta import NO_USAGE
from ...shared.question_fields import write_extras
from .wire import ChoiceQuestion, DecisionsRequest, PredicateQuestion, ScoreQuestion, WireQuestion

NUMBERS_PER_MAP, NUMBERS_PER_BIN = 10, 3


def write_decisions(wire: DecisionsRequest, found: Sequence[OptionScores]) -> dict[str, Any]:
    usage = sum((scores.usage for scores in found), NO_USAGE)
    pairs = zip(wire.questions, found, strict=True)
    return {
        "id": f"dec_{uuid.uuid4().hex}",
        "object": "decision",
        "model": wire.model,
        "answers": [write_answer(question, scores, wire.min_confidence) for question, scores in pairs],
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": usage.prompt_tokens - usage.cached_tokens,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def write_answer(question: WireQuestion, scores: OptionScores, min_confidence: float) -> dict[str, Any]:
    """The object of one question; `calibration` is there if one was applied, `explanation` if it was asked for."""
    name: dict[str, Any] = {"name": question.name or None}
    if scores.confidence < min_confidence:
        return {"type": "refusal", **name}
    name |= write_extras(scores)
    match question:
        case PredicateQuestion():
            return {"type": "predicate", **name, "probability": scores.probabilities[0]}
        case ChoiceQuestion(choices=choices):
            shares = zip(choices, scores.probabilities, strict=True)
            return {
                "type": "choice",
                **name,
                "choice": choices[scores.chosen].value,
                "confidence": scores.confidence,
                "probabilities": [{"value": choice.value, "probability": share} for choice, share in shares],
            }
        case ScoreQuestion(levels=levels):
            return {
                "type": "score",
                **name,
                "score": scores.mean_level,
                "confidence": scores.confidence,
                "probabilities": [
                    {"value": index, "label": level.label, "probability": share}
                    for index, (level, share) in enumerate(zip(levels, scores.probabilities, strict=True))
                ],
            }


def count_numbers(calibration: Calibration) -> int:
    """How many numbers `write_calibration` writes."""
    bins = sum(len(each.before.bins) + len(each.after.bins) for each in calibration.maps)
    return NUMBERS_PER_MAP * len(calibration.maps) + NUMBERS_PER_BIN * bins


def write_calibration(model: Model) -> dict[str, Any]:
    """`kind` is OpenAI's; the kind `noul` of /v1/systemone is a predicate. A `question` of null: all of the kind."""
    return {"object": "calibration", "model": model.name, "maps": list(map(write_map, model.calibration.maps))}


def write_map(applied: CalibrationMap) -> dict[str, Any]:
    question = {"name": applied.question_name, "digest": applied.question} if applied.question else None
    return {
        "name": applied.name,
        "kind": applied.kind,
        "question": question,
        "method": applied.method,
        "fitted_answers": applied.fitted_answers,
        "held_out_answers": applied.held_out_answers,
        "before": asdict(applied.before),
        "after": asdict(applied.after),
    }

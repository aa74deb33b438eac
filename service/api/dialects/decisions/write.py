"""Answers of OpenAI's decisions API."""

import uuid
from collections.abc import Sequence
from typing import Any

from ....decisions.question import OptionScores
from ....text.answer_delta import NO_USAGE
from ...shared.question_fields import write_extras
from .wire import ChoiceQuestion, DecisionsRequest, PredicateQuestion, ScoreQuestion, WireQuestion


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

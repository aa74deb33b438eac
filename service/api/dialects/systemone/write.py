"""Answers of /v1/systemone, with vLLM's diagnostics."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ....core.errors import PolyheadError
from ....decisions.question import DecisionRequest, OptionScores, Question
from ....text.answer_delta import NO_USAGE
from ...shared.openai_errors import write_openai_error
from ...shared.question_fields import write_extras


def write_systemone(model: str, decision: DecisionRequest, found: Sequence[OptionScores]) -> dict[str, Any]:
    pairs = list(zip(decision.questions, found, strict=True))
    usage = sum((scores.usage for scores in found), NO_USAGE)
    return {
        "id": f"decision-{uuid.uuid4().hex}",
        "object": "structured_decision",
        "created": int(time.time()),
        "model": model,
        "answers": {question.name: write_answer(question, scores) for question, scores in pairs},
        "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens},
        "diagnostics": {question.name: write_diagnostics(scores) for question, scores in pairs},
    }


def write_answer(question: Question, scores: OptionScores) -> dict[str, Any]:
    """The object of one question; `calibration` is there if one was applied, `explanation` if it was asked for."""
    match question.kind:
        case "predicate":
            yes, no = scores.probabilities
            answer = {"type": "noul", "noul": yes, "probabilities": {"yes": yes, "no": no}}
        case "choice":
            names = [option.name for option in question.options]
            answer = {
                "type": "choice",
                "choice": names[scores.chosen],
                "probabilities": dict(zip(names, scores.probabilities, strict=True)),
            }
        case "score":
            answer = {
                "type": "score",
                "score": scores.mean_level,
                "legend": {str(level): option.name for level, option in enumerate(question.options)},
                "probabilities": {str(level): share for level, share in enumerate(scores.probabilities)},
            }
    return {**answer, "confidence": scores.confidence, **write_extras(scores)}


def write_diagnostics(scores: OptionScores) -> dict[str, Any]:
    return {"label_mass": scores.label_mass, "argmax_is_label": scores.is_label_likeliest}


def write_error(error: PolyheadError) -> dict[str, Any]:
    """vLLM's clients read `error`, TypeSafe's `detail`."""
    return {**write_openai_error(error), "detail": error.message}

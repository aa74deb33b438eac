"""Fields that both dialects of decisions have, and JSON values as text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from ...decisions.question import MAX_PERMUTATIONS, OptionScores
from ...explain.explain_request import ExplainParameters
from .dialect import Wire, between, max_chars
from .explain_options import MAX_INDICES, MAX_STEPS

MAX_NAME_CHARS = 256  # characters of a question's name
Permutations = Annotated[int, between(1, MAX_PERMUTATIONS)]
QuestionName = Annotated[str, max_chars(MAX_NAME_CHARS)]
QuestionMethod = Literal["auto", "gradient_x_input", "integrated_gradients", "occlusion"]  # auto: by the model
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]


def json_text(value: str | Mapping[str, Any] | Sequence[Any] | None) -> str:
    """A text as it is, nothing as an empty text, any other value as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()


class QuestionExplain(Wire):
    """How the chosen option is explained, by attributions to the characters of the text."""

    method: QuestionMethod = "auto"
    steps: Annotated[int, between(1, MAX_STEPS)] = 50
    baseline: Literal["auto", "pad", "mask", "unk", "eos", "zero"] = "auto"
    window: Annotated[int, between(1, MAX_INDICES)] = 1

    @property
    def parameters(self) -> ExplainParameters:
        given = ExplainParameters(steps=self.steps, baseline=self.baseline, window=self.window)
        return replace(given, suits_model=True) if self.method == "auto" else replace(given, method=self.method)


class AskedQuestion(Wire):
    """Extensions that a question of each kind has."""

    permutations: Permutations = 1
    explain: QuestionExplain | None = None

    @property
    def explain_parameters(self) -> ExplainParameters | None:
        return self.explain.parameters if self.explain else None


def write_extras(scores: OptionScores) -> dict[str, Any]:
    """What an answer has beside its probabilities: the name of its calibration, and its explanation."""
    calibration = {"calibration": scores.calibration} if scores.calibration else {}
    return calibration | ({"explanation": scores.explanation} if scores.explanation else {})

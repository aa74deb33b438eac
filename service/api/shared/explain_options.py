"""How it is asked why: an object that stands beside a text, or is the option `explain` of a call that answers one.

Knows no dialect and no answer.
"""

from typing import Annotated, Literal

from pydantic import Field

from ...core.errors import BadRequest
from ...core.request import ExplainMethod
from ...explain.explain_request import NO_TARGET, ExplainParameters, TargetSpec
from .dialect import Count, Wire, between, max_items, must_be

MAX_INDICES = 1024  # layers, or heads
MAX_STEPS = 1000
MAX_TARGET_CHARS = 10_000  # characters

IndexList = Annotated[
    list[Annotated[int, between(0, MAX_INDICES)]], Field(min_length=1, fail_fast=True), max_items(MAX_INDICES)
]
TargetText = Annotated[str, Field(min_length=1, max_length=MAX_TARGET_CHARS)]
Position = Annotated[int, between(0, (1 << 31) - 1)]


class TargetFields(Wire):
    """What of the answer is explained; which of these there are is the task's to say."""

    label: Annotated[str | int, must_be("a label's name or its number")] | None = None
    start: Position | None = None
    end: Position | None = None
    token: Position | None = None
    mask: Position | None = None
    word: TargetText | None = None
    text: TargetText | None = None


class ExplainFields(Wire):
    """How an answer is explained: beside a text, or as the option `explain` of a call that answers it."""

    method: ExplainMethod = "attention"
    target: TargetFields = TargetFields()
    layers: IndexList = Field(default_factory=list)
    heads: IndexList = Field(default_factory=list)
    top_k: Count = 0
    dtype: Literal["float32", "float16"] = "float32"
    encoding: Literal["json", "base64"] = "json"
    steps: Annotated[int, between(1, MAX_STEPS)] = 50
    baseline: Literal["auto", "pad", "mask", "unk", "eos", "zero"] = "auto"
    window: Annotated[int, between(1, MAX_INDICES)] = 1


def read_explain_options(wire: ExplainFields, max_tokens: int = 0) -> ExplainParameters:
    """Raises BadRequest for numbers that JSON would not have at half their precision."""
    if wire.dtype == "float16" and wire.encoding == "json":
        raise BadRequest("dtype: float16 is told only as encoding base64", param="dtype")
    target = {name: value for name, value in wire.target.model_dump().items() if value is not None}
    return ExplainParameters(
        method=wire.method,
        target=TargetSpec(**target) if target else NO_TARGET,
        layers=tuple(dict.fromkeys(wire.layers)),
        heads=tuple(dict.fromkeys(wire.heads)),
        top_k=wire.top_k,
        as_base64=wire.encoding == "base64",
        half_precision=wire.dtype == "float16",
        steps=wire.steps,
        baseline=wire.baseline,
        window=wire.window,
        max_tokens=max_tokens,
    )

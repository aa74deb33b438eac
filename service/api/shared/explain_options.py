"""The wire object with the options of an explanation: a body of its own, or the field `explain` of other calls."""

from typing import Annotated, Literal

from pydantic import Field

from ...core.errors import BadRequest
from ...core.request import ExplainMethod
from ...explain.explain_request import NO_TARGET, ExplainParameters, TargetSpec
from .dialect import Count, Position, Wire, between, max_items, must_be

MAX_INDICES = 1024  # layers or heads
MAX_STEPS = 1000
MAX_TARGET_CHARS = 10_000  # characters

IndexList = Annotated[
    list[Annotated[int, between(0, MAX_INDICES)]], Field(min_length=1, fail_fast=True), max_items(MAX_INDICES)
]
TargetText = Annotated[str, Field(min_length=1, max_length=MAX_TARGET_CHARS)]


class TargetFields(Wire):
    """Which part of the answer is explained; the task decides which fields apply."""

    label: Annotated[str | Position, must_be("a label's name or its number")] | None = None
    start: Position | None = None
    end: Position | None = None
    token: Position | None = None
    mask: Position | None = None
    word: TargetText | None = None
    text: TargetText | None = None


class ExplainFields(Wire):
    """How an answer is explained."""

    method: Literal["auto", ExplainMethod] = "auto"
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
    """The explain options.  Raises BadRequest for float16 in JSON, which has no half precision."""
    if wire.dtype == "float16" and wire.encoding == "json":
        raise BadRequest("dtype: float16 needs the encoding base64", param="dtype")
    target = {name: value for name, value in wire.target.model_dump().items() if value is not None}
    return ExplainParameters(
        method="attention" if wire.method == "auto" else wire.method,
        suits_model=wire.method == "auto",
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

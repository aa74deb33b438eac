"""How it is asked why: an object that stands beside a text, or is the option `explain` of a call that answers one.

Knows no dialect and no answer.
"""

from typing import Annotated, Literal

from pydantic import Field

from ...core.errors import BadRequest
from ...core.request import Method
from ...explain.explain_request import NOTHING, Target, Why
from .dialect import Count, Wire, at_most, between, described

MOST_NAMED = 1024  # layers, or heads
MOST_STEPS = 1000
LONGEST_TARGET = 10_000  # characters

Numbers = Annotated[
    list[Annotated[int, between(0, MOST_NAMED)]], Field(min_length=1, fail_fast=True), at_most(MOST_NAMED)
]
Text = Annotated[str, Field(min_length=1, max_length=LONGEST_TARGET)]
Place = Annotated[int, between(0, (1 << 31) - 1)]


class Asked(Wire):
    """What of the answer is explained; which of these there are is the task's to say."""

    label: Annotated[str | int, described("a label's name or its number")] | None = None
    start: Place | None = None
    end: Place | None = None
    token: Place | None = None
    mask: Place | None = None
    word: Text | None = None
    text: Text | None = None


class Explaining(Wire):
    """How an answer is explained: beside a text, or as the option `explain` of a call that answers it."""

    method: Method = "attention"
    target: Asked = Asked()
    layers: Numbers = Field(default_factory=list)
    heads: Numbers = Field(default_factory=list)
    top_k: Count = 0
    dtype: Literal["float32", "float16"] = "float32"
    encoding: Literal["json", "base64"] = "json"
    steps: Annotated[int, between(1, MOST_STEPS)] = 50
    baseline: Literal["auto", "pad", "mask", "unk", "eos", "zero"] = "auto"
    window: Annotated[int, between(1, MOST_NAMED)] = 1


def why_of(wire: Explaining, max_tokens: int = 0) -> Why:
    """Raises BadRequest for numbers that JSON would not have at half their precision."""
    if wire.dtype == "float16" and wire.encoding == "json":
        raise BadRequest("dtype: float16 is told only as encoding base64", param="dtype")
    target = {name: value for name, value in wire.target.model_dump().items() if value is not None}
    return Why(
        method=wire.method,
        target=Target(**target) if target else NOTHING,
        layers=tuple(dict.fromkeys(wire.layers)),
        heads=tuple(dict.fromkeys(wire.heads)),
        top_k=wire.top_k,
        packed=wire.encoding == "base64",
        half=wire.dtype == "float16",
        steps=wire.steps,
        baseline=wire.baseline,
        window=wire.window,
        max_tokens=max_tokens,
    )

"""Moderation in the format of OpenAI: POST /v1/moderations.

The categories are the labels of a served classifier.  A label is flagged where its probability reaches its threshold.
"""

import uuid
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import BadRequest
from ....text.encoder_inputs import EncodingRequest
from ...shared.dialect import (
    MAX_TEXTS,
    Dialect,
    EngineRequest,
    Wire,
    authorized_models,
    between,
    max_items,
    must_be,
    record_model,
)
from ...shared.encoding_calls import collect_scores, json_response, reply_size
from ...shared.head_options import MAX_LABELS
from ...shared.openai_errors import write_openai_error
from ...shared.post_routes import add_post_routes

DEFAULT_THRESHOLD = 0.5
router = APIRouter(tags=["OpenAI"])


class ModerationPart(Wire):
    """A part of one input.  Images are refused by the name of their type."""

    type: Literal["text"]
    text: str


class ModerationRequest(EngineRequest):
    """`thresholds` is an extension: by label, the probability from which it is flagged; other labels never are.
    Without it each label is flagged from 0.5 on."""

    model: str = ""
    input: Annotated[
        str | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[ModerationPart], Field(fail_fast=True)],
        must_be('a string, a list of strings, or a list of objects {"type": "text", "text": ...}'),
        max_items(MAX_TEXTS),
    ]
    thresholds: Annotated[dict[str, Annotated[float, between(0, 1)]], max_items(MAX_LABELS)] = Field(
        default_factory=dict
    )


def read_moderation(wire: ModerationRequest) -> EncodingRequest:
    """Each string is an input; parts are one input together."""
    if isinstance(wire.input, str):
        return EncodingRequest(field="input", inputs=(wire.input,))
    parts = [each for each in wire.input if isinstance(each, ModerationPart)]
    if parts:
        return EncodingRequest(field="input", inputs=("\n".join(part.text for part in parts),))
    return EncodingRequest(field="input", inputs=tuple(each for each in wire.input if isinstance(each, str)))


def label_thresholds(wire: ModerationRequest, labels: Sequence[str]) -> Mapping[str, float]:
    """Raises BadRequest for a label that the model does not have."""
    for label in wire.thresholds:
        if label not in labels:
            message = f"the model has no label {label[:60]!r}; it has {', '.join(labels[:20])}"
            raise BadRequest(f"thresholds: {message}", param="thresholds")
    return wire.thresholds or dict.fromkeys(labels, DEFAULT_THRESHOLD)


def write_moderation(labels: Sequence[str], values: Sequence[float], thresholds: Mapping[str, float]) -> dict[str, Any]:
    scores = dict(zip(labels, values, strict=True))
    categories = {label: label in thresholds and score >= thresholds[label] for label, score in scores.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": {label: ["text"] for label in scores},
    }


@add_post_routes(router, "/v1/moderations", ModerationRequest, "Which labels texts reach.")
async def answer_moderation(request: Request, wire: ModerationRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve_or_only(wire.model, ["classify"]))
    thresholds = label_thresholds(wire, model.labels)
    outputs = await collect_scores(request, wire, model, read_moderation(wire))

    def write() -> dict[str, Any]:
        results = [write_moderation(model.labels, output.values, thresholds) for output in outputs]
        return {"id": f"modr-{uuid.uuid4().hex}", "model": wire.model or model.name, "results": results}

    return await json_response(sum(map(reply_size, outputs)), write)


DIALECT = Dialect(
    name="OpenAI moderations",
    prefixes=("/v1/moderations",),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)

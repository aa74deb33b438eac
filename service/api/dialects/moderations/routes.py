"""Moderation in the format of OpenAI: POST /v1/moderations.

The categories are the labels of a served classifier.  A label is flagged where its probability reaches its threshold.
"""

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ....core.errors import BadRequest
from ....core.model import Model
from ....text.encoder_inputs import EncodingRequest
from ....text.encoder_outputs import ScoreOutput
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
from ...shared.encoding_calls import ReplyWriter, max_label_bytes, start_replies, write_body
from ...shared.head_options import MAX_LABELS
from ...shared.openai_errors import write_openai_error
from ...shared.post_routes import add_post_routes

DEFAULT_THRESHOLD = 0.5
OVERHEAD_BYTES = 128  # bytes of one result without its labels
LABEL_COPIES = 3  # in one result
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
    known = frozenset(labels)
    for label in wire.thresholds:
        if label not in known:
            message = f"the model has no label {label[:60]!r}; it has {', '.join(labels[:20])}"
            raise BadRequest(f"thresholds: {message}", param="thresholds")
    return wire.thresholds or dict.fromkeys(labels, DEFAULT_THRESHOLD)


def result_writer(model: Model, thresholds: Mapping[str, float]) -> ReplyWriter:
    """Writes the result for each input."""
    labels = model.labels
    applied = orjson.Fragment(orjson.dumps({label: ["text"] for label in labels}))  # the same in all results
    return ReplyWriter(
        write_one=partial(write_moderation, labels, thresholds, applied),
        write_error=write_openai_error,
        max_bytes=OVERHEAD_BYTES + LABEL_COPIES * max_label_bytes(model.label_bytes),
    )


def write_moderation(
    labels: Sequence[str], thresholds: Mapping[str, float], applied: orjson.Fragment, answer: ScoreOutput
) -> dict[str, Any]:
    scores = dict(zip(labels, answer.values, strict=True))
    categories = {label: label in thresholds and score >= thresholds[label] for label, score in scores.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": applied,
    }


@add_post_routes(router, "/v1/moderations", ModerationRequest, "Which labels texts reach.")
async def answer_moderation(request: Request, wire: ModerationRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve_or_only(wire.model, ["classify"]))
    thresholds, encoding = label_thresholds(wire, model.labels), read_moderation(wire)
    replies = await start_replies(request, wire, model, encoding)
    results = await write_body(request, replies, result_writer(model, thresholds), len(encoding.inputs))
    before = orjson.dumps({"id": f"modr-{uuid.uuid4().hex}", "model": wire.model or model.name})[:-1]
    return results.response(before + b',"results":[', b"]}")


DIALECT = Dialect(
    name="OpenAI moderations",
    prefixes=("/v1/moderations",),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)

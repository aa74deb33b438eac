"""The dialect of OpenAI's responses: items in, items out, nothing kept, under /v1/responses.

Its wire objects are `responses_wire`, what they ask `responses_read`, its answers `responses_write`; here is only the
way between them.
"""

import time
import uuid
from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ...shared.dialect import Dialect, about, body, permitted, takes
from ...shared.generation_calls import json_of, kept, spoken
from ...shared.openai_errors import write_error
from ...shared.output_items import said, streamed
from ...shared.streaming import EventStream, answer, events, named
from .read import read_response, repeated
from .wire import ResponseRequest
from .write import Call, Events, write_response

router = APIRouter(tags=["OpenAI responses"])


@router.post("/v1/responses", openapi_extra=takes(ResponseRequest), summary="Answer a conversation of items.")
async def responses(request: Request) -> Response:
    wire = await body(request, ResponseRequest)
    return await answer(request, respond(request, wire))


async def respond(request: Request, wire: ResponseRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, ["generate"]))
    call = Call(id=f"resp_{uuid.uuid4().hex}", created=int(time.time()), asked=repeated(wire))
    *_, utterances = await spoken(request, wire, model, read_response(wire), call.id)
    if wire.stream:
        told = Events(call)
        return await EventStream.open(events(streamed(told, utterances), told.failed, spell=named))
    parts = await said(kept(request, utterances))
    return await json_of(parts, lambda: write_response(call, parts))


DIALECT = Dialect(
    name="OpenAI responses", prefixes=("/v1/responses",), error=write_error, status=attrgetter("status"), router=router
)

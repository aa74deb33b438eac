"""Routes of OpenAI's responses API, under /v1/responses.  Nothing is stored."""

import time
import uuid
from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....text.answer_stream import collect_deltas
from ...shared.dialect import (
    Dialect,
    authorized_models,
    record_model,
    request_context,
)
from ...shared.generation_calls import ScoreClaim, start_answers, write_json
from ...shared.openai_errors import write_openai_error
from ...shared.output_items import stream_items
from ...shared.post_routes import add_post_routes
from ...shared.streaming import EventStream, encode_events, encode_named_event
from .read import echo_request, read_response
from .wire import ResponseRequest
from .write import ResponseEvents, ResponseInfo, write_response

router = APIRouter(tags=["OpenAI responses"])


@add_post_routes(router, "/v1/responses", ResponseRequest, "Answer a conversation of items.")
async def answer_response(request: Request, wire: ResponseRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    echo = echo_request(wire, model)
    call = ResponseInfo(id=f"resp_{uuid.uuid4().hex}", created=int(time.time()), request_fields=echo)
    answers = await start_answers(request, wire, model, read_response(wire), call.id)
    if wire.stream:
        response_events = ResponseEvents(call)
        items = stream_items(response_events, answers)
        chunks = encode_events(items, response_events.failure_event, encode=encode_named_event)
        return await EventStream.open(chunks)
    [deltas] = await collect_deltas(answers, ScoreClaim(request_context(request).claim).add)
    return await write_json(request, deltas, lambda: write_response(call, deltas))


DIALECT = Dialect(
    name="OpenAI responses",
    prefixes=("/v1/responses",),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)

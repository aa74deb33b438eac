"""The Anthropic dialect: messages, and how many tokens they are, under /v1/messages.

Its wire objects are `anthropic_wire`, what they ask `anthropic_read`, its answers `anthropic_write`; here is only the
way between them.
"""

import uuid
from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....text.chat_prompt import fitted
from ....text.prompts import Chat
from ...shared.dialect import Dialect, about, body, permitted, server, takes, terms, visit
from ...shared.generation_calls import json_of, spoken
from ...shared.output_items import said, streamed
from ...shared.streaming import EventStream, JsonResponse, answer, events, named
from .read import read_count, read_messages
from .wire import CountRequest, MessagesRequest
from .write import PING, Call, Events, write_count, write_error, write_message

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages", openapi_extra=takes(MessagesRequest), summary="The next turn of a conversation.")
async def messages(request: Request) -> Response:
    wire = await body(request, MessagesRequest)
    return await answer(request, converse(request, wire))


async def converse(request: Request, wire: MessagesRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, ["generate"]))
    call = Call(id=f"msg_{uuid.uuid4().hex}", model=wire.model, most=wire.max_tokens)
    _, length, utterances = await spoken(request, wire, model, read_messages(wire), call.id)
    if wire.stream:
        told = streamed(Events(call, length), utterances)
        return await EventStream.open(events(told, write_error, spell=named), still=named(PING))
    parts = await said(utterances)
    return await json_of(parts, lambda: write_message(call, parts))


@router.post(
    "/v1/messages/count_tokens", openapi_extra=takes(CountRequest), summary="How many tokens a conversation is."
)
async def count_tokens(request: Request) -> Response:
    wire = await body(request, CountRequest)
    return await answer(request, count(request, wire))


async def count(request: Request, wire: CountRequest) -> Response:
    model = about(request, permitted(request).resolve(wire.model, ["generate"]))
    [chat] = fitted(read_count(wire), model).prompts
    assert isinstance(chat, Chat), "a conversation"
    conditions = terms(request, wire)
    with visit(request).tokenising():
        _, ids = await server(request).text.prompted(model, chat, "messages", special=False, terms=conditions)
    return JsonResponse(write_count(len(ids)))


DIALECT = Dialect(
    name="Anthropic", prefixes=("/v1/messages",), error=write_error, status=attrgetter("status"), router=router
)

"""Routes of the Anthropic dialect: messages and their token counts, under /v1/messages."""

import uuid
from operator import attrgetter

from fastapi import APIRouter, Request
from starlette.responses import Response

from ....text.answer_stream import collect_deltas
from ....text.generation_request import ChatMessages
from ...shared.dialect import (
    Dialect,
    answer_threads,
    authorized_models,
    read_terms,
    record_model,
    request_context,
    text_processor,
)
from ...shared.generation_calls import fit_conversation, start_answers, write_json
from ...shared.output_items import stream_items
from ...shared.post_routes import add_post_routes
from ...shared.streaming import EventStream, JsonResponse, StreamWriter, encode_events, encode_item, frame_named_event
from .read import read_count, read_messages
from .wire import CountRequest, MessagesRequest
from .write import PING, MessageEvents, MessageInfo, write_anthropic_error, write_count, write_message

router = APIRouter(tags=["Anthropic"])


@add_post_routes(router, "/v1/messages", MessagesRequest, "The next turn of a conversation.")
async def answer_messages(request: Request, wire: MessagesRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    call = MessageInfo(id=f"msg_{uuid.uuid4().hex}", model=wire.model, max_tokens=wire.max_tokens)
    answers = await start_answers(request, wire, model, read_messages(wire), call.id)
    if wire.stream:
        message_events = stream_items(MessageEvents(call, answers.requests[0].prompt_tokens), answers)
        return await EventStream.open(
            encode_events(
                message_events, StreamWriter(answer_threads(request), write_anthropic_error, frame_named_event)
            ),
            keepalive=encode_item(PING, frame_named_event),
        )
    [deltas] = await collect_deltas(answers)
    return await write_json(request, deltas, lambda: write_message(call, deltas))


@add_post_routes(router, "/v1/messages/count_tokens", CountRequest, "How many tokens a conversation is.")
async def answer_count(request: Request, wire: CountRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    [chat] = (await fit_conversation(request, read_count(wire), model)).prompts
    assert isinstance(chat, ChatMessages), "a conversation"
    terms = read_terms(request, wire)
    with request_context(request).time_tokenising():
        _, ids = await text_processor(request).render_prompt(model, chat, "messages", special=False, terms=terms)
    return JsonResponse(write_count(len(ids)))


DIALECT = Dialect(
    name="Anthropic",
    prefixes=("/v1/messages",),
    error=write_anthropic_error,
    status=attrgetter("status"),
    router=router,
)

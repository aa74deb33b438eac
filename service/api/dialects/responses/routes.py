"""Routes of OpenAI's responses API, under /v1/responses."""

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Annotated, Any, Literal, TypeVar

import orjson
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from ....core.errors import BadRequest, BodyTooLarge, NoSuchResponse, NotFound, Overloaded
from ....resources.request_memory import BYTES_PER_BODY_BYTE
from ....text.answer_stream import collect_deltas
from ...shared.dialect import (
    Dialect,
    admit_reader,
    answer_threads,
    authorized_models,
    record_model,
    request_context,
    server,
)
from ...shared.generation_calls import start_answers, write_json
from ...shared.json_body import open_json
from ...shared.openai_errors import write_openai_error
from ...shared.output_items import OutputItem, collect_items, stream_items
from ...shared.post_routes import add_post_routes
from ...shared.streaming import (
    INLINE_BYTES,
    EventStream,
    JsonResponse,
    PartsResponse,
    StreamWriter,
    dump_chunks,
    encode_events,
    frame_named_event,
    json_weight,
)
from .read import echo_request, read_response
from .response_store import NO_MEMORY, ResponseStore, StoredResponse, Turn
from .stored_items import count_characters, dump_input, dump_output, read_items
from .wire import InputItem, ResponseRequest
from .write import ResponseEvents, ResponseInfo, write_response

router = APIRouter(tags=["OpenAI responses"])
MAX_LISTED_ITEMS, LISTED_ITEMS = 100, 20  # that a client may ask for, and gets
WRITTEN_BYTES = 6  # of a byte of text as JSON, at most
T = TypeVar("T")


def responses(request: Request) -> ResponseStore:
    found: ResponseStore = request.app.state.responses
    return found


def find_response(request: Request, response_id: str) -> StoredResponse:
    """Raises NotFound."""
    store = responses(request)
    if not store.is_enabled:
        raise NotFound("responses are not kept here; the server needs room for them (--responses-mib MIB)")
    return store.find(response_id, request_context(request).owner)


@add_post_routes(router, "/v1/responses", ResponseRequest, "Answer a conversation of items.")
async def answer_response(request: Request, wire: ResponseRequest) -> Response:
    model = record_model(request, authorized_models(request).resolve(wire.model, ["generate"]))
    stored = is_stored(request, wire)
    before = find_previous(request, wire)
    earlier = await read_conversation(request, before) if before else []
    id, created = f"resp_{uuid.uuid4().hex}", int(time.time())
    answers = await start_answers(request, wire, model, read_response(wire, earlier), id)
    echo = echo_request(wire, model, stored=stored)  # now that the sizes of tools and schema are checked
    call = ResponseInfo(id=id, created=created, request_fields=echo)
    kept = KeptCall(request, call, wire.input, before)
    if wire.stream:
        response_events = ResponseEvents(call)
        answers.keep_scores()  # the last events repeat the whole answer
        items = stream_items(response_events, answers)
        if stored:
            items = keep_at_end(items, lambda response: keep_streamed(kept, response_events.items.items, response))
        writer = StreamWriter(answer_threads(request), response_events.failure_event, frame_named_event)
        return await EventStream.open(encode_events(items, writer))
    [deltas] = await collect_deltas(answers)
    response = await write_json(request, deltas, lambda: write_response(call, deltas))
    if stored:
        status = "incomplete" if deltas[-1].finish == "length" else "completed"
        await keep_response(kept, lambda: collect_items(deltas), status, response.parts)
    return response


def is_stored(request: Request, wire: ResponseRequest) -> bool:
    """Whether the response is kept.  Raises BadRequest where the server keeps none and the request asks for it."""
    if responses(request).is_enabled:
        return wire.store
    if "store" in wire.model_fields_set and wire.store:
        message = "true is not supported by this server, which keeps no responses (--responses-mib MIB)"
        raise BadRequest(f"store: {message}", param="store")
    return False


def find_previous(request: Request, wire: ResponseRequest) -> Turn | None:
    """The turn that the request continues.  Raises NoSuchResponse."""
    if not wire.previous_response_id:
        return None
    try:
        return find_response(request, wire.previous_response_id).turn
    except NotFound as error:
        message = f"previous_response_id: {error.message}"
        raise NoSuchResponse(message, param="previous_response_id") from None


async def read_conversation(request: Request, turn: Turn) -> list[InputItem]:
    """The items of a conversation.  It may be as large as a body, and takes as much memory."""
    limit = server(request).settings.max_body_bytes
    if turn.total_size > limit:
        message = f"the conversation has {turn.total_size} bytes, at most {limit} are read (max_body_bytes)"
        raise BadRequest(f"previous_response_id: {message}", param="previous_response_id")
    request_context(request).claim.grow(BYTES_PER_BODY_BYTE * turn.total_size, "the conversation")
    text = await open_json(request, b"[%s]" % b",".join(turn.conversation()))
    return await text.run(lambda: read_items(text.parse("previous_response_id")))


@dataclass(frozen=True)
class KeptCall:
    """What is known of a response before it is there; `before` is the turn that it continues."""

    request: Request
    info: ResponseInfo
    inputs: Sequence[InputItem]
    before: Turn | None


async def keep_at_end(
    events: AsyncGenerator[dict[str, Any], None], keep: Callable[[dict[str, Any]], Awaitable[None]]
) -> AsyncGenerator[dict[str, Any], None]:
    """The same events.  `keep` is called with the whole response before the client learns that it has ended."""
    async for event in events:
        if event["type"] in ("response.completed", "response.incomplete"):
            await keep(event["response"])
        yield event


async def keep_streamed(kept: KeptCall, items: Sequence[OutputItem], response: dict[str, Any]) -> None:
    size = WRITTEN_BYTES * sum(len(item.text) for item in items)  # memory for log-probabilities is claimed already
    context = request_context(kept.request)
    try:
        context.claim.grow(size, "the response")
    except (BodyTooLarge, Overloaded):
        responses(kept.request).note_removed(kept.info.id, context.owner, NO_MEMORY)
        return
    size = json_weight(response, INLINE_BYTES)
    content = await run_sized(kept.request, size, partial(dump_chunks, response))
    await keep_response(kept, lambda: items, response["status"], content)


async def keep_response(
    kept: KeptCall, items: Callable[[], Sequence[OutputItem]], status: str, content: Sequence[bytes]
) -> None:
    """Keep a response with its conversation.  `content` is the response as JSON, in chunks; `status` is that of its
    last item.
    """

    def write_turn() -> Turn:
        return Turn(dump_input(kept.info, kept.inputs), dump_output(kept.info, items(), status), kept.before)

    turn = await run_sized(kept.request, count_characters(kept.inputs) + sum(map(len, content)), write_turn)
    owner = request_context(kept.request).owner
    responses(kept.request).keep(StoredResponse(kept.info.id, owner, tuple(content), turn))


async def run_sized(request: Request, size: int, function: Callable[[], T]) -> T:
    """Run `function`, which reads or writes `size` bytes; if they are many, on a thread."""
    return function() if size <= INLINE_BYTES else await answer_threads(request).run(size, function)


@router.get("/v1/responses/{response_id}", summary="A response that is kept.")
async def show_response(request: Request, response_id: str, *, stream: bool = False) -> Response:
    found = find_response(request, response_id)
    if stream:
        raise BadRequest("stream: true is not supported for a response that has ended", param="stream")
    admit_reader(request, found.size, "the response")
    return PartsResponse(found.content)


@router.delete("/v1/responses/{response_id}", summary="Delete a response that is kept.")
async def delete_response(request: Request, response_id: str) -> Response:
    find_response(request, response_id)
    responses(request).delete(response_id, request_context(request).owner)
    return JsonResponse({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items", summary="The items from which a response was generated.")
async def list_input_items(
    request: Request,
    response_id: str,
    after: str = "",
    limit: Annotated[int, Query(ge=1, le=MAX_LISTED_ITEMS)] = LISTED_ITEMS,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    found = find_response(request, response_id)
    size = found.turn.total_size
    admit_reader(request, BYTES_PER_BODY_BYTE * size, "the list")
    items = found.input_items() if order == "asc" else found.input_items()[::-1]
    content = await run_sized(request, size, lambda: write_page(items, after, limit))
    return Response(content, media_type=JsonResponse.media_type)


def write_page(items: Sequence[bytes], after: str, limit: int) -> bytes:
    """Up to `limit` items behind the one with the id `after`.  Raises BadRequest."""
    start = 0
    if after:
        start = next((place for place, item in enumerate(items, 1) if item_id(item) == after), 0)
        if not start:
            raise BadRequest(f"after: there is no {after[:60]!r} in this list", param="after")
    page = items[start : start + limit]
    ends = {
        "first_id": item_id(page[0]) if page else None,
        "last_id": item_id(page[-1]) if page else None,
        "has_more": start + limit < len(items),
    }
    return b'{"object":"list","data":[%s],%s' % (b",".join(page), orjson.dumps(ends)[1:])


def item_id(item: bytes) -> str:
    return str(orjson.loads(item)["id"])


DIALECT = Dialect(
    name="OpenAI responses",
    prefixes=("/v1/responses",),
    error=write_openai_error,
    status=attrgetter("status"),
    router=router,
)

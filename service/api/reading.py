"""How a call about many texts is answered: in one piece, or a line for each text as soon as it is known.

Knows no dialect's words.  The one idea: a dialect says what one text's answer looks like and what a list of them does;
who reads it as it comes (`Accept: application/x-ndjson`) gets the former, one line each, `{"index": 0, "result": ...}`.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

from service.answers import Reply, Scores, replies
from service.api.dialect import Work, server, submitter, terms, visit
from service.api.stream import JsonResponse, LineStream, dumps_sliced, events, line
from service.errors import PolyheadError
from service.inputs import Reading
from service.model import Model
from service.outcome import on_thread

Replies = AsyncGenerator[Reply | PolyheadError, None]
MANY = 64  # answers that are written off the event loop
STEPS = 2  # of one call that the engine has at a time: one to compute, and the next
R = TypeVar("R")


@dataclass(frozen=True)
class Writing:
    """How a dialect writes: `one` text's answer, `whole` the list of them, and an `error`."""

    one: Callable[[Any], Any]  # of its kind of Reply
    error: Callable[[PolyheadError], Mapping[str, Any]]
    whole: Callable[[list[Any]], Any] = lambda items: items

    def item(self, index: int, reply: Reply | PolyheadError) -> Any:
        """In a list that may have errors in it, each says where it is."""
        return {"index": index, **self.error(reply)} if isinstance(reply, PolyheadError) else self.one(reply)

    def line(self, index: int, reply: Reply | PolyheadError) -> Mapping[str, Any]:
        written: Mapping[str, Any] = self.item(index, reply)
        return written if isinstance(reply, PolyheadError) else {"index": index, "result": written}


async def read(request: Request, wire: Work, model: Model, asked: Reading) -> Replies:
    """The answers as they come.  Raises what is wrong with the texts; nothing is submitted yet."""
    call = f"{model.task}-{uuid.uuid4().hex}"
    with visit(request).tokenising():
        reads = await server(request).text.inputs(model, asked, call, terms(request, wire))
    ahead = STEPS * server(request).settings.encoder_step_tokens
    return replies(model, asked, reads, submitter(request, model), ahead)


async def every(answers: Replies, kind: type[R]) -> list[R]:
    """All of them, where one that fails ends the call."""
    async with aclosing(answers):
        return [kinded(answer, kind) async for answer in answers]


def kinded(answer: Reply | PolyheadError, kind: type[R]) -> R:
    if isinstance(answer, PolyheadError):
        raise answer
    assert isinstance(answer, kind), "a model of this task answers otherwise"
    return answer


async def scores(request: Request, wire: Work, model: Model, asked: Reading) -> list[Scores]:
    return await every(await read(request, wire, model, asked), Scores)


async def written(request: Request, answers: Replies, writing: Writing) -> Response:
    """In the form that the client accepts."""
    if LineStream.media_type in request.headers.get("accept", ""):
        return await LineStream.open(events(numbered(answers, writing), writing.error, spell=line))
    async with aclosing(answers):
        known = [answer async for answer in answers]
    return await spelled(len(known), lambda: all_of(known, writing))


async def spelled(count: int, content: Callable[[], Any]) -> Response:
    """As JSON; the vectors of many texts are millions of numbers, and not written on the event loop."""
    if count < MANY:
        return JsonResponse(content())
    return await on_thread(lambda: Response(dumps_sliced(content()), media_type=JsonResponse.media_type))


def all_of(known: list[Reply | PolyheadError], writing: Writing) -> Any:
    return writing.whole([writing.item(index, answer) for index, answer in enumerate(known)])


async def numbered(answers: Replies, writing: Writing) -> AsyncGenerator[Mapping[str, Any], None]:
    index = 0
    async with aclosing(answers):
        async for answer in answers:
            yield writing.line(index, answer)
            index += 1

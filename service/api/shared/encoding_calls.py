"""How a call about many texts is answered: in one piece, or a line for each text as soon as it is known.

Knows no dialect's words.  The one idea: a dialect says what one text's answer looks like and what a list of them does;
who reads it as it comes (`Accept: application/x-ndjson`) gets the former, one line each, `{"index": 0, "result": ...}`.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Any, TypeVar

import orjson
from fastapi import Request
from starlette.responses import Response

from ...concurrency.outcome import on_thread
from ...concurrency.time_slices import SLICE
from ...core.errors import PolyheadError
from ...core.model import Model
from ...core.request import Encode
from ...resources.request_memory import NUMBER, PLACED, STEP, TEXT, TOKEN, Claim
from ...text.detokenizer import Piece
from ...text.inputs import Read, Reading
from ...text.pipelines import Found, Guessed, Reply, Scores, States, Tagged, Weighed, replies
from .dialect import Work, server, submitter, terms, visit
from .streaming import LineStream, Parts, dumps_sliced, events, line

Replies = AsyncGenerator[Reply | PolyheadError, None]
FEW = 1 << 10  # numbers that are written on the event loop; more are written on a thread
PORTION = 1 << 15  # numbers that are written at a time
ENTRY = 48  # bytes of {"label":,"score":} and of a number with all its digits, without the label
TABLE = 8  # bytes for each number of a table: as float32, and a copy
NUMBER_32 = 16  # bytes of a 32-bit float as JSON, and the comma after it, at most
STEPS = 2  # of one call that the engine has at a time: one to compute, and the next
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class Writing:
    """How a dialect writes: `one` text's answer, and an `error`.

    `alone`: there is one answer, and no list around it.  `most`: bytes that one answer takes at most, where that is
    known before it is computed; memory for all of them is claimed before the first is.
    """

    one: Callable[[Any], Any]  # of its kind of Reply
    error: Callable[[PolyheadError], Mapping[str, Any]]
    alone: bool = False
    most: int = 0

    def item(self, index: int, reply: Reply | PolyheadError) -> Any:
        """In a list that may have errors in it, each says where it is."""
        return {"index": index, **self.error(reply)} if isinstance(reply, PolyheadError) else self.one(reply)

    def line(self, index: int, reply: Reply | PolyheadError) -> bytes:
        written = dumps_sliced(self.item(index, reply))
        return written if isinstance(reply, PolyheadError) else b'{"index":%d,"result":%s}' % (index, written)


def most_labels(labels: Sequence[str], top_k: int = 0) -> int:
    """Bytes of a text's labels with their scores, at most; with `top_k` only so many."""
    sizes = (len(orjson.dumps(label)) for label in labels)
    return sum(nlargest(top_k, sizes) if top_k else sizes) + ENTRY * min(top_k or len(labels), len(labels))


def most_numbers(width: int) -> int:
    """Bytes of a vector of 32-bit floats, about."""
    return NUMBER_32 * width


async def read(request: Request, wire: Work, model: Model, asked: Reading) -> Replies:
    """The answers as they come.  Raises what is wrong with the texts; nothing is submitted yet.

    Memory for what is computed is claimed for the whole call: a part of it would be computed in vain.
    """
    call = f"{model.task}-{uuid.uuid4().hex}"
    with visit(request).tokenising():
        reads = await server(request).text.inputs(model, asked, call, terms(request, wire))
    visit(request).claim.grow(sum(memory(model, one) for one in reads if isinstance(one, Read)), "the answer")
    ahead = STEPS * server(request).settings.encoder_step_tokens
    return replies(model, asked, reads, submitter(request, model), ahead)


def memory(model: Model, one: Read) -> int:
    """Bytes for an input's requests and what is computed for them, at most where that is known."""
    return sum(TEXT + TOKEN * request.prompt_tokens + computed(model, request) for request in one.requests)


def computed(model: Model, request: Encode) -> int:
    """Bytes of what a head answers: tables of float32, or lists of Python floats."""
    labels = len(model.labels)
    match model.task:
        case "embed":
            width = request.dimensions or model.width
            return TABLE * request.prompt_tokens * width if request.form == "tokens" else NUMBER * width
        case "tag":
            return (PLACED + TABLE * labels) * request.prompt_tokens
        case "classify" | "rank":
            return NUMBER * max(labels, 1)
        case "span":
            return (PLACED + TABLE * 2) * request.prompt_tokens
        case _:
            return 0


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


async def written(request: Request, answers: Replies, writing: Writing, count: int) -> Response:
    """In the form that the client accepts.  `count`: how many answers there will be."""
    if LineStream.media_type in request.headers.get("accept", ""):
        return await LineStream.open(events(numbered(answers, writing), writing.error, spell=line))
    body = await body_of(request, answers, writing, count)
    return body.response(b"", b"") if writing.alone else body.response()


class Body:
    """JSON of many answers, written a portion at a time.  What it takes is claimed before and while it grows.

    `prompt_tokens` are those of all answers in it.
    """

    def __init__(self, claim: Claim, expected: int) -> None:
        """`expected`: bytes of all of it, as far as that is known."""
        self._claim, self._parts, self._size, self._claimed = claim, list[bytes](), 0, 0
        self.prompt_tokens = 0
        self._reserve(expected)

    def add(self, part: bytes) -> None:
        """Raises BodyTooLarge or Overloaded where there is no memory for it."""
        self._size += len(part) + 1
        if self._size > self._claimed:
            self._reserve(max(self._size - self._claimed, STEP))
        self._parts += (b",", part) if self._parts else (part,)

    def response(self, before: bytes = b"[", after: bytes = b"]") -> Response:
        """All of it between `before` and `after`."""
        return Parts([before, *self._parts, after])

    def _reserve(self, size: int) -> None:
        self._claim.grow(size, "the answer")
        self._claimed += size


async def body_of(request: Request, answers: Replies, writing: Writing, count: int) -> Body:
    """Each portion of the answers is written, and dropped, before the next is asked for."""
    body, index = Body(visit(request).claim, count * writing.most), 0
    async with aclosing(answers):
        async for some in portions(answers):
            write = partial(items_of, writing, index, some)
            body.add(await apart(sum(map(size_of, some)), write))
            body.prompt_tokens += sum(one.usage.prompt_tokens for one in some if not isinstance(one, PolyheadError))
            index += len(some)
    return body


async def portions(answers: Replies) -> AsyncGenerator[list[Reply | PolyheadError], None]:
    """Lists of at most SLICE answers; one ends where it has PORTION numbers."""
    some, size = list[Reply | PolyheadError](), 0
    async for answer in answers:
        some.append(answer)
        size += size_of(answer)
        if size >= PORTION or len(some) == SLICE:
            yield some
            some, size = [], 0
    if some:
        yield some


def items_of(writing: Writing, index: int, some: Sequence[Reply | PolyheadError]) -> bytes:
    """JSON of answers of which the first is the `index`-th, without the list's brackets."""
    return b",".join(dumps_sliced(writing.item(index + place, answer)) for place, answer in enumerate(some))


def size_of(reply: Reply | PolyheadError) -> int:
    """About how many numbers, or other things that take as long to write."""
    match reply:
        case Scores(values=values):
            return len(values)
        case States(rows=rows):
            return rows.nbytes // rows.itemsize
        case Tagged(entities=found):
            return 8 * len(found)
        case Found(answers=found):
            return sum(8 + len(one.text) // 8 for one in found)
        case Guessed(masks=masks):
            return sum(8 + len(word.sequence) // 8 for mask in masks for word in mask)
        case Weighed(words=words):
            return 2 * len(words)
        case _:
            return 1


def piece_size(piece: Piece) -> int:
    """The same of a generated text: its tokens are written with those that were likely, where asked for."""
    return 8 + len(piece.text) // 8 + 8 * sum(1 + len(each.top) for each in (*piece.drawn, *piece.prompt))


async def apart(size: int, write: Callable[[], T]) -> T:
    """What `write` makes of `size` numbers: on the event loop if they are few, else on a thread."""
    return write() if size <= FEW else await on_thread(write)


async def spelled(size: int, content: Callable[[], Any]) -> Response:
    """`content` as JSON; with more than FEW numbers, or things that take as long, it is not made on the event loop."""
    return Parts([await apart(size, lambda: dumps_sliced(content()))])


async def numbered(answers: Replies, writing: Writing) -> AsyncGenerator[bytes, None]:
    """A line for each."""
    index = 0
    async with aclosing(answers):
        async for answer in answers:
            yield await apart(size_of(answer), partial(writing.line, index, answer))
            index += 1

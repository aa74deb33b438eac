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

from ...concurrency.outcome import run_on_thread
from ...concurrency.time_slices import SLICE_SIZE
from ...core.errors import PolyheadError
from ...core.model import Model
from ...core.request import Encode
from ...resources.request_memory import (
    ANSWER_CLAIM_STEP,
    BYTES_PER_NUMBER,
    BYTES_PER_OFFSET,
    BYTES_PER_TEXT,
    BYTES_PER_TOKEN,
    MemoryClaim,
)
from ...text.detokenizer import AnswerDelta
from ...text.encoder_inputs import EncodedInput, EncodingRequest
from ...text.encoder_outputs import (
    EncoderOutput,
    FillOutput,
    ScoreOutput,
    SpanOutput,
    SparseVector,
    TagOutput,
    TokenVectors,
    stream_outputs,
)
from .dialect import EngineRequest, read_terms, request_context, server, submitter
from .streaming import LineStream, PartsResponse, dumps_sliced, encode_events, encode_line

Replies = AsyncGenerator[EncoderOutput | PolyheadError, None]
INLINE_NUMBERS = 1 << 10  # numbers that are written on the event loop; more are written on a thread
PORTION_NUMBERS = 1 << 15  # numbers that are written at a time
LABEL_BYTES = 48  # bytes of {"label":,"score":} and of a number with all its digits, without the label
TABLE_BYTES = 8  # bytes for each number of a table: as float32, and a copy
FLOAT32_BYTES = 16  # bytes of a 32-bit float as JSON, and the comma after it, at most
STEPS_AHEAD = 2  # of one call that the engine has at a time: one to compute, and the next
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class ReplyWriter:
    """How a dialect writes: `one` text's answer, and an `error`.

    `alone`: there is one answer, and no list around it.  `most`: bytes that one answer takes at most, where that is
    known before it is computed; memory for all of them is claimed before the first is.
    """

    write_one: Callable[[Any], Any]  # of its kind of Reply
    write_error: Callable[[PolyheadError], Mapping[str, Any]]
    is_single: bool = False
    max_bytes: int = 0

    def build_item(self, index: int, reply: EncoderOutput | PolyheadError) -> Any:
        """In a list that may have errors in it, each says where it is."""
        return (
            {"index": index, **self.write_error(reply)} if isinstance(reply, PolyheadError) else self.write_one(reply)
        )

    def write_line(self, index: int, reply: EncoderOutput | PolyheadError) -> bytes:
        written = dumps_sliced(self.build_item(index, reply))
        return written if isinstance(reply, PolyheadError) else b'{"index":%d,"result":%s}' % (index, written)


def max_label_bytes(labels: Sequence[str], top_k: int = 0) -> int:
    """Bytes of a text's labels with their scores, at most; with `top_k` only so many."""
    sizes = (len(orjson.dumps(label)) for label in labels)
    return sum(nlargest(top_k, sizes) if top_k else sizes) + LABEL_BYTES * min(top_k or len(labels), len(labels))


def max_vector_bytes(width: int) -> int:
    """Bytes of a vector of 32-bit floats, about."""
    return FLOAT32_BYTES * width


async def start_replies(request: Request, wire: EngineRequest, model: Model, asked: EncodingRequest) -> Replies:
    """The answers as they come.  Raises what is wrong with the texts; nothing is submitted yet.

    Memory for what is computed is claimed for the whole call: a part of it would be computed in vain.
    """
    call = f"{model.task}-{uuid.uuid4().hex}"
    with request_context(request).time_tokenising():
        reads = await server(request).text.read_inputs(model, asked, call, read_terms(request, wire))
    request_context(request).claim.grow(
        sum(input_memory(model, one) for one in reads if isinstance(one, EncodedInput)), "the answer"
    )
    ahead = STEPS_AHEAD * server(request).settings.encoder_step_tokens
    return stream_outputs(model, asked, reads, submitter(request, model), ahead)


def input_memory(model: Model, one: EncodedInput) -> int:
    """Bytes for an input's requests and what is computed for them, at most where that is known."""
    return sum(
        BYTES_PER_TEXT + BYTES_PER_TOKEN * request.prompt_tokens + result_memory(model, request)
        for request in one.requests
    )


def result_memory(model: Model, request: Encode) -> int:
    """Bytes of what a head answers: tables of float32, or lists of Python floats."""
    labels = len(model.labels)
    match model.task:
        case "embed":
            width = request.dimensions or model.width
            return TABLE_BYTES * request.prompt_tokens * width if request.form == "tokens" else BYTES_PER_NUMBER * width
        case "tag":
            return (BYTES_PER_OFFSET + TABLE_BYTES * labels) * request.prompt_tokens
        case "classify" | "rank":
            return BYTES_PER_NUMBER * max(labels, 1)
        case "span":
            return (BYTES_PER_OFFSET + TABLE_BYTES * 2) * request.prompt_tokens
        case _:
            return 0


async def collect_replies(answers: Replies, kind: type[R]) -> list[R]:
    """All of them, where one that fails ends the call."""
    async with aclosing(answers):
        return [check_reply(answer, kind) async for answer in answers]


def check_reply(answer: EncoderOutput | PolyheadError, kind: type[R]) -> R:
    if isinstance(answer, PolyheadError):
        raise answer
    assert isinstance(answer, kind), "a model of this task answers otherwise"
    return answer


async def collect_scores(
    request: Request, wire: EngineRequest, model: Model, asked: EncodingRequest
) -> list[ScoreOutput]:
    return await collect_replies(await start_replies(request, wire, model, asked), ScoreOutput)


async def reply_response(request: Request, answers: Replies, writing: ReplyWriter, count: int) -> Response:
    """In the form that the client accepts.  `count`: how many answers there will be."""
    if LineStream.media_type in request.headers.get("accept", ""):
        return await LineStream.open(
            encode_events(write_lines(answers, writing), writing.write_error, spell=encode_line)
        )
    body = await write_body(request, answers, writing, count)
    return body.response(b"", b"") if writing.is_single else body.response()


class JsonListBody:
    """JSON of many answers, written a portion at a time.  What it takes is claimed before and while it grows.

    `prompt_tokens` are those of all answers in it.
    """

    def __init__(self, claim: MemoryClaim, expected: int) -> None:
        """`expected`: bytes of all of it, as far as that is known."""
        self._claim, self._parts, self._size, self._claimed = claim, list[bytes](), 0, 0
        self.prompt_tokens = 0
        self._reserve(expected)

    def add(self, part: bytes) -> None:
        """Raises BodyTooLarge or Overloaded where there is no memory for it."""
        self._size += len(part) + 1
        if self._size > self._claimed:
            self._reserve(max(self._size - self._claimed, ANSWER_CLAIM_STEP))
        self._parts += (b",", part) if self._parts else (part,)

    def response(self, before: bytes = b"[", after: bytes = b"]") -> Response:
        """All of it between `before` and `after`."""
        return PartsResponse([before, *self._parts, after])

    def _reserve(self, size: int) -> None:
        self._claim.grow(size, "the answer")
        self._claimed += size


async def write_body(request: Request, answers: Replies, writing: ReplyWriter, count: int) -> JsonListBody:
    """Each portion of the answers is written, and dropped, before the next is asked for."""
    body, index = JsonListBody(request_context(request).claim, count * writing.max_bytes), 0
    async with aclosing(answers):
        async for some in split_portions(answers):
            write = partial(write_items, writing, index, some)
            body.add(await run_off_loop(sum(map(reply_size, some)), write))
            body.prompt_tokens += sum(one.usage.prompt_tokens for one in some if not isinstance(one, PolyheadError))
            index += len(some)
    return body


async def split_portions(answers: Replies) -> AsyncGenerator[list[EncoderOutput | PolyheadError], None]:
    """Lists of at most SLICE answers; one ends where it has PORTION numbers."""
    some, size = list[EncoderOutput | PolyheadError](), 0
    async for answer in answers:
        some.append(answer)
        size += reply_size(answer)
        if size >= PORTION_NUMBERS or len(some) == SLICE_SIZE:
            yield some
            some, size = [], 0
    if some:
        yield some


def write_items(writing: ReplyWriter, index: int, some: Sequence[EncoderOutput | PolyheadError]) -> bytes:
    """JSON of answers of which the first is the `index`-th, without the list's brackets."""
    return b",".join(dumps_sliced(writing.build_item(index + place, answer)) for place, answer in enumerate(some))


def reply_size(reply: EncoderOutput | PolyheadError) -> int:
    """About how many numbers, or other things that take as long to write."""
    match reply:
        case ScoreOutput(values=values):
            return len(values)
        case TokenVectors(rows=rows):
            return rows.nbytes // rows.itemsize
        case TagOutput(entities=found):
            return 8 * len(found)
        case SpanOutput(answers=found):
            return sum(8 + len(one.text) // 8 for one in found)
        case FillOutput(masks=masks):
            return sum(8 + len(word.filled_text) // 8 for mask in masks for word in mask)
        case SparseVector(weights=words):
            return 2 * len(words)
        case _:
            return 1


def piece_size(piece: AnswerDelta) -> int:
    """The same of a generated text: its tokens are written with those that were likely, where asked for."""
    return 8 + len(piece.text) // 8 + 8 * sum(1 + len(each.top) for each in (*piece.logprobs, *piece.prompt_logprobs))


async def run_off_loop(size: int, write: Callable[[], T]) -> T:
    """What `write` makes of `size` numbers: on the event loop if they are few, else on a thread."""
    return write() if size <= INLINE_NUMBERS else await run_on_thread(write)


async def json_response(size: int, content: Callable[[], Any]) -> Response:
    """`content` as JSON; with more than FEW numbers, or things that take as long, it is not made on the event loop."""
    return PartsResponse([await run_off_loop(size, lambda: dumps_sliced(content()))])


async def write_lines(answers: Replies, writing: ReplyWriter) -> AsyncGenerator[bytes, None]:
    """A line for each."""
    index = 0
    async with aclosing(answers):
        async for answer in answers:
            yield await run_off_loop(reply_size(answer), partial(writing.write_line, index, answer))
            index += 1

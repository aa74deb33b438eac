"""Runs calls about many texts, and writes their answers: one JSON list, or a line for each text when it is ready.

A dialect defines how it writes the answer for one text.  With `Accept: application/x-ndjson` each answer is a line
`{"index": 0, "result": ...}`.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response

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
from ...text.answer_delta import AnswerDelta
from ...text.encoder_inputs import EncodedInput, EncodingRequest
from ...text.encoder_outputs import (
    EncoderOutput,
    FillOutput,
    ScoreOutput,
    SeveralOutputs,
    SpanOutput,
    SparseVector,
    TagOutput,
    TokenVectors,
    stream_outputs,
    submit_inputs,
)
from .dialect import (
    EngineRequest,
    answer_threads,
    output_job,
    read_terms,
    request_context,
    server,
    submitter,
    text_processor,
    turn_taker,
)
from .streaming import (
    LineStream,
    PartsResponse,
    StreamWriter,
    dump_chunks,
    dump_parts,
    encode_events,
    encode_item,
    frame_line,
    gather_parts,
)

Replies = AsyncGenerator[EncoderOutput | PolyheadError, None]
INLINE_NUMBERS = 1 << 10  # numbers that are written on the event loop; more are written on a thread
PORTION_NUMBERS = 1 << 15  # numbers that are written in one portion
LABEL_BYTES = 48  # bytes of {"label":,"score":} and of a number with all its digits, without the label
WORD_BYTES = 128  # bytes for each weight of a word: a tuple, its number and its float, and its slot
WRITTEN_BYTES = 24  # bytes of JSON for each unit of `reply_size`, at most
CHARACTERS_PER_UNIT = 4  # characters of a text that count as a unit of `reply_size`: a control character has 6 bytes
TABLE_BYTES = 8  # bytes for each number of a table: as float32, and a copy
FLOAT32_BYTES = 16  # bytes of a 32-bit float as JSON, and the comma after it, at most
STEPS_AHEAD = 2  # engine steps of one call that are submitted ahead: the current one and the next
R = TypeVar("R")
T = TypeVar("T")


@dataclass(frozen=True)
class ReplyWriter:
    """How a dialect writes the answers of a call: `write_one` answer, and `write_error`.

    `is_single`: there is one answer, without a list around it.  `max_bytes`: upper bound of one answer's bytes where it
    is known beforehand; memory for all answers is claimed before the first is computed.
    """

    write_one: Callable[[Any], Any]  # takes the task's EncoderOutput
    write_error: Callable[[PolyheadError], Mapping[str, Any]]
    is_single: bool = False
    max_bytes: int = 0

    def build_item(self, index: int, reply: EncoderOutput | PolyheadError) -> Any:
        """One item of the list; an error carries its index."""
        if isinstance(reply, PolyheadError):
            return {"index": index, **self.write_error(reply)}
        return self.write_one(reply)

    def write_line(self, index: int, reply: EncoderOutput | PolyheadError) -> list[bytes]:
        """One line of the stream, in chunks."""
        item = self.build_item(index, reply)
        if isinstance(reply, PolyheadError):
            return [encode_item(item, frame_line)]
        return dump_chunks(item, b'{"index":%d,"result":' % index, b"}\n")


def max_label_bytes(label_bytes: Sequence[int], top_k: int = 0) -> int:
    """Upper bound of the bytes of one text's labels with their scores; with `top_k` only of so many. `label_bytes`: the
    bytes of each label as JSON, the largest first."""
    sizes = label_bytes[:top_k] if top_k else label_bytes
    return sum(sizes) + LABEL_BYTES * len(sizes)


def max_vector_bytes(width: int) -> int:
    """Approximate bytes of a vector of `width` 32-bit floats."""
    return FLOAT32_BYTES * width


async def start_replies(request: Request, wire: EngineRequest, model: Model, encoding: EncodingRequest) -> Replies:
    """The answers as they arrive.  Raises if the texts are not valid, and what the submission raises.

    Memory for the results is claimed for the whole call: the work for a part of it would be lost.
    """
    call = f"{model.task}-{uuid.uuid4().hex}"
    terms = read_terms(request, wire)
    with request_context(request).time_tokenising():
        encoded = await text_processor(request).read_inputs(model, encoding, call, terms)
    size = sum(input_memory(model, one) for one in encoded if isinstance(one, EncodedInput))
    request_context(request).claim.grow(size, "the answer")
    ahead = STEPS_AHEAD * server(request).settings.encoder_step_tokens
    take_turn = turn_taker(request)
    if len(encoded) >= SLICE_SIZE:
        await take_turn()
    sources = submit_inputs(encoded, submitter(request, model), ahead, take_turn)
    request_context(request).cleanup.callback(sources.close)
    return stream_outputs(model, encoding, encoded, sources, output_job(request, model, terms))


def input_memory(model: Model, one: EncodedInput) -> int:
    """Bytes of an input's requests and their results, an upper bound where it is known."""
    return sum(
        BYTES_PER_TEXT + BYTES_PER_TOKEN * request.prompt_tokens + result_memory(model, request)
        for request in one.requests
    )


def result_memory(model: Model, request: Encode) -> int:
    """Bytes of a head's result: tables of float32, or lists of Python floats."""
    labels = len(model.labels)
    match model.task:
        case "embed":
            width = request.dimensions or model.width
            tables = TABLE_BYTES * request.prompt_tokens * width if "tokens" in request.forms else 0
            words = WORD_BYTES * request.prompt_tokens if "words" in request.forms else 0
            return tables + words + (BYTES_PER_NUMBER * width if "" in request.forms else 0)
        case "tag":
            return (BYTES_PER_OFFSET + TABLE_BYTES * labels) * request.prompt_tokens
        case "classify" | "rank" | "choose":
            return BYTES_PER_NUMBER * max(labels, 1)
        case "label_spans":
            assert model.label_prompt is not None, "it reads labels"
            columns = model.label_prompt.columns * len(request.label_rows)
            return (BYTES_PER_OFFSET + TABLE_BYTES * columns) * len(request.text_rows)
        case "label_texts" | "decide":
            return BYTES_PER_NUMBER * len(request.label_rows)
        case "span":
            return (BYTES_PER_OFFSET + TABLE_BYTES * 2) * request.prompt_tokens
        case _:
            return 0


async def compare_replies(
    request: Request, answers: Replies, kind: type[R], compare: Callable[[R, Sequence[R]], list[float]]
) -> tuple[list[float], int]:
    """The score of the first reply with each other one, and the prompt tokens of all.

    They are computed, and the replies dropped, in portions.
    """
    queries, scores, tokens = list[R](), list[float](), 0
    async with aclosing(answers):
        async for portion in split_portions(answers):
            replies = [check_reply(one, kind) for one in portion]
            tokens += sum(one.usage.prompt_tokens for one in portion if not isinstance(one, PolyheadError))
            if not queries:
                queries.append(replies.pop(0))
            work = partial(compare, queries[0], replies)
            scores += await run_off_loop(request, sum(map(reply_size, portion)), work)
    return scores, tokens


async def collect_replies(answers: Replies, kind: type[R]) -> list[R]:
    """All answers.  The first error ends the call."""
    async with aclosing(answers):
        return [check_reply(answer, kind) async for answer in answers]


def check_reply(answer: EncoderOutput | PolyheadError, kind: type[R]) -> R:
    if isinstance(answer, PolyheadError):
        raise answer
    assert isinstance(answer, kind), "a reply of another task"
    return answer


async def reply_response(request: Request, answers: Replies, writing: ReplyWriter, count: int) -> Response:
    """The response in the format that the client accepts.  `count`: the number of answers."""
    if LineStream.media_type in request.headers.get("accept", ""):
        return await LineStream.open(
            encode_events(
                write_lines(request, answers, writing),
                StreamWriter(answer_threads(request), writing.write_error, frame_line),
            )
        )
    body = await write_body(request, answers, writing, count)
    return body.response(b"", b"") if writing.is_single else body.response()


class JsonListBody:
    """A JSON list of many answers, written in portions.  Memory is claimed beforehand and while it grows.

    `prompt_tokens` is the sum over all answers in it.
    """

    def __init__(self, claim: MemoryClaim, expected: int) -> None:
        """`expected`: bytes of the whole list, as far as they are known."""
        self._claim, self._parts, self._size, self._claimed = claim, list[bytes](), 0, 0
        self.prompt_tokens = 0
        self._reserve(expected)

    def expect(self, size: int) -> None:
        """Claim what the next portion takes beyond what is claimed, before it is written. Raises as `add` does."""
        if (missing := self._size + size - self._claimed) > 0:
            self._reserve(missing)

    def add(self, parts: Sequence[bytes]) -> None:
        """Add one portion.  Raises BodyTooLarge or Overloaded if there is no memory for it."""
        self._size += sum(map(len, parts)) + 1
        if self._size > self._claimed:
            self._reserve(max(self._size - self._claimed, ANSWER_CLAIM_STEP))
        self._parts += (b",", *parts) if self._parts else parts

    def response(self, before: bytes = b"[", after: bytes = b"]") -> Response:
        """The whole list between `before` and `after`."""
        return PartsResponse([before, *self._parts, after])

    def _reserve(self, size: int) -> None:
        self._claim.grow(size, "the answer")
        self._claimed += size


async def write_body(request: Request, answers: Replies, writing: ReplyWriter, count: int) -> JsonListBody:
    """Write each portion of the answers, and drop it, before the next is awaited."""
    body, index = JsonListBody(request_context(request).claim, count * writing.max_bytes), 0
    async with aclosing(answers):
        async for portion in split_portions(answers):
            write, size = partial(write_items, writing, index, portion), sum(map(reply_size, portion))
            body.expect(WRITTEN_BYTES * size)
            body.add(await run_off_loop(request, size, write))
            body.prompt_tokens += sum(one.usage.prompt_tokens for one in portion if not isinstance(one, PolyheadError))
            index += len(portion)
    return body


async def split_portions(answers: Replies) -> AsyncGenerator[list[EncoderOutput | PolyheadError], None]:
    """Lists of at most SLICE_SIZE answers; a list ends when it has PORTION_NUMBERS numbers."""
    portion, size = list[EncoderOutput | PolyheadError](), 0
    async for answer in answers:
        portion.append(answer)
        size += reply_size(answer)
        if size >= PORTION_NUMBERS or len(portion) == SLICE_SIZE:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def write_items(writing: ReplyWriter, index: int, replies: Sequence[EncoderOutput | PolyheadError]) -> list[bytes]:
    """JSON of answers, the first of which is the `index`-th, without the brackets of the list, in chunks."""

    def parts() -> Iterator[bytes]:
        for place, answer in enumerate(replies):
            yield b"," if place else b""
            yield from dump_parts(writing.build_item(index + place, answer))

    return list(gather_parts(parts()))


def reply_size(reply: EncoderOutput | PolyheadError) -> int:
    """Approximate cost of writing a reply, in numbers."""
    match reply:
        case ScoreOutput(values=values):
            return len(values)
        case TokenVectors(rows=rows):
            return rows.nbytes // rows.itemsize
        case TagOutput(entities=found):
            return 8 * len(found)
        case SpanOutput(answers=found):
            return sum(8 + len(one.text) // CHARACTERS_PER_UNIT for one in found)
        case FillOutput(masks=masks):
            return sum(8 + len(word.filled_text) // CHARACTERS_PER_UNIT for mask in masks for word in mask)
        case SparseVector(weights=words):
            return 2 * len(words)
        case SeveralOutputs(outputs=outputs):
            return sum(map(reply_size, outputs))
        case _:
            return 1


def answer_size(piece: AnswerDelta) -> int:
    """The same for a generated text; its tokens and their alternatives count, too."""
    return (
        8
        + len(piece.text) // 8
        + 8 * sum(1 + len(each.likeliest) for each in (*piece.logprobs, *piece.prompt_logprobs))
    )


async def run_off_loop(request: Request, size: int, write: Callable[[], T]) -> T:
    """Run `write`, which writes `size` numbers: on the event loop if they are few, else on a thread."""
    return write() if size <= INLINE_NUMBERS else await answer_threads(request).run(WRITTEN_BYTES * size, write)


async def json_response(request: Request, size: int, content: Callable[[], Any]) -> Response:
    """A response with `content` as JSON.  With more than INLINE_NUMBERS numbers it is written on a thread."""
    return PartsResponse(await run_off_loop(request, size, lambda: dump_chunks(content())))


async def write_lines(request: Request, answers: Replies, writing: ReplyWriter) -> AsyncGenerator[list[bytes], None]:
    """One line for each answer, in chunks."""
    index = 0
    async with aclosing(answers):
        async for answer in answers:
            yield await run_off_loop(request, reply_size(answer), partial(writing.write_line, index, answer))
            index += 1

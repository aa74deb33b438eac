"""How answers for many texts are written: which memory is claimed, on which thread, and what is dropped."""

import asyncio
import math
import sys
import threading
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from polyhead.service.api.dialects.openai.routes import embedding_envelope, make_embedding_writer
from polyhead.service.api.dialects.openai.write import write_embedding
from polyhead.service.api.dialects.tei.write import SPARSE_WRITER, TOKEN_VECTOR_WRITER
from polyhead.service.api.shared import pipeline_outputs as findings
from polyhead.service.api.shared.encoding_calls import (
    INLINE_NUMBERS,
    ReplyWriter,
    max_label_bytes,
    reply_response,
    result_memory,
    write_body,
)
from polyhead.service.api.shared.openai_errors import write_openai_error
from polyhead.service.api.shared.streaming import LineStream, PartsResponse, dumps_sliced
from polyhead.service.concurrency.thread_pool import ThreadPool
from polyhead.service.core.errors import BodyTooLarge, PolyheadError
from polyhead.service.core.model import json_sizes
from polyhead.service.core.request import Encode
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, UNBOUNDED_HEADROOM, Headroom, MemoryClaim
from polyhead.service.text.answer_delta import Usage
from polyhead.service.text.encoder_outputs import (
    EncoderOutput,
    FillOutput,
    MaskCandidate,
    ScoreOutput,
    SeveralOutputs,
    SparseVector,
    TagOutput,
    TokenVectors,
)
from polyhead.service.text.entities import Entity

MIB = 1 << 20
LABELS = tuple(f"label \x01 {index}" for index in range(77))
CLASSIFY = ReplyWriter(
    write_one=lambda reply: findings.rank_labels(LABELS, reply.values),
    write_error=write_openai_error,
    max_bytes=max_label_bytes(json_sizes(LABELS)),
)
TAGS = ReplyWriter(write_one=lambda reply: map(findings.write_entity, reply.entities), write_error=write_openai_error)
WORDS = ReplyWriter(write_one=lambda reply: findings.write_masks(reply.masks), write_error=write_openai_error)
WRITERS: Mapping[type, Callable[[Any], Any]] = {
    ScoreOutput: partial(write_embedding, encoding="float"),
    SparseVector: partial(write_embedding, encoding="float"),
    TokenVectors: partial(write_embedding, encoding="float"),
    TagOutput: TAGS.write_one,
    FillOutput: WORDS.write_one,
}
Replies = AsyncGenerator[EncoderOutput | PolyheadError, None]


def asking(headroom: Headroom = UNBOUNDED_HEADROOM, accept: str = "") -> Any:
    """The parts of a request that are used."""
    state = SimpleNamespace(context=SimpleNamespace(claim=MemoryClaim(headroom), owner=""))
    server = SimpleNamespace(request_threads=ThreadPool(1, "requests", math.inf))
    app = SimpleNamespace(state=SimpleNamespace(server=server))
    return SimpleNamespace(state=state, app=app, headers={"accept": accept})


async def replies(make: Callable[[], EncoderOutput], count: int) -> Replies:
    for _ in range(count):
        yield make()


def scores(width: int = len(LABELS)) -> ScoreOutput:
    return ScoreOutput(np.random.default_rng(1).normal(size=width).tolist(), Usage(3))


def table(rows: int = 4, width: int = 64) -> TokenVectors:
    values = np.random.default_rng(1).normal(size=(rows, width)).astype(np.float32)
    return TokenVectors(memoryview(values.tobytes()).cast("B").cast("f", (rows, width)), Usage(rows))


def entities_of() -> TagOutput:
    return TagOutput([Entity("B-PER", 0.123456789, "word" * 5, 3, 9, index) for index in range(40)], Usage(40))


def filled_masks() -> FillOutput:
    return FillOutput([[MaskCandidate(5, "fox", 0.123456789, "a quick fox " * 40) for _ in range(20)]], Usage(40))


def word_weights() -> SparseVector:
    return SparseVector(tuple((index, 0.123456789) for index in range(500)), Usage(9))


def several_outputs() -> SeveralOutputs:
    """What a text of 500 words has: a vector, weights of words, and vectors of 40 tokens."""
    return SeveralOutputs((scores(64), word_weights(), table(40)), Usage(9))


def vectors(width: int) -> ReplyWriter:
    return make_embedding_writer(SimpleNamespace(width=width), ("",), "float")  # type: ignore[arg-type]


ANSWERS = {
    "labels": (CLASSIFY, scores),
    "vectors": (vectors(384), lambda: scores(384)),
    "vectors of tokens": (TOKEN_VECTOR_WRITER, table),
    "entities": (TAGS, entities_of),
    "words": (WORDS, filled_masks),
    "weights": (SPARSE_WRITER, word_weights),
    "several outputs": (
        make_embedding_writer(SimpleNamespace(width=64), ("", "words", "tokens"), "float"),  # type: ignore[arg-type]
        several_outputs,
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_the_memory_of_a_written_answer_is_claimed(kind: str) -> None:
    writing, make = ANSWERS[kind]
    portion = 8 * MIB  # written at one time, as Python objects and as JSON
    few = asyncio.run(write_body(asking(), replies(make, 10), writing, 10))  # made once
    headroom, count = Headroom(), 10 * (2 * portion) // sum(map(len, few._parts))
    tracemalloc.start()
    body = asyncio.run(write_body(asking(headroom), replies(make, count), writing, count))
    grown = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert grown <= headroom._reserved + portion
    assert sum(map(len, body._parts)) > portion  # a smaller test would show nothing
    assert len(orjson.loads(b"[%s]" % b"".join(body._parts))) == count
    assert body.prompt_tokens == count * make().usage.prompt_tokens


@pytest.mark.parametrize("make", [several_outputs, word_weights, table, entities_of, filled_masks, scores])
def test_a_portion_is_claimed_before_it_is_written(make: Callable[[], Any]) -> None:
    """However long one answer is, whose length follows from its text."""
    headroom, written = Headroom(), list[tuple[int, int]]()

    def write(reply: Any) -> Any:
        reserved = headroom._reserved
        outputs = reply.outputs if isinstance(reply, SeveralOutputs) else (reply,)
        size = sum(len(dumps_sliced(WRITERS[type(each)](each))) for each in outputs)
        written.append((reserved, size))

    writing = ReplyWriter(write_one=write, write_error=write_openai_error)
    asyncio.run(write_body(asking(headroom), replies(make, 1), writing, 1))
    [(reserved, size)] = written
    assert reserved >= size


def test_the_results_of_all_outputs_are_claimed() -> None:
    """The float32 numbers of vectors, and the weights of words as Python objects."""
    model: Any = SimpleNamespace(task="embed", labels=(), width=64)
    request = Encode("text", tuple(range(500)), more_forms=("words", "tokens"))
    made = word_weights()
    objects = sum(sys.getsizeof(pair) + sum(map(sys.getsizeof, pair)) for pair in made.weights)
    words = result_memory(model, request) - result_memory(model, replace(request, more_forms=("tokens",)))
    assert words >= objects + sys.getsizeof(made.weights)
    assert result_memory(model, request) - words >= 500 * 64 * 4 + 64 * 8


def test_labels_are_claimed_before_the_first_is_computed() -> None:
    begun = list[bool]()

    async def never() -> Replies:
        begun.append(True)
        yield scores()

    with pytest.raises(BodyTooLarge, match="the answer takes about"):
        asyncio.run(write_body(asking(Headroom(free=ALLOCATOR_BYTES + 40 * MIB)), never(), CLASSIFY, 16384))
    assert not begun


def test_an_answer_that_outgrows_the_memory_is_refused_while_it_is_written() -> None:
    headroom = Headroom(free=ALLOCATOR_BYTES + 33 * MIB)
    with pytest.raises(BodyTooLarge, match="the answer takes about"):
        asyncio.run(write_body(asking(headroom), replies(filled_masks, 1 << 20), WORDS, 1 << 20))


@pytest.mark.parametrize("accept", ["", LineStream.media_type])
@pytest.mark.parametrize(("labels", "aside"), [(INLINE_NUMBERS // 2, False), (INLINE_NUMBERS + 1, True)])
def test_one_text_with_many_labels_is_not_written_on_the_event_loop(accept: str, labels: int, aside: bool) -> None:
    names, threads = tuple(map(str, range(labels))), list[bool]()

    def one(reply: ScoreOutput) -> Any:
        threads.append(threading.current_thread() is not threading.main_thread())
        return findings.rank_labels(names, reply.values)

    writing = ReplyWriter(write_one=one, write_error=write_openai_error)
    asyncio.run(reply_response(asking(accept=accept), replies(lambda: scores(labels), 1), writing, 1))
    assert threads == [aside]


def test_a_large_answer_is_sent_in_pieces() -> None:
    parts, sent = [b"[", b"a" * 600_000, b",", b"b" * 10, b"]"], list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(PartsResponse(parts)({"type": "http"}, send, send))  # type: ignore[arg-type]
    head, *bodies = sent
    assert (b"content-length", b"600013") in head["headers"]
    assert b"".join(each["body"] for each in bodies) == b"".join(parts)
    assert max(len(each["body"]) for each in bodies) <= 1 << 18
    assert [each["more_body"] for each in bodies] == [True] * (len(bodies) - 1) + [False]


def test_json_around_embeddings_is_whole() -> None:
    before, after = embedding_envelope('a "name"', 7)
    usage = {"prompt_tokens": 7, "total_tokens": 7}
    assert orjson.loads(before + after) == {"object": "list", "data": [], "model": 'a "name"', "usage": usage}


def test_items_of_an_iterator_are_dropped_once_they_are_written() -> None:
    assert dumps_sliced(iter([])) == b"[]"
    assert orjson.loads(dumps_sliced({"index": index} for index in range(100))) == [{"index": n} for n in range(100)]
    assert orjson.loads(dumps_sliced(np.arange(10_000.0))) == list(range(10_000))


class Counted(list[float]):
    """Counts how often it is iterated."""

    passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        return super().__iter__()


def test_softmax_goes_through_labels_a_fixed_number_of_times() -> None:
    raw = Counted([1.0, 3.0, 2.0, -700.0] * 50)
    shares = findings.apply_function("softmax", raw)
    assert sum(shares) == pytest.approx(1)
    assert raw.passes < 5
    assert findings.apply_function("sigmoid", [0.0, 800.0, -800.0]) == [0.5, 1.0, 0.0]


def test_only_requested_labels_are_made() -> None:
    assert [one["label"] for one in findings.rank_labels("abcd", [1.0, 2.0, 2.0, 0.5], 3)] == ["b", "c", "a"]
    assert [one["label"] for one in findings.rank_labels("abcd", [1.0, 2.0, 2.0, 0.5], 0, 1.5)] == ["b", "c"]

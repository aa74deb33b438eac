"""From what heads say to answers: the events of encoders become labels, vectors, entities, spans and words.

Knows no HTTP and no engine, only a source of events that can be closed.  The one idea: however many texts a call has,
the engine has few of them at a time, so that what others ask waits for some steps and not for the whole call.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyhead.models.tokenizer import TokenizerError

from ..concurrency.outcome import on_thread
from ..concurrency.time_slices import SLICE, run_sliced, spaced
from ..core.errors import AnswerTooLarge, Overloaded, PolyheadError, StepFailed
from ..core.model import Model
from ..core.request import Done, Encode, Encoded, Failed, Filled, Table
from .answer_spans import Answer, Window, answers
from .detokenizer import EventSource, Submit, Usage
from .entities import Entity, Tagging, entities, merged
from .inputs import Read, Reading
from .zero_shot import softmax

T = TypeVar("T")
MOST_WEIGHTS = 1 << 19  # of the words of all texts of one call
PAUSE_S = 0.1  # until a call that was begun asks again whether there is room for the rest


@dataclass(frozen=True, slots=True)
class Scores:
    """What a head says of one text: a score per label, one relevance, or a vector."""

    values: list[float]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Tagged:
    """What is found in one text, in its order."""

    entities: list[Entity]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Found:
    """Where in a context the answer to a question stands, the likeliest first."""

    answers: list[Answer]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Word:
    """What may stand in a mask's place, and the text with it there."""

    token: int
    text: str
    score: float
    sequence: str


@dataclass(frozen=True, slots=True)
class Guessed:
    """The likeliest words for each mask of one text."""

    masks: list[list[Word]]
    usage: Usage


@dataclass(frozen=True, slots=True)
class States:
    """A vector for each token of one text, [T, W]."""

    rows: "memoryview[float]"
    usage: Usage


@dataclass(frozen=True, slots=True)
class Weighed:
    """The words that one text is about, as (token, weight)."""

    words: tuple[tuple[int, float], ...]
    usage: Usage


Said = Encoded | Table | Filled
Reply = Scores | Tagged | Found | Guessed | States | Weighed


async def replies(
    model: Model, asked: Reading, reads: Sequence[Read | PolyheadError], submit: Submit, ahead: int
) -> AsyncGenerator[Reply | PolyheadError, None]:
    """What is answered to each of `reads`, in their order.

    Submits when first asked; the engine has at most `ahead` tokens of them at a time, or one longer text.  What fails
    is raised and ends all; where the others are wanted without it, it stands in the place of an answer.  Closing the
    generator aborts what is under way.
    """
    requests = (request for read in reads if isinstance(read, Read) for request in read.requests)
    weights = 0
    async with aclosing(under_way(requests, submit, ahead)) as sources:
        async for read in spaced(reads):
            if isinstance(read, PolyheadError):
                yield read
                continue
            outcomes = [await said(await anext(sources)) for _ in read.requests]
            failed = [outcome for outcome in outcomes if isinstance(outcome, PolyheadError)]
            if failed and not asked.partial:
                raise failed[0]
            events = [outcome for outcome in outcomes if not isinstance(outcome, PolyheadError)]
            found = failed[0] if failed else await reply(model, asked, read, events)
            weights += len(found.words) if isinstance(found, Weighed) else 0
            check_weights(asked, weights)
            yield found


def check_weights(asked: Reading, count: int) -> None:
    """Raises AnswerTooLarge.  How many words a text is about is known once it is computed."""
    if count > MOST_WEIGHTS:
        message = f"{asked.field}: the answer has more than {MOST_WEIGHTS} weights of words; send fewer inputs"
        raise AnswerTooLarge(message, param=asked.field)


async def under_way(requests: Iterable[Encode], submit: Submit, ahead: int) -> AsyncGenerator[EventSource, None]:
    """The sources of `requests`, in their order: the rest is submitted, and made, as those before are done with."""
    waiting, begun = Waiting(requests), deque[tuple[int, EventSource]]()
    first = True
    try:
        while waiting.head is not None or begun:
            some = next_of(waiting, ahead, sum(tokens for tokens, _ in begun))
            try:
                begun += zip((len(request.tokens) for request in some), submit(some), strict=True) if some else ()
                first = False
                if len(some) == SLICE:  # there may be room for more
                    await asyncio.sleep(0)
                    continue
            except Overloaded:
                if first:
                    raise
                waiting.put_back(some)  # it is others who hold the room
                if not begun:
                    await asyncio.sleep(PAUSE_S)
                    continue
            yield begun[0][1]
            begun.popleft()
    finally:
        run_sliced(lambda one: one[1].close(), begun)


class Waiting:
    """Requests that are not submitted yet, made one at a time.  `head`: the next one, None at the end."""

    def __init__(self, requests: Iterable[Encode]) -> None:
        self._rest = iter(requests)
        self.head = next(self._rest, None)

    def take(self) -> Encode:
        taken = self.head
        assert taken is not None, "there is a next one"
        self.head = next(self._rest, None)
        return taken

    def put_back(self, requests: Sequence[Encode]) -> None:
        self._rest = chain(requests, () if self.head is None else (self.head,), self._rest)
        self.head = next(self._rest, None)


def next_of(waiting: Waiting, ahead: int, taken: int) -> list[Encode]:
    """Those taken from the head of `waiting` that fit beside `taken` of `ahead` tokens, once half of these are free;
    SLICE at most."""
    some: list[Encode] = []
    room = ahead - taken
    if taken and room < ahead // 2:
        return some
    while len(some) < SLICE and waiting.head is not None:
        if len(waiting.head.tokens) > room and (taken or some):
            break
        some.append(waiting.take())
        room -= len(some[-1].tokens)
    return some


async def said(source: EventSource) -> tuple[Said, Usage] | PolyheadError:
    """The event of a request, and what it cost; or why there is none."""
    found: Said | None = None
    async for event in source:
        match event:
            case Encoded(values=values) if not math.isfinite(sum(values)):
                return StepFailed("the network answered with numbers that are not finite")
            case Encoded() | Table() | Filled():
                found = event
            case Failed():
                return event.error
            case Done() if found is not None:
                return found, Usage(event.prompt_tokens)
    return StepFailed("the engine ended a request without an answer")


async def reply(model: Model, asked: Reading, read: Read, events: Sequence[tuple[Said, Usage]]) -> Reply:
    """One answer of what was said of an input's windows.  What takes long is not done on the event loop."""
    usage = sum((cost for _, cost in events), Usage())
    match events[0][0]:
        case Encoded() if model.both_orders:
            return Scores(added([event.values for event, _ in events if isinstance(event, Encoded)], asked), usage)
        case Encoded(values=values):
            return Scores(values, usage)
        case Filled(candidates=[weights]) if asked.form == "words":
            return Weighed(weights, usage)
        case Table(scores=rows) if asked.form == "tokens":
            return States(rows, usage)
        case Filled():
            filled = [event for event, _ in events if isinstance(event, Filled)]
            return Guessed(await aside(partial(words, model, read, filled[0])), usage)
        case Table():
            tables = [np.asarray(event.scores) for event, _ in events if isinstance(event, Table)]
            if model.task == "span":
                return Found(await aside(partial(spans, asked, read, tables)), usage)
            return Tagged(await aside(partial(tagged, model, asked, read, tables)), usage)


async def aside(work: Callable[[], T]) -> T:
    """What `work` returns, on a thread.  Raises PolyheadError where the tokenizer fails."""
    try:
        return await on_thread(work)
    except TokenizerError as error:
        raise PolyheadError(str(error)) from None


def added(orders: Sequence[Sequence[float]], asked: Reading) -> list[float]:
    """Scores of a pair's two orders, each of which is half of what there is to say; then closed, if wanted."""
    logits = np.asarray(orders, np.float64).sum(axis=0)
    return [float(score) for score in (logits if asked.raw else softmax(logits))]


def tagged(model: Model, asked: Reading, read: Read, tables: Sequence[NDArray[np.float32]]) -> list[Entity]:
    tagging = Tagging(
        tokenizer=model.tokenizer, labels=model.labels, aggregation=asked.aggregation, ignored=asked.ignored
    )
    text = str(read.given)
    found = [
        entity
        for part, scores in zip(read.parts, tables, strict=True)
        for entity in entities(tagging, text, part, scores)
    ]
    return merged(found) if len(tables) > 1 else found


def spans(asked: Reading, read: Read, tables: Sequence[NDArray[np.float32]]) -> list[Answer]:
    context = read.given[1]
    assert isinstance(context, str), "a context is text"
    return answers(asked.asking, context, [Window(*each) for each in zip(read.parts, tables, strict=True)])


def words(model: Model, read: Read, filled: Filled) -> list[list[Word]]:
    """The sequence is without special tokens where one mask is filled; else it shows the masks that are left."""
    [request] = read.requests
    lone = len(request.rows) == 1
    return [
        [
            Word(
                token,
                model.tokenizer.decode([token], skip_special=False),
                score,
                sequence(model, request, row, token, plain=lone),
            )
            for token, score in candidates
        ]
        for row, candidates in zip(request.rows, filled.candidates, strict=True)
    ]


def sequence(model: Model, request: Encode, row: int, token: int, *, plain: bool) -> str:
    ids = (*request.tokens[:row], token, *request.tokens[row + 1 :])
    return model.tokenizer.decode(ids, skip_special=plain)

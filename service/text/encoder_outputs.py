"""Outputs of encoders: turns the head events of a call's requests into labels, vectors, entities, spans and tokens.

However many texts a call has, the engine gets only few of them at a time. So requests of other clients wait for some
steps, and not for the whole call.
"""

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from polyhead.models.tokenizer import TokenizerError

from ..concurrency.time_slices import SLICE_SIZE, TakeTurn, call_in_slices, iterate_in_slices, yield_turn
from ..core.errors import AnswerTooLarge, Overloaded, PolyheadError, StepFailed
from ..core.model import Model
from ..core.request import Done, Encode, Failed, Generate, HeadOutput, TokenCandidates, TokenOutputs
from .answer_delta import Usage
from .answer_spans import AnswerRange, ScoredWindow, SpanAnswer, find_ranges, name_answers
from .encoder_inputs import EncodedInput, EncodingRequest, checked_batches
from .entities import Entity, TaggingSettings, find_entities, merge_windows
from .event_source import EventSource, Submit
from .label_spans import find_label_spans, name_spans
from .output_job import OutputJob
from .zero_shot import softmax

T = TypeVar("T")
MAX_SPARSE_WEIGHTS = 1 << 19  # of the sparse vectors of all texts of one call
BYTES_PER_SPAN = 512  # bytes for each span that is compared: its range, its text's hash, their places in two tables
BYTES_PER_ANSWER = 256  # bytes for each answer that is a part of a text, or a text with a mask filled: without its text
BYTES_PER_ANSWER_CHARACTER = 4  # bytes for each character of its text
RETRY_S = 0.1  # seconds until a call tries again to submit its remaining requests


@dataclass(frozen=True, slots=True)
class ScoreOutput:
    """The scores of one text: one for each label, one relevance, or a vector."""

    values: list[float]
    usage: Usage


@dataclass(frozen=True, slots=True)
class TagOutput:
    """The entities of one text, in its order."""

    entities: list[Entity]
    usage: Usage


@dataclass(frozen=True, slots=True)
class SpanOutput:
    """The answers to a question in a context, the most probable first."""

    answers: list[SpanAnswer]
    usage: Usage


@dataclass(frozen=True, slots=True)
class MaskCandidate:
    """A token for a mask, and the text with the mask replaced by it."""

    token: int
    text: str
    score: float
    filled_text: str


@dataclass(frozen=True, slots=True)
class FillOutput:
    """The most probable candidates for each mask of one text."""

    masks: list[list[MaskCandidate]]
    usage: Usage


@dataclass(frozen=True, slots=True)
class TokenVectors:
    """A vector for each token of one text, [T, W]."""

    rows: "memoryview[float]"
    usage: Usage


@dataclass(frozen=True, slots=True)
class SparseVector:
    """The tokens that a text is about, as (token, weight)."""

    weights: tuple[tuple[int, float], ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class SeveralOutputs:
    """The outputs of one text, in the order in which they were asked for."""

    outputs: tuple[ScoreOutput | TokenVectors | SparseVector, ...]
    usage: Usage


HeadEvent = HeadOutput | TokenOutputs | TokenCandidates
EncoderOutput = ScoreOutput | TagOutput | SpanOutput | FillOutput | TokenVectors | SparseVector | SeveralOutputs


class SubmittedAhead:
    """The event sources of `requests`, in their order.

    The first are submitted at once, further requests are made and submitted as those before are finished: the engine
    has at most `ahead` tokens of them at a time, or one longer text. Raises what `submit` raises; where there is no
    room for further requests, they wait. `take_turn` is awaited before each further batch.
    """

    def __init__(
        self, requests: Iterable[Encode | Generate], submit: Submit, ahead: int, take_turn: TakeTurn = yield_turn
    ) -> None:
        self.take_turn = take_turn
        self._waiting, self._submit, self._ahead = UnsubmittedRequests(requests), submit, ahead
        self._begun = deque[tuple[int, EventSource]]()  # submitted sources with their tokens
        self._is_current = False  # the first of them is being read
        self._may_fit_more = self._submit_batch()

    async def next(self) -> EventSource:
        """The source of the next request. The one before it is finished."""
        if self._is_current:
            self._begun.popleft()
            self._is_current = False
        if not self._may_fit_more:
            self._may_fit_more = self._fill()
        while self._may_fit_more:
            await self.take_turn()
            self._may_fit_more = self._fill()
        while not self._begun:
            assert self._waiting.next_request is not None, "there is a next one"
            await asyncio.sleep(RETRY_S)
            self._fill()
        self._is_current = True
        return self._begun[0][1]

    def close(self) -> None:
        """Abort the requests that have not ended."""
        call_in_slices(lambda one: one[1].close(), self._begun)

    def _fill(self) -> bool:
        """Submit a batch beside those that were submitted. Returns whether there may be room for more."""
        try:
            return self._submit_batch()
        except Overloaded:  # requests of other calls use the capacity
            return False

    def _submit_batch(self) -> bool:
        batch = take_fitting(self._waiting, self._ahead, sum(tokens for tokens, _ in self._begun))
        if not batch:
            return False
        try:
            sources = self._submit(batch)
        except Overloaded:
            self._waiting.put_back(batch)
            raise
        self._begun += zip((len(request.tokens) for request in batch), sources, strict=True)
        return len(batch) == SLICE_SIZE


class UnsubmittedRequests:
    """The requests of a call that are not submitted yet, made one at a time. `next_request` is None at the end."""

    def __init__(self, requests: Iterable[Encode | Generate]) -> None:
        self._rest = iter(requests)
        self.next_request = next(self._rest, None)

    def take(self) -> Encode | Generate:
        taken = self.next_request
        assert taken is not None, "there is a next one"
        self.next_request = next(self._rest, None)
        return taken

    def put_back(self, requests: Sequence[Encode | Generate]) -> None:
        self._rest = chain(requests, () if self.next_request is None else (self.next_request,), self._rest)
        self.next_request = next(self._rest, None)


def take_fitting(waiting: UnsubmittedRequests, ahead: int, taken: int) -> list[Encode | Generate]:
    """Take requests that fit beside `taken` of `ahead` tokens, at most SLICE_SIZE; none until half of
    `ahead` is free.
    """
    batch: list[Encode | Generate] = []
    room = ahead - taken
    if taken and room < ahead // 2:
        return batch
    while len(batch) < SLICE_SIZE and waiting.next_request is not None:
        if len(waiting.next_request.tokens) > room and (taken or batch):
            break
        batch.append(waiting.take())
        room -= len(batch[-1].tokens)
    return batch


def submit_inputs(
    reads: Sequence[EncodedInput | PolyheadError], submit: Submit, ahead: int, take_turn: TakeTurn = yield_turn
) -> SubmittedAhead:
    """Submit the requests of inputs, at most `ahead` tokens at a time. The requests are made as they are submitted."""
    requests = (text_request for read in reads if isinstance(read, EncodedInput) for text_request in read.requests)
    return SubmittedAhead(requests, submit, ahead, take_turn)


async def stream_outputs(
    model: Model,
    request: EncodingRequest,
    reads: Sequence[EncodedInput | PolyheadError],
    sources: SubmittedAhead,
    job: OutputJob,
) -> AsyncGenerator[EncoderOutput | PolyheadError, None]:
    """Yield the output of each of `reads`, whose requests are submitted by `sources`, in their order. What takes long
    runs on the threads of `job`.

    An error is raised and ends the call; with `request.partial` it takes the place of its output. Closing the
    generator aborts the running requests.
    """
    weights = 0
    try:
        async for read in iterate_in_slices(reads, SLICE_SIZE, sources.take_turn):
            if isinstance(read, PolyheadError):
                yield read
                continue
            outcomes = [await read_events(await sources.next()) for _ in read.requests]
            failed = [outcome for outcome in outcomes if isinstance(outcome, PolyheadError)]
            if failed and not request.partial:
                raise failed[0]
            events = [outcome for outcome in outcomes if not isinstance(outcome, PolyheadError)]
            found = failed[0] if failed else await build_outputs(job, model, request, read, events)
            weights += count_weights(found)
            check_weights(request, weights)
            yield found
    finally:
        job.is_abandoned = True
        sources.close()


def check_weights(request: EncodingRequest, count: int) -> None:
    """Raise AnswerTooLarge for too many weights. Their number is known only once they are computed."""
    if count > MAX_SPARSE_WEIGHTS:
        message = f"{request.field}: the answer has more than {MAX_SPARSE_WEIGHTS} weights of words; send fewer inputs"
        raise AnswerTooLarge(message, param=request.field)


def count_weights(found: EncoderOutput | PolyheadError) -> int:
    match found:
        case SparseVector(weights=weights):
            return len(weights)
        case SeveralOutputs(outputs=outputs):
            return sum(map(count_weights, outputs))
        case _:
            return 0


async def read_events(source: EventSource) -> tuple[list[HeadEvent], Usage] | PolyheadError:
    """Return the head events of a request, one for each of its forms, and its usage, or its error."""
    found = list[HeadEvent]()
    async for event in source:
        match event:
            case HeadOutput(values=values) if not math.isfinite(sum(values)):
                return StepFailed("the network answered with numbers that are not finite")
            case HeadOutput() | TokenOutputs() | TokenCandidates():
                found.append(event)
            case Failed():
                return event.error
            case Done() if found:
                return found, Usage(event.prompt_tokens)
    return StepFailed("the engine ended a request without an answer")


async def build_outputs(
    job: OutputJob,
    model: Model,
    request: EncodingRequest,
    read: EncodedInput,
    answers: Sequence[tuple[list[HeadEvent], Usage]],
) -> EncoderOutput:
    """Build one input's output from the events of its windows, or its outputs if several forms are asked for."""
    if not request.more_forms:
        return await build_output(job, model, request, read, [(events[0], usage) for events, usage in answers])
    [(events, usage)] = answers
    outputs = list[ScoreOutput | TokenVectors | SparseVector]()
    for event, form in zip(events, request.forms, strict=True):
        built = await build_output(job, model, replace(request, form=form, more_forms=()), read, [(event, usage)])
        assert isinstance(built, ScoreOutput | TokenVectors | SparseVector), "an output of an embedder"
        outputs.append(built)
    return SeveralOutputs(tuple(outputs), usage)


async def build_output(
    job: OutputJob,
    model: Model,
    request: EncodingRequest,
    read: EncodedInput,
    events: Sequence[tuple[HeadEvent, Usage]],
) -> EncoderOutput:
    """Build one input's output from the events of its windows. Long work runs on the threads of `job`."""
    usage = sum((cost for _, cost in events), Usage())
    match events[0][0]:
        case HeadOutput() if model.both_orders:
            return ScoreOutput(
                add_pair_orders([event.values for event, _ in events if isinstance(event, HeadOutput)], request), usage
            )
        case HeadOutput(values=values):
            return ScoreOutput(values, usage)
        case TokenCandidates(candidates=[weights]) if request.form == "words":
            return SparseVector(weights, usage)
        case TokenOutputs(scores=rows) if request.form == "tokens":
            return TokenVectors(rows, usage)
        case TokenCandidates():
            [filled] = [event for event, _ in events if isinstance(event, TokenCandidates)]
            count = sum(map(len, filled.candidates))
            claim_answers(job, count, count * len(read.source))
            size = count * len(read.requests[0].tokens)
            return FillOutput(await run_work(job, size, partial(fill_candidates, model, read, filled, job)), usage)
        case TokenOutputs(scores=rows) if model.label_prompt is not None:
            return TagOutput(await label_words(job, model, request, read, np.asarray(rows)), usage)
        case TokenOutputs():
            tables = [np.asarray(event.scores) for event, _ in events if isinstance(event, TokenOutputs)]
            size = sum(table.size for table in tables)
            if model.task == "span":
                return SpanOutput(await answer_question(job, request, read, tables), usage)
            entities = await run_work(job, size, partial(tag_entities, model, request, read, tables, job))
            return TagOutput(entities, usage)


async def run_work(job: OutputJob, size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns, on a thread. Raises PolyheadError if the tokenizer fails."""
    try:
        return await job.run(size, work)
    except TokenizerError as error:
        raise PolyheadError(str(error)) from None


def claim_answers(job: OutputJob, count: int, characters: int) -> None:
    """Claim memory for `count` answers of a text, whose texts have so many characters together."""
    job.claim.grow(BYTES_PER_ANSWER * count + BYTES_PER_ANSWER_CHARACTER * characters, "the answer")


async def answer_question(
    job: OutputJob, request: EncodingRequest, read: EncodedInput, tables: Sequence[NDArray[np.float32]]
) -> list[SpanAnswer]:
    """Return the answers to a question. The memory of their texts is claimed once they are known."""
    context = read.source[1]
    assert isinstance(context, str), "a context is text"
    spans = len(tables) * request.span_options.spans_per_window
    size = sum(table.size for table in tables) + spans

    def find() -> list[AnswerRange]:
        with job.claim.reserved(BYTES_PER_SPAN * spans, f"{request.field}: comparing {spans} spans"):
            windows = (ScoredWindow(*each) for each in zip(read.parts, tables, strict=True))
            return find_ranges(request.span_options, context, windows, job.check)

    found = await run_work(job, size, find)
    characters = sum(answer.end - answer.start for answer in found)
    claim_answers(job, len(found), characters)
    return await run_work(job, characters, partial(name_answers, context, found))


def add_pair_orders(orders: Sequence[Sequence[float]], request: EncodingRequest) -> list[float]:
    """Add the scores of a pair's two orders, each of which is half of its logits; then apply softmax, unless raw scores
    are requested.
    """
    logits = np.asarray(orders, np.float64).sum(axis=0)
    return [float(score) for score in (logits if request.raw else softmax(logits))]


def tag_entities(
    model: Model, request: EncodingRequest, read: EncodedInput, tables: Sequence[NDArray[np.float32]], job: OutputJob
) -> list[Entity]:
    tagging = TaggingSettings(
        tokenizer=model.tokenizer,
        labels=model.labels,
        aggregation=request.aggregation,
        ignored_labels=request.ignored_labels,
    )
    text, found = str(read.source), list[Entity]()
    for part, scores in zip(read.parts, tables, strict=True):
        job.check()
        found += find_entities(tagging, text, part, scores)
    return merge_windows(found) if len(tables) > 1 else found


async def label_words(
    job: OutputJob, model: Model, request: EncodingRequest, read: EncodedInput, scores: NDArray[np.float32]
) -> list[Entity]:
    """Return the spans of a text's words that have one of the labels. Their memory is claimed once they are known."""
    prompt, text = model.label_prompt, str(read.source)
    assert prompt is not None, "the model reads labels"
    search = partial(find_label_spans, prompt, request.span_search, request.labels, scores, request.field)
    found = await run_work(job, scores.size, search)
    characters = sum(read.words[span.last][1] - read.words[span.first][0] for span in found)
    claim_answers(job, len(found), characters)
    return await run_work(job, characters, partial(name_spans, text, read.words, request.labels, found))


def fill_candidates(
    model: Model, read: EncodedInput, filled: TokenCandidates, job: OutputJob
) -> list[list[MaskCandidate]]:
    """Return the candidates for each mask. Their texts have no special tokens if there is a single mask; else the other
    masks remain visible.
    """
    [text_request] = read.requests
    lone = len(text_request.rows) == 1
    return [
        [
            MaskCandidate(
                token,
                model.tokenizer.decode([token], skip_special=False),
                score,
                fill_text(model, text_request, row, token, plain=lone),
            )
            for some in checked_batches(candidates, job.check)
            for token, score in some
        ]
        for row, candidates in zip(text_request.rows, filled.candidates, strict=True)
    ]


def fill_text(model: Model, text_request: Encode, row: int, token: int, *, plain: bool) -> str:
    ids = (*text_request.tokens[:row], token, *text_request.tokens[row + 1 :])
    return model.tokenizer.decode(ids, skip_special=plain)

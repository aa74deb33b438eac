"""From tokens to text: turns the events of requests into deltas of their answers.

Text is sent as soon as it is final. Bytes of an incomplete character, and text that may be the beginning of a stop
string, are held back.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from operator import methodcaller
from time import perf_counter
from typing import Literal, Protocol, TypeVar

from polyhead.models.tokenizer import Tokenizer, TokenizerError

from ..concurrency.outcome import Failure, attempt, unwrap
from ..concurrency.time_slices import SLICE_SIZE, TOKENS_PER_SLICE, call_in_slices, iterate_in_slices
from ..core.errors import PolyheadError
from ..core.request import Done, Event, Failed, Generate, GeneratedToken, PromptScores, Request
from ..engine.worker import RequestTiming

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


class EventSource(Protocol):
    """The events of a submitted request; Done or Failed is the last. Closing it early aborts the request.

    `answered` means that the request counts as done, since the answer is complete.
    """

    @property
    def timing(self) -> RequestTiming: ...

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def close(self, *, answered: bool = False) -> None: ...


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer; `cached_tokens` of the prompt's tokens were found in the cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )


@dataclass(frozen=True)
class StopRules:
    """What ends an answer beside the model's own stop tokens. With `keep`, it stays at the end of the text."""

    strings: tuple[str, ...] = ()
    tokens: frozenset[int] = frozenset()
    keep: bool = False

    @cached_property
    def failure_tables(self) -> tuple[Sequence[int], ...]:
        """The failure table of each string, computed once for all answers of a call."""
        return tuple(failure_table(string) for string in self.strings)


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token, its bytes and its log probability, which is None for the first token of a prompt. `id` is its number in
    the vocabulary.
    """

    data: bytes
    logprob: float | None
    id: int = -1

    @property
    def text(self) -> str:
        """The token as text. Bytes that are not valid UTF-8 by themselves are written as escapes."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token of an answer or of a prompt. `offset`: where its text begins, in characters. `top`: the most probable
    tokens in its place. `id`: its number in the vocabulary.
    """

    token: ScoredToken
    offset: int
    top: tuple[ScoredToken, ...]
    id: int


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The next part of an answer; the last one has a `finish` and the usage. `logprobs` only if they were requested.

    `stop` is the stop string that was found, or the requested stop token that ended the answer. The first delta has
    `prompt_logprobs`, if they were requested. `token_count`: tokens generated so far.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Literal["", "stop", "length"] = ""
    usage: Usage = Usage()
    stop: str | int = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_count: int = 0


def failure_table(stop: str) -> list[int]:
    """Return at k how many characters of `stop` still match if the character after the first k differs."""
    falls = [0, 0]
    for char in stop[1:]:
        fall = falls[-1]
        while fall and stop[fall] != char:
            fall = falls[fall]
        falls.append(fall + (stop[fall] == char))
    return falls


class StopString:
    """Searches one string, a character at a time (Knuth, Morris, Pratt 1977, doi:10.1137/0206024).

    `matched`: how many of its characters the text ends with. `falls`: its failure table.
    """

    __slots__ = ("falls", "matched", "stop")

    def __init__(self, stop: str, falls: Sequence[int]) -> None:
        self.stop, self.falls, self.matched = stop, falls, 0

    def push(self, char: str) -> bool:
        """Whether the stop string ends with this character. Not to be called again after that."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self.falls[self.matched]
        self.matched += self.stop[self.matched] == char
        return self.matched == len(self.stop)


class StopBuffer:
    """Holds back the end of a text while it may be the beginning of a stop string.

    The string that is complete first ends the text, before it, or after it with `keep`. Of several that end at the same
    character, the longest counts.
    """

    def __init__(self, stops: StopRules) -> None:
        self.stops = [StopString(stop, falls) for stop, falls in zip(stops.strings, stops.failure_tables, strict=True)]
        self.pending = ""
        self.found = ""
        self.keep = stops.keep

    def push(self, text: str) -> str:
        """Add text; return what certainly precedes any stop string."""
        self.pending += text
        for end, char in enumerate(text, len(self.pending) - len(text) + 1):
            # each of them must get the character, so no short-circuit
            ended = [stop.stop for stop in self.stops if stop.push(char)]
            if ended:
                self.found = max(ended, key=len)
                self.pending = self.pending[: end if self.keep else end - len(self.found)]
                return self.flush()
        return self.release(max((stop.matched for stop in self.stops), default=0))

    def release(self, keep: int) -> str:
        certain = len(self.pending) - keep
        shown, self.pending = self.pending[:certain], self.pending[certain:]
        return shown

    def flush(self) -> str:
        return self.release(0)


class Detokenizer:
    """Writes one answer: token events in, deltas out. With `counted`, the prompt's tokens count in its usage."""

    def __init__(self, tokenizer: Tokenizer, stops: StopRules, request: Generate, *, counted: bool = True) -> None:
        self.tokenizer, self.request, self.stops = tokenizer, request, stops
        self.stream, self.tail = tokenizer.stream(), StopBuffer(stops)
        self.token_count = self.length = self.shown_length = 0  # generated tokens; decoded characters; characters sent
        self.cached_tokens = 0  # tokens of the prompt
        self.counts_prompt = counted
        self.unshown_tokens: deque[TokenLogprobs] = deque()  # tokens of which no character was sent yet

    @property
    def is_stopped(self) -> bool:
        return bool(self.tail.found)

    @property
    def usage(self) -> Usage:
        """The usage so far."""
        return (
            Usage(self.request.prompt_tokens, self.token_count, self.cached_tokens)
            if self.counts_prompt
            else Usage(0, self.token_count, 0)
        )

    def prompt_logprobs(self, event: PromptScores) -> Iterator[TokenLogprobs]:
        """Yield the prompt's own tokens. The first has no log probability."""
        stream, offset = self.tokenizer.stream(skip_special=False), 0
        for id, (logprob, top) in zip(self.request.tokens, ((None, ()), *event.scores), strict=True):
            yield TokenLogprobs(self.score_token(id, logprob), offset, self.score_top(top), id)
            offset += len(stream.push(id))

    def push(self, event: GeneratedToken) -> AnswerDelta:
        """Return the delta that the token completes, which may be empty."""
        text = self.stream.push(event.id)
        if self.request.logprobs >= 0:
            self.unshown_tokens.append(
                TokenLogprobs(
                    self.score_token(event.id, event.logprob), self.length, self.score_top(event.top), event.id
                )
            )
        self.token_count += 1
        self.cached_tokens = event.cached_tokens
        return self.show(text)

    def show(self, text: str) -> AnswerDelta:
        self.length += len(text)
        early = self.token_count < self.request.sampling.min_tokens  # stop strings do not apply yet
        shown = text if early else self.tail.push(text)
        self.shown_length += len(shown)
        return AnswerDelta(shown, self.take_shown_tokens(), token_count=self.token_count)

    def take_shown_tokens(self) -> tuple[TokenLogprobs, ...]:
        """Take the tokens that begin before the end of the sent text. The token of an incomplete character waits."""
        logprobs = []
        while self.unshown_tokens and self.unshown_tokens[0].offset < self.shown_length:
            logprobs.append(self.unshown_tokens.popleft())
        return tuple(logprobs)

    def close(self, done: Done) -> AnswerDelta:
        """Return the last delta, with the text that was held back."""
        is_requested = done.token in self.stops.tokens
        piece = self.show(
            (self.stream.push(done.token) if is_requested and self.stops.keep else "") + self.stream.flush()
        )
        self.token_count, self.cached_tokens = done.completion_tokens, done.cached_tokens
        if self.is_stopped:
            return replace(piece, finish="stop", usage=self.usage, stop=self.tail.found)
        finish: Literal["stop", "length"] = "length" if done.reason == "length" else "stop"
        text, logprobs = piece.text + self.tail.flush(), piece.logprobs + tuple(self.unshown_tokens)
        return AnswerDelta(
            text, logprobs, finish, self.usage, done.token if is_requested else "", token_count=self.token_count
        )

    def score_top(self, likeliest: Sequence[tuple[int, float]]) -> tuple[ScoredToken, ...]:
        return tuple(self.score_token(id, logprob) for id, logprob in likeliest)

    def score_token(self, id: int, logprob: float | None) -> ScoredToken:
        if logprob is not None and not logprob > MIN_LOGPROB:  # minus infinity, or not a number
            logprob = MIN_LOGPROB
        return ScoredToken(self.tokenizer.piece_bytes(id), logprob, id)


Submit = Callable[[Sequence[Request]], Sequence[EventSource]]
SubmitCall = Callable[[Sequence[Request]], Awaitable[Sequence[EventSource]]]
T = TypeVar("T")


async def stream_answers(
    tokenizer: Tokenizer, stops: StopRules, requests: Sequence[Generate], submit: SubmitCall
) -> AsyncGenerator[tuple[int, AnswerDelta], None]:
    """Yield the answers to `requests` as they are generated: the index of the request, and its next delta.

    Submits with the first iteration. If one request fails, all end with its error; closing the generator ends them too.
    A prompt with several answers is counted once.
    """
    sources = await submit(requests)
    try:
        firsts = {request.group or request.id: request.id for request in reversed(requests)}
        answers = [
            stream_answer(partial(Detokenizer, tokenizer, stops, request, counted=first == request.id), source)
            for request, source in zip(requests, sources, strict=True)
            for first in (firsts[request.group or request.id],)
        ]
        async with aclosing(merge_streams(answers)) as every:
            async for index, piece in every:
                yield index, piece
    finally:
        call_in_slices(methodcaller("close"), sources)


async def stream_answer(build: Callable[[], Detokenizer], source: EventSource) -> AsyncGenerator[AnswerDelta, None]:
    """Yield the deltas of one answer. Lets other tasks run after every TOKENS tokens, even if all events are there
    already.
    """
    detokenizer = call_tokenizer(build)
    async for event in source:
        match event:
            case GeneratedToken():
                if detokenizer.token_count % TOKENS_PER_SLICE == TOKENS_PER_SLICE - 1:
                    await asyncio.sleep(0)
                began = perf_counter()
                piece = call_tokenizer(partial(detokenizer.push, event))
                source.timing.record_text(began)
                if detokenizer.is_stopped:
                    source.close(answered=True)
                    yield replace(piece, finish="stop", usage=detokenizer.usage, stop=detokenizer.tail.found)
                    return
                if piece.text or piece.logprobs:
                    yield piece
            case PromptScores():
                yield AnswerDelta("", prompt_logprobs=await collect_prompt_logprobs(detokenizer, event))
            case Done():
                began = perf_counter()
                piece = call_tokenizer(partial(detokenizer.close, event))
                source.timing.record_text(began)
                yield piece
            case Failed():
                raise event.error


async def collect_prompt_logprobs(detokenizer: Detokenizer, event: PromptScores) -> tuple[TokenLogprobs, ...]:
    """Return the prompt's tokens, computed in slices of TOKENS tokens a turn of the event loop."""
    left, logprobs = detokenizer.prompt_logprobs(event), list[TokenLogprobs]()
    while some := call_tokenizer(lambda: tuple(islice(left, TOKENS_PER_SLICE))):
        logprobs += some
        await asyncio.sleep(0)
    return tuple(logprobs)


def call_tokenizer(write: Callable[[], T]) -> T:
    """Return what `write` returns. Raises PolyheadError if the tokenizer fails, also by a panic in its library."""
    outcome = attempt(write)
    if isinstance(outcome, Failure) and isinstance(outcome.error, TokenizerError):
        raise PolyheadError(f"the answer cannot be made text: {outcome.error}")
    return unwrap(outcome)


async def merge_streams(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Yield the items of all `sources` as they arrive, each with the index of its source.

    Sources are started and cancelled in slices of SLICE_SIZE a turn of the event loop.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: ItemQueue[T] = asyncio.Queue()
    tasks, taken = list[asyncio.Task[None]](), 0
    try:
        left = len(sources)
        while left:
            if len(tasks) < len(sources):
                some = sources[len(tasks) : len(tasks) + SLICE_SIZE]
                tasks += [start_pump(index, source, queue) for index, source in enumerate(some, len(tasks))]
                await asyncio.sleep(0)
                if queue.empty():
                    continue
            got = await queue.get()
            taken += 1
            if not taken % SLICE_SIZE:
                await asyncio.sleep(0)
            if isinstance(got, tuple):
                yield got
            else:
                got.result()  # raises the error of the source
                left -= 1
    finally:
        call_in_slices(methodcaller("cancel"), tasks)
        await asyncio.gather(*tasks[:SLICE_SIZE], return_exceptions=True)


ItemQueue = asyncio.Queue[tuple[int, T] | asyncio.Task[None]]


def start_pump(index: int, source: AsyncGenerator[T, None], queue: ItemQueue[T]) -> asyncio.Task[None]:
    """Start a task that puts the items of `source` into `queue`, and then the task itself."""

    async def pump() -> None:
        async for item in source:
            queue.put_nowait((index, item))

    def over(task: asyncio.Task[None]) -> None:
        queue.put_nowait(task)
        if not task.cancelled():
            task.exception()  # no other code reads it once the call has ended

    task = asyncio.create_task(pump())
    task.add_done_callback(over)
    return task


async def collect_answers(count: int, items: AsyncGenerator[tuple[int, AnswerDelta], None]) -> list[AnswerDelta]:
    """Return `count` whole answers, each as one delta."""
    return [
        join_answer(deltas) async for deltas in iterate_in_slices(await collect_parts(count, items), TOKENS_PER_SLICE)
    ]


async def collect_parts(count: int, items: AsyncGenerator[tuple[int, T], None]) -> list[list[T]]:
    """Return the list of parts of each of `count` answers."""
    parts: list[list[T]] = [[] for _ in range(count)]
    async with aclosing(items):
        async for index, item in items:
            parts[index].append(item)
    return parts


def join_answer(parts: Sequence[AnswerDelta]) -> AnswerDelta:
    logprobs = tuple(token for part in parts for token in part.logprobs)
    prompt = tuple(token for part in parts for token in part.prompt_logprobs)
    return replace(parts[-1], text="".join(part.text for part in parts), logprobs=logprobs, prompt_logprobs=prompt)

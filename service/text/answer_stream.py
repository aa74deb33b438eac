"""The answers of one call, as they are generated: events of requests in, deltas of their answers out."""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from operator import methodcaller
from time import perf_counter
from typing import Self, TypeVar

from polyhead.models.tokenizer import Tokenizer, TokenizerError

from ..concurrency.outcome import Failure, attempt, unwrap
from ..concurrency.time_slices import (
    SLICE_SIZE,
    TOKENS_PER_SLICE,
    TakeTurn,
    call_in_slices,
    iterate_in_slices,
    split_in_slices,
    yield_turn,
)
from ..core.errors import PolyheadError
from ..core.request import Done, Event, Failed, Generate, GeneratedToken, PromptScores
from ..resources.request_memory import UNBOUNDED_HEADROOM, MemoryClaim
from .answer_delta import AnswerDelta, TokenLogprobs, join_deltas
from .chat_parser import ChatParser, ExpectedOutput
from .detokenizer import Detokenizer
from .event_source import EventReader
from .score_claim import ScoreClaim
from .stop_strings import StopRules

CLAIM_TOKENS = 256  # tokens whose memory is counted in one iteration of the event loop

T = TypeVar("T")


class AnswerStream:
    """An async iterator of (index of the request, next delta of its answer), in the order in which they are generated.

    If one request fails, all are ended and its error is raised. Closing the stream aborts the requests that have not
    ended. A prompt with several answers is counted once. `expected` says what the answers may contain beside text;
    None: text only.

    Log-probabilities claim memory in `scores`: those of generated tokens from when they are read until the delta after
    theirs is asked for, those of prompts until the end of the request, since each answer to a prompt may repeat them.
    Those of prompts are expected there before the requests are submitted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopRules,
        requests: Sequence[Generate],
        events: EventReader,
        expected: ExpectedOutput | None = None,
    ) -> None:
        self.requests = requests
        self._tokenizer, self._stops, self._expected = tokenizer, stops, expected
        self._events, self._sources = events, events.sources
        self._detokenizers: dict[int, Detokenizer] = {}
        self._parsers: dict[int, ChatParser] = {}
        self.scores = ScoreClaim(MemoryClaim(UNBOUNDED_HEADROOM))
        self._keeps_scores, self._repeated = False, 1  # as `keep_scores` says
        self._sent: tuple[TokenLogprobs, ...] = ()  # of the last delta: no longer kept when the next one is asked for
        self._tokens = 0  # tokens that were made text
        self._slice = min(TOKENS_PER_SLICE * len(requests), SLICE_SIZE)  # tokens in one iteration of the event loop
        self._counted = {request.group or request.id: request.id for request in reversed(requests)}  # of each prompt

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, AnswerDelta]:
        """Other tasks run after a number of tokens, even if more events are there already."""
        is_read = False
        try:
            await self._release_sent()
            while True:
                index, event = await self._events.read()
                delta = await self._read_event(index, event)
                if not delta.is_empty:
                    is_read = True
                    return index, self._expected.hide(delta) if self._expected is not None else delta
        finally:
            if not is_read:
                self.close()

    def keep_scores(self, repeated: int = 1) -> None:
        """Log-probabilities stay claimed until the end of the request, since all deltas are kept. Those of a prompt are
        written `repeated` times.
        """
        self._keeps_scores, self._repeated = True, repeated

    def close(self) -> None:
        """Abort the requests that have not ended."""
        call_in_slices(methodcaller("close"), self._sources)

    async def aclose(self) -> None:
        self.close()

    async def _read_event(self, index: int, event: Event) -> AnswerDelta:
        """The delta that an event completes, which may be empty. Raises the error of a request that failed."""
        if index not in self._detokenizers:
            self._detokenizers[index] = call_tokenizer(partial(self._new_detokenizer, self.requests[index]))
        detokenizer, source = self._detokenizers[index], self._sources[index]
        match event:
            case GeneratedToken():
                self._tokens += 1
                if not self._tokens % self._slice:
                    await self._events.take_turn()
                began = perf_counter()
                delta = call_tokenizer(partial(detokenizer.push, event))
                source.timing.record_text(began)
                if delta.finish:  # a stop string was found
                    source.close(answered=True)
            case Done():
                began = perf_counter()
                delta = call_tokenizer(partial(detokenizer.close, event))
                source.timing.record_text(began)
            case PromptScores():
                delta = AnswerDelta(prompt_logprobs=await self._collect_prompt_logprobs(detokenizer, event))
            case Failed():
                raise event.error
            case _:
                raise AssertionError("an event of another task")
        delta = self._parse(index, delta)
        self._sent = () if self._keeps_scores else delta.logprobs
        if delta.finish:
            self._sent += detokenizer.take_unshown_tokens()  # behind a stop string
            self._events.leave(index)  # there may be more events, too
            del self._detokenizers[index]
            self._parsers.pop(index, None)
        return delta

    async def _collect_prompt_logprobs(
        self, detokenizer: Detokenizer, event: PromptScores
    ) -> tuple[TokenLogprobs, ...]:
        """Return the prompt's tokens, computed in slices of TOKENS_PER_SLICE tokens a turn of the event loop."""
        left, logprobs = detokenizer.prompt_logprobs(event), list[TokenLogprobs]()
        while some := call_tokenizer(lambda: tuple(islice(left, TOKENS_PER_SLICE))):
            self.scores.receive(detokenizer.request, len(some))
            self.scores.add(some, self._repeated)
            logprobs += some
            await self._events.take_turn()
        return tuple(logprobs)

    def _new_detokenizer(self, request: Generate) -> Detokenizer:
        counted = self._counted[request.group or request.id] == request.id
        return Detokenizer(self._tokenizer, self._stops, request, self.scores.add, counted=counted)

    async def _release_sent(self) -> None:
        """Release the memory of the log-probabilities of the last delta."""
        sent, self._sent = self._sent, ()
        async for some in iterate_in_slices(split_in_slices(sent, CLAIM_TOKENS), 1, self._events.take_turn):
            self.scores.remove(some)

    def _parse(self, index: int, delta: AnswerDelta) -> AnswerDelta:
        if self._expected is None:
            return delta
        if index not in self._parsers:
            self._parsers[index] = ChatParser(self._expected)
        return self._parsers[index].push(delta)


def call_tokenizer(write: Callable[[], T]) -> T:
    """Return what `write` returns. Raises PolyheadError if the tokenizer fails, also by a panic in its library."""
    outcome = attempt(write)
    if isinstance(outcome, Failure) and isinstance(outcome.error, TokenizerError):
        raise PolyheadError(f"the answer cannot be made text: {outcome.error}")
    return unwrap(outcome)


def ignore_delta() -> None:
    """The callback of calls that only collect."""


async def collect_deltas(
    answers: AnswerStream, repeated: int = 1, on_delta: Callable[[], None] = ignore_delta
) -> list[list[AnswerDelta]]:
    """Return the deltas of each answer. `on_delta` is called whenever one has arrived.

    Memory for their log-probabilities stays claimed; those of a prompt are written `repeated` times.
    """
    answers.keep_scores(repeated)
    deltas: list[list[AnswerDelta]] = [[] for _ in answers.requests]
    async with aclosing(answers):
        async for index, delta in answers:
            on_delta()
            deltas[index].append(delta)
    return deltas


async def join_answers(answers: Sequence[Sequence[AnswerDelta]], take_turn: TakeTurn = yield_turn) -> list[AnswerDelta]:
    """Return each answer as one delta. Other tasks run after every SLICE_SIZE deltas."""
    joined, count = list[AnswerDelta](), 0
    for deltas in answers:
        joined.append(join_deltas(deltas))
        count += len(deltas)
        if count >= SLICE_SIZE:
            await take_turn()
            count = 0
    return joined

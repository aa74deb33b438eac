"""From tokens to text: turns the tokens of an answer into its deltas.

Text is sent as soon as it is final. Bytes of an incomplete character, and text that may be the beginning of a stop
string, are held back.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from polyhead.models.tokenizer import Tokenizer

from ..core.request import AnswerEnd, Done, Generate, GeneratedToken, PromptScores
from .answer_delta import AnswerDelta, ScoredFields, ScoredToken, TokenLogprobs, Usage, text_parts
from .stop_strings import StopBuffer, StopRules

MIN_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot express


def ignore_scores(tokens: Sequence[TokenLogprobs]) -> None:
    """The callback where no memory is claimed."""


class Detokenizer:
    """Writes one answer: token events in, deltas out. With `counted`, the prompt's tokens count in its usage.

    `on_scores` is called with the log-probabilities of a token before they are kept; they wait for the token's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopRules,
        request: Generate,
        on_scores: Callable[[Sequence[TokenLogprobs]], None] = ignore_scores,
        *,
        counted: bool = True,
    ) -> None:
        self.tokenizer, self.request, self.stops, self.on_scores = tokenizer, request, stops, on_scores
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
        """Return the delta that the token completes, which may be empty; it is the last if a stop string was found."""
        text = self.stream.push(event.id)
        if self.request.logprobs >= 0:
            token, top = self.score_token(event.id, event.logprob), self.score_top(event.top)
            scored = TokenLogprobs(token, self.length, top, event.id)
            self.on_scores((scored,))
            self.unshown_tokens.append(scored)
        self.token_count += 1
        self.cached_tokens = event.cached_tokens
        return self.end_if_stopped(self.show(text))

    def end_if_stopped(self, delta: AnswerDelta) -> AnswerDelta:
        """Return the last delta if a stop string was found, else `delta`."""
        return replace(delta, finish="stop", usage=self.usage, stop=self.tail.found) if self.is_stopped else delta

    def show(self, text: str) -> AnswerDelta:
        self.length += len(text)
        early = self.token_count < self.request.sampling.min_tokens  # stop strings do not apply yet
        shown = text if early else self.tail.push(text)
        self.shown_length += len(shown)
        return AnswerDelta(text_parts(shown), self.take_shown_tokens(), token_count=self.token_count)

    def take_shown_tokens(self) -> tuple[TokenLogprobs, ...]:
        """Take the tokens that begin before the end of the sent text. The token of an incomplete character waits."""
        logprobs = []
        while self.unshown_tokens and self.unshown_tokens[0].offset < self.shown_length:
            logprobs.append(self.unshown_tokens.popleft())
        return tuple(logprobs)

    def take_unshown_tokens(self) -> tuple[TokenLogprobs, ...]:
        """Take all tokens that wait, at the end of the answer."""
        left = tuple(self.unshown_tokens)
        self.unshown_tokens.clear()
        return left

    def close(self, done: Done) -> AnswerDelta:
        """Return the last delta, with the text that was held back."""
        is_requested = done.token in self.stops.tokens
        piece = self.show(
            (self.stream.push(done.token) if is_requested and self.stops.keep else "") + self.stream.flush()
        )
        self.token_count, self.cached_tokens = done.completion_tokens, done.cached_tokens
        if self.is_stopped:
            return self.end_if_stopped(piece)
        finish: AnswerEnd = "length" if done.reason == "length" else "stop"
        text, logprobs = piece.text + self.tail.flush(), piece.logprobs + self.take_unshown_tokens()
        return AnswerDelta(
            text_parts(text),
            logprobs,
            finish,
            self.usage,
            done.token if is_requested else "",
            token_count=self.token_count,
        )

    def score_top(self, likeliest: Sequence[tuple[int, float]]) -> tuple[ScoredFields, ...]:
        return tuple([self.score_fields(id, logprob) for id, logprob in likeliest])

    def score_token(self, id: int, logprob: float | None) -> ScoredToken:
        return ScoredToken(*self.score_fields(id, logprob))

    def score_fields(self, id: int, logprob: float | None) -> ScoredFields:
        if logprob is not None and not logprob > MIN_LOGPROB:  # minus infinity, or not a number
            logprob = MIN_LOGPROB
        return self.tokenizer.piece_bytes(id), logprob, id

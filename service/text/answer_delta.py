"""The parts in which an answer is sent: text, reasoning, tool calls, log-probabilities, and the usage at its end."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, starmap
from typing import Literal

from ..core.request import AnswerEnd


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


NO_USAGE = Usage()


ScoredFields = tuple[bytes, float | None, int]  # of a ScoredToken


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
    """A token of an answer or of a prompt. `offset`: where its text begins, in characters. `likeliest`: the fields of
    the most probable tokens in its place. `id`: its number in the vocabulary.

    Millions of the latter may wait for a client: as plain tuples of plain values, garbage collection does not look at
    them.
    """

    token: ScoredToken
    offset: int
    likeliest: tuple[ScoredFields, ...]
    id: int

    @property
    def top(self) -> Iterator[ScoredToken]:
        """The most probable tokens in its place."""
        return starmap(ScoredToken, self.likeliest)


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """The beginning of a tool call, the `index`-th of the answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON object of a call's arguments."""

    index: int
    text: str


AnswerPart = ReasoningDelta | TextDelta | ToolCallStart | ArgumentsDelta


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """The next part of an answer; the last one has a `finish` and the usage. `logprobs` only if they were requested.

    `finish` is "calls" if the answer is complete and calls tools. `stop` is the stop string that was found, or the
    requested stop token that ended the answer. The first delta has `prompt_logprobs`, if they were requested.
    `token_count`: tokens generated so far, of which `reasoning_tokens` were reasoning.
    """

    parts: tuple[AnswerPart, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: AnswerEnd | Literal["", "calls"] = ""
    usage: Usage = NO_USAGE
    stop: str | int = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_count: int = 0
    reasoning_tokens: int = 0

    @property
    def text(self) -> str:
        """The text of the answer, without reasoning and tool calls."""
        return "".join(part.text for part in self.parts if isinstance(part, TextDelta))

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not (self.parts or self.logprobs or self.finish or self.prompt_logprobs)


def text_parts(text: str) -> tuple[AnswerPart, ...]:
    return (TextDelta(text),) if text else ()


def merge_key(part: AnswerPart) -> tuple[type, int]:
    return type(part), part.index if isinstance(part, ToolCallStart | ArgumentsDelta) else 0


def merge_parts(parts: Iterable[AnswerPart]) -> tuple[AnswerPart, ...]:
    """Merge neighbouring parts of the same kind, and of the same tool call."""
    merged: list[AnswerPart] = []
    for _, group in groupby(parts, key=merge_key):
        first, *others = group
        if others and not isinstance(first, ToolCallStart):
            texts = [part.text for part in (first, *others) if not isinstance(part, ToolCallStart)]
            merged.append(replace(first, text="".join(texts)))
        else:
            merged += (first, *others)
    return tuple(merged)


def join_deltas(deltas: Sequence[AnswerDelta]) -> AnswerDelta:
    """A whole answer as one delta."""
    return replace(
        deltas[-1],
        parts=merge_parts(part for delta in deltas for part in delta.parts),
        logprobs=tuple(token for delta in deltas for token in delta.logprobs),
        prompt_logprobs=tuple(token for delta in deltas for token in delta.prompt_logprobs),
    )

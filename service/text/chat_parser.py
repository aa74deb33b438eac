"""Parser of chat answers: splits the text of an answer into reasoning, text and tool calls as it is generated.

Text that may still be the beginning of a tag is held back, so nothing that was sent has to be withdrawn.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from polyhead.models.chat.chat_format import ChatFormat

from ..concurrency.time_slices import iterate_in_slices
from .detokenizer import AnswerDelta, TokenLogprobs, Usage, collect_parts
from .tool_call_parser import (
    ArgumentsDelta,
    ChatPart,
    ReasoningDelta,
    TextDelta,
    ToolCallParser,
    ToolCallStart,
    certain_length,
)

__all__ = ["ArgumentsDelta", "ChatPart", "ReasoningDelta", "TextDelta", "ToolCallStart"]

NO_USAGE, PLAIN_FORMAT = Usage(), ChatFormat()


@dataclass(frozen=True, slots=True)
class ChatDelta:
    """The next part of an answer; the last one has a `finish` and the usage. `logprobs` only if they were requested.

    `stop` is the stop string or the token that ended the answer, if it was not the model's own. `reasoning_tokens` of
    the answer's tokens were reasoning. The first delta has `prompt_logprobs`, if they were requested.
    """

    parts: tuple[ChatPart, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: Literal["", "stop", "length", "calls"] = ""
    usage: Usage = NO_USAGE
    reasoning_tokens: int = 0
    stop: str | int = ""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


ChatDeltas = AsyncGenerator[tuple[int, ChatDelta], None]


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """What an answer may contain beside text: calls of `tools`, and reasoning.

    `reasoning` is "may" if the model decides whether to reason, and "does" if the prompt ends inside the reasoning.
    """

    format: ChatFormat = PLAIN_FORMAT
    tools: frozenset[str] = frozenset()
    reasoning: Literal["", "may", "does"] = ""


class ReasoningParser:
    """Splits off the reasoning at the beginning of one answer, which stands between tags. Space around the tags is
    dropped.
    """

    def __init__(self, begin: str, end: str, reasoning: Literal["", "may", "does"]) -> None:
        self.begin, self.end = begin, end
        self.state: Literal["", "may", "does", "did"] = reasoning
        self.pending, self.has_output = "", False

    def push(self, text: str) -> tuple[str, str]:
        """Return the new reasoning, and the new text after it."""
        self.pending += text
        if self.state == "may":
            start = self.pending.lstrip()
            if start.startswith(self.begin):
                self.state, self.pending = "does", start.removeprefix(self.begin)
            elif not self.begin.startswith(start):
                self.state = ""
        thought = self.take_reasoning() if self.state == "does" else ""
        if self.state == "did":
            self.pending = self.pending.lstrip()
            self.state = "" if self.pending else "did"
        return thought, self.take(len(self.pending)) if not self.state else ""

    def take_reasoning(self) -> str:
        if not self.has_output:
            self.pending = self.pending.lstrip()
        at = self.pending.find(self.end)
        if at < 0:
            taken = self.take(certain_length(self.pending, self.end))
        else:
            taken = self.take(at).rstrip()
            self.pending, self.state = self.pending.removeprefix(self.end), "did"
        self.has_output = self.has_output or bool(taken)
        return taken

    def take(self, count: int) -> str:
        taken, self.pending = self.pending[:count], self.pending[count:]
        return taken

    def close(self) -> tuple[str, str]:
        """Return the reasoning and the text that were held back, at the end of the answer."""
        thinking = self.state == "does"
        held = self.take(len(self.pending))
        return (held.rstrip(), "") if thinking else ("", held)


class ChatParser:
    """The parser of one answer: takes deltas of text, returns chat deltas."""

    def __init__(self, expected: ExpectedOutput) -> None:
        format = expected.format
        self.reasoning = ReasoningParser(format.begin, format.end, expected.reasoning if format.end else "")
        self.tool_calls = ToolCallParser(format.style, expected.tools) if expected.tools else None
        self.reasoning_tokens = 0

    def push(self, piece: AnswerDelta) -> ChatDelta:
        thinking = self.reasoning.state == "does"
        thought, text = self.reasoning.push(piece.text)
        if thinking or thought:
            self.reasoning_tokens = piece.token_count
        parts = self.parse_parts(thought, text)
        if not piece.finish:
            return ChatDelta(merge_parts(parts), piece.logprobs, prompt_logprobs=piece.prompt_logprobs)
        parts += self.parse_parts(*self.reasoning.close())
        parts += self.tool_calls.close() if self.tool_calls else []
        called = piece.finish == "stop" and self.tool_calls is not None and self.tool_calls.has_complete_calls
        finish: Literal["", "stop", "length", "calls"] = "calls" if called else piece.finish
        return ChatDelta(
            merge_parts(parts),
            piece.logprobs,
            finish,
            piece.usage,
            self.reasoning_tokens,
            piece.stop,
            prompt_logprobs=piece.prompt_logprobs,
        )

    def parse_parts(self, thought: str, text: str) -> list[ChatPart]:
        parts: list[ChatPart] = [ReasoningDelta(thought)] if thought else []
        if text:
            parts += self.tool_calls.push(text) if self.tool_calls else [TextDelta(text)]
        return parts


def merge_parts(parts: Sequence[ChatPart]) -> tuple[ChatPart, ...]:
    """Merge neighbouring parts of the same kind."""
    joined: list[ChatPart] = []
    for part in parts:
        match joined[-1] if joined else None, part:
            case TextDelta(text=before), TextDelta(text=after):
                joined[-1] = TextDelta(before + after)
            case ReasoningDelta(text=before), ReasoningDelta(text=after):
                joined[-1] = ReasoningDelta(before + after)
            case ArgumentsDelta(index=one, text=before), ArgumentsDelta(index=other, text=after) if one == other:
                joined[-1] = ArgumentsDelta(one, before + after)
            case _:
                joined.append(part)
    return tuple(joined)


async def parse_answers(answers: AsyncGenerator[tuple[int, AnswerDelta], None], expected: ExpectedOutput) -> ChatDeltas:
    """Parse `answers`, each with a parser of its own. Closing this generator closes `answers`."""
    parsers: defaultdict[int, ChatParser] = defaultdict(lambda: ChatParser(expected))
    async with aclosing(answers):
        async for index, piece in answers:
            delta = parsers[index].push(piece)
            if delta.parts or delta.logprobs or delta.finish or delta.prompt_logprobs:
                yield index, delta


async def drop_reasoning(deltas: ChatDeltas) -> ChatDeltas:
    """Remove the reasoning from the deltas. Its tokens still count."""
    async with aclosing(deltas):
        async for index, delta in deltas:
            yield (
                index,
                replace(delta, parts=tuple(part for part in delta.parts if not isinstance(part, ReasoningDelta))),
            )


async def collect_chat_answers(count: int, deltas: ChatDeltas) -> list[ChatDelta]:
    """Return `count` whole answers, each as one delta."""
    return [join_deltas(every) async for every in iterate_in_slices(await collect_parts(count, deltas), 1)]


def join_deltas(deltas: Sequence[ChatDelta]) -> ChatDelta:
    return replace(
        deltas[-1],
        parts=merge_parts([part for each in deltas for part in each.parts]),
        logprobs=tuple(token for each in deltas for token in each.logprobs),
        prompt_logprobs=tuple(token for each in deltas for token in each.prompt_logprobs),
    )

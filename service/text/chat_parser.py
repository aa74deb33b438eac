"""From text to what was said: thoughts, words and calls of tools, told apart as they come.

Knows no HTTP and no dialect.  The one idea: what may still be the beginning of a tag waits, so that nothing that was
told is ever taken back.
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
    """The next bit of an answer; the last one has a `finish` and the usage.  `drawn` only where asked for.

    `stop` is the stop string or token that ended it, where the answer itself did not.  Of the answer's tokens
    `thought_tokens` were thoughts.  The tokens of the `prompt` are in the first one, where they were asked for.
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
    """What may be in an answer beside words: calls of `tools`, thoughts where the model `thinks`.

    "may": it says so itself; "does": the prompt ends within its thoughts.
    """

    format: ChatFormat = PLAIN_FORMAT
    tools: frozenset[str] = frozenset()
    reasoning: Literal["", "may", "does"] = ""


class ReasoningParser:
    """What stands before the words of one answer, between tags.  Space round the tags is theirs."""

    def __init__(self, begin: str, end: str, thinks: Literal["", "may", "does"]) -> None:
        self.begin, self.end = begin, end
        self.state: Literal["", "may", "does", "did"] = thinks
        self.pending, self.has_output = "", False

    def push(self, text: str) -> tuple[str, str]:
        """What is thought, and what follows it."""
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
            said = self.take(certain_length(self.pending, self.end))
        else:
            said = self.take(at).rstrip()
            self.pending, self.state = self.pending.removeprefix(self.end), "did"
        self.has_output = self.has_output or bool(said)
        return said

    def take(self, count: int) -> str:
        said, self.pending = self.pending[:count], self.pending[count:]
        return said

    def close(self) -> tuple[str, str]:
        """What was held back, now that nothing follows."""
        thinking = self.state == "does"
        held = self.take(len(self.pending))
        return (held.rstrip(), "") if thinking else ("", held)


class ChatParser:
    """One answer: its pieces in, what they say out."""

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
    """Neighbours of one kind as one."""
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
    """What `answers` say, each as `expected`; closing it closes them."""
    hearings: defaultdict[int, ChatParser] = defaultdict(lambda: ChatParser(expected))
    async with aclosing(answers):
        async for index, piece in answers:
            said = hearings[index].push(piece)
            if said.parts or said.logprobs or said.finish or said.prompt_logprobs:
                yield index, said


async def drop_reasoning(utterances: ChatDeltas) -> ChatDeltas:
    """Without the thoughts, which are counted all the same."""
    async with aclosing(utterances):
        async for index, said in utterances:
            yield index, replace(said, parts=tuple(part for part in said.parts if not isinstance(part, ReasoningDelta)))


async def collect_chat_answers(count: int, utterances: ChatDeltas) -> list[ChatDelta]:
    """`count` answers, each in one."""
    return [join_deltas(every) async for every in iterate_in_slices(await collect_parts(count, utterances), 1)]


def join_deltas(utterances: Sequence[ChatDelta]) -> ChatDelta:
    return replace(
        utterances[-1],
        parts=merge_parts([part for each in utterances for part in each.parts]),
        logprobs=tuple(token for each in utterances for token in each.logprobs),
        prompt_logprobs=tuple(token for each in utterances for token in each.prompt_logprobs),
    )

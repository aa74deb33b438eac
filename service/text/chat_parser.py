"""Parser of chat answers: splits the text of an answer into reasoning, text and tool calls as it is generated.

Text that may still be the beginning of a tag is held back, so nothing that was sent has to be withdrawn.
"""

from dataclasses import dataclass, replace
from typing import Literal

from polyhead.models.chat.chat_format import ChatFormat

from .answer_delta import AnswerDelta, AnswerPart, ReasoningDelta, TextDelta, merge_parts
from .tool_call_parser import ToolCallParser, certain_length

PLAIN_FORMAT = ChatFormat()


@dataclass(frozen=True, slots=True)
class ExpectedOutput:
    """What an answer may contain beside text: calls of `tools`, and reasoning.

    `reasoning` is "may" if the model decides whether to reason, and "does" if the prompt ends inside the reasoning.
    `shows_reasoning`: the client gets the reasoning; its tokens count in any case.
    """

    format: ChatFormat = PLAIN_FORMAT
    tools: frozenset[str] = frozenset()
    reasoning: Literal["", "may", "does"] = ""
    shows_reasoning: bool = True

    def hide(self, delta: AnswerDelta) -> AnswerDelta:
        """Remove what the client does not get."""
        if self.shows_reasoning:
            return delta
        return replace(delta, parts=tuple(part for part in delta.parts if not isinstance(part, ReasoningDelta)))


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
    """The parser of one answer: takes deltas of text, returns them in parts."""

    def __init__(self, expected: ExpectedOutput) -> None:
        format = expected.format
        self.reasoning = ReasoningParser(format.begin, format.end, expected.reasoning if format.end else "")
        self.tool_calls = ToolCallParser(format.style, expected.tools) if expected.tools else None
        self.reasoning_tokens = 0

    def push(self, delta: AnswerDelta) -> AnswerDelta:
        """Split the text of the next delta into parts."""
        thinking = self.reasoning.state == "does"
        thought, text = self.reasoning.push(delta.text)
        if thinking or thought:
            self.reasoning_tokens = delta.token_count
        parts = self.parse_parts(thought, text)
        if not delta.finish:
            return replace(delta, parts=merge_parts(parts))
        parts += self.parse_parts(*self.reasoning.close())
        parts += self.tool_calls.close() if self.tool_calls else []
        called = delta.finish == "stop" and self.tool_calls is not None and self.tool_calls.has_complete_calls
        return replace(
            delta,
            parts=merge_parts(parts),
            finish="calls" if called else delta.finish,
            reasoning_tokens=self.reasoning_tokens,
        )

    def parse_parts(self, thought: str, text: str) -> list[AnswerPart]:
        parts: list[AnswerPart] = [ReasoningDelta(thought)] if thought else []
        if text:
            parts += self.tool_calls.push(text) if self.tool_calls else [TextDelta(text)]
        return parts

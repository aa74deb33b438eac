"""Parser of tool calls in an answer's text, as it is generated.

A call is emitted as soon as its tool is certain, and its arguments as they are written. Text that turns out not to be a
call is emitted unchanged as text. A call is a JSON object that begins with the name of one of `tools`.
"""

import re
import uuid
from collections.abc import Callable

from polyhead.models.chat.chat_format import ToolCallStyle

from .answer_delta import AnswerPart, ArgumentsDelta, TextDelta, ToolCallStart

SPACE = " \n\r\t"
HEAD_PATTERN = r'_\{_(?:"type"_:_"function"_,_)?"name"_:_"([^"\\]*)"_,_"(?:arguments|parameters)"_:_(?=\{)'
HEAD_REGEX = re.compile(HEAD_PATTERN.replace("_", f"[{SPACE}]*"))
COMPACT_HEADS = [
    f'{{{kind}"name":"%s","{key}":{{' for kind in ("", '"type":"function",') for key in ("arguments", "parameters")
]
MAX_HEAD = 1024  # characters in which the name must be found


def certain_length(text: str, tag: str) -> int:
    """Return how many characters are certainly not part of `tag`. Space before a tag belongs to it."""
    matched = next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    return len(text[: len(text) - matched].rstrip())


class JsonExtent:
    """Finds the end of a JSON object in text that comes in pieces."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped = 0, False, False

    def push(self, text: str) -> int:
        """Return how many characters of `text` belong to the object, if it ends in it; -1 if the object continues."""
        for count, char in enumerate(text, 1):
            if self.escaped:
                self.escaped = False
            elif self.quoted:
                self.quoted, self.escaped = char != '"', char == "\\"
            elif char == '"':
                self.quoted = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth <= 0:
                    return count
        return -1


class ToolCallParser:
    """The parser of one answer: takes text, returns text and calls of `tools`.

    `step` is the parsing function for the current state; it returns whether there is more to parse. `unparsed` is text
    that was taken for the beginning of a call.
    """

    def __init__(self, style: ToolCallStyle, tools: frozenset[str]) -> None:
        self.style, self.tools = style, tools
        self.heads = [head % name for head in COMPACT_HEADS for name in tools]
        self.step: Callable[[], bool] = self.parse_text if style.begin else self.parse_opening
        self.pending = self.unparsed = ""
        self.count, self.is_in_list = 0, False
        self.extent = JsonExtent()
        self.endings: list[str] = []
        self.parts: list[AnswerPart] = []

    @property
    def has_complete_calls(self) -> bool:
        """Whether tools were called and the last call is complete."""
        return self.count > 0 and self.step != self.parse_arguments

    def push(self, text: str) -> list[AnswerPart]:
        self.pending += text
        return self.take_parts()

    def close(self) -> list[AnswerPart]:
        """Return what was held back, at the end of the answer. What is left of a complete call is dropped."""
        parts = []
        while self.step == self.parse_head:
            self.reject_call()
            parts += self.take_parts()
        if self.step in (self.parse_text, self.parse_opening) and not (self.count and not self.pending.strip()):
            self.add_text(len(self.pending))
        return parts + self.parts

    def take_parts(self) -> list[AnswerPart]:
        while self.step():
            pass
        parts, self.parts = self.parts, []
        return parts

    def add_text(self, count: int) -> None:
        if count:
            self.parts.append(TextDelta(self.pending[:count]))
            self.pending = self.pending[count:]

    # Steps

    def parse_text(self) -> bool:
        """Emit text until a call begins."""
        at = self.pending.find(self.style.begin)
        if at < 0:
            self.add_text(certain_length(self.pending, self.style.begin))
            return False
        self.add_text(len(self.pending[:at].rstrip()))
        return self.begin_call(self.pending.index(self.style.begin) + len(self.style.begin))

    def parse_opening(self) -> bool:
        """Decide whether the answer is calls, if calls must be the whole answer: only a bracket may begin one."""
        start, mark = self.pending.lstrip(SPACE), self.style.mark
        if mark.startswith(start):
            return False
        start = start.removeprefix(mark).lstrip(SPACE)
        if start.startswith("[") and self.style.listed:
            self.is_in_list = True
            return self.begin_call(len(self.pending) - len(start) + 1)
        if start.startswith("{"):
            return self.begin_call(len(self.pending) - len(start))
        self.step = self.parse_rest if start else self.step
        return bool(start)

    def parse_rest(self) -> bool:
        """Emit everything as text."""
        self.add_text(len(self.pending))
        return False

    def begin_call(self, count: int) -> bool:
        """Take `count` characters as the beginning of a call."""
        self.unparsed, self.pending = self.pending[:count], self.pending[count:]
        self.step = self.parse_head
        return True

    def parse_head(self) -> bool:
        """Parse the name of the tool, once it is certain."""
        match = HEAD_REGEX.match(self.pending, 0, MAX_HEAD)
        if match and match[1] in self.tools:
            self.add_call(match[1])
            self.pending, self.extent = self.pending[match.end() :], JsonExtent()
            self.step = self.parse_arguments
            return True
        return not self.may_become_head() and self.reject_call()

    def may_become_head(self) -> bool:
        """Whether the text may still become the head of a call."""
        tight = re.sub(f"[{SPACE}]", "", self.pending)
        return len(self.pending) < MAX_HEAD and any(head.startswith(tight) and head != tight for head in self.heads)

    def add_call(self, name: str) -> None:
        self.parts.append(ToolCallStart(self.count, f"call_{uuid.uuid4().hex[:24]}", name))
        self.count += 1
        self.unparsed = ""

    def parse_arguments(self) -> bool:
        end = self.extent.push(self.pending)
        count = end if end >= 0 else len(self.pending)
        if count:
            self.parts.append(ArgumentsDelta(self.count - 1, self.pending[:count]))
        self.pending = self.pending[count:]
        return end >= 0 and self.expect_endings("}", self.style.end)

    def expect_endings(self, *endings: str) -> bool:
        self.endings = [each for each in endings if each]
        self.step = self.parse_endings
        return True

    def parse_endings(self) -> bool:
        """Skip the text that ends a call."""
        while self.endings:
            start = self.pending.lstrip()
            if start.startswith(self.endings[0]):
                self.pending = start.removeprefix(self.endings.pop(0))
            elif self.endings[0].startswith(start):
                return False
            else:
                return self.reject_call()
        self.step = self.parse_text if self.style.begin else self.parse_next
        return True

    def parse_next(self) -> bool:
        """Parse what follows a call if calls are the whole answer: another call, or the end of the list."""
        start, divider = self.pending.lstrip(), self.style.between.strip()
        if not start:
            return False
        if start.startswith(divider) and (self.is_in_list or not self.style.listed):
            return self.begin_call(len(self.pending) - len(start) + len(divider))
        if start[0] != "]" or not self.is_in_list:
            return self.reject_call()
        self.pending, self.is_in_list = start[1:], False
        return True

    def reject_call(self) -> bool:
        """Emit the text as text: it is not a call. Parts that were emitted already remain."""
        if self.unparsed:
            self.parts.append(TextDelta(self.unparsed))
        self.unparsed = ""
        self.step = self.parse_text if self.style.begin else self.parse_rest
        return True

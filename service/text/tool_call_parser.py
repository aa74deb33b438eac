"""From text to calls of tools, as it comes.

Knows no tokens and no dialect.  The one idea: a call is told as soon as it is certain which tool is called, and its
arguments as they are written; what turns out to be no call is text, to the last character.  What is a call is what
`tools` lets be one: an object that begins with the name of a tool.
"""

import re
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from polyhead.models.chat.chat_format import Style

SPACE = " \n\r\t"
SPELLED = r'_\{_(?:"type"_:_"function"_,_)?"name"_:_"([^"\\]*)"_,_"(?:arguments|parameters)"_:_(?=\{)'
HEAD = re.compile(SPELLED.replace("_", f"[{SPACE}]*"))
TIGHT_HEADS = [
    f'{{{kind}"name":"%s","{key}":{{' for kind in ("", '"type":"function",') for key in ("arguments", "parameters")
]
LONGEST_HEAD = 1024  # characters in which a name is looked for


@dataclass(frozen=True, slots=True)
class Thought:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class Words:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A tool is called, the `index`-th of the answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON object that a tool is called with."""

    index: int
    text: str


Part = Thought | Words | Call | Arguments


def certain(text: str, tag: str) -> int:
    """How many characters can be shown before it is known whether `tag` follows; space before a tag is part of it."""
    matched = next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)
    return len(text[: len(text) - matched].rstrip())


class Extent:
    """Where a JSON object ends that is looked for a bit at a time."""

    def __init__(self) -> None:
        self.depth, self.quoted, self.escaped = 0, False, False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to it, up to its end; -1: all, and more to come."""
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


class Calls:
    """One answer: text in, words and calls of `tools` out.

    `step` is what is done with the text that is held; it says whether there is more to do.  `raw` is what was taken
    for the beginning of a call.
    """

    def __init__(self, style: Style, tools: frozenset[str]) -> None:
        self.style, self.tools = style, tools
        self.heads = [head % name for head in TIGHT_HEADS for name in tools]
        self.step: Callable[[], bool] = self.words if style.begin else self.opening
        self.held = self.raw = ""
        self.count, self.listing = 0, False
        self.extent = Extent()
        self.wanted: list[str] = []
        self.parts: list[Part] = []

    @property
    def called(self) -> bool:
        """Tools were called, and the last call is whole."""
        return self.count > 0 and self.step != self.arguments

    def push(self, text: str) -> list[Part]:
        self.held += text
        return self.told()

    def close(self) -> list[Part]:
        """What was held back, now that nothing follows: the end of a call that was told needs no words."""
        parts = []
        while self.step == self.head:
            self.broken()
            parts += self.told()
        if self.step in (self.words, self.opening) and not (self.count and not self.held.strip()):
            self.say(len(self.held))
        return parts + self.parts

    def told(self) -> list[Part]:
        while self.step():
            pass
        parts, self.parts = self.parts, []
        return parts

    def say(self, count: int) -> None:
        if count:
            self.parts.append(Words(self.held[:count]))
            self.held = self.held[count:]

    # Steps

    def words(self) -> bool:
        """Words until a call begins."""
        at = self.held.find(self.style.begin)
        if at < 0:
            self.say(certain(self.held, self.style.begin))
            return False
        self.say(len(self.held[:at].rstrip()))
        return self.begin(self.held.index(self.style.begin) + len(self.style.begin))

    def opening(self) -> bool:
        """Where calls are the whole answer, only a bracket may begin one."""
        start, mark = self.held.lstrip(SPACE), self.style.mark
        if mark.startswith(start):
            return False
        start = start.removeprefix(mark).lstrip(SPACE)
        if start.startswith("[") and self.style.listed:
            self.listing = True
            return self.begin(len(self.held) - len(start) + 1)
        if start.startswith("{"):
            return self.begin(len(self.held) - len(start))
        self.step = self.rest if start else self.step
        return bool(start)

    def rest(self) -> bool:
        """Nothing but words follows."""
        self.say(len(self.held))
        return False

    def begin(self, count: int) -> bool:
        """So many characters lead to a call."""
        self.raw, self.held = self.held[:count], self.held[count:]
        self.step = self.head
        return True

    def head(self) -> bool:
        """Which tool is called, once that is certain."""
        match = HEAD.match(self.held, 0, LONGEST_HEAD)
        if match and match[1] in self.tools:
            self.call(match[1])
            self.held, self.extent = self.held[match.end() :], Extent()
            self.step = self.arguments
            return True
        return not self.beginning() and self.broken()

    def beginning(self) -> bool:
        """Whether this may still become a head."""
        tight = re.sub(f"[{SPACE}]", "", self.held)
        return len(self.held) < LONGEST_HEAD and any(head.startswith(tight) and head != tight for head in self.heads)

    def call(self, name: str) -> None:
        self.parts.append(Call(self.count, f"call_{uuid.uuid4().hex[:24]}", name))
        self.count += 1
        self.raw = ""

    def arguments(self) -> bool:
        end = self.extent.push(self.held)
        count = end if end >= 0 else len(self.held)
        if count:
            self.parts.append(Arguments(self.count - 1, self.held[:count]))
        self.held = self.held[count:]
        return end >= 0 and self.close_with("}", self.style.end)

    def close_with(self, *wanted: str) -> bool:
        self.wanted = [each for each in wanted if each]
        self.step = self.closing
        return True

    def closing(self) -> bool:
        """What still belongs to the call."""
        while self.wanted:
            start = self.held.lstrip()
            if start.startswith(self.wanted[0]):
                self.held = start.removeprefix(self.wanted.pop(0))
            elif self.wanted[0].startswith(start):
                return False
            else:
                return self.broken()
        self.step = self.words if self.style.begin else self.next
        return True

    def next(self) -> bool:
        """Another call, or the end of them, where they are the whole answer."""
        start, divider = self.held.lstrip(), self.style.between.strip()
        if not start:
            return False
        if start.startswith(divider) and (self.listing or not self.style.listed):
            return self.begin(len(self.held) - len(start) + len(divider))
        if start[0] != "]" or not self.listing:
            return self.broken()
        self.held, self.listing = start[1:], False
        return True

    def broken(self) -> bool:
        """It is none; what was told of it remains."""
        if self.raw:
            self.parts.append(Words(self.raw))
        self.raw = ""
        self.step = self.words if self.style.begin else self.rest
        return True

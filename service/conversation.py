"""From text to what was said: thoughts, words and calls of tools, told apart as they come.

Knows no HTTP and no dialect.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Literal

from service.transcript import Drawn, Usage

FREE = Usage()


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


@dataclass(frozen=True, slots=True)
class Utterance:
    """The next bit of an answer; the last one has a `finish` and the usage.  `drawn` only where asked for.

    `stop` is the stop string or token that ended it, where the answer itself did not.
    """

    parts: tuple[Part, ...]
    drawn: tuple[Drawn, ...] = ()
    finish: Literal["", "stop", "length", "calls"] = ""
    usage: Usage = FREE
    thought_tokens: int = 0
    stop: str | int = ""


Utterances = AsyncGenerator[tuple[int, Utterance], None]

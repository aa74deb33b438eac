"""From text to what was said: thoughts, words and calls of tools, told apart as they come.

Knows no HTTP and no dialect.  The one idea: what may still be the beginning of a tag waits, so that nothing that was
told is ever taken back.
"""

from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from polyhead.models.chat.chat_format import Format

from ..concurrency.time_slices import spaced
from .detokenizer import Drawn, Piece, Usage, parted
from .tool_call_parser import Arguments, Call, Calls, Part, Thought, Words, certain

__all__ = ["Arguments", "Call", "Part", "Thought", "Words"]

FREE, PLAIN_FORMAT = Usage(), Format()


@dataclass(frozen=True, slots=True)
class Utterance:
    """The next bit of an answer; the last one has a `finish` and the usage.  `drawn` only where asked for.

    `stop` is the stop string or token that ended it, where the answer itself did not.  Of the answer's tokens
    `thought_tokens` were thoughts.  The tokens of the `prompt` are in the first one, where they were asked for.
    """

    parts: tuple[Part, ...]
    drawn: tuple[Drawn, ...] = ()
    finish: Literal["", "stop", "length", "calls"] = ""
    usage: Usage = FREE
    thought_tokens: int = 0
    stop: str | int = ""
    prompt: tuple[Drawn, ...] = ()


Utterances = AsyncGenerator[tuple[int, Utterance], None]


@dataclass(frozen=True, slots=True)
class Expected:
    """What may be in an answer beside words: calls of `tools`, thoughts where the model `thinks`.

    "may": it says so itself; "does": the prompt ends within its thoughts.
    """

    format: Format = PLAIN_FORMAT
    tools: frozenset[str] = frozenset()
    thinks: Literal["", "may", "does"] = ""


class Thoughts:
    """What stands before the words of one answer, between tags.  Space round the tags is theirs."""

    def __init__(self, begin: str, end: str, thinks: Literal["", "may", "does"]) -> None:
        self.begin, self.end = begin, end
        self.state: Literal["", "may", "does", "did"] = thinks
        self.held, self.told = "", False

    def push(self, text: str) -> tuple[str, str]:
        """What is thought, and what follows it."""
        self.held += text
        if self.state == "may":
            start = self.held.lstrip()
            if start.startswith(self.begin):
                self.state, self.held = "does", start.removeprefix(self.begin)
            elif not self.begin.startswith(start):
                self.state = ""
        thought = self.thought() if self.state == "does" else ""
        if self.state == "did":
            self.held = self.held.lstrip()
            self.state = "" if self.held else "did"
        return thought, self.taken(len(self.held)) if not self.state else ""

    def thought(self) -> str:
        if not self.told:
            self.held = self.held.lstrip()
        at = self.held.find(self.end)
        if at < 0:
            said = self.taken(certain(self.held, self.end))
        else:
            said = self.taken(at).rstrip()
            self.held, self.state = self.held.removeprefix(self.end), "did"
        self.told = self.told or bool(said)
        return said

    def taken(self, count: int) -> str:
        said, self.held = self.held[:count], self.held[count:]
        return said

    def close(self) -> tuple[str, str]:
        """What was held back, now that nothing follows."""
        thinking = self.state == "does"
        held = self.taken(len(self.held))
        return (held.rstrip(), "") if thinking else ("", held)


class Hearing:
    """One answer: its pieces in, what they say out."""

    def __init__(self, expected: Expected) -> None:
        format = expected.format
        self.thoughts = Thoughts(format.begin, format.end, expected.thinks if format.end else "")
        self.calls = Calls(format.style, expected.tools) if expected.tools else None
        self.thought_tokens = 0

    def hear(self, piece: Piece) -> Utterance:
        thinking = self.thoughts.state == "does"
        thought, text = self.thoughts.push(piece.text)
        if thinking or thought:
            self.thought_tokens = piece.tokens
        parts = self.parts(thought, text)
        if not piece.finish:
            return Utterance(merged(parts), piece.drawn, prompt=piece.prompt)
        parts += self.parts(*self.thoughts.close())
        parts += self.calls.close() if self.calls else []
        called = piece.finish == "stop" and self.calls is not None and self.calls.called
        finish: Literal["", "stop", "length", "calls"] = "calls" if called else piece.finish
        return Utterance(
            merged(parts), piece.drawn, finish, piece.usage, self.thought_tokens, piece.stop, prompt=piece.prompt
        )

    def parts(self, thought: str, text: str) -> list[Part]:
        parts: list[Part] = [Thought(thought)] if thought else []
        if text:
            parts += self.calls.push(text) if self.calls else [Words(text)]
        return parts


def merged(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Neighbours of one kind as one."""
    joined: list[Part] = []
    for part in parts:
        match joined[-1] if joined else None, part:
            case Words(text=before), Words(text=after):
                joined[-1] = Words(before + after)
            case Thought(text=before), Thought(text=after):
                joined[-1] = Thought(before + after)
            case Arguments(index=one, text=before), Arguments(index=other, text=after) if one == other:
                joined[-1] = Arguments(one, before + after)
            case _:
                joined.append(part)
    return tuple(joined)


async def conversed(answers: AsyncGenerator[tuple[int, Piece], None], expected: Expected) -> Utterances:
    """What `answers` say, each as `expected`; closing it closes them."""
    hearings: defaultdict[int, Hearing] = defaultdict(lambda: Hearing(expected))
    async with aclosing(answers):
        async for index, piece in answers:
            said = hearings[index].hear(piece)
            if said.parts or said.drawn or said.finish or said.prompt:
                yield index, said


async def silent(utterances: Utterances) -> Utterances:
    """Without the thoughts, which are counted all the same."""
    async with aclosing(utterances):
        async for index, said in utterances:
            yield index, replace(said, parts=tuple(part for part in said.parts if not isinstance(part, Thought)))


async def whole_utterances(count: int, utterances: Utterances) -> list[Utterance]:
    """`count` answers, each in one."""
    return [joined(every) async for every in spaced(await parted(count, utterances), 1)]


def joined(utterances: Sequence[Utterance]) -> Utterance:
    return replace(
        utterances[-1],
        parts=merged([part for each in utterances for part in each.parts]),
        drawn=tuple(token for each in utterances for token in each.drawn),
        prompt=tuple(token for each in utterances for token in each.prompt),
    )

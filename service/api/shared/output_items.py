"""An answer as a list of items: what was thought, what was said, each call of a tool.

Knows no dialect.  The one idea: an item is a run of parts of one kind; what begins, goes on and ends is told as it
happens, and the whole answer is what has ended.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...text.chat_parser import Arguments, Call, Part, Thought, Utterance, Utterances, Words
from ...text.detokenizer import Drawn

Kind = Literal["thought", "words", "call"]


@dataclass(slots=True)
class Item:
    """The `index`-th of an answer.  `text` is what it says so far: of a call its arguments, the call's `id` and the
    tool's `name` beside it.  `drawn` are the tokens of words, where asked for."""

    kind: Kind
    index: int
    text: str = ""
    id: str = ""
    name: str = ""
    drawn: list[Drawn] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Begun:
    item: Item


@dataclass(frozen=True, slots=True)
class More:
    """`text` has been added to the item, and to the tokens of words `drawn`."""

    item: Item
    text: str
    drawn: tuple[Drawn, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """`cut`: because the answer had no room for more."""

    item: Item
    cut: bool = False


Happening = Begun | More | Ended


class Items:
    """One answer.  `every` item of it so far, the last one still growing unless `close` was called."""

    def __init__(self) -> None:
        self.every: list[Item] = []
        self._growing = False
        self._waiting: list[Drawn] = []  # tokens of which nothing was said yet; words may be held back

    def push(self, utterance: Utterance) -> Iterator[Happening]:
        self._waiting += utterance.drawn
        for part in utterance.parts:
            yield from self._open(part)
            match part:
                case Words(text=text):
                    yield self._more(text, self._drawn(text))
                case Thought() | Arguments():
                    yield self._more(part.text)
        if utterance.parts and kind_of(utterance.parts[-1]) != "words":
            self._waiting = []
        if utterance.finish:
            yield from self.close(cut=utterance.finish == "length")

    def close(self, *, cut: bool = False) -> Iterator[Happening]:
        if self._growing:
            self._growing = False
            yield Ended(self.every[-1], cut)

    def _open(self, part: Part) -> Iterator[Happening]:
        """The item that `part` belongs to is there; the one before it has ended."""
        kind = kind_of(part)
        if self._growing and self.every[-1].kind == kind and not isinstance(part, Call):
            return
        yield from self.close()
        item = Item(kind, len(self.every))
        if isinstance(part, Call):
            item.id, item.name = part.id, part.name
        self.every.append(item)
        self._growing = True
        yield Begun(item)

    def _drawn(self, text: str) -> list[Drawn]:
        """The waiting tokens that wrote `text`.  Those before it were of tags, those after it wait on."""
        written, wanted = b"".join(each.token.data for each in self._waiting), text.encode()
        at = written.rfind(wanted)
        begin, end = (at, at + len(wanted)) if at >= 0 else (0, len(written))
        taken, waiting, place = [], [], 0
        for each in self._waiting:
            first, place = place, place + len(each.token.data)
            if first >= end:
                waiting.append(each)
            elif place > begin:
                taken.append(each)
        self._waiting = waiting
        return taken

    def _more(self, text: str, drawn: Sequence[Drawn] = ()) -> More:
        item = self.every[-1]
        item.text += text
        item.drawn += drawn
        return More(item, text, tuple(drawn))


def kind_of(part: Part) -> Kind:
    match part:
        case Thought():
            return "thought"
        case Words():
            return "words"
        case Call() | Arguments():
            return "call"


def whole(utterances: Sequence[Utterance]) -> list[Item]:
    """All items of an answer that has ended."""
    items = Items()
    for utterance in utterances:
        for _ in items.push(utterance):
            pass
    return items.every


class Events(Protocol):
    """A dialect's words for one answer as it is written."""

    def start(self) -> Iterator[dict[str, Any]]: ...

    def chunks(self, utterance: Utterance) -> Iterator[dict[str, Any]]: ...


async def streamed(events: Events, utterances: Utterances) -> AsyncGenerator[dict[str, Any], None]:
    """What begins is told once there is something to tell: until then the call can still be refused."""
    begun = False
    async with aclosing(utterances):
        async for _, utterance in utterances:
            if not begun:
                for event in events.start():
                    yield event
            begun = True
            for event in events.chunks(utterance):
                yield event


async def said(utterances: Utterances) -> list[Utterance]:
    """All of one answer."""
    async with aclosing(utterances):
        return [utterance async for _, utterance in utterances]

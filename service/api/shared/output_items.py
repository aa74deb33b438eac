"""An answer as a list of items: what was thought, what was said, each call of a tool.

Knows no dialect.  The one idea: an item is a run of parts of one kind; what begins, goes on and ends is told as it
happens, and the whole answer is what has ended.
"""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from ...text.chat_parser import (
    ArgumentsDelta,
    ChatDelta,
    ChatDeltas,
    ChatPart,
    ReasoningDelta,
    TextDelta,
    ToolCallStart,
)
from ...text.detokenizer import TokenLogprobs

ItemKind = Literal["thought", "words", "call"]


@dataclass(slots=True)
class OutputItem:
    """The `index`-th of an answer.  `text` is what it says so far: of a call its arguments, the call's `id` and the
    tool's `name` beside it.  `drawn` are the tokens of words, where asked for."""

    kind: ItemKind
    index: int
    text: str = ""
    id: str = ""
    name: str = ""
    drawn: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ItemBegun:
    item: OutputItem


@dataclass(frozen=True, slots=True)
class ItemDelta:
    """`text` has been added to the item, and to the tokens of words `drawn`."""

    item: OutputItem
    text: str
    drawn: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemEnded:
    """`cut`: because the answer had no room for more."""

    item: OutputItem
    cut: bool = False


ItemEvent = ItemBegun | ItemDelta | ItemEnded


class OutputItems:
    """One answer.  `every` item of it so far, the last one still growing unless `close` was called."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._is_open = False
        self._pending_tokens: list[TokenLogprobs] = []  # tokens of which nothing was said yet; words may be held back

    def push(self, utterance: ChatDelta) -> Iterator[ItemEvent]:
        self._pending_tokens += utterance.logprobs
        for part in utterance.parts:
            yield from self._open_item(part)
            match part:
                case TextDelta(text=text):
                    yield self._extend_item(text, self._take_tokens(text))
                case ReasoningDelta() | ArgumentsDelta():
                    yield self._extend_item(part.text)
        if utterance.parts and item_kind(utterance.parts[-1]) != "words":
            self._pending_tokens = []
        if utterance.finish:
            yield from self.close(cut=utterance.finish == "length")

    def close(self, *, cut: bool = False) -> Iterator[ItemEvent]:
        if self._is_open:
            self._is_open = False
            yield ItemEnded(self.items[-1], cut)

    def _open_item(self, part: ChatPart) -> Iterator[ItemEvent]:
        """The item that `part` belongs to is there; the one before it has ended."""
        kind = item_kind(part)
        if self._is_open and self.items[-1].kind == kind and not isinstance(part, ToolCallStart):
            return
        yield from self.close()
        item = OutputItem(kind, len(self.items))
        if isinstance(part, ToolCallStart):
            item.id, item.name = part.id, part.name
        self.items.append(item)
        self._is_open = True
        yield ItemBegun(item)

    def _take_tokens(self, text: str) -> list[TokenLogprobs]:
        """The waiting tokens that wrote `text`.  Those before it were of tags, those after it wait on."""
        written, wanted = b"".join(each.token.data for each in self._pending_tokens), text.encode()
        at = written.rfind(wanted)
        begin, end = (at, at + len(wanted)) if at >= 0 else (0, len(written))
        taken, waiting, place = [], [], 0
        for each in self._pending_tokens:
            first, place = place, place + len(each.token.data)
            if first >= end:
                waiting.append(each)
            elif place > begin:
                taken.append(each)
        self._pending_tokens = waiting
        return taken

    def _extend_item(self, text: str, drawn: Sequence[TokenLogprobs] = ()) -> ItemDelta:
        item = self.items[-1]
        item.text += text
        item.drawn += drawn
        return ItemDelta(item, text, tuple(drawn))


def item_kind(part: ChatPart) -> ItemKind:
    match part:
        case ReasoningDelta():
            return "thought"
        case TextDelta():
            return "words"
        case ToolCallStart() | ArgumentsDelta():
            return "call"


def collect_items(utterances: Sequence[ChatDelta]) -> list[OutputItem]:
    """All items of an answer that has ended."""
    items = OutputItems()
    for utterance in utterances:
        for _ in items.push(utterance):
            pass
    return items.items


class AnswerEvents(Protocol):
    """A dialect's words for one answer as it is written."""

    def start_events(self) -> Iterator[dict[str, Any]]: ...

    def delta_events(self, utterance: ChatDelta) -> Iterator[dict[str, Any]]: ...


async def stream_items(events: AnswerEvents, utterances: ChatDeltas) -> AsyncGenerator[dict[str, Any], None]:
    """What begins is told once there is something to tell: until then the call can still be refused."""
    begun = False
    async with aclosing(utterances):
        async for _, utterance in utterances:
            if not begun:
                for event in events.start_events():
                    yield event
            begun = True
            for event in events.delta_events(utterance):
                yield event


async def collect_answer(utterances: ChatDeltas) -> list[ChatDelta]:
    """All of one answer."""
    async with aclosing(utterances):
        return [utterance async for _, utterance in utterances]

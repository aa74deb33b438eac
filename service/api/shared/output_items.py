"""An answer as a list of items: reasoning, text, and tool calls.

An item is a run of parts of one kind.  Streams send an event when an item begins, grows and ends; the whole answer is
the list of the items that ended.
"""

import math
import sys
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pydantic_core import from_json

from ...text.answer_delta import (
    AnswerDelta,
    AnswerPart,
    ArgumentsDelta,
    ReasoningDelta,
    TextDelta,
    TokenLogprobs,
    ToolCallStart,
)
from ...text.answer_stream import AnswerStream

ItemKind = Literal["reasoning", "text", "call"]

LARGEST = int(sys.float_info.max)


@dataclass(slots=True)
class OutputItem:
    """The item number `index` of an answer.

    `text` is what it has so far; for a call it is the arguments, with the call's `id` and the tool's `name`.
    `logprobs` are those of the tokens of text, where they are requested.
    """

    kind: ItemKind
    index: int
    text: str = ""
    id: str = ""
    name: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ItemBegun:
    item: OutputItem


@dataclass(frozen=True, slots=True)
class ItemDelta:
    """`text` was added to the item, and `logprobs` to its log-probabilities."""

    item: OutputItem
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ItemEnded:
    """`cut`: the answer reached its length limit."""

    item: OutputItem
    cut: bool = False


ItemEvent = ItemBegun | ItemDelta | ItemEnded


class OutputItems:
    """The items of one answer so far; the last one is still growing unless `close` was called."""

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._is_open = False
        self._pending_tokens: list[TokenLogprobs] = []  # tokens whose text has not come yet; text may be held back

    def push(self, delta: AnswerDelta) -> Iterator[ItemEvent]:
        self._pending_tokens += delta.logprobs
        for part in delta.parts:
            yield from self._open_item(part)
            match part:
                case TextDelta(text=text):
                    yield self._extend_item(text, self._take_tokens(text))
                case ReasoningDelta() | ArgumentsDelta():
                    yield self._extend_item(part.text)
        if delta.parts and item_kind(delta.parts[-1]) != "text":
            self._pending_tokens = []
        if delta.finish:
            yield from self.close(cut=delta.finish == "length")

    def close(self, *, cut: bool = False) -> Iterator[ItemEvent]:
        if self._is_open:
            self._is_open = False
            yield ItemEnded(self.items[-1], cut)

    def _open_item(self, part: AnswerPart) -> Iterator[ItemEvent]:
        """Make sure that the item of `part` exists; ends the previous one."""
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
        """Take the pending tokens that wrote `text`.  Tokens before it belong to tags; tokens after it stay pending."""
        data, target = b"".join(each.token.data for each in self._pending_tokens), text.encode()
        at = data.rfind(target)
        begin, end = (at, at + len(target)) if at >= 0 else (0, len(data))
        taken, waiting, place = [], [], 0
        for each in self._pending_tokens:
            first, place = place, place + len(each.token.data)
            if first >= end:
                waiting.append(each)
            elif place > begin:
                taken.append(each)
        self._pending_tokens = waiting
        return taken

    def _extend_item(self, text: str, tokens: Sequence[TokenLogprobs] = ()) -> ItemDelta:
        item = self.items[-1]
        item.text += text
        item.logprobs += tokens
        return ItemDelta(item, text, tuple(tokens))


def item_kind(part: AnswerPart) -> ItemKind:
    match part:
        case ReasoningDelta():
            return "reasoning"
        case TextDelta():
            return "text"
        case ToolCallStart() | ArgumentsDelta():
            return "call"


def collect_items(deltas: Sequence[AnswerDelta]) -> list[OutputItem]:
    """All items of a finished answer."""
    items = OutputItems()
    for delta in deltas:
        for _ in items.push(delta):
            pass
    return items.items


def parse_arguments(text: str) -> dict[str, Any]:
    """The arguments of a call; incomplete ones, if the answer was cut, as far as they go."""
    try:
        read = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return {name: writable_number(value) for name, value in read.items()} if isinstance(read, dict) else {}


def writable_number(value: Any) -> Any:
    """The same value, in which numbers that JSON of 64 bits cannot hold are the nearest float."""
    match value:
        case dict():
            return {name: writable_number(each) for name, each in value.items()}
        case list():
            return [writable_number(each) for each in value]
        case float() if math.isinf(value):
            return math.copysign(sys.float_info.max, value)
        case int() if not -(1 << 63) <= value < 1 << 64:
            return float(max(min(value, LARGEST), -LARGEST))
    return value


class AnswerEvents(Protocol):
    """How a dialect writes the events of one answer."""

    def start_events(self) -> Iterator[dict[str, Any]]: ...

    def delta_events(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]: ...


async def stream_items(events: AnswerEvents, answers: AnswerStream) -> AsyncGenerator[dict[str, Any], None]:
    """The start events are sent with the first part: until then the call can still be rejected with a status."""
    started = False
    async with aclosing(answers):
        async for _, delta in answers:
            if not started:
                for event in events.start_events():
                    yield event
            started = True
            for event in events.delta_events(delta):
                yield event

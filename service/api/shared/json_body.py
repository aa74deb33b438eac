"""Parses request bodies as JSON, with limits.

The cost of parsing depends on the values, not the bytes: twenty megabytes of text are one string and take 20 ms, twenty
megabytes of brackets are millions of lists and take seconds.  So the values are counted, and their memory is claimed,
before any is made.  What JSON parsers accept silently is rejected, since the client would never learn of it: a
duplicate key, a number that does not fit into 64 bits.

Long bodies are counted and parsed on threads, where keys take turns by bytes: large bodies of one key do not delay
those of others.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import orjson
from starlette.requests import ClientDisconnect, Request

from ...concurrency.thread_pool import WorkInfo
from ...core.errors import BadRequest, ClientGone
from ...resources.request_memory import BYTES_PER_MEMBER, BYTES_PER_VALUE, MemoryClaim
from ..access.app_state import AppState
from ..access.request_context import RequestContext
from .streaming import run_while_connected

MAX_VALUES = 1 << 19  # in one body: numbers, strings, lists, objects
MAX_ARGUMENT_VALUES = 1 << 16  # values in the arguments of all tool calls of one request, which are strings in its body
# Lists, objects and members of objects in one body: a third of a microsecond and more each, in one call that holds the
# interpreter's lock, while a number or a text takes a tenth of that.
MAX_NODES = 1 << 18
INLINE_VALUES = 1 << 11  # values that are parsed and validated on the event loop; more are parsed on a thread
MAX_DEPTH = 64  # levels of nested lists and objects
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1  # range of integers
DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
LONG_NUMBER = b"0" * 19  # as many digits as an integer outside of the range may have
READING = "reading the body"
SCAN_BYTES = 1 << 16  # bytes that are scanned at a time; other threads may run in between
WIDE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")  # either half of a character beyond U+FFFF
BELOW_FOUR_BYTES = bytes(range(0xF0))  # of UTF-8: bytes that do not begin a character of four
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))
CONTAINERS = (list, dict)
Bytes = bytes | bytearray
T = TypeVar("T")


async def receive_body(request: Request) -> bytearray:
    """The raw body.  Raises ClientGone if the client disconnects."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect:
        raise ClientGone("the connection closed before the body was complete") from None
    return body


async def receive_body_in_turn(request: Request) -> bytearray:
    """The raw body, which is then read on the event loop: in each of its turns a key has one body, since very many may
    be complete at once.  Raises ClientGone if the client disconnects.
    """
    body = await receive_body(request)
    await cast(AppState, request.app.state.server).turns.take(request.state.context.owner)
    return body


async def receive_json(request: Request) -> "JsonText":
    """The body, which is to be parsed: its values are counted, and memory for them is claimed.

    Raises ClientGone if the client disconnects, BodyTooLarge and Overloaded if there is no memory.
    """
    return await open_json(request, await receive_body_in_turn(request))


async def open_json(request: Request, content: Bytes) -> "JsonText":
    """Count the values in `content`, the body or a part of it, and claim memory for them before any is made."""
    context, count = request.state.context, partial(count_json, content)
    seen = count() if len(content) <= SCAN_BYTES else await run_in_turn(request, READING, len(content), count)
    if len(content) > INLINE_VALUES:
        claim_values(context.claim, seen, "what the body contains")
    return JsonText(content, seen, request)


async def run_in_turn(request: Request, what: str, size: int, function: Callable[[], T]) -> T:
    """The result of `function`, on a thread where the keys of requests take turns by `size`, in bytes.  `what` names it
    in errors.

    Raises Expired at the deadline of the request, and ClientGone where its client leaves: it holds a place in flight no
    longer, and work that was not begun is dropped.
    """
    context: RequestContext = request.state.context
    threads = cast(AppState, request.app.state.server).request_threads
    work = WorkInfo(what, threads, context.owner, max(size, 1))
    return await run_while_connected(request, context.wait(threads.run(function, work)))


@dataclass
class JsonCounts:
    """What is in a JSON text outside of its strings."""

    values: int = 0
    containers: int = 0
    colons: int = 0
    widened_bytes: int = 0  # of strings, beyond one for each byte of their text
    has_long_number: bool = False

    @property
    def memory_of_values(self) -> int:
        """Bytes of the values, at most, without one for each byte of the text of strings, and without what each list or
        object takes beside the values in it."""
        return BYTES_PER_VALUE * self.values + BYTES_PER_MEMBER * self.colons + self.widened_bytes

    @property
    def excess(self) -> str:
        """What there is too much of, and how much is read; empty if all of it is."""
        if self.values > MAX_VALUES:
            return f"more than {MAX_VALUES} values"
        if (nodes := self.containers + self.colons) > MAX_NODES:
            return f"{nodes} lists, objects and members of objects, more than {MAX_NODES}"
        return ""


@dataclass(frozen=True)
class JsonText:
    """A JSON text of `request`, whose values were counted."""

    content: Bytes
    counts: JsonCounts
    request: Request

    async def run(self, function: Callable[[], T]) -> T:
        """The result of `function`, which reads the text or its values; if they are many, it runs on a thread."""
        if len(self.content) <= SCAN_BYTES and self.counts.values <= INLINE_VALUES:
            return function()
        return await run_in_turn(self.request, READING, len(self.content), function)

    def parse(self, what: str = "the body") -> Any:
        """Its value.  `what` names the text in error messages.  Raises BadRequest."""
        return parse_counted(self.content, self.counts, what)


def claim_values(claim: MemoryClaim, seen: JsonCounts, what: str) -> None:
    """Claim memory for the values of a text.  They may take fifty times that of the text: an object in an object takes
    five characters of it.  Too many values are not claimed, because they are refused when they are parsed.

    Raises as `MemoryClaim.grow` does.
    """
    if not seen.excess:
        claim.grow_by_containers(seen.containers, seen.memory_of_values, what)


def parse_json(body: Bytes, what: str) -> Any:
    """The JSON value in `body`.  `what` names the text in error messages.  Raises BadRequest."""
    return parse_counted(body, count_json(body), what)


def parse_counted(body: Bytes, seen: JsonCounts, what: str) -> Any:
    if excess := seen.excess:
        raise BadRequest(f"{what}: has {excess}, at most so many are read")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{what} is not valid JSON: {error}") from None
    if seen.containers > MAX_DEPTH:
        check_depth(value, what)
    if seen.has_long_number or count_members(value, seen.colons) < seen.colons:
        check_strictly(body, what)
    return value


def count_json(body: Bytes, most: int = MAX_VALUES) -> JsonCounts:
    """Count until there are more than `most` values."""
    seen, unfinished = JsonCounts(), StringSize()
    start, inside, tail = 0, 0, b""
    while start < len(body) and seen.values <= most:
        part = body[start : start + SCAN_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = body[start : start + SCAN_BYTES + 1]  # do not split an escape sequence
        start += len(part)
        quoted = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        bare, texts = b"".join(quoted[inside::2]), quoted[1 - inside :: 2]
        if inside:
            unfinished.add(texts.pop(0))
            if len(quoted) > 1:  # it ends in this part
                seen.widened_bytes += unfinished.widened_bytes
                unfinished = StringSize()
        inside ^= len(quoted) % 2 == 0
        if inside and texts:
            unfinished.add(texts.pop())
        whole = StringSize()
        whole.add(b"".join(texts))
        seen.widened_bytes += whole.widened_bytes
        opened = bare.count(b"[") + bare.count(b"{")
        seen.containers += opened
        seen.colons += bare.count(b":")
        seen.values += opened + bare.count(b",")  # every value except the first follows one of these
        digits = tail + bare.translate(DIGITS_TO_ZERO)
        seen.has_long_number |= LONG_NUMBER in digits
        tail = digits[-len(LONG_NUMBER) :]
    return seen


@dataclass
class StringSize:
    """How much memory a string takes whose text is read in parts: each of its characters is as wide as the widest."""

    size: int = 0  # of the text, in bytes
    characters: int = 0  # at most
    width: int = 1  # bytes of a character

    def add(self, text: Bytes) -> None:
        is_ascii, has_escapes = text.isascii(), b"\\" in text and b"\\u" in text  # one byte is found faster
        self.size += len(text)
        self.characters += len(text if is_ascii else text.translate(None, CONTINUATION_BYTES))
        if (has_escapes and WIDE_ESCAPE.search(text)) or (not is_ascii and text.translate(None, BELOW_FOUR_BYTES)):
            self.width = 4
        elif has_escapes or not is_ascii:
            self.width = max(self.width, 2)

    @property
    def widened_bytes(self) -> int:
        """Bytes beyond one for each byte of the text."""
        return max(self.width * self.characters - self.size, 0)


def check_depth(value: Any, what: str) -> None:
    """Raises BadRequest if lists and objects are nested more than MAX_DEPTH levels deep."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in inner_values(one) if type(inner) in CONTAINERS]
    if level:
        raise BadRequest(f"{what}: is nested deeper than {MAX_DEPTH} levels, at most so many are read")


def inner_values(value: Any) -> Sequence[Any]:
    """The values inside a list or an object."""
    return tuple(value.values()) if type(value) is dict else value


def count_members(value: Any, most: int) -> int:
    """The number of members of all objects in `value`; stops counting at `most`."""
    found, left = 0, [value]
    while left and found < most:
        one = left.pop()
        if type(one) is dict:
            found += len(one)
            left += one.values()
        elif type(one) is list:
            left += one
    return found


def count_containers(value: Any) -> int:
    """The number of lists and objects in `value`, with itself."""
    found, left = 0, [value]
    while left:
        one = left.pop()
        if type(one) in CONTAINERS:
            found += 1
            left += inner_values(one)
    return found


def check_strictly(body: Bytes, what: str) -> None:
    """Raises BadRequest for a duplicate key, or an integer that does not fit into 64 bits."""

    def unique(pairs: list[tuple[str, Any]]) -> None:
        keys = set()
        for key, _ in pairs:
            if key in keys:
                raise BadRequest(f"{what}: an object has the key {key[:60]!r} twice; every key stands once")
            keys.add(key)

    def fitting(digits: str) -> None:
        if len(digits) > len(str(MIN_INTEGER)) or not MIN_INTEGER <= int(digits) <= MAX_INTEGER:
            raise BadRequest(f"{what}: the integer {digits[:20]}... does not fit in 64 bits")

    json.loads(body, object_pairs_hook=unique, parse_int=fitting)


def check_arguments(texts: Iterable[tuple[str, str]]) -> None:
    """Count the values in the arguments of all tool calls of a request before they are parsed.

    `texts` are pairs of arguments and field name.  Raises BadRequest at the field that exceeds MAX_ARGUMENT_VALUES.
    """
    values = 0
    for text, field in texts:
        values += count_json(text.encode(errors="replace"), MAX_ARGUMENT_VALUES).values + 1
        if values > MAX_ARGUMENT_VALUES:
            most = f"at most {MAX_ARGUMENT_VALUES} are read in the arguments of all calls of a request"
            raise BadRequest(f"{field}: has too many values, {most}", param=field)


def read_arguments(text: str, field: str) -> dict[str, Any]:
    """The arguments of an earlier tool call, a JSON object that a model wrote.  Its numbers are kept as they are.

    Raises BadRequest.
    """
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadRequest(f"{field}: must be a JSON object as text, got {text[:60]!r}", param=field)
    check_depth(value, field)
    return value

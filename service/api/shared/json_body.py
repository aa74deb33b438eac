"""A request's body as a JSON value.

Knows no wire object.  Two ideas.  What a parser costs is what it makes, not what it reads: twenty megabytes of text
are one string and take 20 ms, twenty megabytes of brackets are millions of lists and take seconds, in which nobody
else is answered; so the values are counted before any is made.  And what a parser does in silence is a fault in a
request that its sender never hears of: so a key that comes twice and a number that doesn't fit are refused, too.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request

from ...concurrency.outcome import run_on_thread
from ...core.errors import BadRequest, ClientGone

MAX_VALUES = 1 << 19  # in one body: numbers, strings, lists, objects
MAX_ARGUMENT_VALUES = 1 << 16  # such values in the arguments of all calls of one request, which are strings of its body
MAX_DEPTH = 64  # lists and objects in one another
MIN_INTEGER, MAX_INTEGER = -(1 << 63), (1 << 64) - 1  # integers that stay what they are
DIGITS_TO_ZERO = bytes.maketrans(b"123456789", b"000000000")
LONG_NUMBER = b"0" * 19  # digits: of an integer that may be outside, or behind a point
SCAN_BYTES = 1 << 16  # bytes looked at in one go: others get a turn after each
CONTAINERS = (list, dict)
Bytes = bytes | bytearray
T = TypeVar("T")


async def read_json_body(request: Request) -> Any:
    """The JSON value in the body.  BadRequest if there is none or it is too much; ClientGone without a client."""
    return await parse_body(await receive_body(request))


async def receive_body(request: Request) -> bytearray:
    """The body as it is, in one piece however many it came in; ClientGone without a client."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
    except ClientDisconnect:
        raise ClientGone("the connection closed before the body was complete") from None
    return body


async def parse_body(body: Bytes) -> Any:
    """The JSON value in `body`.  Raises BadRequest."""
    return await run_by_size(len(body), partial(parse_json, body))


async def run_by_size(length: int, function: Callable[[], T]) -> T:
    """What `function` makes of a body of so many bytes: of a long one on a thread, for it may have many values."""
    return function() if length <= SCAN_BYTES else await run_on_thread(function)


def parse_json(body: Bytes, what: str = "the body") -> Any:
    """The same; `what` is the field or the thing that this is the text of.  Raises BadRequest."""
    seen = count_json(body)
    if seen.values > MAX_VALUES:
        raise BadRequest(f"{what}: has more than {MAX_VALUES} values, at most so many are read")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"{what} is not valid JSON: {error}") from None
    if seen.containers > MAX_DEPTH:
        check_depth(value, what)
    if seen.has_long_number or count_members(value, seen.colons) < seen.colons:
        check_strictly(body, what)
    return value


@dataclass
class JsonCounts:
    """What is in a text beside its strings: `opened` lists and objects, `colons` behind keys, a `long` number."""

    values: int = 0
    containers: int = 0
    colons: int = 0
    has_long_number: bool = False


def count_json(body: Bytes, most: int = MAX_VALUES) -> JsonCounts:
    """Those of the first `most` values and a few more."""
    seen = JsonCounts()
    start, inside, tail = 0, 0, b""
    while start < len(body) and seen.values <= most:
        part = body[start : start + SCAN_BYTES]
        if (len(part) - len(part.rstrip(b"\\"))) % 2:
            part = body[start : start + SCAN_BYTES + 1]  # not between a backslash and what it escapes
        start += len(part)
        quoted = part.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')
        bare = b"".join(quoted[inside::2])
        inside ^= len(quoted) % 2 == 0
        opened = bare.count(b"[") + bare.count(b"{")
        seen.containers += opened
        seen.colons += bare.count(b":")
        seen.values += opened + bare.count(b",")  # every value but the first stands after one of these
        digits = tail + bare.translate(DIGITS_TO_ZERO)
        seen.has_long_number |= LONG_NUMBER in digits
        tail = digits[-len(LONG_NUMBER) :]
    return seen


def check_depth(value: Any, what: str) -> None:
    """Raises BadRequest if lists and objects are more than DEEPEST in one another."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for one in level for inner in inner_values(one) if type(inner) in CONTAINERS]
    if level:
        raise BadRequest(f"{what}: is nested deeper than {MAX_DEPTH} levels, at most so many are read")


def inner_values(value: Any) -> Sequence[Any]:
    """Of a list or an object."""
    return tuple(value.values()) if type(value) is dict else value


def count_members(value: Any, most: int) -> int:
    """How many members the objects in `value` have together; it doesn't look further once there are `most`."""
    found, left = 0, [value]
    while left and found < most:
        one = left.pop()
        if type(one) is dict:
            found += len(one)
            left += one.values()
        elif type(one) is list:
            left += one
    return found


def check_strictly(body: Bytes, what: str) -> None:
    """Raises BadRequest with the key that an object has twice, or with the integer that doesn't fit in 64 bits."""

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
    """Count the values in the arguments of all calls of a request, given with their fields, before they are read.

    Raises BadRequest at the field with which they are more than MOST_ARGUMENTS.
    """
    values = 0
    for text, field in texts:
        values += count_json(text.encode(errors="replace"), MAX_ARGUMENT_VALUES).values + 1
        if values > MAX_ARGUMENT_VALUES:
            most = f"at most {MAX_ARGUMENT_VALUES} are read in the arguments of all calls of a request"
            raise BadRequest(f"{field}: has too many values, {most}", param=field)


def read_arguments(text: str, field: str) -> dict[str, Any]:
    """The object that a model once wrote as a call's arguments: its numbers are the model's, and stay what they are.

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

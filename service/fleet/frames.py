"""Requests and events as bytes: what goes between a process that speaks HTTP and one that computes.

Knows no connection.  The one idea: what may be said is a closed table of plain values (`FORMS`); each is the row of its
fields, and nothing that arrives names code, so that a stranger's bytes can be nonsense but never a program.  Times are
sent as what is left of them, because clocks differ.
"""

import hashlib
import hmac
from asyncio import StreamReader
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any, Literal

import msgpack
from pydantic import ConfigDict, TypeAdapter

from polyhead.models.chat import ChatTemplate
from polyhead.models.core.errors import ModelError
from polyhead.models.tokenizer import Tokenizer

from ..concurrency.outcome import Failure, attempt
from ..core import errors
from ..core.errors import PolyheadError
from ..core.grammar import Grammar, Thinking
from ..core.guide import Asked, Guide
from ..core.model import Customs, Model
from ..core.request import (
    Attribution,
    Beams,
    Done,
    Encode,
    Encoded,
    Explain,
    Explained,
    Failed,
    Filled,
    Generate,
    Prompted,
    Sampling,
    Table,
    Terms,
    Token,
    Weights,
)
from ..structured.guide_compiler import Compiled
from ..structured.thinking import Thoughtful

VERSION = 2  # of this table; both ends have the same
MOST = 1 << 28  # bytes of a frame
LENGTH = 4  # bytes that say how many follow
NONCE = 32  # bytes
DEEPEST = 8  # forms in one another
LEFT_S = 15.0  # whoever asks a replica that leaves has so long to find somebody else

ASTRAY = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError, ModelError)

Row = Sequence[Any]
Role = Literal["asks", "answers"]


@dataclass(frozen=True, slots=True)
class Begun:
    """A request is being computed, `waited` seconds after the replica got it."""

    waited: float


class FrameError(ValueError):
    """What came is not what is said here; the connection it came by is not worth keeping."""


@dataclass(frozen=True)
class Form:
    """How a value becomes a row of plain ones, and a row a value."""

    row: Callable[[Any], Row]
    value: Callable[..., Any]


# Fields whose values travel as something else, and tables, whose buffers are checked as they are made.
SENT_AS: Mapping[Any, Any] = {
    Guide | None: Asked | None,
    "memoryview[float]": Any,
    tuple[Weights, ...]: tuple[Any, ...],
    tuple[Attribution, ...]: tuple[Any, ...],
}


def checked(*kinds: Any) -> Callable[[Any], Any]:
    """A function that returns a row of values of these types, or raises a ValueError."""
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return TypeAdapter(tuple[kinds], config=config).validate_python  # type: ignore[valid-type]


def fielded(kind: type) -> Form:
    """A dataclass as the row of its fields, each of the type that is declared."""
    names = [field.name for field in fields(kind)]
    of_types = checked(*(SENT_AS.get(field.type, field.type) for field in fields(kind)))

    def value(*told: Any) -> Any:
        return kind(**dict(zip(names, of_types(told), strict=True)))

    return Form(lambda whole: [getattr(whole, name) for name in names], value)


def floats(kind: type, buffer: str) -> Form:
    """One of whose fields is a table of float32, told as bytes and shape."""
    plain = fielded(kind)
    place = [field.name for field in fields(kind)].index(buffer)

    def row(value: Any) -> Row:
        told = list(plain.row(value))
        told[place] = told[place].tobytes(), told[place].shape
        return told

    def value(*told: Any) -> Any:
        data, shape = told[place]
        table = memoryview(data).cast("f", shape) if data else memoryview(data).cast("f")
        return plain.value(*told[:place], table, *told[place + 1 :])

    return Form(row, value)


def left(terms: Terms) -> Row:
    return terms.owner, terms.priority, terms.deadline - perf_counter(), terms.trace


def due(*told: Any) -> Terms:
    owner, priority, seconds, trace = of_terms(told)
    return Terms(owner, priority, seconds + perf_counter(), trace)


of_floats = TypeAdapter(list[float]).validate_python
of_terms, of_error = checked(str, int, float, str), checked(str, str, str, int, str, str)


def said(error: PolyheadError) -> Row:
    return type(error).__name__, error.message, error.param, error.retry_after, error.model, error.task


def meant(*told: Any) -> PolyheadError:
    name, message, param, retry_after, *whose = of_error(told)
    error = ERRORS.get(name, PolyheadError)(message, param=param, retry_after=retry_after)
    error.model, error.task = whose
    return error


def tokenizer_of(*parts: str) -> Tokenizer:
    """Raises FrameError for whatever the tokenizers library raises: for bad data that is a bare Exception."""
    outcome = attempt(partial(Tokenizer.of, *parts))
    if isinstance(outcome, Failure):
        raise FrameError(f"a tokenizer cannot be made: {outcome.error}") from None
    return outcome


ERRORS: Mapping[str, type[PolyheadError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PolyheadError) and kind is not errors.Unreadable
}

# In this order: a form's number is its place.  A guide travels as what it was compiled from.
FORMS: Mapping[type, Form] = {
    frozenset: Form(lambda values: tuple(sorted(values)), lambda *values: frozenset(values)),
    PolyheadError: Form(said, meant),
    Terms: Form(left, due),
    Encoded: Form(attrgetter("values"), lambda *values: Encoded(of_floats(values))),
    Table: floats(Table, "scores"),
    Weights: floats(Weights, "values"),
    Attribution: floats(Attribution, "values"),
    Tokenizer: Form(attrgetter("parts"), tokenizer_of),
    ChatTemplate: Form(attrgetter("parts"), ChatTemplate.of),
    **{
        kind: fielded(kind)
        for kind in (
            *(Asked, Grammar, Thinking),
            *(Generate, Encode, Explain, Sampling, Beams),
            *(Token, Prompted, Filled, Explained, Done, Failed),
            *(Model, Customs, Begun),
        )
    },
}
NUMBERS = {kind: number for number, kind in enumerate(FORMS)}
VALUES = [form.value for form in FORMS.values()]
STANDS_FOR: Mapping[type, Callable[[Any], Any]] = dict.fromkeys((Compiled, Thoughtful), attrgetter("asked"))


def plain(value: Any) -> Any:
    """What the library doesn't know, in words that it does."""
    kind = type(value)
    if kind in STANDS_FOR:
        value = STANDS_FOR[kind](value)
        kind = type(value)
    elif isinstance(value, PolyheadError):
        kind = PolyheadError
    elif isinstance(value, Mapping):
        return dict(value)
    if kind not in NUMBERS:
        raise FrameError(f"{kind.__name__} is nothing that is sent")
    return msgpack.ExtType(NUMBERS[kind], packed(tuple(FORMS[kind].row(value))))


def packed(value: Any) -> bytes:
    """Raises FrameError for what is not in the table, and for a number that has no room in 64 bits."""
    return bytes(msgpack.packb(value, default=plain))


def unpacked(data: bytes, depth: int = 0) -> Any:
    """Raises FrameError.  `depth`: of how many forms it is a part; without a bound they would exhaust the C stack."""

    def revived(number: int, data: bytes) -> Any:
        if not 0 <= number < len(VALUES) or depth == DEEPEST:
            raise FrameError(f"{number} is the number of no form, or more than {DEEPEST} are in one another")
        return VALUES[number](*unpacked(data, depth + 1))

    try:
        return msgpack.unpackb(data, use_list=False, ext_hook=revived, strict_map_key=False)
    except (*ASTRAY, msgpack.UnpackException) as error:
        raise FrameError(f"a frame of {len(data)} bytes cannot be read: {error}") from None


Way = tuple[Callable[[Any], Any], Callable[..., None]]  # what `checked` returns, and the function that gets its values


def followed(ways: Mapping[str, Way], words: Any) -> None:
    """Call the function that the first of `words` names with the others.  Raises FrameError where they do not fit."""
    if not (isinstance(words, tuple) and words and isinstance(words[0], str) and words[0] in ways):
        raise FrameError("it begins with no word that is known here")
    of_types, function = ways[words[0]]
    try:
        rest = of_types(words[1:])
    except ValueError as error:
        raise FrameError(f"{words[0]}: {next(iter(str(error).splitlines()))}") from None
    function(*rest)


def mark_of(model: Model) -> str:
    """The same for models that are made of the same, wherever they are loaded."""
    return hashlib.blake2b(packed(replace(model, created=0, adapter=0)), digest_size=16).hexdigest()


def frame(value: Any) -> bytes:
    data = packed(value)
    if len(data) > MOST:
        raise FrameError(f"{len(data)} bytes are more than a frame has, {MOST}")
    return len(data).to_bytes(LENGTH, "big") + data


async def read(reader: StreamReader, most: int = MOST) -> Any:
    """The next one.  Raises FrameError, and IncompleteReadError where there is none."""
    length = int.from_bytes(await reader.readexactly(LENGTH), "big")
    if length > most:
        raise FrameError(f"a frame of {length} bytes is announced; at most {most} are read")
    return unpacked(await reader.readexactly(length))


def proof(secret: str, role: Role, nonce: bytes) -> bytes:
    """That whoever answers `nonce` so knows the secret (HMAC, RFC 2104), which itself is not sent.

    The role is in it: what one side shows is of no use to whoever wants to pass for the other.
    """
    return hmac.new(secret.encode(), role.encode() + nonce, hashlib.sha256).digest()

"""The wire format between a process that serves HTTP and a replica: requests, events and models as msgpack frames.

`CODECS` is a closed table of the types that may be sent.  Each is sent as the row of its fields.  No type is looked up
by a name from the wire, so bytes of an attacker cannot run code.  Deadlines are sent as the seconds that are left,
because clocks of machines differ.
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
from ..core.guide import Guide, GuideSpec
from ..core.model import GenerationDefaults, Model
from ..core.request import (
    AttentionWeights,
    Attribution,
    BeamSearchOptions,
    Done,
    Encode,
    ExplainTextRequest,
    ExplanationResult,
    Failed,
    Generate,
    GeneratedToken,
    HeadOutput,
    PromptScores,
    Sampling,
    Terms,
    TokenCandidates,
    TokenOutputs,
)
from ..structured.compiled_guide import CompiledGuide
from ..structured.thinking import ThinkingGuide

PROTOCOL_VERSION = 2  # of this table; both ends must have the same
MAX_FRAME_BYTES = 1 << 28  # bytes of a frame, at most
LENGTH_BYTES = 4  # bytes of the length in front of a frame
NONCE_BYTES = 32  # bytes
MAX_DEPTH = 8  # nested extension values, at most
LEAVE_TIMEOUT_S = 15.0  # seconds in which clients of a leaving replica find another one

DECODE_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError, ModelError)

FieldRow = Sequence[Any]
Role = Literal["asks", "answers"]


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """Computation of a request began, `waited_s` seconds after the replica received it."""

    waited_s: float


class FrameError(ValueError):
    """A frame that the protocol does not allow; the connection is closed."""


@dataclass(frozen=True)
class Codec:
    """Encodes a value as a row of plain values and decodes it."""

    encode: Callable[[Any], FieldRow]
    decode: Callable[..., Any]


# Fields that are sent with another type, and tables of floats, whose buffers are checked when they are decoded.
WIRE_FIELD_TYPES: Mapping[Any, Any] = {
    Guide | None: GuideSpec | None,
    "memoryview[float]": Any,
    tuple[AttentionWeights, ...]: tuple[Any, ...],
    tuple[Attribution, ...]: tuple[Any, ...],
}


def row_validator(*kinds: Any) -> Callable[[Any], Any]:
    """Return a function that validates a row of values of these types.  The function raises ValueError."""
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return TypeAdapter(tuple[kinds], config=config).validate_python  # type: ignore[valid-type]


def dataclass_codec(kind: type) -> Codec:
    """The codec of a dataclass: the row of its fields, validated against their declared types."""
    names = [field.name for field in fields(kind)]
    validate = row_validator(*(WIRE_FIELD_TYPES.get(field.type, field.type) for field in fields(kind)))

    def decode(*row: Any) -> Any:
        return kind(**dict(zip(names, validate(row), strict=True)))

    return Codec(lambda instance: [getattr(instance, name) for name in names], decode)


def float_table_codec(kind: type, buffer: str) -> Codec:
    """The codec of a dataclass whose field `buffer` is a table of float32, sent as its bytes and its shape."""
    plain = dataclass_codec(kind)
    index = [field.name for field in fields(kind)].index(buffer)

    def encode(value: Any) -> FieldRow:
        cells = list(plain.encode(value))
        cells[index] = cells[index].tobytes(), cells[index].shape
        return cells

    def decode(*cells: Any) -> Any:
        data, shape = cells[index]
        table = memoryview(data).cast("f", shape) if data else memoryview(data).cast("f")
        return plain.decode(*cells[:index], table, *cells[index + 1 :])

    return Codec(encode, decode)


def encode_terms(terms: Terms) -> FieldRow:
    return terms.owner, terms.priority, terms.deadline - perf_counter(), terms.trace


def decode_terms(*row: Any) -> Terms:
    owner, priority, seconds, trace = validate_terms(row)
    return Terms(owner, priority, seconds + perf_counter(), trace)


validate_floats = TypeAdapter(list[float]).validate_python
validate_terms, validate_error = row_validator(str, int, float, str), row_validator(str, str, str, int, str, str)


def encode_error(error: PolyheadError) -> FieldRow:
    return type(error).__name__, error.message, error.param, error.retry_after, error.model, error.task


def decode_error(*row: Any) -> PolyheadError:
    name, message, param, retry_after, *context = validate_error(row)
    error = ERROR_TYPES.get(name, PolyheadError)(message, param=param, retry_after=retry_after)
    error.model, error.task = context
    return error


def decode_tokenizer(*parts: str) -> Tokenizer:
    """Build a tokenizer from its parts.  Raises FrameError for bad data, for which the tokenizers library raises a bare
    Exception.
    """
    outcome = attempt(partial(Tokenizer.from_parts, *parts))
    if isinstance(outcome, Failure):
        raise FrameError(f"a tokenizer cannot be made: {outcome.error}") from None
    return outcome


ERROR_TYPES: Mapping[str, type[PolyheadError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PolyheadError) and kind is not errors.UnreadableRequest
}

# The position in this table is the type's number on the wire. A guide is sent as the specification that it was compiled
# from.
CODECS: Mapping[type, Codec] = {
    frozenset: Codec(lambda values: tuple(sorted(values)), lambda *values: frozenset(values)),
    PolyheadError: Codec(encode_error, decode_error),
    Terms: Codec(encode_terms, decode_terms),
    HeadOutput: Codec(attrgetter("values"), lambda *values: HeadOutput(validate_floats(values))),
    TokenOutputs: float_table_codec(TokenOutputs, "scores"),
    AttentionWeights: float_table_codec(AttentionWeights, "values"),
    Attribution: float_table_codec(Attribution, "values"),
    Tokenizer: Codec(attrgetter("parts"), decode_tokenizer),
    ChatTemplate: Codec(attrgetter("parts"), ChatTemplate.from_parts),
    **{
        kind: dataclass_codec(kind)
        for kind in (
            *(GuideSpec, Grammar, Thinking),
            *(Generate, Encode, ExplainTextRequest, Sampling, BeamSearchOptions),
            *(GeneratedToken, PromptScores, TokenCandidates, ExplanationResult, Done, Failed),
            *(Model, GenerationDefaults, RequestStarted),
        )
    },
}
CODEC_NUMBERS = {kind: number for number, kind in enumerate(CODECS)}
DECODERS = [form.decode for form in CODECS.values()]
REPLACEMENTS: Mapping[type, Callable[[Any], Any]] = dict.fromkeys((CompiledGuide, ThinkingGuide), attrgetter("spec"))


def encode_extension(value: Any) -> Any:
    """Encode a value that msgpack has no type for, as an extension value.  Raises FrameError for a type that is not in
    CODECS.
    """
    kind = type(value)
    if kind in REPLACEMENTS:
        value = REPLACEMENTS[kind](value)
        kind = type(value)
    elif isinstance(value, PolyheadError):
        kind = PolyheadError
    elif isinstance(value, Mapping):
        return dict(value)
    if kind not in CODEC_NUMBERS:
        raise FrameError(f"{kind.__name__} cannot be sent")
    return msgpack.ExtType(CODEC_NUMBERS[kind], pack(tuple(CODECS[kind].encode(value))))


def pack(value: Any) -> bytes:
    """Encode a value with msgpack.  Raises FrameError for a type that is not in CODECS and for an integer beyond 64
    bits.
    """
    return bytes(msgpack.packb(value, default=encode_extension))


def unpack(data: bytes, depth: int = 0) -> Any:
    """Decode a value.  Raises FrameError.

    `depth` is the number of extension values around it.  It is bounded because unbounded nesting would exhaust the C
    stack.
    """

    def revived(number: int, data: bytes) -> Any:
        if not 0 <= number < len(DECODERS) or depth == MAX_DEPTH:
            raise FrameError(f"{number} is no extension type, or more than {MAX_DEPTH} are nested")
        return DECODERS[number](*unpack(data, depth + 1))

    try:
        return msgpack.unpackb(data, use_list=False, ext_hook=revived, strict_map_key=False)
    except (*DECODE_ERRORS, msgpack.UnpackException) as error:
        raise FrameError(f"a frame of {len(data)} bytes cannot be read: {error}") from None


# A validator of a message's fields, and the function that gets them.
MessageRoute = tuple[Callable[[Any], Any], Callable[..., None]]


def dispatch_message(routes: Mapping[str, MessageRoute], message: Any) -> None:
    """Call the function that the message's first field names with its other fields.  Raises FrameError if the name is
    unknown or the fields have other types.
    """
    if not (isinstance(message, tuple) and message and isinstance(message[0], str) and message[0] in routes):
        raise FrameError("its first field is no known message type")
    validate, function = routes[message[0]]
    try:
        rest = validate(message[1:])
    except ValueError as error:
        raise FrameError(f"{message[0]}: {next(iter(str(error).splitlines()))}") from None
    function(*rest)


def model_digest(model: Model) -> str:
    """Return a digest of a model's content.  It is equal for the same model loaded in several processes."""
    return hashlib.blake2b(pack(replace(model, created=0, adapter=0)), digest_size=16).hexdigest()


def encode_frame(value: Any) -> bytes:
    data = pack(value)
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(data)} bytes are more than a frame has, {MAX_FRAME_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


async def read_frame(reader: StreamReader, max_bytes: int = MAX_FRAME_BYTES) -> Any:
    """Read the next frame.  Raises FrameError for a bad one and IncompleteReadError at the end of the connection."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > max_bytes:
        raise FrameError(f"a frame of {length} bytes is announced; at most {max_bytes} are read")
    return unpack(await reader.readexactly(length))


def compute_proof(secret: str, role: Role, nonce: bytes) -> bytes:
    """Return the proof of knowing `secret` for a nonce (HMAC-SHA256, RFC 2104).

    The role is part of the message, so a proof of one side cannot be replayed by the other.
    """
    return hmac.new(secret.encode(), role.encode() + nonce, hashlib.sha256).digest()

"""The wire format between a process that serves HTTP and a replica: requests, events and models as msgpack frames.

`CODECS` is a closed table of the types that may be sent.  Each is sent as the row of its fields.  No type is looked up
by a name from the wire, so bytes of an attacker cannot run code.  Deadlines are sent as the seconds that are left,
because clocks of machines differ.  The number of values in a frame is limited: a byte of msgpack may become a hundred
bytes of Python objects.
"""

import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from operator import attrgetter
from time import perf_counter
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgpack
from pydantic import ConfigDict, FailFast, TypeAdapter, ValidationError

from polyhead.models.chat import ChatTemplate
from polyhead.models.chat.pair_prompt import PairPrompt, PairTemplate
from polyhead.models.core.decision_prompt import LabelSchemaPrompt, OptionMarkPrompt
from polyhead.models.core.errors import ModelError
from polyhead.models.core.label_prompt import LabelPrompt
from polyhead.models.core.late_interaction import LateInteraction, TextRole
from polyhead.models.tokenizer import Tokenizer

from ..concurrency.outcome import Failure, attempt
from ..core import errors
from ..core.calibration import Calibration, CalibrationMap, Reliability, ReliabilityBin
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
    ExplanationProgress,
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

PROTOCOL_VERSION = 13  # of this table and of the messages; both ends must have the same
MAX_FRAME_BYTES = 1 << 28  # bytes of a frame, at most
LENGTH_BYTES = 4  # bytes of the length in front of a frame
NONCE_BYTES = 32  # bytes
MAX_DEPTH = 8  # nested extension values, at most
MAX_ARRAY_ITEMS = 1 << 22  # of one array, at most; the longest are the tokens of a prompt
MAX_ITEMS = 1 << 24  # of all arrays of a frame, at most
MAX_MAP_ITEMS, MAX_MAPS = 1 << 14, 64  # entries of one map, and maps of a frame, at most
MAX_EXTENSIONS = 1 << 16  # extension values of a frame, at most; a request has about eight
UNCHECKED_BYTES = 1 << 12  # up to this size, the lengths that arrays announce cannot take much memory
LEAVE_TIMEOUT_S = 15.0  # seconds in which clients of a leaving replica find another one

DECODE_ERRORS = (ValueError, TypeError, ArithmeticError, LookupError, RecursionError, MemoryError, ModelError)

FieldRow = Sequence[Any]
Role = Literal["asks", "answers"]


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """Computation of a request began, `waited_s` seconds after the replica received it."""

    waited_s: float


@dataclass(frozen=True, slots=True)
class SimilarRequest:
    """A request that differs from another of its message, the one with `number`, in its seed and in `own`: see
    `similar_requests`.
    """

    number: int
    seed: int
    own: tuple[Any, ...]


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


class HashableFailFast(FailFast):
    """FailFast for types in a union: the types of a union are hashed."""

    def __hash__(self) -> int:
        return hash(self.fail_fast)


def fail_fast(kind: Any) -> Any:
    """Return the type with its containers annotated so that validation ends at the first wrong item.

    Otherwise pydantic makes an error for each of a million wrong items.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[fail_fast(arguments[0]), *arguments[1:]]
    if origin in (Union, UnionType):
        return Union[tuple(map(fail_fast, arguments))]  # noqa: UP007
    if origin in (tuple, list, frozenset):
        return Annotated[origin[tuple(map(fail_fast, arguments))], HashableFailFast()]
    return kind


def row_validator(*kinds: Any) -> Callable[[Any], Any]:
    """Return a function that validates a row of values of these types.  The function raises ValidationError, which has
    one error, or one for each type of a union.
    """
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    return TypeAdapter(fail_fast(tuple[kinds]), config=config).validate_python  # type: ignore[valid-type]


def describe_error(error: Exception) -> str:
    """Return the message of an error; of a ValidationError the first one, without the value."""
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'fields'}: {first['msg']}"


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


validate_floats = TypeAdapter(fail_fast(list[float])).validate_python
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
            *(GeneratedToken, PromptScores, TokenCandidates, ExplanationProgress, ExplanationResult, Done, Failed),
            *(Model, GenerationDefaults, RequestStarted, SimilarRequest, PairPrompt, LateInteraction, TextRole),
            *(LabelPrompt, PairTemplate, OptionMarkPrompt, LabelSchemaPrompt),
            *(Calibration, CalibrationMap, Reliability, ReliabilityBin),
        )
    },
}
CODEC_NUMBERS = {kind: number for number, kind in enumerate(CODECS)}
DECODERS = [form.decode for form in CODECS.values()]
# Types of which models are made.  No message has them, because a tokenizer is a program: see `unpack_model`.
MODEL_KINDS = (
    *(Model, GenerationDefaults, Tokenizer, ChatTemplate, PairPrompt, PairTemplate),
    *(LateInteraction, TextRole, LabelPrompt, OptionMarkPrompt, LabelSchemaPrompt),
    *(Calibration, CalibrationMap, Reliability, ReliabilityBin),
)
MODEL_NUMBERS = frozenset(CODEC_NUMBERS[kind] for kind in MODEL_KINDS)
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
    cells = tuple(CODECS[kind].encode(value))
    if any(type(cell) is tuple and len(cell) > MAX_ARRAY_ITEMS for cell in cells):
        raise FrameError(f"a field of {kind.__name__} has more than {MAX_ARRAY_ITEMS} items")
    return msgpack.ExtType(CODEC_NUMBERS[kind], pack(cells))


def pack(value: Any) -> bytes:
    """Encode a value with msgpack.  Raises FrameError for a type that is not in CODECS and for an integer beyond 64
    bits.
    """
    return bytes(msgpack.packb(value, default=encode_extension))


class FrameDecoder:
    """Decodes the values of one frame, and counts them: their limits are MAX_ITEMS, MAX_MAPS and MAX_EXTENSIONS.

    `refused` are numbers of extension types that may not occur.
    """

    def __init__(self, refused: Collection[int] = ()) -> None:
        self._refused = refused
        self._items_left, self._maps_left, self._extensions_left = MAX_ITEMS, MAX_MAPS, MAX_EXTENSIONS
        self._depth = 0

    def decode(self, data: bytes) -> Any:
        """Decode a value.  Raises FrameError."""
        try:
            if len(data) > UNCHECKED_BYTES:
                check_lengths(data)
            return msgpack.unpackb(
                data,
                use_list=False,
                ext_hook=self._decode_extension,
                list_hook=self._count_items,
                object_hook=self._count_map,
                max_array_len=MAX_ARRAY_ITEMS,
                max_map_len=MAX_MAP_ITEMS,
            )
        except FrameError:
            raise
        except (*DECODE_ERRORS, msgpack.UnpackException) as error:
            raise FrameError(f"a value of {len(data)} bytes cannot be read: {describe_error(error)}") from None

    def _decode_extension(self, number: int, data: bytes) -> Any:
        self._extensions_left -= 1
        if not 0 <= number < len(DECODERS) or number in self._refused:
            raise FrameError(f"{number} is no extension type that may occur here")
        # The depth is bounded because unbounded nesting would exhaust the C stack.
        if self._depth == MAX_DEPTH or self._extensions_left < 0:
            raise FrameError(f"more than {MAX_DEPTH} extension values are nested, or it has more than {MAX_EXTENSIONS}")
        self._depth += 1
        value = DECODERS[number](*self.decode(data))
        self._depth -= 1
        return value

    def _count_items(self, items: tuple[Any, ...]) -> tuple[Any, ...]:
        self._items_left -= len(items)
        if self._items_left < 0:
            raise FrameError(f"its arrays have more than {MAX_ITEMS} items")
        return items

    def _count_map(self, entries: dict[Any, Any]) -> dict[Any, Any]:
        self._maps_left -= 1
        if self._maps_left < 0:
            raise FrameError(f"it has more than {MAX_MAPS} maps")
        return entries


def check_item_count(data: bytes) -> None:
    """Raise FrameError if `data`, packed values one after the other, has more items than a frame may have."""
    if len(data) <= MAX_ITEMS:  # an item has at least one byte
        return
    left = MAX_ITEMS

    def count(items: tuple[Any, ...]) -> None:
        nonlocal left
        left -= len(items)

    def count_nested(number: int, data: bytes) -> None:  # noqa: ARG001
        unpacker = msgpack.Unpacker(
            max_buffer_size=len(data) or 1, use_list=False, list_hook=count, ext_hook=count_nested
        )
        unpacker.feed(data)
        for _ in unpacker:
            pass

    count_nested(0, data)
    if left < 0:
        raise FrameError(f"its arrays have more than {MAX_ITEMS} items")


def check_lengths(data: bytes) -> None:
    """Raise ValueError if an array or a map is shorter than it announces.

    Memory is taken for as many items as are announced, so nested arrays could take memory for many times the bytes of
    the frame.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    unpacker.skip()


def unpack(data: bytes) -> Any:
    """Decode a value of any type of the table.  Raises FrameError."""
    return FrameDecoder().decode(data)


def unpack_message(data: bytes) -> Any:
    """Decode a message, in which there is no part of a model.  Raises FrameError."""
    return FrameDecoder(MODEL_NUMBERS).decode(data)


# A model on the wire: the digest of its bytes, the bytes, and when it was loaded, in seconds since 1970. The bytes are
# equal for the same model loaded in several processes.
PackedModel = tuple[str, bytes, int]


def pack_model(model: Model) -> PackedModel:
    """Encode a model.  A large vocabulary takes about a second."""
    data = pack(replace(model, created=0, adapter=0))
    return digest_bytes(data), data, model.created


def unpack_model(data: bytes, created: int) -> Model:
    """Decode a model.  A large vocabulary takes seconds.  Raises FrameError if the data is no model."""
    model = unpack(data)
    if not isinstance(model, Model):
        raise FrameError("the data of a model is none")
    return replace(model, created=created)


def digest_bytes(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encode_frame(value: Any) -> bytes:
    return frame(pack(value))


def frame(data: bytes) -> bytes:
    """Return the frame of a packed value.  Raises FrameError if it is too long."""
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"{len(data)} bytes are more than a frame has, {MAX_FRAME_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def compute_proof(secret: str, role: Role, nonce: bytes) -> bytes:
    """Return the proof of knowing `secret` for a nonce (HMAC-SHA256, RFC 2104).

    The role is part of the message, so a proof of one side cannot be replayed by the other.
    """
    return hmac.new(secret.encode(), role.encode() + nonce, hashlib.sha256).digest()

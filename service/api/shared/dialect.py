"""The parts of every dialect: its paths, error format, routes, and the reading of JSON bodies.

A wire object is validated once, strictly, when the request is read.  Every error message has the form
"field: what would be right, got what came".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar, cast

import orjson
from fastapi import APIRouter, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function

from ...concurrency.thread_pool import OwnerThreads, ThreadPool
from ...concurrency.time_slices import LoopTurns, TakeTurn
from ...config.keys import MAX_PRIORITY
from ...config.settings import Settings
from ...core.errors import BadRequest, EmptyInput, Forbidden, PolyheadError, cut_text
from ...core.model import Model
from ...core.request import Request as InferenceRequest
from ...core.request import Terms
from ...core.text_limits import input_label
from ...metrics import Metrics
from ...runtime.model_resolver import is_placeholder
from ...text.event_source import EventSource, Submit, SubmitCall
from ...text.output_job import OutputJob
from ...text.tokenization import TextProcessor
from ..access.admission import Admission
from ..access.authorized_models import AuthorizedModels
from ..access.model_paths import is_below, path_below_model
from ..access.request_context import MAX_TIMEOUT_S, MIN_TIMEOUT_S, RequestContext
from .json_body import receive_json
from .streaming import JSON_LINES

NeutralValues = Mapping[str, tuple[Any, ...]]  # by field, the values at which an unsupported field changes nothing
FREE_BYTES = 1 << 16  # that a GET may claim without a place in flight: no more than a connection has in its buffers
MAX_SUGGESTED_CHARS = 100  # characters of an unknown field for which a known one is suggested
SAME_FIELDS = (  # names that dialects give to one thing
    ("input", "inputs", "text", "texts", "prompt", "query", "question", "messages"),
    ("documents", "texts", "passages", "sentences"),
    ("max_tokens", "max_new_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "max_length"),
    ("stop", "stop_sequences"),
    ("labels", "candidate_labels"),
)
MAX_QUOTED_CHARS = 60  # characters of an offending value, or of a key on the way to it, that a message repeats
MAX_TEXTS = 100_000  # in one call; the setting max_batch_texts is smaller
MAX_IDS = 1 << 18  # of one prompt, or lists of token ids


@dataclass(frozen=True)
class Dialect:
    """One HTTP API.

    `prefixes` are the paths it owns, including everything below them, and the same suffixes below the path of one model
    (/models/{name}/predict, /models/{name}/v1/completions).
    """

    name: str
    prefixes: tuple[str, ...]
    error: Callable[[PolyheadError], dict[str, Any]]
    status: Callable[[PolyheadError], int]
    router: APIRouter

    def matches(self, path: str) -> bool:
        return any(is_below(path_below_model(path), prefix) or is_below(path, prefix) for prefix in self.prefixes)


class Server(Protocol):
    """What dialects need of the application state."""

    @property
    def settings(self) -> Settings: ...

    @property
    def has_admin_key(self) -> bool: ...

    @property
    def text(self) -> TextProcessor: ...

    @property
    def metrics(self) -> Metrics: ...

    @property
    def admission(self) -> Admission: ...

    @property
    def request_threads(self) -> ThreadPool: ...

    @property
    def turns(self) -> LoopTurns: ...

    def submit(
        self, context: RequestContext, model: Model, requests: Sequence[InferenceRequest]
    ) -> Sequence[EventSource]: ...

    async def submit_in_slices(
        self, context: RequestContext, model: Model, requests: Sequence[InferenceRequest]
    ) -> Sequence[EventSource]: ...

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]: ...


def server(request: Request) -> Server:
    found: Server = request.app.state.server
    return found


def authorized_models(request: Request) -> AuthorizedModels:
    """The served models that the key of the request may use."""
    return AuthorizedModels(request.app.state.server.registry, request_context(request).key)


def request_context(request: Request) -> RequestContext:
    found: RequestContext = request.state.context
    return found


def text_processor(request: Request) -> TextProcessor:
    """What makes tokens of the request's texts, and texts of its tokens, beside the memory that the request has."""
    return server(request).text.for_request(request_context(request).claim)


def output_job(request: Request, model: Model, terms: Terms) -> OutputJob:
    """The reading of a call's answers, on the threads for short texts."""
    context = request_context(request)
    return OutputJob(server(request).text.output_threads(model, context.owner), terms, context.claim)


def answer_threads(request: Request) -> OwnerThreads:
    """The threads that write long answers, where keys take turns by bytes."""
    threads = server(request).request_threads
    return OwnerThreads(threads, "writing the answer", threads, request_context(request).owner)


def turn_taker(request: Request) -> TakeTurn:
    """What lets others run between slices of a long call: in each turn of the event loop a key has one slice."""
    return partial(server(request).turns.take, request_context(request).owner)


def admit_reader(request: Request, size: int, what: str) -> None:
    """Claim `size` bytes for `what`, which a GET sends: they stay in memory until the client has read them, also when
    it is deleted.  A large one takes a place among the requests in flight, so that a key's readers cannot claim all
    memory; how many tokens are in flight is no matter.

    Raises BodyTooLarge, Overloaded and Unavailable.
    """
    context = request_context(request)
    if size > FREE_BYTES:
        context.cleanup.enter_context(server(request).admission.admit(context.owner, has_tokens=False))
    context.claim.grow(size, what)


def record_model(request: Request, model: Model) -> Model:
    """Record that the request is for `model`, for metrics and logs.  Returns `model`."""
    context = request_context(request)
    context.model, context.task = model.name, model.task
    return model


def submitter(request: Request, model: Model) -> Submit:
    """The function with which a dialect submits requests to the engine."""
    return partial(server(request).submit, request_context(request), model)


def call_submitter(request: Request, model: Model) -> SubmitCall:
    """The same for calls of very many requests."""
    return partial(server(request).submit_in_slices, request_context(request), model)


class Wire(BaseModel):
    """A JSON object as a client sends it.  Unknown fields are errors; null means the same as a missing field.

    `unsupported` lists fields that the real API has and this server does not support: accepted at the values that
    change nothing, otherwise rejected by name. `advice` says of some of them what to use instead.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[NeutralValues] = {}
    advice: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, value: Any) -> Any:
        """`value` without nulls and without unsupported fields at neutral values."""
        if not isinstance(value, dict):
            return value
        for name in value.keys() & cls.unsupported.keys():
            if value[name] is not None and not is_neutral(value[name], cls.unsupported[name]):
                facts = {"field": name, "value": value[name], "advice": cls.advice.get(name, "")}
                raise PydanticCustomError("unsupported", "is not supported", facts)
        known = wire_names(cls)
        for name in value.keys() - known - cls.unsupported.keys():  # one is enough for the message
            hint = suggest_name(str(name), (*known, *cls.unsupported))
            raise PydanticCustomError("unknown", "is not a known field", {"field": str(name), "hint": hint})
        return {k: v for k, v in value.items() if k not in cls.unsupported and not (v is None and k in known)}

    @classmethod
    def read(cls, value: Any) -> Self:
        """Validate `value`.  Raises BadRequest in the words of `to_bad_request`."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            refusal = to_bad_request(error)
        raise refusal  # here it has no context: pydantic's error holds copies of a client's keys


W = TypeVar("W", bound=Wire)


@cache
def wire_names(kind: type[Wire]) -> frozenset[str]:
    """The JSON names of a wire object's fields; they may differ from the names in Python."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


async def read_body(request: Request, kind: type[W]) -> W:
    """The JSON body of the request as a `kind`.  Raises BadRequest if it is not valid."""
    text = await receive_json(request)
    return await text.run(lambda: kind.read(text.parse()))


async def read_model_body(request: Request, kind: type[W]) -> W:
    """The same for a `kind` with a field `model`, on routes that also exist below the path of a model."""
    text, name = await receive_json(request), request.path_params.get("name", "")
    return await text.run(lambda: kind.read(fill_model(text.parse(), name)))


def fill_model(value: Any, name: str) -> Any:
    """The body `value` with the model `name` of its path, if there is one.

    The body may have that name, a placeholder, or no name.  Raises BadRequest for another one.
    """
    if not name or not isinstance(value, dict):
        return value
    given = value.get("model") or ""
    if not isinstance(given, str) or not is_placeholder(given):
        check_path_model(given, name, "model")
    return value | {"model": name}


def check_path_model(given: Any, name: str, field: str) -> None:
    """Raises BadRequest if the body names another model in `field` than the path does; empty: it names none."""
    if name and given not in ("", name):
        message = f"{field}: the address names {name[:100]!r}; give that name or none, got {quote_json(given)}"
        raise BadRequest(message, param=field)


def describe_body(*kinds: type[Wire], lines: Sequence[type[Wire]] = ()) -> dict[str, Any]:
    """For `openapi_extra` of a route: its body is one of `kinds`, or JSON lines that are `lines`."""
    return cast(dict[str, Any], BodyDescription(kinds, lines))


class BodyDescription(Mapping[str, Any]):
    """What `describe_body` returns.  The schemas are generated on demand: all of them take a quarter of a second."""

    def __init__(self, kinds: Sequence[type[Wire]], lines: Sequence[type[Wire]]) -> None:
        self.kinds, self.lines = kinds, lines

    def __getitem__(self, name: str) -> Any:
        if name != "requestBody":
            raise KeyError(name)
        content = {"application/json": {"schema": describe_kinds(self.kinds)}}
        if self.lines:
            content[JSON_LINES] = describe_lines(self.lines)
        return {"required": True, "content": content}

    def __iter__(self) -> Iterator[str]:
        return iter(("requestBody",))

    def __len__(self) -> int:
        return 1


def describe_kinds(kinds: Sequence[type[Wire]]) -> dict[str, Any]:
    """The schema of a value that is one of `kinds`."""
    schemas = [inline_schema(kind) for kind in kinds]
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def describe_lines(lines: Sequence[type[Wire]]) -> dict[str, Any]:
    """The media type of a body whose first line is the first of `lines`, and whose others are each one of the rest.

    OpenAPI 3.1 has no schema for lines, so the whole is a text and each line is described as 3.2's `itemSchema` would.
    """
    first, *others = lines
    names = " or ".join(each.__name__ for each in others)
    text = f"JSON lines: the first is a {first.__name__}, each other a {names}, or its text alone."
    return {"schema": {"type": "string", "description": text}, "x-itemSchema": describe_kinds(lines)}


def inline_schema(kind: type[Wire]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    inlined: dict[str, Any] = resolve_refs(schema, schema.pop("$defs", {}))
    return inlined


def resolve_refs(schema: Any, named: Mapping[str, Any]) -> Any:
    """`schema` with each reference replaced by its definition in `named`.

    A default out of bounds means that the field was not given; clients cannot send it, so it is left out.
    """
    match schema:
        case {"default": int() | float() as default, "minimum": low, "maximum": high, **others} if (
            not low <= default <= high
        ):
            return resolve_refs({"minimum": low, "maximum": high, **others}, named)
        case {"$ref": str(reference), **others}:
            return resolve_refs(named[reference.rpartition("/")[2]], named) | others
        case dict():
            return {key: resolve_refs(value, named) for key, value in schema.items()}
        case list():
            return [resolve_refs(value, named) for value in schema]
        case _:
            return schema


@dataclass(frozen=True)
class Bounds:
    """Numbers from `low` to `high`, both included.  The JSON schema of the field has the bounds, too."""

    low: float
    high: float

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return handler(schema) | {"minimum": self.low, "maximum": self.high}

    def check(self, value: Any) -> Any:
        if not self.low <= value <= self.high:
            limits = {"low": self.low, "high": self.high}
            raise PydanticCustomError("bounds", "must be between {low} and {high}", limits)
        return value


def between(low: float, high: float) -> Bounds:
    return Bounds(low, high)


def must_be(sentence: str) -> WrapValidator:
    """Replaces pydantic's messages about every member of a union by one sentence."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence}) from None

    return WrapValidator(check)


def max_items(items: int) -> BeforeValidator:
    """Lists and objects of at most `items` items.

    They are counted before any item is validated: a long list would block the event loop.
    """

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > items:
            raise PydanticCustomError("too_long", "must have at most {max_length} items", {"max_length": items})
        return value

    return BeforeValidator(check)


def max_chars(limit: int) -> AfterValidator:
    """Strings of at most `limit` characters."""

    def check(value: str) -> str:
        if len(value) > limit:
            raise PydanticCustomError("longer", "is too long", {"most": limit, "length": len(value)})
        return value

    return AfterValidator(check)


def check_text_count(value: Any) -> Any:
    """Raises if a list of texts is longer than MAX_TEXTS; a list of token ids may be longer."""
    if isinstance(value, list) and len(value) > MAX_TEXTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_long", "must have at most {max_length} items", {"max_length": MAX_TEXTS})
    return value


def read_terms(request: Request, wire: "EngineRequest") -> Terms:
    """The request terms for the engine: owner, priority, and the deadline from header, body and settings.

    Raises Forbidden for a priority that the key may not ask for.
    """
    context = request_context(request)
    if wire.priority > context.max_priority:
        message = f"the key {context.owner!r} may ask for {context.max_priority} at most, got {wire.priority}"
        raise Forbidden(f"priority: {message} (max_priority in the keys file)", param="priority")
    if wire.timeout:
        context.limit_time(wire.timeout)
    return replace(context.terms, priority=wire.priority or context.priority)


Count = Annotated[int, between(1, (1 << 31) - 1)]  # the default 0 means that it was not given
Position = Annotated[int, between(0, (1 << 31) - 1)]  # an index, from 0
TokenId = Position
ClientName = Annotated[str, Field(max_length=512)]  # of a user or a prefix; answers may repeat it
MetadataPairs = Annotated[  # OpenAI's rules
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], max_items(16)
]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
TextsOrIds = Annotated[
    str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)],
    must_be("a string, a list of strings, a list of token ids or a list of lists of token ids"),
    BeforeValidator(check_text_count),
    max_items(MAX_IDS),
]


class EngineRequest(Wire):
    """A request to the engine: it may set a time limit and a priority."""

    timeout: Annotated[float, between(MIN_TIMEOUT_S, MAX_TIMEOUT_S)] = 0.0  # seconds; 0: not given
    priority: Annotated[int, between(-MAX_PRIORITY, MAX_PRIORITY)] = 0  # higher goes first


def normalize_inputs(given: str | list[int] | list[str | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One text, one list of token ids, or a list of such, as a tuple of such."""
    if isinstance(given, str):
        return (given,)
    ids = tuple(item for item in given if isinstance(item, int))
    if ids:
        return (ids,)
    return tuple(item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int))


def item_paths(field: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The path of each text in error messages.  Raises EmptyInput if there are none."""
    if not texts:
        raise EmptyInput(f"{field}: must not be empty", param=field)
    return tuple(input_label(field, index, len(texts)) for index in range(len(texts)))


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def quote_json(value: Any) -> str:
    """`value` as JSON, shortened for a message."""
    shown = take_beginning(value, iter(range(MAX_QUOTED_CHARS + 1)))
    try:
        text = orjson.dumps(shown, default=str).decode()
    except orjson.JSONEncodeError:  # an integer of more than 64 bits, or half of a character
        text = repr(shown)
    return cut_text(text, MAX_QUOTED_CHARS)


def take_beginning(value: Any, left: Iterator[int]) -> Any:
    """A copy of as much of `value` as a message may show, of no more values than are `left`: each is a character at
    least.  So the cost does not grow with the value.
    """
    if next(left, None) is None:
        return None
    most = MAX_QUOTED_CHARS + 1
    match value:
        case str():
            return value[:most]
        case dict():
            return {str(key)[:most]: take_beginning(each, left) for key, each in islice(value.items(), most)}
        case list():
            return [take_beginning(each, left) for each in islice(value, most)]
        case _:
            return value


# pydantic's error type -> the sentence; {placeholders} are filled from the error's context
EXPECTATIONS = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "literal_error": "must be {expected}",
    "string_too_short": "must have at least {min_length} character(s)",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} item(s)",
    "too_long": "must have at most {max_length} items",
    "longer": "must have at most {most} characters, has {length}",
    "bounds": "must be between {low} and {high}",
    "described": "must be {sentence}",
}


def to_bad_request(error: ValidationError) -> BadRequest:
    """The first of pydantic's errors as a BadRequest with a readable sentence."""
    return describe_error(error.errors(include_url=False)[0])


def describe_error(first: ErrorDetails) -> BadRequest:
    context, param = first.get("ctx", {}), field_path(first["loc"])
    match first["type"]:
        case "missing":
            problem = "is required"
        case "unknown":
            param = field_path((*first["loc"], context["field"]))
            problem = "is not a known field" + context["hint"]
            if param == "model":
                problem = "is not a field of this route; the model is named in the path, as in /models/NAME/predict"
        case "unsupported":
            param = field_path((*first["loc"], context["field"]))
            advice = f"; {context['advice']}" if context.get("advice") else ""
            problem = f"{quote_json(context['value'])} is not supported by this server{advice}"
        case kind:
            expected = EXPECTATIONS[kind].format(**context) if kind in EXPECTATIONS else strip_message(first)
            problem = f"{expected}, got {quote_json(first['input'])}"
    return BadRequest(f"{param or 'the body'}: {problem}", param=param)


def strip_message(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ").removesuffix(".")


def field_path(parts: Sequence[int | str]) -> str:
    """("messages", 0, "content") -> "messages[0].content"; leaves out the tags of unions (<text>).

    Keys of a client's objects are cut, each of them to MAX_QUOTED_CHARS.
    """
    named = [part for part in parts if isinstance(part, int) or not part.startswith("<")]
    cut = [part if isinstance(part, int) else cut_text(part, MAX_QUOTED_CHARS) for part in named]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in cut).removeprefix(".")


def suggest_name(name: str, known: Sequence[str]) -> str:
    """A hint with a known name that means the same elsewhere, or that is similar to `name`; empty for a long name,
    which takes long to compare.
    """
    same = [other for group in SAME_FIELDS if name in group for other in group if other in known]
    close = same or (get_close_matches(name, known, n=1) if len(name) <= MAX_SUGGESTED_CHARS else [])
    return f"; did you mean {close[0]}?" if close else ""

"""What every dialect is made of: its paths, its way of saying an error, its routes, and how it reads a JSON body.

Knows no dialect.  The one idea: a wire object is checked once, strictly, at the door, and every complaint is a
sentence of the form "field: what would be right, got what came".
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar, cast

import orjson
from fastapi import APIRouter, Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ...config.settings import Settings
from ...core.errors import BadRequest, EmptyInput, PolyheadError
from ...core.model import Model
from ...core.request import Request as Asked
from ...core.request import Terms
from ...core.text_limits import input_label
from ...text.detokenizer import EventSource, Submit, SubmitCall
from ...text.tokenization import TextProcessor
from ..access.authorized_models import AuthorizedModels
from ..access.request_context import MAX_TIMEOUT_S, MIN_TIMEOUT_S, RequestContext
from .json_body import parse_json, receive_body, run_by_size

NeutralValues = Mapping[str, tuple[Any, ...]]  # the values of fields at which they ask for nothing
MAX_SUGGESTED_CHARS = 100  # characters of an unknown field for which a known one is suggested
MAX_QUOTED_CHARS = 60  # characters of an offending value that a message repeats
MAX_TEXTS = 100_000  # in one call; the setting max_batch_texts is less
MAX_IDS = 1 << 18  # of one prompt, or lists of them


@dataclass(frozen=True)
class Dialect:
    """One way of speaking to the server.  `prefixes` are the paths it owns, and all below them, and paths of one model
    that end so (/models/{name}/predict)."""

    name: str
    prefixes: tuple[str, ...]
    error: Callable[[PolyheadError], dict[str, Any]]
    status: Callable[[PolyheadError], int]
    router: APIRouter

    def matches(self, path: str) -> bool:
        asked = "/" + path.rpartition("/")[2]
        return any(
            path == prefix or path.startswith(prefix + "/") or (asked == prefix and path.startswith("/models/"))
            for prefix in self.prefixes
        )


class Server(Protocol):
    """What dialects see of the application."""

    @property
    def settings(self) -> Settings: ...

    @property
    def has_admin_key(self) -> bool: ...

    @property
    def text(self) -> TextProcessor: ...

    def submit(self, visit: RequestContext, model: Model, requests: Sequence[Asked]) -> Sequence[EventSource]: ...

    async def submit_in_slices(
        self, visit: RequestContext, model: Model, requests: Sequence[Asked]
    ) -> Sequence[EventSource]: ...

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]: ...


def server(request: Request) -> Server:
    found: Server = request.app.state.server
    return found


def authorized_models(request: Request) -> AuthorizedModels:
    """The served models that whoever asks may use."""
    return AuthorizedModels(request.app.state.server.registry, request_context(request).key)


def request_context(request: Request) -> RequestContext:
    found: RequestContext = request.state.visit
    return found


def record_model(request: Request, model: Model) -> Model:
    """`model`: the request is about it, and counts as its own however it ends."""
    here = request_context(request)
    here.model, here.task = model.name, model.task
    return model


def submitter(request: Request, model: Model) -> Submit:
    """The one way from a dialect to the engine."""
    return partial(server(request).submit, request_context(request), model)


def call_submitter(request: Request, model: Model) -> SubmitCall:
    """The same way for calls of very many requests."""
    return partial(server(request).submit_in_slices, request_context(request), model)


class Wire(BaseModel):
    """A JSON object as a client sends it.  Unknown fields are errors; a null says the same as leaving the field out.

    `unsupported` lists fields that the dialect knows and this server does not do: accepted at the values that ask
    for nothing, refused by name otherwise.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
    unsupported: ClassVar[NeutralValues] = {}

    @model_validator(mode="before")
    @classmethod
    def drop_neutral_fields(cls, value: Any) -> Any:
        """`value` without nulls and without unsupported fields that ask for nothing."""
        if not isinstance(value, dict):
            return value
        for name in value.keys() & cls.unsupported.keys():
            if value[name] is not None and not is_neutral(value[name], cls.unsupported[name]):
                raise PydanticCustomError("unsupported", "is not supported", {"field": name, "value": value[name]})
        known = wire_names(cls)
        for name in value.keys() - known - cls.unsupported.keys():  # one is enough, there may be many
            hint = suggest_name(str(name), (*known, *cls.unsupported))
            raise PydanticCustomError("unknown", "is not a known field", {"field": str(name), "hint": hint})
        return {k: v for k, v in value.items() if k not in cls.unsupported and not (v is None and k in known)}

    @classmethod
    def read(cls, value: Any) -> Self:
        """Raises BadRequest in the words of `complaint`."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise to_bad_request(error) from None


W = TypeVar("W", bound=Wire)


@cache
def wire_names(kind: type[Wire]) -> frozenset[str]:
    """The names of a wire object's fields on the wire, which Python may have other uses for."""
    return frozenset(field.alias or name for name, field in kind.model_fields.items())


async def read_body(request: Request, kind: type[W]) -> W:
    """The request's JSON body as a `kind`; whatever is wrong with it is a BadRequest."""
    content = await receive_body(request)
    return await run_by_size(len(content), lambda: kind.read(parse_json(content)))


def describe_body(*kinds: type[Wire]) -> dict[str, Any]:
    """For the description of a route: that its body is one of `kinds`."""
    return cast(dict[str, Any], BodyDescription(kinds))


class BodyDescription(Mapping[str, Any]):
    """What `takes` says, written out when somebody asks for the description: all of them take a quarter of a second."""

    def __init__(self, kinds: Sequence[type[Wire]]) -> None:
        self.kinds = kinds

    def __getitem__(self, name: str) -> Any:
        if name != "requestBody":
            raise KeyError(name)
        schemas = [inline_schema(kind) for kind in self.kinds]
        schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        return {"required": True, "content": {"application/json": {"schema": schema}}}

    def __iter__(self) -> Iterator[str]:
        return iter(("requestBody",))

    def __len__(self) -> int:
        return 1


def inline_schema(kind: type[Wire]) -> dict[str, Any]:
    schema = kind.model_json_schema()
    written: dict[str, Any] = resolve_refs(schema, schema.pop("$defs", {}))
    return written


def resolve_refs(schema: Any, named: Mapping[str, Any]) -> Any:
    """`schema` with the definitions it refers to written out in their places."""
    match schema:
        case {"$ref": str(reference), **others}:
            return resolve_refs(named[reference.rpartition("/")[2]], named) | others
        case dict():
            return {key: resolve_refs(value, named) for key, value in schema.items()}
        case list():
            return [resolve_refs(value, named) for value in schema]
        case _:
            return schema


def between(low: float, high: float) -> AfterValidator:
    """Numbers from `low` to `high`, both included."""

    def check(value: Any) -> Any:
        if not low <= value <= high:
            raise PydanticCustomError("bounds", "must be between {low} and {high}", {"low": low, "high": high})
        return value

    return AfterValidator(check)


def must_be(sentence: str) -> WrapValidator:
    """One sentence instead of what pydantic says of every arm of a union."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("described", "must be {sentence}", {"sentence": sentence}) from None

    return WrapValidator(check)


def max_items(items: int) -> BeforeValidator:
    """Lists and objects of so many items, counted before any is looked at: a long one would hold up the event loop."""

    def check(value: Any) -> Any:
        if isinstance(value, list | dict) and len(value) > items:
            raise PydanticCustomError("too_long", "must have at most {max_length} items", {"max_length": items})
        return value

    return BeforeValidator(check)


def max_chars(most: int) -> AfterValidator:
    """Texts of so many characters."""

    def check(value: str) -> str:
        if len(value) > most:
            raise PydanticCustomError("longer", "is too long", {"most": most, "length": len(value)})
        return value

    return AfterValidator(check)


def check_text_count(value: Any) -> Any:
    """A list of texts is shorter than one of token ids may be."""
    if isinstance(value, list) and len(value) > MAX_TEXTS and not isinstance(value[0], int):
        raise PydanticCustomError("too_long", "must have at most {max_length} items", {"max_length": MAX_TEXTS})
    return value


def read_terms(request: Request, wire: "EngineRequest") -> Terms:
    """On what terms the engine is asked: whose request it is, and what header, body and settings say together."""
    here = request_context(request)
    if wire.timeout:
        here.limit_time(wire.timeout)
    return replace(here.terms, priority=wire.priority)


Count = Annotated[int, between(1, (1 << 31) - 1)]  # its default, 0, says that none was given
TokenId = Annotated[int, between(0, (1 << 31) - 1)]
Ids = Annotated[list[TokenId], Field(fail_fast=True)]
TextsOrIds = Annotated[
    str | Ids | Annotated[list[str | Ids], Field(fail_fast=True)],
    must_be("a string, a list of strings, a list of token ids or a list of lists of token ids"),
    BeforeValidator(check_text_count),
    max_items(MAX_IDS),
]


class EngineRequest(Wire):
    """What asks the engine for something may say how long that may take, and how urgent it is."""

    timeout: Annotated[float, between(MIN_TIMEOUT_S, MAX_TIMEOUT_S)] = 0.0  # seconds; 0: it doesn't say
    priority: Annotated[int, between(-100, 100)] = 0  # higher goes first


def normalize_inputs(given: str | list[int] | list[str | list[int]]) -> tuple[str | tuple[int, ...], ...]:
    """One text or list of ids, or a list of such, as a list of such."""
    if isinstance(given, str):
        return (given,)
    ids = tuple(item for item in given if isinstance(item, int))
    if ids:
        return (ids,)
    return tuple(item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int))


def item_paths(field: str, texts: Sequence[str]) -> tuple[str, ...]:
    """What messages call each; EmptyInput if there are none."""
    if not texts:
        raise EmptyInput(f"{field}: must not be empty", param=field)
    return tuple(input_label(field, index, len(texts)) for index in range(len(texts)))


def is_neutral(value: Any, neutral: Sequence[Any]) -> bool:
    return any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in neutral)


def quote_json(value: Any) -> str:
    """`value` as JSON, cut to a length fit for a message."""
    try:
        text = orjson.dumps(value, default=str).decode()
    except orjson.JSONEncodeError:  # it reads deeper than it writes
        return "a deeply nested value"
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "..."


# pydantic's kind of error -> what would be right; {placeholders} are filled from the error's context
EXPECTATIONS = {
    "string_type": "must be a string",
    "int_type": "must be a whole number",
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
    """The first of pydantic's findings as a sentence for people."""
    first = error.errors(include_url=False)[0]
    context, param = first.get("ctx", {}), field_path(first["loc"])
    match first["type"]:
        case "missing":
            said = "is required"
        case "unknown":
            param = field_path((*first["loc"], context["field"][:MAX_QUOTED_CHARS]))
            said = "is not a known field" + context["hint"]
        case "unsupported":
            param = field_path((*first["loc"], context["field"]))
            said = f"{quote_json(context['value'])} is not supported by this server"
        case kind:
            right = EXPECTATIONS[kind].format(**context) if kind in EXPECTATIONS else strip_message(first)
            said = f"{right}, got {quote_json(first['input'])}"
    return BadRequest(f"{param or 'the body'}: {said}", param=param)


def strip_message(error: ErrorDetails) -> str:
    return error["msg"].removeprefix("Value error, ").removesuffix(".")


def field_path(parts: Sequence[int | str]) -> str:
    """("messages", 0, "content") -> "messages[0].content"; leaves out which of several objects it is (<text>)."""
    named = [part for part in parts if isinstance(part, int) or not part.startswith("<")]
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in named).removeprefix(".")


def suggest_name(name: str, known: Sequence[str]) -> str:
    """A known name that is like `name`; none for a long one, which takes long to compare and is no slip of typing."""
    close = get_close_matches(name, known, n=1) if len(name) <= MAX_SUGGESTED_CHARS else []
    return f"; did you mean {close[0]}?" if close else ""

"""What /openapi.json says of every route beside what the route says itself: its address, its key, and how it fails.

Knows no dialect.  The one idea: a route says what it takes.  What may go wrong before and behind it is the same
everywhere, so it is told from the errors there are, in the shape and with the status of the dialect that owns the path.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI

from ..core.errors import (
    BadRequest,
    ClientGone,
    Conflict,
    Forbidden,
    ForeignOrigin,
    InsufficientMemory,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    PolyheadError,
    Unauthorized,
    Unavailable,
    UnreadableRequest,
)
from .access.auth import required_access
from .shared.dialect import Dialect

Json = dict[str, Any]
EVENT_STREAM, OCTET_STREAM, PLAIN_TEXT = "text/event-stream", "application/octet-stream", "text/plain"
# How routes answer that do not answer in JSON alone, by how their paths end.
MEDIA_TYPES: Mapping[str, Sequence[str]] = {
    "/generate_stream": ("application/json", EVENT_STREAM),
    "/infer": ("application/json", OCTET_STREAM),
    "/metrics": (PLAIN_TEXT, "application/openmetrics-text"),
}
PROBE_PATHS = frozenset({"/livez", "/readyz", "/startupz", "/health", "/v2/health/live", "/v2/health/ready"})
UNDOCUMENTED_ERRORS = frozenset(
    {ClientGone, MethodNotAllowed, UnreadableRequest}
)  # nobody reads it, or it is no operation's
ADMIN_ERRORS = frozenset({Conflict, InsufficientMemory})  # what only changes of the served models run into
# Where nothing is done.
GET_ERRORS = frozenset(
    {BadRequest, Unauthorized, Forbidden, ForeignOrigin, NotFound, MisdirectedRequest, Unavailable, PolyheadError}
)
PUBLIC_ERRORS = (ForeignOrigin, MisdirectedRequest)  # where no key is asked for, too


def describe_app(app: FastAPI, make: Callable[[], Json], owner: Callable[[str], Dialect]) -> Json:
    """The description that `make` gives, completed once; `owner` is the dialect of a path."""
    if app.openapi_schema is None:
        schema = make()
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                complete_operation(path, method.upper(), operation, owner(path))
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema


def complete_operation(path: str, method: str, operation: Json, dialect: Dialect) -> None:
    names = re.findall(r"\{(\w+)\}", path)
    text = {"type": "string", "minLength": 1}
    operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    public = required_access(path, method) == "public"
    operation["security"] = [] if public else [{"key": []}]
    operation["responses"] = success_responses(path, operation)
    operation["responses"] |= error_responses(dialect, PUBLIC_ERRORS if public else list(error_kinds(path, method)))
    if path in PROBE_PATHS:
        operation["responses"]["503"] = {"description": "No, and why.", "content": {"application/json": {}}}


def success_responses(path: str, operation: Json) -> Json:
    """How it goes well."""
    media = next((media for end, media in MEDIA_TYPES.items() if path.endswith(end)), ("application/json",))
    if "stream" in body_fields(operation):
        media = (*media, EVENT_STREAM)
    return {"200": {"description": "What was asked for.", "content": {kind: {} for kind in dict.fromkeys(media)}}}


def body_fields(operation: Json) -> set[str]:
    """What the body of a request may have."""
    body = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
    schema = body["content"]["application/json"]["schema"]
    return {name for each in schema.get("anyOf", [schema]) for name in each.get("properties", ())}


def error_kinds(path: str, method: str) -> Iterator[type[PolyheadError]]:
    """The errors that a route may answer with."""
    for kind in walk_subclasses(PolyheadError):
        if kind in UNDOCUMENTED_ERRORS or (method == "GET" and kind not in GET_ERRORS):
            continue
        if kind not in ADMIN_ERRORS or required_access(path, method) == "admin":
            yield kind


def walk_subclasses(kind: type[PolyheadError]) -> Iterator[type[PolyheadError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from walk_subclasses(each)


def error_responses(dialect: Dialect, kinds: Sequence[type[PolyheadError]]) -> Json:
    """By status."""
    found: dict[int, list[PolyheadError]] = {}
    for kind in kinds:
        for error in (kind("why"), kind("why", param="field")):
            found.setdefault(dialect.status(error), []).append(error)
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": infer_schema([dialect.error(error) for error in errors])}},
        }
        for status, errors in sorted(found.items())
    }


def infer_schema(values: Sequence[Any]) -> Json:
    """The schema of values that are alike: all of their fields are required."""
    match values[0]:
        case dict(first):
            fields = {name: infer_schema([value[name] for value in values]) for name in first}
            return {"type": "object", "properties": fields, "required": list(first)}
        case _:
            types = sorted({JSON_TYPES[type(value)] for value in values})
            return {"type": types[0] if len(types) == 1 else types}


JSON_TYPES = {str: "string", int: "integer", type(None): "null"}

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
    MethodNotAllowed,
    Misdirected,
    NoRoom,
    NotFound,
    PolyheadError,
    Unauthorized,
    Unavailable,
    Unreadable,
)
from .access.auth import access
from .shared.dialect import Dialect

Json = dict[str, Any]
EVENTS, OCTETS, METRICS = "text/event-stream", "application/octet-stream", "text/plain"
# How routes answer that do not answer in JSON alone, by how their paths end.
MEDIA: Mapping[str, Sequence[str]] = {
    "/generate_stream": ("application/json", EVENTS),
    "/infer": ("application/json", OCTETS),
    "/metrics": (METRICS, "application/openmetrics-text"),
}
PROBES = frozenset({"/livez", "/readyz", "/startupz", "/health", "/v2/health/live", "/v2/health/ready"})
UNSAID = frozenset({ClientGone, MethodNotAllowed, Unreadable})  # nobody reads it, or it is no operation's
ADMINISTRATION = frozenset({Conflict, NoRoom})  # what only changes of the served models run into
# Where nothing is done.
LOOKING = frozenset(
    {BadRequest, Unauthorized, Forbidden, ForeignOrigin, NotFound, Misdirected, Unavailable, PolyheadError}
)
ANYWHERE = (ForeignOrigin, Misdirected)  # where no key is asked for, too


def described(app: FastAPI, make: Callable[[], Json], owner: Callable[[str], Dialect]) -> Json:
    """The description that `make` gives, completed once; `owner` is the dialect of a path."""
    if app.openapi_schema is None:
        schema = make()
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                complete(path, method.upper(), operation, owner(path))
        schema.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        app.openapi_schema = schema
    return app.openapi_schema


def complete(path: str, method: str, operation: Json, dialect: Dialect) -> None:
    names = re.findall(r"\{(\w+)\}", path)
    text = {"type": "string", "minLength": 1}
    operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    public = access(path, method) == "public"
    operation["security"] = [] if public else [{"key": []}]
    operation["responses"] = answers(path, operation)
    operation["responses"] |= failures(dialect, ANYWHERE if public else list(kinds(path, method)))
    if path in PROBES:
        operation["responses"]["503"] = {"description": "No, and why.", "content": {"application/json": {}}}


def answers(path: str, operation: Json) -> Json:
    """How it goes well."""
    media = next((media for end, media in MEDIA.items() if path.endswith(end)), ("application/json",))
    if "stream" in fields(operation):
        media = (*media, EVENTS)
    return {"200": {"description": "What was asked for.", "content": {kind: {} for kind in dict.fromkeys(media)}}}


def fields(operation: Json) -> set[str]:
    """What the body of a request may have."""
    body = operation.get("requestBody", {"content": {"application/json": {"schema": {}}}})
    schema = body["content"]["application/json"]["schema"]
    return {name for each in schema.get("anyOf", [schema]) for name in each.get("properties", ())}


def kinds(path: str, method: str) -> Iterator[type[PolyheadError]]:
    """The errors that a route may answer with."""
    for kind in family(PolyheadError):
        if kind in UNSAID or (method == "GET" and kind not in LOOKING):
            continue
        if kind not in ADMINISTRATION or access(path, method) == "admin":
            yield kind


def family(kind: type[PolyheadError]) -> Iterator[type[PolyheadError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from family(each)


def failures(dialect: Dialect, kinds: Sequence[type[PolyheadError]]) -> Json:
    """By status."""
    found: dict[int, list[PolyheadError]] = {}
    for kind in kinds:
        for error in (kind("why"), kind("why", param="field")):
            found.setdefault(dialect.status(error), []).append(error)
    return {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": shape([dialect.error(error) for error in errors])}},
        }
        for status, errors in sorted(found.items())
    }


def shape(values: Sequence[Any]) -> Json:
    """The schema of values that are alike: all of their fields are required."""
    match values[0]:
        case dict(first):
            fields = {name: shape([value[name] for value in values]) for name in first}
            return {"type": "object", "properties": fields, "required": list(first)}
        case _:
            types = sorted({TYPES[type(value)] for value in values})
            return {"type": types[0] if len(types) == 1 else types}


TYPES = {str: "string", int: "integer", type(None): "null"}

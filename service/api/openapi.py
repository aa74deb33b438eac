"""Completes /openapi.json: each route's path parameters, security, success responses and error responses.

A route declares only its body.  The errors it may return are derived from the error classes, with the format and the
status of the dialect that owns the path.
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
    InsufficientStorage,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    PolyheadError,
    Unauthorized,
    Unavailable,
    UnreadableRequest,
)
from .access.auth import required_access
from .access.model_paths import is_below
from .shared.dialect import Dialect
from .shared.streaming import JSON_LINES

Json = dict[str, Any]
EVENT_STREAM = "text/event-stream"
OCTET_STREAM, PLAIN_TEXT = "application/octet-stream", "text/plain"
# Media types of routes whose path has this suffix; all other routes return JSON only.
MEDIA_TYPES: Mapping[str, Sequence[str]] = {
    "/generate_stream": ("application/json", EVENT_STREAM),
    "/infer": ("application/json", OCTET_STREAM),
    "/api/chat": ("application/json", JSON_LINES),
    "/api/generate": ("application/json", JSON_LINES),
    "/v1/systemone": ("application/json", JSON_LINES),
    "/content": (OCTET_STREAM,),
    "/metrics": (PLAIN_TEXT, "application/openmetrics-text"),
}
PROBE_PATHS = frozenset(
    {"/livez", "/healthz", "/readyz", "/startupz", "/health", "/ping", "/v2/health/live", "/v2/health/ready"}
)
# Errors that no client receives, or that belong to no operation.
UNDOCUMENTED_ERRORS = frozenset({ClientGone, MethodNotAllowed, UnreadableRequest})
ADMIN_ERRORS = frozenset({Conflict, InsufficientMemory})  # of operations that change the served models
FILE_ERRORS = frozenset({Conflict, InsufficientStorage})  # of operations on files and batches
FILE_PATHS = ("/v1/files", "/v1/batches")
# Errors of GET routes.
GET_ERRORS = frozenset(
    {BadRequest, Unauthorized, Forbidden, ForeignOrigin, NotFound, MisdirectedRequest, Unavailable, PolyheadError}
)
PUBLIC_ERRORS = (ForeignOrigin, MisdirectedRequest)  # errors of public routes


def describe_app(app: FastAPI, make: Callable[[], Json], owner: Callable[[str], Dialect]) -> Json:
    """The OpenAPI document that `make` returns, completed once; `owner` returns the dialect of a path."""
    if app.openapi_schema is None:
        schema = make()
        for path, operations in schema["paths"].items():
            for method, operation in operations.items():
                complete_operation(path, method.upper(), operation, owner(path))
        # without FastAPI's own objects for errors, which no response has
        schema["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        app.openapi_schema = schema
    return app.openapi_schema


def complete_operation(path: str, method: str, operation: Json, dialect: Dialect) -> None:
    names = re.findall(r"\{(\w+)\}", path)
    text = {"type": "string", "minLength": 1}
    query = [given for given in operation.get("parameters", ()) if given["in"] == "query"]
    operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names] + query
    public = required_access(path, method) == "public"
    operation["security"] = [] if public else [{"key": []}]
    operation["responses"] = success_responses(path, operation)
    operation["responses"] |= error_responses(dialect, PUBLIC_ERRORS if public else list(error_kinds(path, method)))
    if path in PROBE_PATHS:
        operation["responses"]["503"] = {
            "description": "No; the body gives the reasons.",
            "content": {"application/json": {}},
        }


def success_responses(path: str, operation: Json) -> Json:
    """The success response."""
    media = next((media for end, media in MEDIA_TYPES.items() if path.endswith(end)), ("application/json",))
    if "stream" in body_fields(operation):
        media = (*media, EVENT_STREAM)
    return {"200": {"description": "Successful response.", "content": {kind: {} for kind in dict.fromkeys(media)}}}


def body_fields(operation: Json) -> set[str]:
    """The field names that the request body may have."""
    body = operation.get("requestBody", {"content": {}})
    schema = body["content"].get("application/json", {"schema": {}})["schema"]
    return {name for each in schema.get("anyOf", [schema]) for name in each.get("properties", ())}


def error_kinds(path: str, method: str) -> Iterator[type[PolyheadError]]:
    """The error classes that a route may return."""
    for kind in walk_subclasses(PolyheadError):
        if kind in UNDOCUMENTED_ERRORS or (method == "GET" and kind not in GET_ERRORS):
            continue
        if kind not in ADMIN_ERRORS | FILE_ERRORS or kind in own_errors(path, method):
            yield kind


def own_errors(path: str, method: str) -> frozenset[type[PolyheadError]]:
    """Error classes that only some routes may return."""
    if required_access(path, method) == "admin":
        return ADMIN_ERRORS
    return FILE_ERRORS if any(is_below(path, prefix) for prefix in FILE_PATHS) else frozenset()


def walk_subclasses(kind: type[PolyheadError]) -> Iterator[type[PolyheadError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from walk_subclasses(each)


def error_responses(dialect: Dialect, kinds: Sequence[type[PolyheadError]]) -> Json:
    """The error responses, by status."""
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
    """The JSON schema of values of the same structure; all of their fields are required."""
    match values[0]:
        case dict(first):
            fields = {name: infer_schema([value[name] for value in values]) for name in first}
            return {"type": "object", "properties": fields, "required": list(first)}
        case _:
            types = sorted({JSON_TYPES[type(value)] for value in values})
            return {"type": types[0] if len(types) == 1 else types}


JSON_TYPES = {str: "string", int: "integer", type(None): "null"}

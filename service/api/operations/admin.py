"""Admin routes: load, reload and unload models, and set aliases, under /admin.  They exist only with an admin key.

An operation goes on whether or not its client stays connected.  The response only follows it: one JSON object at the
end, or server-sent events with its progress.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ...core.errors import BadRequest
from ...core.model import ServedName
from ...runtime.operation import ModelOperation
from ..access.app_state import RegistryProtocol
from ..shared.dialect import Wire, answer_threads, between, describe_body, read_body
from ..shared.json_body import receive_json
from ..shared.openai_errors import write_openai_error
from ..shared.streaming import EventStream, JsonResponse, StreamWriter, encode_events, run_while_connected
from .health import app_state, write_model_state

PROGRESS_POLL_S = 0.1  # seconds between two progress events
MAX_DRAIN_S = 3600
WHOLE_SECONDS = re.compile("[0-9]{1,6}")  # a whole number of seconds
NameText = Annotated[str, Field(min_length=1, max_length=4096)]
DrainSeconds = Annotated[float, between(0, MAX_DRAIN_S)]
router = APIRouter(tags=["administration"])


class LoadRequest(Wire):
    """The name BASE:NAME loads an adapter of the model BASE; with `merge` it is merged into a model of its own."""

    name: NameText
    source: NameText
    merge: bool = False
    stream: bool = False


class ReloadRequest(Wire):
    """Without a source the model is read again from its present source."""

    source: Annotated[str, Field(max_length=4096)] = ""
    drain_seconds: DrainSeconds = -1  # -1: the setting
    stream: bool = False


class AliasRequest(Wire):
    model: NameText


@router.get("/admin/models", summary="Every served name, the running operation, and the memory.")
async def models(request: Request) -> Response:
    registry = request_registry(request)
    operation, budget = registry.operation, registry.memory_budget()
    return JsonResponse(
        {
            "models": [write_admin_model(known) for known in registry.model_statuses()],
            "change": {"what": operation.description, **write_progress(operation)} if operation else None,
            "memory": {"limit_bytes": budget[0], "free_bytes": budget[1]},
        }
    )


@router.post("/admin/models", openapi_extra=describe_body(LoadRequest), summary="Load one more model.")
async def load(request: Request) -> Response:
    wire = await read_body(request, LoadRequest)
    return await answer_operation(
        request, request_registry(request).load(wire.name, wire.source, merge=wire.merge), wire.stream
    )


@router.post(
    "/admin/models/{name:path}/reload",
    openapi_extra=describe_body(ReloadRequest),
    summary="Load a model again, or another in its place, while the old one serves.",
)
async def reload(request: Request) -> Response:
    text = await receive_json(request)
    wire = ReloadRequest.read(await text.run(text.parse)) if text.content else ReloadRequest()
    drain = app_state(request).settings.drain_seconds if wire.drain_seconds < 0 else wire.drain_seconds
    operation = request_registry(request).reload(request.path_params["name"], wire.source, drain)
    return await answer_operation(request, operation, wire.stream)


@router.delete(
    "/admin/models/{name:path}",
    summary="Unload a model: what runs has drain_seconds to end; or cancel its load, while it is being loaded.",
)
async def unload(request: Request) -> Response:
    operation = request_registry(request).unload(request.path_params["name"], read_drain_seconds(request))
    return await answer_operation(request, operation, stream=False)


@router.put(
    "/admin/aliases/{alias:path}", openapi_extra=describe_body(AliasRequest), summary="Another name for a model."
)
async def alias(request: Request) -> Response:
    wire, name = await read_body(request, AliasRequest), request.path_params["alias"]
    request_registry(request).alias(name, wire.model)
    return JsonResponse({"alias": name, "model": wire.model})


@router.delete("/admin/aliases/{alias:path}", summary="Forget an alias.")
async def unalias(request: Request) -> Response:
    request_registry(request).unalias(request.path_params["alias"])
    return JsonResponse({"alias": request.path_params["alias"], "model": None})


def request_registry(request: Request) -> RegistryProtocol:
    return app_state(request).registry


def read_drain_seconds(request: Request) -> float:
    """The drain time in the query; the setting if there is none."""
    query = request.query_params
    unknown = [name for name in query if name != "drain_seconds"]
    if unknown:
        raise BadRequest(f"{unknown[0][:60]}: is not a known parameter; there is drain_seconds", param=unknown[0][:60])
    given = query.get("drain_seconds", str(app_state(request).settings.drain_seconds))
    if not WHOLE_SECONDS.fullmatch(given) or int(given) > MAX_DRAIN_S:
        message = f"drain_seconds: must be a whole number from 0 to {MAX_DRAIN_S}, got {given[:60]!r}"
        raise BadRequest(message, param="drain_seconds")
    return int(given)


async def answer_operation(request: Request, operation: ModelOperation, stream: bool) -> Response:
    """Answer with the result of an operation, or with server-sent events of its progress."""
    registry = request_registry(request)
    if stream or "text/event-stream" in request.headers.get("accept", ""):
        return await EventStream.open(
            encode_events(
                stream_progress(registry, operation), StreamWriter(answer_threads(request), write_openai_error)
            )
        )

    async def work() -> Response:
        await operation.wait_and_raise()
        return JsonResponse(write_result(registry, operation))

    return await run_while_connected(request, work())


async def stream_progress(
    registry: RegistryProtocol, operation: ModelOperation
) -> AsyncGenerator[Mapping[str, Any], None]:
    last: Mapping[str, Any] = {}
    while operation.phase != "over":
        if (now := write_progress(operation)) != last:
            last = now
            yield last
        await asyncio.sleep(PROGRESS_POLL_S)
    await operation.wait_and_raise()
    yield write_result(registry, operation)


def write_result(registry: RegistryProtocol, operation: ModelOperation) -> dict[str, Any]:
    """The model after the operation, or that it is unloaded."""
    found = [write_admin_model(known) for known in registry.model_statuses() if known.name == operation.name]
    return found[0] if found else {"name": operation.name, "state": "unloaded"}


def write_progress(operation: ModelOperation) -> dict[str, Any]:
    if operation.phase == "loading":
        return {"state": operation.load_phase, "progress": round(operation.fraction, 3)}
    return {"state": operation.phase}


def write_admin_model(entry: ServedName) -> dict[str, Any]:
    return {
        "name": entry.name,
        "source": entry.source,
        **write_model_state(entry.state),
        "task": entry.task,
        "memory_bytes": entry.memory,
        "explain_memory_bytes": entry.explain_memory,
        "aliases": list(entry.aliases),
    }

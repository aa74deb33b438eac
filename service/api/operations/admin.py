"""Models and aliases changed while serving, under /admin; only there if the settings have a key for it.

Knows no torch.  The one idea: a change goes on whether or not whoever asked for it stays to hear of it, so an answer is
only a look at it: one when it is over, or as server-sent events at every step it takes.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import Response

from ...core.errors import BadRequest
from ...core.model import Known
from ...runtime.operation import Change
from ..access.app_state import Registry
from ..shared.dialect import Wire, between, body, takes
from ..shared.json_body import received, value_of
from ..shared.openai_errors import write_error
from ..shared.streaming import EventStream, JsonResponse, answer, events
from .health import described, server

GLANCE_S = 0.1  # how often a change is looked at for those who follow it
LONGEST_DRAIN = 3600  # seconds
WHOLE = re.compile("[0-9]{1,6}")  # a number of seconds
Text = Annotated[str, Field(min_length=1, max_length=4096)]
Drain = Annotated[float, between(0, LONGEST_DRAIN)]
router = APIRouter(tags=["administration"])


class LoadRequest(Wire):
    """A name BASE:NAME is that of an adapter, laid over the model BASE; `merge` makes a model of its own of both."""

    name: Text
    source: Text
    merge: bool = False
    stream: bool = False


class ReloadRequest(Wire):
    """Without a source the model is read again from where it came."""

    source: Annotated[str, Field(max_length=4096)] = ""
    drain_seconds: Drain = -1  # the setting
    stream: bool = False


class AliasRequest(Wire):
    model: Text


@router.get("/admin/models", summary="Every served name, what is going on, and the memory there is.")
async def models(request: Request) -> Response:
    registry = administered(request)
    change, budget = registry.change, registry.memory()
    return JsonResponse(
        {
            "models": [write_known(known) for known in registry.known()],
            "change": {"what": change.what, **write_change(change)} if change else None,
            "memory": {"limit_bytes": budget[0], "free_bytes": budget[1]},
        }
    )


@router.post("/admin/models", openapi_extra=takes(LoadRequest), summary="Load one more model.")
async def load(request: Request) -> Response:
    wire = await body(request, LoadRequest)
    return await told(request, administered(request).load(wire.name, wire.source, merge=wire.merge), wire.stream)


@router.post(
    "/admin/models/{name:path}/reload",
    openapi_extra=takes(ReloadRequest),
    summary="Load a model again, or another in its place, while the old one serves.",
)
async def reload(request: Request) -> Response:
    content = await received(request)
    wire = ReloadRequest.read(await value_of(content)) if content else ReloadRequest()
    drain = server(request).settings.drain_seconds if wire.drain_seconds < 0 else wire.drain_seconds
    change = administered(request).reload(request.path_params["name"], wire.source, drain)
    return await told(request, change, wire.stream)


@router.delete(
    "/admin/models/{name:path}",
    summary="Unload a model: what runs has drain_seconds to end; or cancel its load, while it is being loaded.",
)
async def unload(request: Request) -> Response:
    change = administered(request).unload(request.path_params["name"], drain_of(request))
    return await told(request, change, stream=False)


@router.put("/admin/aliases/{alias:path}", openapi_extra=takes(AliasRequest), summary="Another name for a model.")
async def alias(request: Request) -> Response:
    wire, name = await body(request, AliasRequest), request.path_params["alias"]
    administered(request).alias(name, wire.model)
    return JsonResponse({"alias": name, "model": wire.model})


@router.delete("/admin/aliases/{alias:path}", summary="Forget an alias.")
async def unalias(request: Request) -> Response:
    administered(request).unalias(request.path_params["alias"])
    return JsonResponse({"alias": request.path_params["alias"], "model": None})


def administered(request: Request) -> Registry:
    return server(request).registry


def drain_of(request: Request) -> float:
    """What the query says of the time to drain; the setting, if it says nothing."""
    query = request.query_params
    unknown = [name for name in query if name != "drain_seconds"]
    if unknown:
        raise BadRequest(f"{unknown[0][:60]}: is not a known parameter; there is drain_seconds", param=unknown[0][:60])
    given = query.get("drain_seconds", str(server(request).settings.drain_seconds))
    if not WHOLE.fullmatch(given) or int(given) > LONGEST_DRAIN:
        message = f"drain_seconds: must be a whole number from 0 to {LONGEST_DRAIN}, got {given[:60]!r}"
        raise BadRequest(message, param="drain_seconds")
    return int(given)


async def told(request: Request, change: Change, stream: bool) -> Response:
    """How a change ends; how it goes, too, for those who want events."""
    registry = administered(request)
    if stream or "text/event-stream" in request.headers.get("accept", ""):
        return await EventStream.open(events(progress(registry, change), write_error, last=b""))

    async def work() -> Response:
        await change.end()
        return JsonResponse(ended(registry, change))

    return await answer(request, work())


async def progress(registry: Registry, change: Change) -> AsyncGenerator[Mapping[str, Any], None]:
    said: Mapping[str, Any] = {}
    while change.phase != "over":
        if (now := write_change(change)) != said:
            said = now
            yield said
        await asyncio.sleep(GLANCE_S)
    await change.end()
    yield ended(registry, change)


def ended(registry: Registry, change: Change) -> dict[str, Any]:
    """The model as it is now, or that it is no more."""
    found = [write_known(known) for known in registry.known() if known.name == change.name]
    return found[0] if found else {"name": change.name, "state": "unloaded"}


def write_change(change: Change) -> dict[str, Any]:
    if change.phase == "loading":
        return {"state": "loading", "progress": round(change.fraction, 3)}
    return {"state": change.phase}


def write_known(known: Known) -> dict[str, Any]:
    return {
        "name": known.name,
        "source": known.source,
        **described(known.state),
        "task": known.task,
        "memory_bytes": known.memory,
        "explain_memory_bytes": known.explaining,
        "aliases": list(known.aliases),
    }

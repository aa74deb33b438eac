"""How the server is: alive, started, ready, and its metrics.  For orchestrators and people; needs no key.

Knows no dialect.  The one idea: live is about the process (restart it if not), ready is about its models (send
nothing yet); loading is never a reason to restart.
"""

from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from service.api.server import Server
from service.model import State

router = APIRouter(tags=["health"])


def server(request: Request) -> Server:
    return cast(Server, request.app.state.server)


@router.head("/livez", include_in_schema=False)
@router.get("/livez", summary="Is the process worth keeping?")
async def livez(request: Request) -> Response:
    alive = server(request).alive()
    return JSONResponse({"live": alive}, 200 if alive else 503)


@router.head("/startupz", include_in_schema=False)
@router.get("/startupz", summary="Has every model been loaded, or found broken?")
async def startupz(request: Request) -> Response:
    started = server(request).started
    return JSONResponse({"started": started}, 200 if started else 503)


@router.head("/health", include_in_schema=False)
@router.get("/health", summary="The same as /readyz.")
@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Can it answer?  Says how far each model is.")
async def readyz(request: Request) -> Response:
    here = server(request)
    models = {name: described(state) for name, state in here.registry.states().items()}
    body = {"ready": here.ready, "draining": here.admission.draining, "models": models}
    return JSONResponse(body, 200 if here.ready else 503)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", summary="Prometheus metrics.")
async def metrics(request: Request) -> Response:
    page, content_type = server(request).metrics.page(request.headers.get("accept", ""))
    return Response(page, media_type=content_type)


@router.head("/", include_in_schema=False)
@router.get("/", include_in_schema=False)
async def index() -> Response:
    return JSONResponse({"name": "polyhead", "docs": "/docs", "openapi": "/openapi.json", "health": "/readyz"})


def described(state: State) -> dict[str, Any]:
    match state.phase:
        case "loading":
            return {"state": state.phase, "progress": round(state.fraction, 3)}
        case "broken":
            return {"state": state.phase, "error": state.why}
        case _:
            return {"state": state.phase}

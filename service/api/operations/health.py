"""Health routes and metrics: alive, started, ready.  For orchestrators and people.

They send nothing through the engine's queue; they look at what the engine has done.  Live is about the process (restart
it if not), ready is about its models (send no requests now), and each negative answer gives its reasons.  Loading is
never a reason to restart.
"""

import time
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ...core.model import LoadState
from ...metrics.history import INTERVAL_S, MetricHistory
from ..access.app_state import AppState

router = APIRouter(tags=["health"])  # also of a replica, which has an AppState and no other state
figures_router = APIRouter(tags=["health"])  # of a server: what it keeps besides, and what needs a request's context


def app_state(request: Request) -> AppState:
    return cast(AppState, request.app.state.server)


@router.head("/healthz", include_in_schema=False)
@router.get("/healthz", summary="The same as /livez.")
@router.head("/livez", include_in_schema=False)
@router.get("/livez", summary="Is the process worth keeping?")
async def livez(request: Request) -> Response:
    """503 if the engine thread has ended, or work has waited for `hang_seconds` without a finished step."""
    reasons = app_state(request).fatal_reasons()
    return JSONResponse({"live": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.head("/startupz", include_in_schema=False)
@router.get("/startupz", summary="Has every model been loaded, or found broken?")
async def startupz(request: Request) -> Response:
    started = app_state(request).is_started
    return JSONResponse({"started": started}, 200 if started else 503)


@router.head("/ping", include_in_schema=False)
@router.get("/ping", summary="The same as /readyz, where SageMaker asks for it.")
@router.head("/health", include_in_schema=False)
@router.get("/health", summary="The same as /readyz.")
@router.head("/readyz", include_in_schema=False)
@router.get("/readyz", summary="Can it answer?  Says how far each model is.")
async def readyz(request: Request) -> Response:
    """503 while it loads or drains, without a model, when a model of the settings is broken or cannot compute any more,
    or when work has waited for `stall_seconds` without a finished step.
    """
    app = app_state(request)
    reasons = app.unready_reasons()
    models = {name: write_model_state(state) for name, state in app.registry.states().items()}
    body = {"ready": not reasons, "draining": app.admission.is_draining, "reasons": reasons, "models": models}
    return JSONResponse(body, 503 if reasons else 200)


@router.head("/metrics", include_in_schema=False)
@router.get("/metrics", summary="Prometheus metrics.")
async def metrics(request: Request) -> Response:
    """OpenMetrics with exemplars, or the text format of Prometheus, depending on Accept; gzipped on request."""
    packed = accepts_gzip(request.headers.get("accept-encoding", ""))
    page, content_type = await app_state(request).metrics.render_on_thread(
        request.headers.get("accept", ""), packed=packed
    )
    headers = {"Vary": "Accept, Accept-Encoding"} | ({"Content-Encoding": "gzip"} if packed else {})
    return Response(page, headers=headers, media_type=content_type)


@figures_router.get("/metrics/history", summary="Figures of the last five minutes.")
async def metrics_history(request: Request) -> Response:
    """A sample every five seconds, with sums over all models; a figure without observations is null."""
    history = cast(MetricHistory, request.app.state.history)
    return JSONResponse({"interval_seconds": INTERVAL_S, "samples": history.read(time.monotonic())})


@figures_router.get("/metrics/errors", summary="The most recent requests that ended with an error.")
async def recent_errors(request: Request) -> Response:
    """At most fifty that were refused and fifty that failed, the newest first, of models that the key may use, without
    texts and keys.

    Requests without a valid key and for unknown paths are not among them.  The log has more about a request id.
    """
    return JSONResponse({"errors": app_state(request).recent_errors.read(request.state.context.key)})


def accepts_gzip(accepted: str) -> bool:
    """Whether a header Accept-Encoding accepts gzip: it is named, and its weight is not 0."""
    named = (part.partition(";") for part in accepted.lower().split(","))
    weights = {coding.strip(): weight.replace(" ", "") for coding, _, weight in named}
    return weights.get("gzip", "q=0").rstrip("0.") != "q="


def write_model_state(state: LoadState) -> dict[str, Any]:
    match state.phase:
        case "loading" | "downloading":
            return {"state": state.phase, "progress": round(state.fraction, 3)}
        case "broken":
            return {"state": state.phase, "error": state.reason}
        case _:
            return {"state": state.phase}

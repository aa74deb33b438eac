"""Builds the FastAPI application from the dialects, and turns every error into a response.

An error has the format of the dialect that owns the path (`DIALECTS`), wherever it was raised.
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route

from polyhead.models.tokenizer import TokenizerError

from ..core.errors import (
    BadRequest,
    ClientGone,
    Expired,
    MethodNotAllowed,
    NotFound,
    PolyheadError,
    Stopped,
    Unauthorized,
    UnsupportedType,
    cut_text,
)
from ..core.version import VERSION
from ..metrics import EarlyOutcome
from ..metrics.history import MetricHistory, sample_forever
from ..resources.process_info import trim_heap_forever
from .access.access_log import MAX_PATH_CHARS
from .access.app_state import AppState
from .access.auth import watch_keys_file
from .access.middleware import AccessMiddleware, ErrorResponder
from .access.own_calls import OwnCalls
from .access.request_context import RequestContext
from .batches.batch_lines import LineRoom
from .batches.batch_runner import BatchRunner
from .batches.batch_store import BatchStore
from .batches.file_store import FileStore, StoreLimits
from .dialects.anthropic import routes as anthropic
from .dialects.batches import routes as batches
from .dialects.batches.wire import read_line
from .dialects.decisions import routes as decisions
from .dialects.explain import routes as explain
from .dialects.hf import routes as hf
from .dialects.moderations import routes as moderations
from .dialects.oip import repository as oip_repository
from .dialects.oip import routes as oip
from .dialects.ollama import routes as ollama
from .dialects.openai import routes as openai
from .dialects.rerank import routes as rerank
from .dialects.responses import routes as responses
from .dialects.responses.response_store import ResponseLimits, ResponseStore
from .dialects.systemone import routes as systemone
from .dialects.tei import routes as tei
from .dialects.tgi import routes as tgi
from .dialects.tokens import routes as tokens
from .http.content_coding import ACCEPTED_CODINGS
from .http.request_head import REQUEST_ID_HEADERS
from .openapi import describe_app
from .operations import admin, health, web_pages
from .shared.dialect import Dialect, describe_error
from .shared.streaming import JsonResponse

# The first dialect that matches owns a path; OpenAI's is the default.  The last has a route for any model's name.
DIALECTS: tuple[Dialect, ...] = (
    rerank.DIALECT,
    anthropic.DIALECT,
    responses.DIALECT,
    moderations.DIALECT,
    batches.DIALECT,
    systemone.DIALECT,
    decisions.DIALECT,
    openai.DIALECT,
    tei.DIALECT,
    tgi.DIALECT,
    oip.DIALECT,
    ollama.DIALECT,
    hf.DIALECT,
)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(server: AppState, lifespan: Lifespan | None = None) -> FastAPI:
    """An application whose routes use `server`; `lifespan` starts and stops the background services."""
    app = FastAPI(
        title="Polyhead",
        version=VERSION,
        summary="Encoder classifiers and decoder generators behind one HTTP server.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # FastAPI renders it for each request; see service.api.operations.web_pages
        docs_url=None,  # FastAPI's pages load scripts from another origin; see service.api.operations.web_pages
        redoc_url=None,
        telemetry={
            "tracing": False,
            "metrics": False,
            "logs": False,
            "auto_configure": False,
        },  # see service.server.traces
    )
    app.state.server = server
    app.state.history = MetricHistory(server.metrics)
    app.state.batches = build_batches(app, server)
    app.state.responses = build_responses(server)
    server.metrics.watch_in_flight(lambda: server.admission.unfinished)
    server.metrics.watch_engine(server.engine)
    server.metrics.watch_drain(server.admission.drain_elapsed_s, server.settings.drain_seconds)
    error_response = partial(respond_error, server)
    admin_routers = [admin.router, oip_repository.router] if server.has_admin_key else []
    routers = (
        health.router,
        health.figures_router,
        web_pages.router,
        *admin_routers,
        tokens.router,
        explain.router,
        *(dialect.router for dialect in DIALECTS),
    )
    for router in routers:
        app.include_router(router)
    app.add_middleware(AccessMiddleware, server=server, error_response=error_response)
    add_error_handlers(app, error_response, [route for router in routers for route in router.routes])
    app.openapi = partial(describe_app, app, app.openapi, find_dialect)  # type: ignore[method-assign]
    app.state.description = web_pages.CachedDocument(app.openapi)
    return app


async def background_works(app: FastAPI) -> list[Coroutine[Any, Any, None]]:
    """What runs beside the requests of an application, until it ends."""
    works = [trim_heap_forever(), watch_keys_file(app.state.server.keys), sample_forever(app.state.history)]
    if app.state.batches is not None:
        await app.state.batches.open()
        works.append(app.state.batches.run())
    if app.state.responses.is_enabled:
        works.append(app.state.responses.remove_expired_forever())
    return works


def build_batches(app: FastAPI, server: AppState) -> BatchRunner | None:
    """What answers batches; None if there is no folder for them.  Raises SettingsError if it cannot be used."""
    settings = server.settings
    if not settings.files_dir:
        return None
    limits = StoreLimits(settings.files_mib << 20, settings.key_share)
    store = BatchStore(FileStore(Path(settings.files_dir).expanduser(), limits, server.keys.owners))
    server.metrics.watch_batches(lambda: len(store.unfinished()))
    room = LineRoom(server.headroom, server.request_threads)
    return BatchRunner(store, OwnCalls(app, server.keys, server.headroom), read_line, room)


def build_responses(server: AppState) -> ResponseStore:
    settings = server.settings
    limits = ResponseLimits(settings.responses_mib << 20, settings.responses_seconds, settings.key_share)
    return ResponseStore(limits, server.keys.owners, server.headroom)


def add_error_handlers(app: FastAPI, error_response: ErrorResponder, routes: Sequence[BaseRoute]) -> None:
    def to_response(request: Request, error: PolyheadError) -> Response:
        return error_response(request.state.context, request.url.path, error)

    async def answer_polyhead_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, PolyheadError)
        return to_response(request, error)

    async def answer_tokenizer_error(request: Request, error: Exception) -> Response:
        """An unforeseen error of a tokenizer's library."""
        return to_response(request, PolyheadError(str(error)))

    async def answer_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == 405 and request.method == "OPTIONS":
            return Response(status_code=204, headers={"Allow": list_methods(request, routes)})
        response = to_response(request, convert_http_error(request, error))
        response.headers.update(error.headers or {})
        return response

    async def answer_validation_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return to_response(request, convert_validation_error(error))

    async def answer_server_error(request: Request, error: Exception) -> Response:  # noqa: ARG001
        """A bug in the server.  The traceback is logged with the request id that the response carries."""
        response = to_response(request, PolyheadError("the server made a mistake; its log says more"))
        response.headers.update(dict.fromkeys(REQUEST_ID_HEADERS, request.state.context.id))
        request.app.state.server.origins.add_cors_headers(request.headers, response.headers)
        return response

    app.add_exception_handler(PolyheadError, answer_polyhead_error)
    app.add_exception_handler(TokenizerError, answer_tokenizer_error)
    app.add_exception_handler(HTTPException, answer_http_error)
    app.add_exception_handler(RequestValidationError, answer_validation_error)
    app.add_exception_handler(Exception, answer_server_error)


def list_methods(request: Request, routes: Sequence[BaseRoute]) -> str:
    """The methods of all routes with the path of the request, in the form of the header Allow."""
    methods = {"OPTIONS"}
    for route in routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] != Match.NONE:
            methods |= route.methods or set()
    return ", ".join(sorted(methods))


def respond_error(server: AppState, context: RequestContext, path: str, error: PolyheadError) -> Response:
    """The response for `error`, in the format of the dialect that owns `path`.

    The request is counted here unless the engine counts it.
    """
    context.outcome, context.reason = error_outcome(error), error.code
    if not context.is_counted:
        context.is_counted = True
        server.metrics.record_early_end(
            early_outcome(error), error.code, error.model or context.model, error.task or context.task
        )
    dialect = find_dialect(path)
    return JsonResponse(dialect.error(error), dialect.status(error), error_headers(error))


def early_outcome(error: PolyheadError) -> EarlyOutcome:
    """The outcome of a request that ended before it reached the engine."""
    match error:
        case Expired():
            return "expired"
        case ClientGone():
            return "aborted"
        case _:
            return "rejected"


def error_outcome(error: PolyheadError) -> str:
    """The outcome of a request that ends with `error`."""
    return "failed" if error.status == 500 or isinstance(error, Stopped) else early_outcome(error)


def find_dialect(path: str) -> Dialect:
    return next((dialect for dialect in DIALECTS if dialect.matches(path)), openai.DIALECT)


def error_headers(error: PolyheadError) -> Mapping[str, str]:
    headers = {}
    if error.retry_after:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnsupportedType) and error.param == "Content-Encoding":
        headers["Accept-Encoding"] = ACCEPTED_CODINGS
    return headers


def convert_http_error(request: Request, error: HTTPException) -> PolyheadError:
    """An exception of the framework as one of our errors."""
    request_line = f"{request.method} {cut_text(request.url.path, MAX_PATH_CHARS)}"
    match error.status_code:
        case 404:
            return NotFound(f"there is no route {request_line}; /docs lists the routes")
        case 405:
            allowed = (error.headers or {}).get("Allow", "")
            return MethodNotAllowed(f"{request_line} is not possible, the route takes {allowed}")
        case _:
            return BadRequest(str(error.detail))


def convert_validation_error(error: RequestValidationError) -> BadRequest:
    """An error of a parameter of a path or query, in the words of those of bodies."""
    first: ErrorDetails = error.errors()[0]
    first["loc"] = first["loc"][1:]  # without "query" or "path"
    return describe_error(first)

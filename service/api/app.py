"""The application: which dialects there are, and what is said to whoever asks for something that cannot be.

Knows no wire object.  The one idea: every error, wherever it was noticed, leaves in the shape of the dialect that
owns the path (`DIALECTS`), with the same headers.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

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
)
from ..core.version import VERSION
from ..metrics import EarlyOutcome
from .access.app_state import AppState
from .access.middleware import AccessMiddleware, ErrorResponder
from .access.request_context import RequestContext
from .dialects.anthropic import routes as anthropic
from .dialects.explain import routes as explain
from .dialects.hf import routes as hf
from .dialects.oip import repository as oip_repository
from .dialects.oip import routes as oip
from .dialects.openai import routes as openai
from .dialects.rerank import routes as rerank
from .dialects.responses import routes as responses
from .dialects.tei import routes as tei
from .dialects.tgi import routes as tgi
from .dialects.tokens import routes as tokens
from .http.request_head import REQUEST_ID_HEADERS
from .openapi import describe_app
from .operations import admin, health
from .operations import web_pages as web
from .shared.dialect import Dialect
from .shared.streaming import JsonResponse

# Who owns a path: the first that says so; OpenAI's where nobody does.  The last has a route for any model's name.
DIALECTS: tuple[Dialect, ...] = (
    rerank.DIALECT,
    anthropic.DIALECT,
    responses.DIALECT,
    openai.DIALECT,
    tei.DIALECT,
    tgi.DIALECT,
    oip.DIALECT,
    hf.DIALECT,
)
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def build_app(server: AppState, lifespan: Lifespan | None = None) -> FastAPI:
    """An application whose routes reach `server`; `lifespan` starts and stops what works for it."""
    app = FastAPI(
        title="Polyhead",
        version=VERSION,
        summary="Encoder classifiers and decoder generators behind one HTTP server.",
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_url=None,  # FastAPI writes it anew for each request; see service.api.operations.web_pages
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
    server.metrics.watch_in_flight(lambda: server.admission.unfinished)
    server.metrics.watch_engine(server.engine)
    server.metrics.watch_drain(server.admission.drain_elapsed_s, server.settings.drain_seconds)
    refuse = partial(respond_error, server)
    administration = [admin.router, oip_repository.router] if server.has_admin_key else []
    for router in (
        health.router,
        web.router,
        *administration,
        tokens.router,
        explain.router,
        *(dialect.router for dialect in DIALECTS),
    ):
        app.include_router(router)
    app.add_middleware(AccessMiddleware, server=server, refuse=refuse)
    add_error_handlers(app, refuse)
    app.openapi = partial(describe_app, app, app.openapi, find_dialect)  # type: ignore[method-assign]
    app.state.description = web.CachedDocument(app.openapi)
    return app


def add_error_handlers(app: FastAPI, refuse: ErrorResponder) -> None:
    def refused(request: Request, error: PolyheadError) -> Response:
        return refuse(request.state.visit, request.url.path, error)

    async def polyhead(request: Request, error: Exception) -> Response:
        assert isinstance(error, PolyheadError)
        return refused(request, error)

    async def failed(request: Request, error: Exception) -> Response:
        """Of a tokenizer's library, on something unforeseen."""
        return refused(request, PolyheadError(str(error)))

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        response = refused(request, convert_http_error(request, error))
        response.headers.update(error.headers or {})
        return response

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return refused(request, convert_validation_error(error))

    async def unforeseen(request: Request, error: Exception) -> Response:  # noqa: ARG001
        """A fault of ours: the traceback goes to the log, under the id that the answer carries."""
        response = refused(request, PolyheadError("the server made a mistake; its log says more"))
        response.headers.update(dict.fromkeys(REQUEST_ID_HEADERS, request.state.visit.id))
        request.app.state.server.origins.mark(request.headers, response.headers)
        return response

    app.add_exception_handler(PolyheadError, polyhead)
    app.add_exception_handler(TokenizerError, failed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(Exception, unforeseen)


def respond_error(server: AppState, visit: RequestContext, path: str, error: PolyheadError) -> Response:
    """`error` as the dialect that owns `path` says it; counted, unless the engine counts the request."""
    visit.outcome, visit.reason = error_outcome(error), error.code
    if not visit.is_counted:
        visit.is_counted = True
        server.metrics.record_early_end(
            missed_outcome(error), error.code, error.model or visit.model, error.task or visit.task
        )
    dialect = find_dialect(path)
    return JsonResponse(dialect.error(error), dialect.status(error), error_headers(error))


def missed_outcome(error: PolyheadError) -> EarlyOutcome:
    """How a request ends that the engine never had."""
    match error:
        case Expired():
            return "expired"
        case ClientGone():
            return "aborted"
        case _:
            return "rejected"


def error_outcome(error: PolyheadError) -> str:
    """How a request ends that this is said to."""
    return "failed" if error.status == 500 or isinstance(error, Stopped) else missed_outcome(error)


def find_dialect(path: str) -> Dialect:
    return next((dialect for dialect in DIALECTS if dialect.matches(path)), openai.DIALECT)


def error_headers(error: PolyheadError) -> Mapping[str, str]:
    headers = {}
    if error.retry_after:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def convert_http_error(request: Request, error: HTTPException) -> PolyheadError:
    """What the framework raises, in our words."""
    asked = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            return NotFound(f"there is no route {asked}; /docs lists the routes")
        case 405:
            allowed = (error.headers or {}).get("Allow", "")
            return MethodNotAllowed(f"{asked} is not possible, the route takes {allowed}")
        case _:
            return BadRequest(str(error.detail))


def convert_validation_error(error: RequestValidationError) -> BadRequest:
    first = error.errors()[0]
    name = str(first["loc"][-1])
    return BadRequest(f"{name}: {first['msg']}", param=name)

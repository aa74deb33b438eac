"""The door every HTTP request goes through: an id, its host and origin, the key, the body's type and limit, a place in
flight, a line in the log.

Knows no route and no dialect.  The one idea: whoever is turned away is turned away before the body is read, and is
told so in the words of the dialect that was spoken (`refuse`).  A place in flight is taken when the body is whole; if
there is none any more, that is an answer, too.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import BodyTooLarge, Overloaded, PolyheadError, SlowBody, Stopped
from ...resources.request_memory import BYTES_PER_BODY_BYTE, MemoryClaim
from ..http.body_limits import IncomingBody
from ..http.request_head import REQUEST_ID_HEADERS
from .access_log import NO_TRACING, RequestRecord, Trace
from .admission import Permit
from .app_state import AppState
from .auth import is_anthropic_path, read_authorization, required_access
from .origins import check_content_type
from .rate_limit import anthropic_headers, openai_headers
from .request_context import TIMEOUT_HEADER, RequestContext, read_timeout

ErrorResponder = Callable[[RequestContext, str, PolyheadError], Response]

QUIET_ACCESS = ("public", "metrics")  # what asks nothing of a model, again and again
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

log = logging.getLogger("polyhead.http")


class AccessMiddleware:
    """ASGI middleware.  `refuse(visit, path, error)` is the response for a request that is turned away."""

    def __init__(self, app: ASGIApp, server: AppState, refuse: ErrorResponder) -> None:
        self.app, self.server, self.error_response = app, server, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun, visit = (
            500,
            False,
            RequestContext(read_request_id(Headers(scope=scope)), claim=MemoryClaim(self.server.headroom)),
        )
        scope.setdefault("state", {})["visit"] = visit
        trace = self.start_trace(visit, scope)
        told = {**dict.fromkeys(REQUEST_ID_HEADERS, visit.id), **trace.headers}
        came = Headers(scope=scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                headers = MutableHeaders(scope=message)
                headers.update(told | self.quota_headers(visit, scope["path"]))
                self.server.origins.add_cors_headers(came, headers)
            await send(message)

        foreseen = False
        try:
            await self.admit(visit, scope, receive, send_with_id)
            foreseen = True
        except asyncio.CancelledError:  # the drain is over
            foreseen = True
            error = Stopped("the server is shutting down", retry_after=1)
            visit.outcome, visit.reason = "failed", error.code
            if not begun:
                await self.error_response(visit, scope["path"], error)(scope, receive, send_with_id)
            raise
        finally:
            visit.claim.release()
            if not foreseen:
                visit.outcome, visit.reason = "failed", PolyheadError.code
            self.record_end(visit, scope, status, trace)

    def start_trace(self, visit: RequestContext, scope: Scope) -> Trace:
        """Of whatever asks for something; probes and pages that anybody may read would be most of all traces."""
        if required_access(scope["path"], scope["method"]) in QUIET_ACCESS:
            return NO_TRACING
        trace = self.server.tracer.begin(visit.arrived, Headers(scope=scope))
        visit.trace_id = trace.id
        return trace

    async def admit(self, visit: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Check what can be checked without the body; only verbs that ask for work take a place in flight."""
        try:
            headers, origins = Headers(scope=scope), self.server.origins
            origins.check_host(headers, scope)
            origins.check_origin(scope["method"], headers)
            if preflight := origins.preflight_headers(scope["method"], headers):
                await Response(status_code=204, headers=preflight)(scope, receive, send)
                return
            kind = self.server.keys.required_scope(scope["path"], scope["method"])
            visit.key = self.server.keys.authenticate(kind, read_authorization(headers, scope["path"]))
            self.server.keys.authorize(visit.key, kind)
            visit.is_counted = administers = kind == "admin"  # it asks nothing of a model
            if scope["method"] in ("GET", "HEAD"):
                visit.admitted = time.perf_counter()
                await self.app(scope, receive, send)
                return
            check_content_type(headers)
            if kind == "inference":
                self.server.quotas.quota_of(visit.key).take_request()
            self.set_deadline(visit, headers)
            limits = self.server.settings
            check_content_length(headers.get("content-length", ""), limits.max_body_bytes)
            with ExitStack() as held:
                place = None if administers else held.enter_context(self.server.admission.open_permit(visit.owner))
                arrival = BodyReceiver(
                    self.server, visit, held.enter_context(self.server.incoming_bodies.open_body()), place
                )
                visit.admitted = time.perf_counter()
                await self.app(scope, arrival.limit_receive(receive), send)
        except PolyheadError as error:
            await self.error_response(visit, scope["path"], error)(scope, receive, send)

    def quota_headers(self, visit: RequestContext, path: str) -> dict[str, str]:
        """What is said of the limits of the key, if it has any."""
        return self.server.quotas.quota_of(visit.key).headers(
            anthropic_headers if is_anthropic_path(path) else openai_headers
        )

    def set_deadline(self, visit: RequestContext, headers: Headers) -> None:
        """What the header and the settings say of how long it may take."""
        if self.server.settings.request_seconds:
            visit.limit_time(self.server.settings.request_seconds)
        if TIMEOUT_HEADER in headers:
            visit.limit_time(read_timeout(headers[TIMEOUT_HEADER]))

    def record_end(self, visit: RequestContext, scope: Scope, status: int, trace: Trace) -> None:
        """One count, one line in the log, and the end of its trace; nothing of headers, query or body."""
        record = RequestRecord.from_scope(visit, scope, status)
        self.server.metrics.record_response(record.method, record.route, record.status, visit.owner)
        level = logging.DEBUG if required_access(scope["path"], record.method) in QUIET_ACCESS else logging.INFO
        log.log(level, "%s", record, extra=record.log_fields)
        trace.end(record)


def read_request_id(headers: Headers) -> str:
    """The client's own id, if it can be logged and sent back as it is; a new one otherwise."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_content_length(announced: str, limit: int) -> None:
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, at most {limit} are taken")


class BodyReceiver:
    """A request whose body is being received."""

    def __init__(self, server: AppState, visit: RequestContext, body: IncomingBody, place: Permit | None) -> None:
        self.context, self.body, self.permit = visit, body, place
        self.incoming_bodies, self.headroom = server.incoming_bodies, server.headroom
        body.release = visit.claim.release
        self.limit_seconds, self.max_bytes = server.settings.body_seconds, server.settings.max_body_bytes
        self.deadline = time.perf_counter() + self.limit_seconds
        self.is_complete = False

    def limit_receive(self, receive: Receive) -> Receive:
        """`receive`, which takes a place in flight when the body is whole, and raises what is wrong with a body.

        BodyTooLarge once it is larger than the limit, SlowBody when it takes longer than bodies may or has to make
        room for others, Expired when it takes longer than the visit may, Overloaded if all places are taken.
        """

        async def counting() -> Message:
            if self.is_complete:
                return await receive()
            message = await self.receive_in_time(receive)
            self.incoming_bodies.add_bytes(self.body, len(message.get("body", b"")))
            if self.body.size > self.max_bytes:
                raise BodyTooLarge(f"the body has more than {self.max_bytes} bytes, at most so many are taken")
            self.claim_memory(BYTES_PER_BODY_BYTE * len(message.get("body", b"")))
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.finish()
            return message

        return counting

    def claim_memory(self, size: int) -> None:
        """Claim memory for `size` bytes more, at the cost of slower bodies if need be.  Raises Overloaded."""
        try:
            self.context.claim.grow(size, "the body")
        except Overloaded:
            if not self.incoming_bodies.make_room(self.body, self.headroom.shortfall(size) / BYTES_PER_BODY_BYTE):
                raise
            self.context.claim.grow(size, "the body")

    async def receive_in_time(self, receive: Receive) -> Message:
        """What is received next.  Raises SlowBody and Expired."""
        try:
            async with asyncio.timeout(min(self.deadline, self.context.deadline) - time.perf_counter()) as timeout:
                with self.body.watch_timeout(timeout):
                    return await receive()
        except TimeoutError:
            self.body.check_aborted()
            if self.context.deadline <= self.deadline:
                raise self.context.deadline_error() from None
            raise SlowBody(f"the body was not complete within {self.limit_seconds:g} s") from None

    def finish(self) -> None:
        self.is_complete = True
        self.incoming_bodies.remove(self.body)
        if self.permit is not None:
            self.permit.acquire()

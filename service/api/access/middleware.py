"""The ASGI middleware that every HTTP request passes.

It assigns a request id, checks host, origin, key, content type and length, admits the request, and logs it at the end.
A request is rejected before its body is read, with an error in the format of the dialect that owns the path.  The
permit is acquired when the body is complete; if there is no room by then, the request is rejected, too.
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ...core.errors import BadRequest, BodyTooLarge, ClientGone, Overloaded, PolyheadError, SlowBody, Stopped
from ...resources.request_memory import BYTES_PER_BODY_BYTE, MemoryClaim
from ..http.body_limits import IncomingBody
from ..http.content_coding import ContentDecoder, make_decoder
from ..http.request_cycle import CLAIMED_BYTES
from ..http.request_head import REQUEST_ID_HEADERS
from .access_log import NO_TRACING, RequestRecord, Trace
from .admission import Permit
from .app_state import AppState
from .auth import is_anthropic_path, read_authorization, required_access
from .origins import check_content_type
from .own_calls import LEAST_PRIORITY, OWN_CALL, OwnCall
from .rate_limit import anthropic_headers, openai_headers
from .request_context import IGNORED_HEADER, TIMEOUT_HEADER, RequestContext, read_timeout, write_ignored

ErrorResponder = Callable[[RequestContext, str, PolyheadError], Response]

QUIET_ACCESS = ("public", "metrics")  # polled routes, which are not traced and are logged at DEBUG
PLANNED_HEAD_BYTES = 4 << 10  # of a head, which are planned for each connection (`resources.connection_memory`)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

CANCELLED = "the batch of this request has ended before it was answered"

log = logging.getLogger("polyhead.http")


class AccessMiddleware:
    """ASGI middleware.  `error_response(context, path, error)` returns the response for a rejected request."""

    def __init__(self, app: ASGIApp, server: AppState, error_response: ErrorResponder) -> None:
        self.app, self.server, self.error_response = app, server, error_response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, has_begun, request_headers = 500, False, Headers(scope=scope)
        own_call: OwnCall | None = scope.get(OWN_CALL)
        context = RequestContext(
            read_request_id(request_headers),
            access=required_access(scope["path"], scope["method"]),
            claim=own_call.claim if own_call else MemoryClaim(self.server.headroom),
        )
        scope.setdefault("state", {})["context"] = context
        trace = self.start_trace(context, scope)
        response_headers = {**dict.fromkeys(REQUEST_ID_HEADERS, context.id), **trace.headers}

        async def send_with_id(message: Message) -> None:
            nonlocal status, has_begun
            if message["type"] == "http.response.start":
                status, has_begun = message["status"], True
                headers = MutableHeaders(scope=message)
                headers.update(response_headers | self.quota_headers(context, scope["path"]))
                if context.ignored:
                    headers[IGNORED_HEADER] = write_ignored(context.ignored)
                self.server.origins.add_cors_headers(request_headers, headers)
            elif message.get("body"):
                message[CLAIMED_BYTES] = context.claim.size
            await send(message)

        is_handled = False
        try:
            await self.admit(context, scope, receive, send_with_id)
            is_handled = True
        except asyncio.CancelledError:  # the drain time is over, or the server does not want its own call any more
            is_handled = True
            error = Stopped("the server is shutting down", retry_after=1) if own_call is None else ClientGone(CANCELLED)
            context.outcome, context.reason = "failed" if own_call is None else "aborted", error.code
            if not has_begun:
                await self.error_response(context, scope["path"], error)(scope, receive, send_with_id)
            raise
        finally:
            context.cleanup.close()
            if own_call is None:
                context.claim.close()
            if not is_handled:
                context.outcome, context.reason = "failed", PolyheadError.code
            self.record_end(context, scope, status, trace)

    def start_trace(self, context: RequestContext, scope: Scope) -> Trace:
        """Start the trace of a request.  Probes and public pages are not traced: they would be most of all traces."""
        if context.access in QUIET_ACCESS:
            return NO_TRACING
        trace = self.server.tracer.begin(context.arrived, Headers(scope=scope))
        context.trace_id = trace.id
        return trace

    async def admit(self, context: RequestContext, scope: Scope, receive: Receive, send: Send) -> None:
        """Check what can be checked without the body, then run the application.

        GET, HEAD and OPTIONS have no body, and need no permit here; a drain waits for their answers.
        """
        try:
            if "\n" in scope["path"]:
                raise BadRequest("the path has a line break in it")  # the pattern of a route matches before it
            headers, origins = Headers(scope=scope), self.server.origins
            scope_name = self.server.keys.apply_rule(context.access)
            if OWN_CALL in scope:
                context.key, context.priority = scope[OWN_CALL].key, LEAST_PRIORITY
            else:
                origins.check_host(headers, scope)
                origins.check_origin(scope["method"], headers)
                if preflight := origins.preflight_headers(scope["method"], headers):
                    await Response(status_code=204, headers=preflight)(scope, receive, send)
                    return
                context.key = self.server.keys.authenticate(scope_name, read_authorization(headers, scope["path"]))
            context.claim.set_owner(context.owner)
            self.server.keys.authorize(context.key, scope_name)
            context.max_priority = self.server.keys.max_priority(context.key)
            context.is_counted = is_admin = scope_name == "admin"  # admin requests are not counted as model requests
            if scope["method"] in ("GET", "HEAD", "OPTIONS"):
                context.admitted = time.perf_counter()
                # Polled routes need not be waited for, and anybody may ask for public ones and read them slowly.
                is_quiet = context.access in QUIET_ACCESS
                with nullcontext() if is_quiet else self.server.admission.count_unfinished():
                    await self.app(scope, receive, send)
                return
            check_content_type(headers, scope["path"])
            decoder = make_decoder(headers.getlist("content-encoding"))
            if scope_name == "inference":
                self.server.quotas.quota_of(context.key).take_request()
            self.set_deadline(context, headers)
            limits = self.server.settings
            check_content_length(headers.get("content-length", ""), limits.max_body_bytes)
            with ExitStack() as stack:
                permit = None if is_admin else stack.enter_context(self.server.admission.open_permit(context.owner))
                body = stack.enter_context(self.server.incoming_bodies.open_body(context.owner))
                receiver = BodyReceiver(self.server, context, body, permit, decoder)
                receiver.count_head(scope)
                context.admitted = time.perf_counter()
                await self.app(scope, receiver.limit_receive(receive), send_uncounted(permit, send))
        except PolyheadError as error:
            await self.error_response(context, scope["path"], error)(scope, receive, send)

    def quota_headers(self, context: RequestContext, path: str) -> dict[str, str]:
        """Headers with what is left of the key's quotas, if it has any."""
        return self.server.quotas.quota_of(context.key).headers(
            anthropic_headers if is_anthropic_path(path) else openai_headers
        )

    def set_deadline(self, context: RequestContext, headers: Headers) -> None:
        """Set the deadline that the settings and the request header give."""
        if self.server.settings.request_seconds:
            context.limit_time(self.server.settings.request_seconds)
        if TIMEOUT_HEADER in headers:
            context.limit_time(read_timeout(headers[TIMEOUT_HEADER]))

    def record_end(self, context: RequestContext, scope: Scope, status: int, trace: Trace) -> None:
        """Count the request, log it, and end its trace.  Nothing of its headers, query or body is logged."""
        record = RequestRecord.from_scope(context, scope, status)
        self.server.metrics.record_response(record.method, record.route, record.status, context.owner)
        if context.access not in QUIET_ACCESS:
            self.server.recent_errors.add(record)
        level = logging.DEBUG if context.access in QUIET_ACCESS else logging.INFO
        log.log(level, "%s", record, extra=record.log_fields)
        trace.end(record)


def read_request_id(headers: Headers) -> str:
    """The client's own id if it is safe to log and to send back, else a new one."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_content_length(announced: str, limit: int) -> None:
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, at most {limit} are taken")


def send_uncounted(permit: Permit | None, send: Send) -> Send:
    """Wrap `send`: the permit is not counted while it waits, which it does only for a client that does not read."""
    if permit is None:
        return send

    async def sending(message: Message) -> None:
        with permit.leave_uncounted():
            await send(message)

    return sending


class BodyReceiver:
    """Receives the body of one admitted request, and decodes it if it was sent compressed."""

    def __init__(
        self,
        server: AppState,
        context: RequestContext,
        body: IncomingBody,
        permit: Permit | None,
        decoder: ContentDecoder | None,
    ) -> None:
        self.context, self.body, self.permit, self.decoder = context, body, permit, decoder
        self.received_bytes = self.head_bytes = 0  # as they were sent
        self.incoming_bodies, self.headroom, self.turns = server.incoming_bodies, server.headroom, server.turns
        body.release = context.claim.release
        self.limit_seconds, self.max_bytes = server.settings.body_seconds, server.settings.max_body_bytes
        self.deadline = time.perf_counter() + self.limit_seconds
        self.is_complete = False

    def limit_receive(self, receive: Receive) -> Receive:
        """Wrap `receive`: acquire the permit when the body is complete, and raise if the body breaks a limit.

        Raises BodyTooLarge if the body exceeds the size limit, SlowBody if it takes longer than the time limit or is
        aborted to make room for others, Expired if it takes longer than the deadline, Overloaded if there is no room.
        """

        async def counting() -> Message:
            if self.is_complete:
                return await receive()
            message = await self.receive_in_time(receive)
            data = message.get("body", b"")
            if self.decoder is None:
                self.count_bytes(data)
            else:
                message = {**message, "body": await self.decode(self.decoder, data)}
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.finish()
            return message

        return counting

    def count_head(self, scope: Scope) -> None:
        """Count what a long head takes as bytes of the body, which it is kept with.  Raises SlowBody and Overloaded."""
        size = len(scope.get("query_string", b"")) + sum(len(name) + len(value) for name, value in scope["headers"])
        self.head_bytes = max(size - PLANNED_HEAD_BYTES, 0)
        if self.head_bytes:
            self.incoming_bodies.add_bytes(self.body, self.head_bytes)
            self.claim_memory(BYTES_PER_BODY_BYTE * self.head_bytes)

    def count_bytes(self, data: bytes) -> None:
        """Count bytes of the body and claim memory for them.  Raises BodyTooLarge, SlowBody and Overloaded."""
        self.incoming_bodies.add_bytes(self.body, len(data))
        self.check_size(self.body.size - self.head_bytes)
        self.claim_memory(BYTES_PER_BODY_BYTE * len(data))

    def check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise BodyTooLarge(f"the body has more than {self.max_bytes} bytes, at most so many are taken")

    async def decode(self, decoder: ContentDecoder, data: bytes) -> bytes:
        """A part of the body without its content coding; the decoded bytes are counted while it expands."""
        if not self.received_bytes and data:
            self.claim_memory(decoder.memory)
        self.received_bytes += len(data)
        self.check_size(self.received_bytes)
        decoded = bytearray()
        for piece in decoder.decode(data):
            self.count_bytes(piece)
            decoded += piece
            await self.turns.take(self.context.owner)
        return bytes(decoded)

    def claim_memory(self, size: int) -> None:
        """Claim memory for `size` more bytes; slower bodies are aborted for it if needed.  Raises Overloaded."""
        try:
            self.context.claim.grow(size, "the body")
        except Overloaded:
            own = self.headroom.share_shortfall(size, self.context.owner)
            missing = max(own, self.headroom.shortfall(size)) / BYTES_PER_BODY_BYTE
            if not self.incoming_bodies.make_room(self.body, missing, own_only=own > 0):
                raise
            self.context.claim.grow(size, "the body")

    async def receive_in_time(self, receive: Receive) -> Message:
        """The next message of `receive`.  Raises SlowBody and Expired."""
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
        if self.decoder is not None:
            self.decoder.finish()
            self.decoder = None  # with its window
        self.is_complete = True
        self.incoming_bodies.remove(self.body)
        if self.permit is not None:
            self.permit.acquire()

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
from ...resources.request_memory import BODY, Claim
from ..http.body_limits import Body
from ..http.request_head import IDS
from .access_log import UNTRACED, Record, Trace
from .admission import Place
from .app_state import Server
from .auth import access, authorization, speaks_anthropic
from .origins import check_type
from .rate_limit import as_anthropic, as_openai
from .request_context import HEADER, Visit, seconds

Refuse = Callable[[Visit, str, PolyheadError], Response]

UNASKED = ("public", "metrics")  # what asks nothing of a model, again and again
REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")

log = logging.getLogger("polyhead.http")


class Gate:
    """ASGI middleware.  `refuse(visit, path, error)` is the response for a request that is turned away."""

    def __init__(self, app: ASGIApp, server: Server, refuse: Refuse) -> None:
        self.app, self.server, self.refuse = app, server, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, begun, visit = 500, False, Visit(request_id(Headers(scope=scope)), claim=Claim(self.server.headroom))
        scope.setdefault("state", {})["visit"] = visit
        trace = self.trace(visit, scope)
        told = {**dict.fromkeys(IDS, visit.id), **trace.headers}
        came = Headers(scope=scope)

        async def send_with_id(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                headers = MutableHeaders(scope=message)
                headers.update(told | self.left(visit, scope["path"]))
                self.server.origins.mark(came, headers)
            await send(message)

        foreseen = False
        try:
            await self.let_in(visit, scope, receive, send_with_id)
            foreseen = True
        except asyncio.CancelledError:  # the drain is over
            foreseen = True
            error = Stopped("the server is shutting down", retry_after=1)
            visit.outcome, visit.reason = "failed", error.code
            if not begun:
                await self.refuse(visit, scope["path"], error)(scope, receive, send_with_id)
            raise
        finally:
            visit.claim.release()
            if not foreseen:
                visit.outcome, visit.reason = "failed", PolyheadError.code
            self.note(visit, scope, status, trace)

    def trace(self, visit: Visit, scope: Scope) -> Trace:
        """Of whatever asks for something; probes and pages that anybody may read would be most of all traces."""
        if access(scope["path"], scope["method"]) in UNASKED:
            return UNTRACED
        trace = self.server.traces.begin(visit.arrived, Headers(scope=scope))
        visit.trace = trace.id
        return trace

    async def let_in(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        """Check what can be checked without the body; only verbs that ask for work take a place in flight."""
        try:
            headers, origins = Headers(scope=scope), self.server.origins
            origins.check_host(headers, scope)
            origins.check_origin(scope["method"], headers)
            if preflight := origins.preflight(scope["method"], headers):
                await Response(status_code=204, headers=preflight)(scope, receive, send)
                return
            kind = self.server.keys.scope(scope["path"], scope["method"])
            visit.key = self.server.keys.shown(kind, authorization(headers, scope["path"]))
            self.server.keys.check(visit.key, kind)
            visit.counted = administers = kind == "admin"  # it asks nothing of a model
            if scope["method"] in ("GET", "HEAD"):
                visit.admitted = time.perf_counter()
                await self.app(scope, receive, send)
                return
            check_type(headers)
            if kind == "inference":
                self.server.quotas.of(visit.key).enter()
            self.allow(visit, headers)
            limits = self.server.settings
            check_length(headers.get("content-length", ""), limits.max_body_bytes)
            with ExitStack() as held:
                place = None if administers else held.enter_context(self.server.admission.arriving(visit.owner))
                arrival = Arrival(self.server, visit, held.enter_context(self.server.receiving.receive()), place)
                visit.admitted = time.perf_counter()
                await self.app(scope, arrival.limited(receive), send)
        except PolyheadError as error:
            await self.refuse(visit, scope["path"], error)(scope, receive, send)

    def left(self, visit: Visit, path: str) -> dict[str, str]:
        """What is said of the limits of the key, if it has any."""
        return self.server.quotas.of(visit.key).told(as_anthropic if speaks_anthropic(path) else as_openai)

    def allow(self, visit: Visit, headers: Headers) -> None:
        """What the header and the settings say of how long it may take."""
        if self.server.settings.request_seconds:
            visit.allow(self.server.settings.request_seconds)
        if HEADER in headers:
            visit.allow(seconds(headers[HEADER]))

    def note(self, visit: Visit, scope: Scope, status: int, trace: Trace) -> None:
        """One count, one line in the log, and the end of its trace; nothing of headers, query or body."""
        record = Record.of(visit, scope, status)
        self.server.metrics.answered(record.method, record.route, record.status, visit.owner)
        level = logging.DEBUG if access(scope["path"], record.method) in UNASKED else logging.INFO
        log.log(level, "%s", record, extra=record.fields)
        trace.end(record)


def request_id(headers: Headers) -> str:
    """The client's own id, if it can be logged and sent back as it is; a new one otherwise."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_length(announced: str, limit: int) -> None:
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, at most {limit} are taken")


class Arrival:
    """A request whose body is being received."""

    def __init__(self, server: Server, visit: Visit, body: Body, place: Place | None) -> None:
        self.visit, self.body, self.place = visit, body, place
        self.receiving, self.headroom = server.receiving, server.headroom
        body.release = visit.claim.release
        self.seconds, self.most = server.settings.body_seconds, server.settings.max_body_bytes
        self.whole_by = time.perf_counter() + self.seconds
        self.whole = False

    def limited(self, receive: Receive) -> Receive:
        """`receive`, which takes a place in flight when the body is whole, and raises what is wrong with a body.

        BodyTooLarge once it is larger than the limit, SlowBody when it takes longer than bodies may or has to make
        room for others, Expired when it takes longer than the visit may, Overloaded if all places are taken.
        """

        async def counting() -> Message:
            if self.whole:
                return await receive()
            message = await self.in_time(receive)
            self.receiving.grow(self.body, len(message.get("body", b"")))
            if self.body.size > self.most:
                raise BodyTooLarge(f"the body has more than {self.most} bytes, at most so many are taken")
            self.claim(BODY * len(message.get("body", b"")))
            if message["type"] == "http.request" and not message.get("more_body", False):
                self.complete()
            return message

        return counting

    def claim(self, size: int) -> None:
        """Claim memory for `size` bytes more, at the cost of slower bodies if need be.  Raises Overloaded."""
        try:
            self.visit.claim.grow(size, "the body")
        except Overloaded:
            if not self.receiving.make_room(self.body, self.headroom.lacking(size) / BODY):
                raise
            self.visit.claim.grow(size, "the body")

    async def in_time(self, receive: Receive) -> Message:
        """What is received next.  Raises SlowBody and Expired."""
        try:
            async with asyncio.timeout(min(self.whole_by, self.visit.deadline) - time.perf_counter()) as timeout:
                with self.body.waiting(timeout):
                    return await receive()
        except TimeoutError:
            self.body.check()
            if self.visit.deadline <= self.whole_by:
                raise self.visit.late() from None
            raise SlowBody(f"the body was not complete within {self.seconds:g} s") from None

    def complete(self) -> None:
        self.whole = True
        self.receiving.end(self.body)
        if self.place is not None:
            self.place.take()

"""The door every HTTP request goes through: an id, the key, the body's limit, a place in flight, a line in the log.

Knows no route and no dialect.  The one idea: whoever is turned away is turned away before the body is read, and is
told so in the words of the dialect that was spoken (`refuse`).
"""

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.quota import as_anthropic, as_openai
from service.api.record import UNTRACED, Record, Trace
from service.api.security import access, authorization, speaks_anthropic
from service.api.server import Server
from service.api.visit import HEADER, IDS, Visit, seconds
from service.errors import BodyTooLarge, PolyheadError, SlowBody
from service.headroom import BODY, Claim
from service.settings import Settings

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
        status, visit = 500, Visit(request_id(Headers(scope=scope)), claim=Claim(self.server.headroom))
        scope.setdefault("state", {})["visit"] = visit
        trace = self.trace(visit, scope)
        told = {**dict.fromkeys(IDS, visit.id), **trace.headers}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(told | self.left(visit, scope["path"]))
            await send(message)

        foreseen = False
        try:
            await self.let_in(visit, scope, receive, send_with_id)
            foreseen = True
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
            headers = Headers(scope=scope)
            kind = self.server.keys.scope(scope["path"], scope["method"])
            visit.key = self.server.keys.shown(kind, authorization(headers, scope["path"]))
            self.server.keys.check(visit.key, kind)
            visit.counted = administers = kind == "admin"  # it asks nothing of a model
            if scope["method"] in ("GET", "HEAD"):
                visit.admitted = time.perf_counter()
                await self.app(scope, receive, send)
                return
            if kind == "inference":
                self.server.quotas.of(visit.key).enter()
            self.allow(visit, headers)
            limits = self.server.settings
            check_length(headers.get("content-length", ""), limits.max_body_bytes)
            with nullcontext() if administers else self.server.admission.admitted(visit.owner):
                visit.admitted = time.perf_counter()
                await self.app(scope, limited(receive, limits, visit), send)
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


def limited(receive: Receive, limits: Settings, visit: Visit) -> Receive:
    """`receive`, which raises what is wrong with a body: BodyTooLarge once it grows past the limit, SlowBody when it
    takes longer than bodies may, Expired when it takes longer than the visit may."""
    size, complete = 0, False
    whole_by = time.perf_counter() + limits.body_seconds

    async def counting() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout(min(whole_by, visit.deadline) - time.perf_counter()):
                message = await receive()
        except TimeoutError:
            if visit.deadline <= whole_by:
                raise visit.late() from None
            raise SlowBody(f"the body was not complete within {limits.body_seconds:g} s") from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > limits.max_body_bytes:
            raise BodyTooLarge(f"the body has more than {limits.max_body_bytes} bytes, at most so many are taken")
        visit.claim.grow(BODY * len(message.get("body", b"")), "the body")
        return message

    return counting

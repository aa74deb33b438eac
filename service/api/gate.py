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
from service.api.security import access, authorization, speaks_anthropic
from service.api.server import Server
from service.api.visit import HEADER, IDS, Visit, seconds
from service.errors import BodyTooLarge, PolyheadError, SlowBody
from service.settings import Settings

Refuse = Callable[[Visit, str, PolyheadError], Response]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
LONGEST_PATH = 200  # characters of a path in the log
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

log = logging.getLogger("polyhead.http")


class Gate:
    """ASGI middleware.  `refuse(visit, path, error)` is the response for a request that is turned away."""

    def __init__(self, app: ASGIApp, server: Server, refuse: Refuse) -> None:
        self.app, self.server, self.refuse = app, server, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        status, visit = 500, Visit(request_id(Headers(scope=scope)))
        scope.setdefault("state", {})["visit"] = visit

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message).update(dict.fromkeys(IDS, visit.id) | self.left(visit, scope["path"]))
            await send(message)

        try:
            await self.let_in(visit, scope, receive, send_with_id)
        finally:
            self.note(visit, scope, status)

    async def let_in(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        """Check what can be checked without the body; only verbs that ask for work take a place in flight."""
        try:
            headers = Headers(scope=scope)
            kind = self.server.keys.scope(scope["path"], scope["method"])
            visit.key = self.server.keys.shown(kind, authorization(headers, scope["path"]))
            self.server.keys.check(visit.key, kind)
            visit.counted = administers = kind == "admin"  # it asks nothing of a model
            if scope["method"] in ("GET", "HEAD"):
                await self.app(scope, receive, send)
                return
            if kind == "inference":
                self.server.quotas.of(visit.key).enter()
            self.allow(visit, headers)
            limits = self.server.settings
            check_length(headers.get("content-length", ""), limits.max_body_bytes)
            with nullcontext() if administers else self.server.admission.admitted(visit.owner):
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

    def note(self, visit: Visit, scope: Scope, status: int) -> None:
        """One line in the log and one count; nothing of headers, query or body."""
        took = time.perf_counter() - visit.arrived
        route = getattr(scope.get("route"), "path", "")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.server.metrics.answered(method, route, status, visit.owner)
        path = scope.get("raw_path", b"").decode("ascii", "replace")[:LONGEST_PATH]
        level = logging.DEBUG if access(scope["path"], method) in ("public", "metrics") else logging.INFO
        fields = {"request_id": visit.id, "method": method, "path": path, "status": status, "seconds": round(took, 6)}
        whose = f" for {visit.owner}" if visit.owner else ""
        told = (method, path, status, took * 1000, whose, visit.id)
        log.log(level, "%s %s %d in %.1f ms%s [%s]", *told, extra=fields | {"owner": visit.owner})


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
        return message

    return counting

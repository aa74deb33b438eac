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

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.security import access, check_key
from service.api.server import Server
from service.errors import BadRequest, BodyTooLarge, PolyheadError

Refuse = Callable[[str, PolyheadError], Response]

REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
BODY_SECONDS = 60  # a client that sends nothing for so long holds no place any longer
LONGEST_PATH = 200  # characters of a path in the log
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

log = logging.getLogger("polyhead.http")


class Gate:
    """ASGI middleware.  `refuse(path, error)` is the response for a request that is turned away."""

    def __init__(self, app: ASGIApp, server: Server, refuse: Refuse) -> None:
        self.app, self.server, self.refuse = app, server, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status, name = time.perf_counter(), 500, request_id(Headers(scope=scope))
        scope.setdefault("state", {})["request_id"] = name

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = name
            await send(message)

        try:
            await self.let_in(scope, receive, send_with_id)
        finally:
            self.note(scope, status, time.perf_counter() - began)

    async def let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check what can be checked without the body; only verbs that ask for work take a place in flight."""
        try:
            headers = Headers(scope=scope)
            if access(scope["path"]) == "key":
                check_key(headers.get("authorization", ""), self.server.settings.api_key.get_secret_value())
            if scope["method"] in ("GET", "HEAD"):
                await self.app(scope, receive, send)
                return
            limit = self.server.settings.max_body_bytes
            check_length(headers.get("content-length", ""), limit)
            with self.server.admission.admitted():
                await self.app(scope, limited(receive, limit), send)
        except PolyheadError as error:
            await self.refuse(scope["path"], error)(scope, receive, send)

    def note(self, scope: Scope, status: int, seconds: float) -> None:
        """One line in the log and one count; nothing of headers, query or body."""
        route = getattr(scope.get("route"), "path", "")
        method = scope["method"] if scope["method"] in METHODS else "other"
        self.server.metrics.answered(method, route, status)
        path = scope.get("raw_path", b"").decode("ascii", "replace")[:LONGEST_PATH]
        name = scope["state"]["request_id"]
        level = logging.DEBUG if access(scope["path"]) == "public" else logging.INFO
        fields = {"request_id": name, "method": method, "path": path, "status": status, "seconds": round(seconds, 6)}
        log.log(level, "%s %s %d in %.1f ms [%s]", method, path, status, seconds * 1000, name, extra=fields)


def request_id(headers: Headers) -> str:
    """The client's own id, if it can be logged and sent back as it is; a new one otherwise."""
    given = headers.get("x-request-id", "")
    return given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def check_length(announced: str, limit: int) -> None:
    if announced.isdecimal() and int(announced) > limit:
        raise BodyTooLarge(f"the body has {int(announced)} bytes, at most {limit} are taken")


def limited(receive: Receive, limit: int) -> Receive:
    """`receive`, which raises BodyTooLarge once the body grows past `limit`, and BadRequest when it stops coming."""
    size, complete = 0, False

    async def counting() -> Message:
        nonlocal size, complete
        if complete:
            return await receive()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                message = await receive()
        except TimeoutError:
            raise BadRequest(f"no more of the body came for {BODY_SECONDS} seconds") from None
        size += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size > limit:
            raise BodyTooLarge(f"the body has more than {limit} bytes, at most so many are taken")
        return message

    return counting

"""Requests that the server sends to itself, in the name of a client's key: the lines of a batch.

They take the way of every request, with its limits, its metrics and its line in the log; only the host, the origin and
the key itself are not checked again.
"""

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from ...concurrency.outcome import wait_for_error
from ...config.keys import ANONYMOUS, MAX_PRIORITY, Key
from ...core.errors import NotFound
from ...resources.request_memory import UNBOUNDED_HEADROOM, Headroom, MemoryClaim
from ..http.request_head import REQUEST_ID_HEADERS
from .auth import Keys

OWN_CALL = "polyhead.own_call"  # the name of an `OwnCall` in an ASGI scope; no client can set it
LEAST_PRIORITY = -MAX_PRIORITY  # requests of clients come first

log = logging.getLogger("polyhead.batches")


@dataclass(frozen=True)
class OwnCall:
    """What the middleware takes from the caller: the key, and the claim on memory, which the caller releases."""

    key: Key
    claim: MemoryClaim


@dataclass(frozen=True)
class OwnAnswer:
    """The response; `body` is JSON.  The request's `claim` on memory counts it, until `release` is called."""

    status: int
    body: bytearray
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    claim: MemoryClaim = field(default_factory=lambda: MemoryClaim(UNBOUNDED_HEADROOM))

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    def release(self) -> None:
        """Let go of the body and its memory, whoever still has the answer."""
        self.body.clear()
        self.claim.close()


class OwnCalls:
    """Sends requests to `app`."""

    def __init__(self, app: ASGIApp, keys: Keys, headroom: Headroom) -> None:
        self.app, self.keys, self.headroom = app, keys, headroom

    async def __call__(self, owner: str, path: str, body: bytes) -> OwnAnswer:
        """The response to a POST of JSON.  Raises NotFound if the key of that name exists no more."""
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
            "client": None,
            "server": None,
            "state": {},
        }
        response, claim = OwnResponse(body), MemoryClaim(self.headroom)
        del body  # the application has it alone, and may drop it
        scope[OWN_CALL] = OwnCall(self.find_key(owner), claim)
        with ExitStack() as unanswered:
            unanswered.callback(claim.close)
            error = await wait_for_error(self.run(scope, response))
            if isinstance(error, Exception) and response.status:
                log.error("a request of a batch was answered %d", response.status, exc_info=error)
            elif error is not None:
                raise error
            unanswered.pop_all()
            return response.to_answer(claim)

    async def run(self, scope: Scope, response: "OwnResponse") -> None:
        await self.app(scope, response.receive, response.send)

    def find_key(self, owner: str) -> Key:
        if not self.keys.are_required:
            return ANONYMOUS
        found = next((key for key in self.keys.all if key.name == owner and "inference" in key.scopes), None)
        if found is None:
            raise NotFound(f"the key {owner!r} exists no more, or may not use models")
        return found


class OwnResponse:
    """The two ends of an ASGI call: the body that is received, and the response that is sent."""

    def __init__(self, body: bytes) -> None:
        self.status, self.content = 0, bytearray()
        self._headers: dict[str, str] = {}
        self._body: bytes | None = body
        self._never = asyncio.Event()

    async def receive(self) -> Message:
        if self._body is None:
            await self._never.wait()  # this client does not leave, it cancels
        body, self._body = self._body, None
        return {"type": "http.request", "body": body or b"", "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._headers = {
                name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]
            }
        elif message["type"] == "http.response.body":
            self.content += message.get("body", b"")

    def to_answer(self, claim: MemoryClaim) -> OwnAnswer:
        request_id = self._headers.get(REQUEST_ID_HEADERS[0].lower(), "")
        return OwnAnswer(self.status, self.content, request_id, self._headers, claim)

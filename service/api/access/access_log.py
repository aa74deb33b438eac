"""What is told of an HTTP request once it is over: its line in the log, and the stages that its trace shows.

Knows neither OpenTelemetry nor a socket.  The one idea: both are read off what the visit and the engine's courses have
kept anyway, so they say the same, nothing is measured for them twice, and nothing of a prompt, an answer or a key is
there to be told.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Literal, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from ...engine.worker import Course
from .request_context import Visit

LONGEST_PATH = 200  # characters of a path that are told
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
WORSE = ("done", "aborted", "expired", "failed")  # of several that ended so or so, the last tells how all did

Stage = Literal["admission", "read", "tokenise", "queue", "steps", "detokenise"]


@dataclass(frozen=True)
class Work:
    """What the engine did for one HTTP request: all its texts and prompts, of which there is at least one, together.

    Times are those of `time.perf_counter`; 0: it never came to that.
    """

    requests: int
    submitted: float  # the first of them
    begun: float  # when a step first computed one of them
    first: float  # when the first token was heard of
    ended: float  # the last of them
    waited: float  # seconds that the one waited which waited longest
    written: float  # when the last of it became text
    writing: float  # seconds that took
    prompt: int  # tokens
    tokens: int  # generated
    cached: int  # of the prompts'

    @classmethod
    def of(cls, courses: Sequence[Course], now: float) -> "Work":
        return cls(
            requests=len(courses),
            submitted=min(course.submitted for course in courses),
            # a step may have begun with one that was given up a moment before
            begun=min((course.begun for course in courses if 0 < course.begun < (course.ended or now)), default=0.0),
            first=min((course.first for course in courses if course.first), default=0.0),
            ended=max(course.ended or now for course in courses),
            waited=max((course.begun or course.ended or now) - course.submitted for course in courses),
            written=max(course.written for course in courses),
            writing=sum(course.writing for course in courses),
            prompt=sum(course.prompt for course in courses),
            tokens=sum(course.tokens for course in courses),
            cached=sum(course.cached for course in courses),
        )


@dataclass(frozen=True)
class Record:
    """`method` and `path` are fit to be shown; `route` is the route's template, empty where there is none."""

    visit: Visit
    method: str
    path: str
    route: str
    status: int
    ended: float  # by `time.perf_counter`
    scheme: str = "http"
    client: str = ""  # its address, as the connection or a trusted proxy has it

    @classmethod
    def of(cls, visit: Visit, scope: Scope, status: int) -> "Record":
        method = scope["method"] if scope["method"] in METHODS else "other"
        path = scope.get("raw_path", b"").decode("ascii", "replace")[:LONGEST_PATH]
        route, client = getattr(scope.get("route"), "path", ""), (scope.get("client") or ("",))[0]
        return cls(visit, method, path, route, status, perf_counter(), scope.get("scheme", "http"), client)

    @cached_property
    def work(self) -> Work | None:
        return Work.of(self.visit.courses, self.ended) if self.visit.courses else None

    @property
    def outcome(self) -> str:
        """done, failed, aborted, expired or rejected."""
        ends = [course.outcome for course in self.visit.courses]
        return self.visit.outcome or max(ends, key=WORSE.index, default="done")

    @property
    def reason(self) -> str:
        """The code of the error that ended it; empty if none did."""
        return self.visit.reason or next((course.reason for course in self.visit.courses if course.reason), "")

    @property
    def seconds(self) -> float:
        return self.ended - self.visit.arrived

    @property
    def first_token(self) -> float:
        """Seconds from its arrival until the first token was heard of; 0: none was."""
        return self.work.first - self.visit.arrived if self.work and self.work.first else 0.0

    @property
    def stages(self) -> list[tuple[Stage, float, float]]:
        """From when until when each was; what never began is not among them.

        Steps go on while text is written, and where the engine has a part of many texts at a time, some wait while
        others are computed: `queue` ends where the steps begin.
        """
        visit, work = self.visit, self.work
        stages: list[tuple[Stage, float, float]] = [("admission", visit.arrived, visit.admitted or self.ended)]
        if visit.tokenised:
            stages.append(("read", visit.admitted, visit.tokenised[0][0]))
            stages += [("tokenise", *times) for times in visit.tokenised]
        if work:
            stages.append(("queue", work.submitted, work.begun or work.ended))
            if work.begun:
                stages.append(("steps", work.begun, work.ended))
            if work.written:
                stages.append(("detokenise", work.first or work.ended, work.written))
        return stages

    @property
    def fields(self) -> Mapping[str, Any]:
        """For machines.  What is not known of it is left out."""
        visit, work = self.visit, self.work
        known = {
            "request_id": visit.id,
            "trace_id": visit.trace,
            "client": self.client,
            "method": self.method,
            "route": self.route,
            "path": self.path,
            "status": self.status,
            "model": visit.model,
            "task": visit.task,
            "key": visit.owner,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 6),
            "queue_seconds": round(work.waited, 6) if work else "",
            "first_token_seconds": round(self.first_token, 6) or "",
        }
        if work:
            known |= {"requests": work.requests, "prompt_tokens": work.prompt}
            known |= {"generated_tokens": work.tokens, "cached_tokens": work.cached}
        return {name: value for name, value in known.items() if value != ""}

    def __str__(self) -> str:
        """For people."""
        visit, work = self.visit, self.work
        whose = f" for {visit.owner}" if visit.owner else ""
        told = [self.outcome, *filter(None, [self.reason, visit.model])]
        if work:
            told.append(f"{work.prompt} + {work.tokens} tokens" if work.tokens else f"{work.prompt} tokens")
            told.append(f"queued {work.waited * 1000:.1f} ms")
        if self.first_token:
            told.append(f"first token after {self.first_token * 1000:.1f} ms")
        line = f"{self.method} {self.path} {self.status} in {self.seconds * 1000:.1f} ms{whose} [{visit.id}]"
        return f"{line}: {', '.join(told)}"


class Trace(Protocol):
    """Of one HTTP request."""

    @property
    def id(self) -> str:
        """32 hex digits, if it is kept; else empty."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What the response says of it."""

    def end(self, record: Record) -> None:
        """The request is over."""


class Traces(Protocol):
    """Where traces go."""

    def begin(self, arrived: float, headers: Headers) -> Trace:
        """A request has arrived, by `time.perf_counter`."""

    async def close(self) -> None:
        """Send what is left, or leave it, in a few seconds."""


class Untraced:
    """Nobody wants to know: the trace of every request, and all of them."""

    id = ""
    headers: Mapping[str, str] = {}

    def begin(self, arrived: float, headers: Headers) -> Trace:  # noqa: ARG002
        return self

    def end(self, record: Record) -> None:
        """See `Trace`; nothing is kept of it."""

    async def close(self) -> None:
        """There is nothing to send."""


UNTRACED = Untraced()

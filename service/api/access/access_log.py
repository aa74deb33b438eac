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

from ...engine.worker import RequestTiming
from .request_context import RequestContext

MAX_PATH_CHARS = 200  # characters of a path that are told
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
OUTCOMES_BY_SEVERITY = (
    "done",
    "aborted",
    "expired",
    "failed",
)  # of several that ended so or so, the last tells how all did

Stage = Literal["admission", "read", "tokenise", "queue", "steps", "detokenise"]


@dataclass(frozen=True)
class EngineSummary:
    """What the engine did for one HTTP request: all its texts and prompts, of which there is at least one, together.

    Times are those of `time.perf_counter`; 0: it never came to that.
    """

    requests: int
    submitted: float  # the first of them
    first_step: float  # when a step first computed one of them
    first_token: float  # when the first token was heard of
    ended: float  # the last of them
    queue_seconds: float  # seconds that the one waited which waited longest
    detokenised: float  # when the last of it became text
    detokenise_seconds: float  # seconds that took
    prompt_tokens: int  # tokens
    generated_tokens: int  # generated
    cached_tokens: int  # of the prompts'

    @classmethod
    def from_timings(cls, courses: Sequence[RequestTiming], now: float) -> "EngineSummary":
        return cls(
            requests=len(courses),
            submitted=min(course.submitted for course in courses),
            # a step may have begun with one that was given up a moment before
            first_step=min(
                (course.started for course in courses if 0 < course.started < (course.ended or now)), default=0.0
            ),
            first_token=min((course.first_token for course in courses if course.first_token), default=0.0),
            ended=max(course.ended or now for course in courses),
            queue_seconds=max((course.started or course.ended or now) - course.submitted for course in courses),
            detokenised=max(course.last_text for course in courses),
            detokenise_seconds=sum(course.text_seconds for course in courses),
            prompt_tokens=sum(course.prompt_tokens for course in courses),
            generated_tokens=sum(course.generated_tokens for course in courses),
            cached_tokens=sum(course.cached_tokens for course in courses),
        )


@dataclass(frozen=True)
class RequestRecord:
    """`method` and `path` are fit to be shown; `route` is the route's template, empty where there is none."""

    context: RequestContext
    method: str
    path: str
    route: str
    status: int
    ended: float  # by `time.perf_counter`
    scheme: str = "http"
    client: str = ""  # its address, as the connection or a trusted proxy has it

    @classmethod
    def from_scope(cls, visit: RequestContext, scope: Scope, status: int) -> "RequestRecord":
        method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
        path = scope.get("raw_path", b"").decode("ascii", "replace")[:MAX_PATH_CHARS]
        route, client = getattr(scope.get("route"), "path", ""), (scope.get("client") or ("",))[0]
        return cls(visit, method, path, route, status, perf_counter(), scope.get("scheme", "http"), client)

    @cached_property
    def engine(self) -> EngineSummary | None:
        return EngineSummary.from_timings(self.context.timings, self.ended) if self.context.timings else None

    @property
    def outcome(self) -> str:
        """done, failed, aborted, expired or rejected."""
        ends = [course.outcome for course in self.context.timings]
        return self.context.outcome or max(ends, key=OUTCOMES_BY_SEVERITY.index, default="done")

    @property
    def reason(self) -> str:
        """The code of the error that ended it; empty if none did."""
        return self.context.reason or next((course.reason for course in self.context.timings if course.reason), "")

    @property
    def seconds(self) -> float:
        return self.ended - self.context.arrived

    @property
    def first_token_seconds(self) -> float:
        """Seconds from its arrival until the first token was heard of; 0: none was."""
        return self.engine.first_token - self.context.arrived if self.engine and self.engine.first_token else 0.0

    @property
    def stages(self) -> list[tuple[Stage, float, float]]:
        """From when until when each was; what never began is not among them.

        Steps go on while text is written, and where the engine has a part of many texts at a time, some wait while
        others are computed: `queue` ends where the steps begin.
        """
        visit, work = self.context, self.engine
        stages: list[tuple[Stage, float, float]] = [("admission", visit.arrived, visit.admitted or self.ended)]
        if visit.tokenise_times:
            stages.append(("read", visit.admitted, visit.tokenise_times[0][0]))
            stages += [("tokenise", *times) for times in visit.tokenise_times]
        if work:
            stages.append(("queue", work.submitted, work.first_step or work.ended))
            if work.first_step:
                stages.append(("steps", work.first_step, work.ended))
            if work.detokenised:
                stages.append(("detokenise", work.first_token or work.ended, work.detokenised))
        return stages

    @property
    def log_fields(self) -> Mapping[str, Any]:
        """For machines.  What is not known of it is left out."""
        visit, work = self.context, self.engine
        known = {
            "request_id": visit.id,
            "trace_id": visit.trace_id,
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
            "queue_seconds": round(work.queue_seconds, 6) if work else "",
            "first_token_seconds": round(self.first_token_seconds, 6) or "",
        }
        if work:
            known |= {"requests": work.requests, "prompt_tokens": work.prompt_tokens}
            known |= {"generated_tokens": work.generated_tokens, "cached_tokens": work.cached_tokens}
        return {name: value for name, value in known.items() if value != ""}

    def __str__(self) -> str:
        """For people."""
        visit, work = self.context, self.engine
        whose = f" for {visit.owner}" if visit.owner else ""
        told = [self.outcome, *filter(None, [self.reason, visit.model])]
        if work:
            told.append(
                f"{work.prompt_tokens} + {work.generated_tokens} tokens"
                if work.generated_tokens
                else f"{work.prompt_tokens} tokens"
            )
            told.append(f"queued {work.queue_seconds * 1000:.1f} ms")
        if self.first_token_seconds:
            told.append(f"first token after {self.first_token_seconds * 1000:.1f} ms")
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

    def end(self, record: RequestRecord) -> None:
        """The request is over."""


class RequestTracer(Protocol):
    """Where traces go."""

    def begin(self, arrived: float, headers: Headers) -> Trace:
        """A request has arrived, by `time.perf_counter`."""

    async def close(self) -> None:
        """Send what is left, or leave it, in a few seconds."""


class NoTracing:
    """Nobody wants to know: the trace of every request, and all of them."""

    id = ""
    headers: Mapping[str, str] = {}

    def begin(self, arrived: float, headers: Headers) -> Trace:  # noqa: ARG002
        return self

    def end(self, record: RequestRecord) -> None:
        """See `Trace`; nothing is kept of it."""

    async def close(self) -> None:
        """There is nothing to send."""


NO_TRACING = NoTracing()

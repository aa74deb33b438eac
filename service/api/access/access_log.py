"""The access log line of a finished HTTP request, and the stages that its trace shows.

Both are computed from the timings in `RequestContext` and in the engine's `RequestTiming`, so they agree with each
other and nothing is measured twice.  Neither holds any text of a prompt or an answer, nor a key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from typing import Any, Literal, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from ...engine.worker import RequestTiming
from .request_context import OUTCOMES_BY_SEVERITY, RequestContext

MAX_PATH_CHARS = 200  # characters of a path that are logged
KNOWN_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

Stage = Literal["admission", "read", "tokenise", "queue", "steps", "detokenise"]


@dataclass(frozen=True)
class EngineSummary:
    """What the engine did for one HTTP request, summed over all its engine requests (at least one).

    Times are in seconds of `time.perf_counter`; 0 means that the request never reached that point.
    """

    requests: int
    submitted: float  # when the first of them was submitted
    first_step: float  # when the first step began that computed one of them
    first_token: float  # when the first token arrived
    ended: float  # when the last of them ended
    queue_seconds: float  # the longest wait of one of them
    detokenised: float  # when the last token was detokenised
    detokenise_seconds: float  # seconds spent in the detokenizer
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int  # prompt tokens found in the cache

    @classmethod
    def from_timings(cls, timings: Sequence[RequestTiming], now: float) -> "EngineSummary":
        return cls(
            requests=len(timings),
            submitted=min(timing.submitted for timing in timings),
            # a step may have started with a request that was aborted just before
            first_step=min(
                (timing.started for timing in timings if 0 < timing.started < (timing.ended or now)), default=0.0
            ),
            first_token=min((timing.first_token for timing in timings if timing.first_token), default=0.0),
            ended=max(timing.ended or now for timing in timings),
            queue_seconds=max((timing.started or timing.ended or now) - timing.submitted for timing in timings),
            detokenised=max(timing.last_text for timing in timings),
            detokenise_seconds=sum(timing.text_seconds for timing in timings),
            prompt_tokens=sum(timing.prompt_tokens for timing in timings),
            generated_tokens=sum(timing.generated_tokens for timing in timings),
            cached_tokens=sum(timing.cached_tokens for timing in timings),
        )


@dataclass(frozen=True)
class RequestRecord:
    """One finished HTTP request, as it is logged, counted and traced.

    `method` and `path` are safe to print; `route` is the route's template, empty if no route matched.
    """

    context: RequestContext
    method: str
    path: str
    route: str
    status: int
    ended: float  # by `time.perf_counter`
    scheme: str = "http"
    client: str = ""  # its address, from the connection or from a trusted proxy

    @classmethod
    def from_scope(cls, context: RequestContext, scope: Scope, status: int) -> "RequestRecord":
        method = scope["method"] if scope["method"] in KNOWN_METHODS else "other"
        path = scope.get("raw_path", b"").decode("ascii", "replace")[:MAX_PATH_CHARS]
        route, client = getattr(scope.get("route"), "path", ""), (scope.get("client") or ("",))[0]
        return cls(context, method, path, route, status, perf_counter(), scope.get("scheme", "http"), client)

    @cached_property
    def engine(self) -> EngineSummary | None:
        return EngineSummary.from_timings(self.context.timings, self.ended) if self.context.timings else None

    @property
    def outcome(self) -> str:
        """One of done, failed, aborted, expired, rejected."""
        ends = [timing.outcome for timing in self.context.timings]
        return self.context.outcome or max(ends, key=OUTCOMES_BY_SEVERITY.index, default="done")

    @property
    def reason(self) -> str:
        """The code of the error that ended the request; empty if there was none."""
        return self.context.reason or next((timing.reason for timing in self.context.timings if timing.reason), "")

    @property
    def seconds(self) -> float:
        return self.ended - self.context.arrived

    @property
    def first_token_seconds(self) -> float:
        """Seconds from the arrival of the request to its first token; 0 if there was no token."""
        return self.engine.first_token - self.context.arrived if self.engine and self.engine.first_token else 0.0

    @property
    def stages(self) -> list[tuple[Stage, float, float]]:
        """(name, start, end) of each stage that began, in seconds of `time.perf_counter`.

        Stages may overlap: steps go on while text is detokenised.  Where the engine computes some of many texts while
        others still wait, `queue` ends where the first step begins.
        """
        context, engine = self.context, self.engine
        stages: list[tuple[Stage, float, float]] = [("admission", context.arrived, context.admitted or self.ended)]
        if context.tokenise_times:
            stages.append(("read", context.admitted, context.tokenise_times[0][0]))
            stages += [("tokenise", *times) for times in context.tokenise_times]
        if engine:
            stages.append(("queue", engine.submitted, engine.first_step or engine.ended))
            if engine.first_step:
                stages.append(("steps", engine.first_step, engine.ended))
            if engine.detokenised:
                stages.append(("detokenise", engine.first_token or engine.ended, engine.detokenised))
        return stages

    @property
    def log_fields(self) -> Mapping[str, Any]:
        """The fields of the JSON log line.  Unknown values are left out."""
        context, engine = self.context, self.engine
        known = {
            "request_id": context.id,
            "trace_id": context.trace_id,
            "client": self.client,
            "method": self.method,
            "route": self.route,
            "path": self.path,
            "status": self.status,
            "model": context.model,
            "task": context.task,
            "key": context.owner,
            "outcome": self.outcome,
            "reason": self.reason,
            "seconds": round(self.seconds, 6),
            "queue_seconds": round(engine.queue_seconds, 6) if engine else "",
            "first_token_seconds": round(self.first_token_seconds, 6) or "",
        }
        if engine:
            known |= {"requests": engine.requests, "prompt_tokens": engine.prompt_tokens}
            known |= {"generated_tokens": engine.generated_tokens, "cached_tokens": engine.cached_tokens}
        return {name: value for name, value in known.items() if value != ""}

    def __str__(self) -> str:
        """The text log line."""
        context, engine = self.context, self.engine
        owner = f" for {context.owner}" if context.owner else ""
        parts = [self.outcome, *filter(None, [self.reason, context.model])]
        if engine:
            parts.append(
                f"{engine.prompt_tokens} + {engine.generated_tokens} tokens"
                if engine.generated_tokens
                else f"{engine.prompt_tokens} tokens"
            )
            parts.append(f"queued {engine.queue_seconds * 1000:.1f} ms")
        if self.first_token_seconds:
            parts.append(f"first token after {self.first_token_seconds * 1000:.1f} ms")
        line = f"{self.method} {self.path} {self.status} in {self.seconds * 1000:.1f} ms{owner} [{context.id}]"
        return f"{line}: {', '.join(parts)}"


class Trace(Protocol):
    """The trace of one HTTP request."""

    @property
    def id(self) -> str:
        """The trace id, 32 hex digits; empty if the trace is not recorded."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Response headers that carry the trace context."""

    def end(self, record: RequestRecord) -> None:
        """End the trace of the request that `record` describes."""


class RequestTracer(Protocol):
    """Starts traces and exports them."""

    def begin(self, arrived: float, headers: Headers) -> Trace:
        """Start the trace of a request that arrived at `arrived` (`time.perf_counter`)."""

    async def close(self) -> None:
        """Export what is left; gives up after a few seconds."""


class NoTracing:
    """The tracer, and the trace, that record nothing."""

    id = ""
    headers: Mapping[str, str] = {}

    def begin(self, arrived: float, headers: Headers) -> Trace:  # noqa: ARG002
        return self

    def end(self, record: RequestRecord) -> None:
        """Does nothing."""

    async def close(self) -> None:
        """Does nothing."""


NO_TRACING = NoTracing()

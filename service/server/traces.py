"""Traces of requests, sent to an OpenTelemetry collector.

The spans of a request's stages are made when the request has ended, from times in its record
(`service.api.access.access_log`), so tracing costs nothing while it is answered. The extra `otel` installs
OpenTelemetry; the command line imports this module only if traces are enabled.

The library sends spans in batches on a thread of its own, from a bounded queue: what does not fit is dropped, and
logged. Nothing else of OpenTelemetry is used: FastAPI's own instrumentation, which the environment can enable and which
would send exceptions with their quotes, is off.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from starlette.datastructures import Headers

from ..api.access.access_log import EngineSummary, RequestRecord, Stage, Trace
from ..concurrency.outcome import run_on_thread
from ..config.settings import Settings, SettingsError
from ..core.version import VERSION

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import OTELResourceDetector, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    HAS_OPENTELEMETRY = False
else:
    HAS_OPENTELEMETRY = True

EXPORT_TIMEOUT_S = 2.0  # seconds at the end to send the last spans
CHAT_ROUTES = ("/chat/completions", "/messages", "/responses")  # suffixes of chat routes
SpanAttributes = Mapping[str, str | int | float]

log = logging.getLogger(__name__)


class OtelTraces:
    """Implements `service.api.access.access_log` traces. Raises SettingsError if OpenTelemetry is not installed."""

    def __init__(self, settings: Settings) -> None:
        if not HAS_OPENTELEMETRY:
            raise SettingsError("otlp_endpoint: to send traces an extra is needed: pip install 'polyhead[otel]'")
        # It warns of malformed headers, with their text. The standard says to ignore such headers.
        logging.getLogger("opentelemetry.trace").setLevel(logging.ERROR)
        attributes = {"service.name": "polyhead", "service.version": VERSION}
        self.provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(settings.trace_ratio)),
            resource=Resource.create(attributes).merge(
                OTELResourceDetector().detect()
            ),  # the operator may set another name
            shutdown_on_exit=False,
        )
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(f"{settings.otlp_endpoint}/v1/traces")))
        self.tracer = self.provider.get_tracer("polyhead", VERSION)
        self.context = TraceContextTextMapPropagator()

    def begin(self, arrived: float, headers: Headers) -> Trace:
        """Start the span of a request. Its parent is the span in the client's headers; invalid headers are ignored."""
        parent = self.context.extract(trace_headers(headers))
        epoch = time.time_ns() - nanoseconds(time.perf_counter())
        span = self.tracer.start_span("HTTP", parent, SpanKind.SERVER, start_time=epoch + nanoseconds(arrived))
        return OtelTrace(self.tracer, span, epoch)

    async def close(self) -> None:
        # On a thread that may be abandoned: the library waits longer for a collector that does not answer.
        closing = threading.Thread(target=self.provider.shutdown, name="traces", daemon=True)
        closing.start()
        await run_on_thread(partial(closing.join, EXPORT_TIMEOUT_S))
        if closing.is_alive():
            log.warning("the last traces are lost: the collector did not take them in %g s", EXPORT_TIMEOUT_S)


class OtelTrace:
    """The trace of one request. `epoch`: the time in nanoseconds when the clock of `time.perf_counter` was zero."""

    def __init__(self, tracer: "Tracer", span: "Span", epoch: int) -> None:
        self.tracer, self.span, self.epoch = tracer, span, epoch

    @property
    def id(self) -> str:
        context = self.span.get_span_context()
        return f"{context.trace_id:032x}" if context.trace_flags.sampled else ""

    @property
    def headers(self) -> Mapping[str, str]:
        """The trace's id for the response, as in the draft of W3C Trace Context and as OpenTelemetry's own servers send
        it.
        """
        context = self.span.get_span_context()
        if not context.is_valid:
            return {}
        return {"traceresponse": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}

    def end(self, record: RequestRecord) -> None:
        if not self.span.is_recording():
            return
        inside = set_span_in_context(self.span)
        for stage, began, ended in record.stages:
            attributes = STAGE_ATTRIBUTES[stage](record.engine) if record.engine and stage in STAGE_ATTRIBUTES else {}
            span = self.tracer.start_span(stage, inside, attributes=attributes, start_time=self.to_epoch(began))
            span.end(self.to_epoch(ended))
        method = "HTTP" if record.method == "other" else record.method
        self.span.update_name(f"{method} {record.route}".rstrip())
        self.span.set_attributes(request_attributes(record))
        if is_server_error(record):
            self.span.set_status(StatusCode.ERROR)
        self.span.end(self.to_epoch(record.ended))

    def to_epoch(self, moment: float) -> int:
        return self.epoch + nanoseconds(moment)


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def trace_headers(headers: Headers) -> Mapping[str, list[str]]:
    """Return the headers of a trace; more than one parent counts as none."""
    if len(headers.getlist("traceparent")) != 1:
        return {}
    return {name: headers.getlist(name) for name in ("traceparent", "tracestate") if name in headers}


def is_server_error(record: RequestRecord) -> bool:
    """Whether the server failed: an invalid request, or a client that disconnects, is not a server error."""
    return record.status >= 500 or record.outcome in ("failed", "expired")


def request_attributes(record: RequestRecord) -> SpanAttributes:
    """Return the span's attributes, by OpenTelemetry's names for HTTP servers and generative models if it has them."""
    context, work = record.context, record.engine
    attributes = {
        "http.request.method": "_OTHER" if record.method == "other" else record.method,
        "http.route": record.route,
        "http.response.status_code": record.status,
        "url.path": record.path,
        "url.scheme": record.scheme,
        "client.address": record.client,
        "error.type": (record.reason or str(record.status)) if is_server_error(record) else "",
        "gen_ai.operation.name": operation_name(record),
        "gen_ai.provider.name": "polyhead" if context.model else "",
        "gen_ai.request.model": context.model,
        "polyhead.request_id": context.id,
        "polyhead.task": context.task,
        "polyhead.key": context.owner,
        "polyhead.outcome": record.outcome,
        "polyhead.reason": record.reason,
        **(token_attributes(work) if work else {}),
        "polyhead.time_to_first_token": record.first_token_seconds or "",
    }
    return {name: value for name, value in attributes.items() if value != ""}


def operation_name(record: RequestRecord) -> str:
    """Return the operation by OpenTelemetry's conventions; empty for tasks without a name there."""
    match record.context.task:
        case "generate":
            return "chat" if record.route.endswith(CHAT_ROUTES) else "text_completion"
        case "embed":
            return "embeddings"
        case _:
            return ""


def token_attributes(work: EngineSummary) -> SpanAttributes:
    return {
        "polyhead.requests": work.requests,
        "gen_ai.usage.input_tokens": work.prompt_tokens,
        "gen_ai.usage.output_tokens": work.generated_tokens,
        "gen_ai.usage.cache_read.input_tokens": work.cached_tokens,
    }


STAGE_ATTRIBUTES: Mapping[Stage, Callable[[EngineSummary], SpanAttributes]] = {
    "queue": lambda work: {"polyhead.requests": work.requests, "polyhead.longest_wait": work.queue_seconds},
    "steps": token_attributes,
    # It lasts from the first token to the last text, but was busy for only this many seconds.
    "detokenise": lambda work: {
        "polyhead.busy": work.detokenise_seconds,
        "gen_ai.usage.output_tokens": work.generated_tokens,
    },
}

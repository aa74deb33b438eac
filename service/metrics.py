"""Every metric of the server, declared once, and the only place where they are observed.

Knows neither the engine nor HTTP: it is told what happened.  The one idea: an object of this class is one server's
page, with a collector registry of its own, so that two servers in one process don't add up.  Model names become
labels only if they are served here, so that nobody can fill the page with names of their own.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Literal, Protocol

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import choose_encoder

from service.engine.worker import Ended, StepReport
from service.request import Task

SECONDS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
SEQUENCES = tuple(float(1 << power) for power in range(0, 11))
TOKENS = tuple(float(1 << power) for power in range(0, 17, 2))
LABELS = ("model", "task")
Missed = Literal["rejected", "aborted", "expired"]  # how HTTP requests end that the engine never had


class Open(Protocol):
    """Texts and prompts of one model that are not answered yet."""

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...


class Watched(Protocol):
    """What is asked of the engine whenever the page is read."""

    @property
    def tokens(self) -> int:
        """Of prompts and texts not answered yet."""

    def stalled(self) -> float:
        """Seconds without progress while somebody waits."""

    def counts(self) -> Mapping[tuple[str, Task], Open]: ...


class Described(Protocol):
    """What the page says of a served model."""

    @property
    def name(self) -> str: ...

    @property
    def task(self) -> Task: ...

    @property
    def family(self) -> str: ...

    @property
    def dtype(self) -> str: ...
    @property
    def executor(self) -> str: ...


class Metrics:
    """`models` are the names served here.  An `Observer` of the engine."""

    def __init__(self, models: Collection[str]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, with a time
        self._models = set(models)
        self._described: dict[str, tuple[str, ...]] = {}  # labels of model_info
        self._open: Callable[[], Mapping[tuple[str, Task], Open]] = dict
        self._page = CollectorRegistry()
        ProcessCollector(registry=self._page)
        GCCollector(registry=self._page)
        self._declare_requests()
        self._declare_stages()
        self._declare_steps()
        self._declare_models()
        for name in models:
            self._ready.labels(name).set(0)

    def _declare_requests(self) -> None:
        self._requests = self._counter(
            "requests",
            "Texts and prompts by how they ended; HTTP requests that ended before there were any count once.",
            *("model", "task", "outcome"),
        )
        self._received = self._counter(
            "requests_received",
            "Texts and prompts that came; at rest as many as have ended.",
            *LABELS,
        )
        self._rejections = self._counter("rejections", "HTTP requests answered with an error, by its code.", "code")
        self._http = self._counter("http_requests", "HTTP requests by route and status.", "method", "route", "status")
        self._in_flight = Gauge("polyhead_http_requests_in_flight", "HTTP requests admitted.", registry=self._page)
        self._cut = self._counter("connections_cut", "Connections of clients that did not read what they were sent.")
        self._waiting = self._gauge("requests_waiting", "Texts and prompts that wait for their first step.", *LABELS)
        self._running = self._gauge("requests_running", "Texts and prompts being computed.", *LABELS)
        self._request_s = self._histogram("request_seconds", "From submission to the last event.", SECONDS, *LABELS)
        self._first_s = self._histogram(
            "time_to_first_token_seconds", "From submission to the first token.", SECONDS, *LABELS
        )
        self._inter_s = self._histogram(
            "inter_token_seconds", "Between one token of a request and its next.", SECONDS, *LABELS
        )
        self._tokens = self._counter(
            "tokens",
            "Tokens that came (prompt), were answered (generated), and went through the network (computed).",
            *("model", "task", "kind"),
        )

    def _declare_stages(self) -> None:
        self._stage_s = self._histogram(
            "stage_seconds",
            "Time in a stage: tokenise and queue a request, forward and sample a step.",
            SECONDS,
            *("model", "task", "stage"),
        )

    def _declare_steps(self) -> None:
        self._steps = self._counter("engine_steps", "Steps of the engine.", *LABELS)
        self._tokens_in_flight = self._gauge("tokens_in_flight", "Tokens of texts and prompts not answered yet.")
        self._stalled_s = self._gauge("engine_stalled_seconds", "Time without a step while somebody waits for one.")
        self._batch_sequences = self._histogram("batch_sequences", "Sequences in a step.", SEQUENCES, *LABELS)
        self._batch_tokens = self._histogram("batch_tokens", "Tokens in a step.", TOKENS, *LABELS)
        self._padding = self._counter("padding_tokens", "Token slots computed for no token.", *LABELS)
        self._blocks = self._gauge("kv_blocks", "Blocks in the cache.", *LABELS)
        self._blocks_used = self._gauge("kv_blocks_used", "Blocks that running sequences hold.", *LABELS)
        self._preemptions = self._counter("preemptions", "Sequences that lost their blocks to others.", *LABELS)
        self._prefix = self._counter("prefix_cached_tokens", "Prompt tokens found in the cache.", *LABELS)
        self._drafted = self._counter("draft_tokens", "Tokens foretold and tried.", *LABELS)
        self._accepted = self._counter("accepted_tokens", "Tokens foretold that came.", *LABELS)

    def _declare_models(self) -> None:
        self._info = self._gauge(
            "model_info", "A served model; always 1.", "model", "task", "family", "dtype", "executor"
        )
        self._ready = self._gauge("model_ready", "1 if the model is loaded and warm.", "model")

    def step(self, report: StepReport) -> None:
        """One step of the engine."""
        labels = (self._name(report.model), report.task)
        self._steps.labels(*labels).inc()
        self._batch_sequences.labels(*labels).observe(report.sequences)
        self._batch_tokens.labels(*labels).observe(report.tokens)
        self._tokens.labels(*labels, "computed").inc(report.tokens)
        self._padding.labels(*labels).inc(report.padding)
        self._stage_s.labels(*labels, "forward").observe(report.forward_s)
        for seconds in report.queue_s:
            self._stage_s.labels(*labels, "queue").observe(seconds)
        if report.task == "generate":
            self._generated(report, labels)

    def _generated(self, report: StepReport, labels: tuple[str, str]) -> None:
        self._stage_s.labels(*labels, "sample").observe(report.sample_s)
        self._blocks.labels(*labels).set(report.blocks_total)
        self._blocks_used.labels(*labels).set(report.blocks_used)
        self._preemptions.labels(*labels).inc(report.preemptions)
        self._prefix.labels(*labels).inc(report.cached_tokens)
        self._drafted.labels(*labels).inc(report.drafted)
        self._accepted.labels(*labels).inc(report.accepted)
        for seconds in report.first_token_s:
            self._first_s.labels(*labels).observe(seconds)
        for seconds in report.inter_token_s:
            self._inter_s.labels(*labels).observe(seconds)

    def ended(self, ended: Ended) -> None:
        """The last event of a text or prompt."""
        labels = (self._name(ended.model), ended.task)
        self._requests.labels(*labels, ended.outcome).inc()
        self._request_s.labels(*labels).observe(ended.seconds)
        self._tokens.labels(*labels, "prompt").inc(ended.prompt_tokens)
        if ended.task == "generate":
            self._tokens.labels(*labels, "generated").inc(ended.completion_tokens)

    def rested(self, model: str, task: Task) -> None:
        """Nothing of this model can be computed: it has ended, or its readers are behind."""
        if task == "generate":
            self._blocks_used.labels(self._name(model), task).set(0)

    def tokenised(self, model: str, task: Task, seconds: float) -> None:
        """A request's texts became tokens, or were found not to."""
        self._stage_s.labels(self._name(model), task, "tokenise").observe(seconds)

    def received(self, model: str, task: Task, count: int) -> None:
        """So many texts or prompts were submitted; each will end once."""
        self._received.labels(self._name(model), task).inc(count)

    def missed(self, outcome: Missed, code: str, model: str = "", task: str = "") -> None:
        """An HTTP request ended before anything of it reached the engine; `code` is the error's."""
        labels = (self._name(model), task)
        self._received.labels(*labels).inc()
        self._requests.labels(*labels, outcome).inc()
        if outcome == "rejected":
            self._rejections.labels(code).inc()

    def cut(self) -> None:
        """A client that did not read was cut off."""
        self._cut.inc()

    def answered(self, method: str, route: str, status: int) -> None:
        """An HTTP request is over; `route` is the route's template, not the path that was asked for."""
        self._http.labels(method, route, str(status)).inc()

    def watch_in_flight(self, count: Callable[[], int]) -> None:
        """Ask `count` for the HTTP requests in flight whenever the page is read."""
        self._in_flight.set_function(count)

    def watch_engine(self, engine: Watched) -> None:
        """Ask `engine` what is under way whenever the page is read."""
        self._tokens_in_flight.set_function(lambda: engine.tokens)
        self._stalled_s.set_function(engine.stalled)
        self._open = engine.counts

    def loaded(self, model: Described) -> None:
        """A model is ready.  Its series appear at once, at zero, so that rates over a first minute are right."""
        labels = (model.name, model.task)
        self._forget(model.name)
        self._models.add(model.name)
        self._described[model.name] = (*labels, model.family, model.dtype, model.executor)
        self._info.labels(*self._described[model.name]).set(1)
        self._ready.labels(model.name).set(1)
        for outcome in ("done", "failed", "aborted", "expired"):
            self._requests.labels(*labels, outcome)
        for metric in (self._received, self._running, self._waiting, self._request_s, self._steps, self._padding):
            metric.labels(*labels)
        if model.task == "generate":
            counters = (self._preemptions, self._prefix, self._drafted, self._accepted)
            for metric in (self._first_s, self._inter_s, *counters):
                metric.labels(*labels)

    def unloaded(self, model: Described) -> None:
        """A model is gone.  What it counted stays, for rates; what it was is said no more."""
        labels = (model.name, model.task)
        self._forget(model.name)
        self._ready.labels(model.name).set(0)
        for gauge in (self._running, self._waiting, *((self._blocks,) if model.task == "generate" else ())):
            gauge.labels(*labels).set(0)

    def _forget(self, name: str) -> None:
        if name in self._described:
            self._info.remove(*self._described.pop(name))

    def page(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics if `accept` asks for it, the Prometheus text format otherwise."""
        for (model, task), count in self._open().items():
            self._waiting.labels(self._name(model), task).set(count.waiting)
            self._running.labels(self._name(model), task).set(count.running)
        encode, content_type = choose_encoder(accept)
        return encode(self._page), content_type

    def _name(self, model: str) -> str:
        return model if model in self._models else ""

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"polyhead_{name}", text, labels, registry=self._page)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"polyhead_{name}", text, labels, registry=self._page)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"polyhead_{name}", text, labels, buckets=buckets, registry=self._page)

"""The observer that counts what happens on a server, as the metrics of `metric_table`.

Each Metrics object has a collector registry of its own, so that two servers in one process do not add up.  Names of
models and keys become labels only if they are known, so that clients cannot add series to the page.
"""

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal, Protocol

from prometheus_client.samples import Sample

from ..concurrency.outcome import run_on_thread
from ..core.calibration import Calibration
from ..core.names import base_model_name
from ..core.request import WorkerTask
from ..core.version import VERSION
from ..engine.worker import RequestEnd, StepReport
from .confidence_drift import ConfidenceDrift
from .inference_counts import InferenceCounter, InferenceCounts
from .metric_table import ALL_METRICS
from .series import MetricSeries, accepts_openmetrics
from .vllm_names import vllm_families

EarlyOutcome = Literal["rejected", "aborted", "expired"]  # ends of HTTP requests that never reached the engine
ModelLabels = tuple[str, str]  # model and task
ReplicaQueue = tuple[str, str, int]  # model, replica, tokens
MAX_UNLOADED_MODELS = 64  # unloaded models whose counters stay on the page
SeriesNames = tuple[tuple[str, ...], ...]  # names of metrics, and the values of their labels besides model and task

# Series that exist as soon as a model is ready, so that rates over its first minute are right.
REQUEST_SERIES: SeriesNames = (
    ("requests_received",),
    *(("requests", outcome) for outcome in ("done", "failed", "aborted", "expired")),
    *(("failures", reason) for reason in ("step_failed", "stopped", "expired")),
    ("requests_waiting",),
    ("requests_running",),
    ("request_seconds",),
    ("request_prompt_tokens",),
    ("stage_seconds", "tokenise"),
    ("tokens", "prompt"),
)
ANSWER_SERIES: SeriesNames = (
    ("answers", "stop"),
    ("answers", "length"),
    ("request_generated_tokens",),
    ("tokens", "generated"),
)
STEP_SERIES: SeriesNames = (
    ("engine_steps",),
    ("batch_sequences",),
    ("batch_tokens",),
    ("padding_tokens",),
    ("stage_seconds", "queue"),
    ("stage_seconds", "forward"),
    ("tokens", "computed"),
)
GENERATION_SERIES: SeriesNames = (
    ("time_to_first_token_seconds",),
    ("inter_token_seconds",),
    ("stage_seconds", "sample"),
    ("preemptions",),
    ("prefix_cached_tokens",),
    ("draft_tokens",),
    ("accepted_tokens",),
)


class OpenRequests(Protocol):
    """Open requests of one model."""

    @property
    def waiting(self) -> int: ...

    @property
    def running(self) -> int: ...


class ObservedEngine(Protocol):
    """What is read from the engine for each scrape."""

    @property
    def tokens(self) -> int:
        """Prompt tokens of open requests whose clients read."""

    def stalled_seconds(self) -> float:
        """Seconds without progress while requests wait."""

    def counts(self) -> Mapping[tuple[str, WorkerTask], OpenRequests]: ...


class ObservedReplicas(Protocol):
    """What is read from an ingress about its replicas for each scrape: numbers by model."""

    def ready_counts(self) -> Mapping[str, int]:
        """Replicas that take requests."""

    def target_counts(self) -> Mapping[str, int]:
        """Replicas that there should be, where this is known."""

    def queued_tokens(self) -> Iterable[ReplicaQueue]: ...


class ModelInfo(Protocol):
    """What the page tells about a served model."""

    @property
    def name(self) -> str: ...

    @property
    def task(self) -> WorkerTask: ...

    @property
    def family(self) -> str: ...

    @property
    def dtype(self) -> str: ...
    @property
    def executor(self) -> str: ...

    @property
    def calibration(self) -> Calibration: ...


class DecisionScores(Protocol):
    """What is counted of the answer to a question; both are shares from 0 to 1."""

    @property
    def confidence(self) -> float: ...

    @property
    def label_mass(self) -> float: ...


class Metrics:
    """The metrics of one server, which serves `models` and has API keys named `keys`.  An `Observer` of the engine.

    With `vllm`, the metrics of generators appear under vLLM's names, too.  Without `names_keys`, requests and tokens of
    all keys are counted together.
    """

    def __init__(
        self, models: Collection[str], keys: Collection[str] = (), *, vllm: bool = False, names_keys: bool = True
    ) -> None:
        self._models, self._keys = set(models), keys  # which may change
        self._names_keys = names_keys
        self._configured = frozenset(models)  # those of the settings
        self._unloaded: dict[str, None] = {}  # unloaded names that are not in the settings, the oldest first
        self._info_labels: dict[str, tuple[str, ...]] = {}  # labels of model_info
        self._open_models: set[tuple[str, WorkerTask]] = set()  # models whose open requests were set last
        self._drift = ConfidenceDrift()
        self._inference = InferenceCounter()
        self._polls: list[Callable[[], None]] = [self._set_drift]  # each reads a value and sets its gauge
        self._render_thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._waiting_pages: dict[tuple[bool, bool], asyncio.Task[tuple[bytes, str]]] = {}  # by format
        self._series = MetricSeries(ALL_METRICS)
        self._counter, self._gauge, self._histogram = self._series.counter, self._series.gauge, self._series.histogram
        if vllm:
            self._series.add_families(vllm_families)
        self._gauge("build_info", VERSION).set(1)
        for name in models:
            self._gauge("model_ready", name).set(0)
        for key in {key if names_keys else "" for key in keys}:
            self._counter("key_requests", key, "200")
            for kind in ("prompt", "generated"):
                self._counter("key_tokens", key, kind)

    def record_step(self, report: StepReport) -> None:
        """Count a step of the engine."""
        labels = (self._label_of(report.model), report.task)
        self._inference.count_step(labels[0], report)
        self._counter("engine_steps", *labels).inc()
        if report.sequences:  # otherwise its answers wait for masks, or their sources are still read
            self._histogram("batch_sequences", *labels).observe(report.sequences)
            self._histogram("batch_tokens", *labels).observe(report.tokens)
        self._counter("tokens", *labels, "computed").inc(report.tokens)
        self._counter("padding_tokens", *labels).inc(report.padding)
        self._histogram("stage_seconds", *labels, "forward").observe(report.forward_s)
        queue = self._histogram("stage_seconds", *labels, "queue")
        for seconds in report.queue_s:
            queue.observe(seconds)
        if report.task == "generate":
            self._record_generation(report, labels)

    def _record_generation(self, report: StepReport, labels: ModelLabels) -> None:
        self._histogram("stage_seconds", *labels, "sample").observe(report.sample_s)
        self._gauge("kv_blocks", *labels).set(report.blocks_total)
        self._gauge("kv_blocks_used", *labels).set(report.blocks_used)
        self._gauge("kv_window_blocks", *labels).set(report.window_blocks_total)
        self._gauge("kv_window_blocks_used", *labels).set(report.window_blocks_used)
        self._gauge("recurrent_states", *labels).set(report.states_total)
        self._gauge("recurrent_states_used", *labels).set(report.states_used)
        self._gauge("recurrent_states_cached", *labels).set(report.states_cached)
        self._counter("preemptions", *labels).inc(report.preemptions)
        self._counter("prefix_cached_tokens", *labels).inc(report.cached_tokens)
        self._counter("draft_tokens", *labels).inc(report.drafted)
        self._counter("accepted_tokens", *labels).inc(report.accepted)
        first = self._histogram("time_to_first_token_seconds", *labels)
        for seconds, trace in report.first_token_s:
            first.observe(seconds, trace_exemplar(trace))
        inter = self._histogram("inter_token_seconds", *labels)
        for seconds in report.inter_token_s:
            inter.observe(seconds)

    def record_end(self, ended: RequestEnd) -> None:
        """Count the end of a text or prompt."""
        labels, generates = (self._label_of(ended.model), ended.task), ended.task == "generate"
        self._inference.count_end(labels[0], ended)
        self._counter("requests", *labels, ended.outcome).inc()
        if ended.reason:
            self._counter("failures", *labels, ended.reason).inc()
        self._histogram("request_seconds", *labels).observe(ended.seconds, trace_exemplar(ended.terms.trace))
        self._histogram("request_prompt_tokens", *labels).observe(ended.prompt_tokens)
        self._counter("tokens", *labels, "prompt").inc(ended.prompt_tokens)
        if generates and ended.finish:
            self._counter("answers", *labels, ended.finish).inc()
        if generates:
            self._histogram("request_generated_tokens", *labels).observe(ended.completion_tokens)
            self._counter("tokens", *labels, "generated").inc(ended.completion_tokens)
        if ended.terms.owner in self._keys:
            key = ended.terms.owner if self._names_keys else ""
            self._counter("key_tokens", key, "prompt").inc(ended.prompt_tokens)
            self._counter("key_tokens", key, "generated").inc(ended.completion_tokens if generates else 0)

    def inference_counts(self, model: str) -> InferenceCounts:
        """What was counted of `model` since the server started."""
        return self._inference.find(model)

    def record_idle(self, model: str, task: WorkerTask) -> None:
        """A model computes nothing any more: its requests have ended or are paused."""
        if task == "generate":
            for gauge in ("kv_blocks_used", "kv_window_blocks_used", "recurrent_states_used"):
                self._gauge(gauge, self._label_of(model), task).set(0)

    def record_tokenisation(self, model: str, task: WorkerTask, seconds: float) -> None:
        """Count the seconds in which the texts of a request were tokenised, or refused."""
        self._inference.count_tokenisation(self._label_of(model), seconds)
        self._histogram("stage_seconds", self._label_of(model), task, "tokenise").observe(seconds)

    def record_submitted(self, model: str, task: WorkerTask, count: int) -> None:
        """Count submitted texts or prompts; each will end once."""
        self._counter("requests_received", self._label_of(model), task).inc(count)

    def record_early_end(self, outcome: EarlyOutcome, code: str, model: str = "", task: str = "") -> None:
        """Count an HTTP request that ended before it reached the engine; `code` is the error's."""
        labels = (self._label_of(model), task)
        self._counter("requests_received", *labels).inc()
        self._counter("requests", *labels, outcome).inc()
        if outcome == "rejected":
            self._counter("rejections", code).inc()
        elif outcome == "expired":
            self._counter("failures", *labels, code).inc()

    def record_decision(self, model: str, question: str, scores: DecisionScores, *, refused: bool) -> None:
        """Count a question of this kind that was answered, or refused because its answer is too uncertain."""
        labels = self._label_of(model), question
        self._counter("decision_questions", *labels, "refused" if refused else "answered").inc()
        self._histogram("decision_confidence_ratio", *labels).observe(scores.confidence)
        self._histogram("decision_label_mass_ratio", *labels).observe(scores.label_mass)

    def record_cut_connection(self) -> None:
        """Count a connection that was closed because its client did not read."""
        self._counter("connections_cut").inc()

    def record_response(self, method: str, route: str, status: int, owner: str = "") -> None:
        """Count the response to an HTTP request; `route` is the route's template, not the path, and `owner` the name of
        its key.
        """
        self._counter("http_requests", method, route, str(status)).inc()
        if owner in self._keys:
            self._counter("key_requests", owner if self._names_keys else "", str(status)).inc()

    def watch_in_flight(self, count: Callable[[], int]) -> None:
        """Read the number of HTTP requests in flight from `count` for each scrape."""
        self._add_poll("http_requests_in_flight", count)

    def watch_batches(self, count: Callable[[], int]) -> None:
        """Read the number of batches that have not ended from `count` for each scrape."""
        self._add_poll("batches_in_flight", count)

    def watch_log(self, count_dropped: Callable[[], int]) -> None:
        """Read for each scrape how many lines of the log were dropped since the start."""
        shown = 0

        def poll() -> None:
            nonlocal shown
            dropped = max(count_dropped(), shown)
            self._counter("log_lines_dropped").inc(dropped - shown)
            shown = dropped

        self._polls.append(poll)

    def watch_drain(self, since: Callable[[], float], limit: float) -> None:
        """Read for each scrape how many seconds the server has been stopping; it has `limit` seconds."""
        self._add_poll("draining_seconds", since)
        self._gauge("draining_limit_seconds").set(limit)

    def watch_engine(self, engine: ObservedEngine) -> None:
        """Read the open requests and tokens from `engine` for each scrape."""
        self._add_poll("tokens_in_flight", lambda: engine.tokens)
        self._add_poll("engine_stalled_seconds", engine.stalled_seconds)
        self._polls.append(lambda: self._set_open_requests(engine.counts()))

    def watch_replicas(self, observed: ObservedReplicas) -> None:
        """Read the replicas, their target numbers and their queues from `roll` for each scrape."""
        shown: set[tuple[str, str]] = set()

        def poll() -> None:
            for model, replicas in observed.ready_counts().items():
                self._gauge("replicas", model).set(replicas)
                self._gauge("model_ready", model).set(replicas > 0)
            for model, replicas in observed.target_counts().items():
                self._gauge("wanted_replicas", model).set(replicas)
            queued = {(model, replica): tokens for model, replica, tokens in observed.queued_tokens()}
            for labels in shown - queued.keys():
                self._gauge.remove("replica_queued_tokens", *labels)
            for labels, tokens in queued.items():
                self._gauge("replica_queued_tokens", *labels).set(tokens)
            shown.clear()
            shown.update(queued)

        self._polls.append(poll)

    def record_routed(self, model: str, why: str) -> None:
        self._counter("routed", model, why).inc()

    def record_rerouted(self, model: str, count: int) -> None:
        """Count requests sent to another replica, because theirs was lost before its first event."""
        self._counter("rerouted", model).inc(count)

    def record_lost_replica(self, model: str) -> None:
        """Count a connection to a replica that broke."""
        self._counter("replicas_lost", model).inc()

    def record_calibrated(self, model: str, question: str, calibration: str, confidence: float) -> None:
        """Count the confidence of an answer to a question of this kind to which the map `calibration` was applied."""
        self._drift.record(self._label_of(model), question, calibration, confidence)

    def _set_drift(self) -> None:
        for labels, index in self._drift.indexes().items():
            self._gauge("decision_confidence_drift_ratio", *labels).set(index)

    def _add_poll(self, name: str, value: Callable[[], float]) -> None:
        self._polls.append(lambda: self._gauge(name).set(value()))

    def _set_open_requests(self, counts: Mapping[tuple[str, WorkerTask], OpenRequests]) -> None:
        for model, task in self._open_models - counts.keys():  # these models are gone
            self._gauge("requests_waiting", self._label_of(model), task).set(0)
            self._gauge("requests_running", self._label_of(model), task).set(0)
        self._open_models = set(counts)
        for (model, task), count in counts.items():
            self._gauge("requests_waiting", self._label_of(model), task).set(count.waiting)
            self._gauge("requests_running", self._label_of(model), task).set(count.running)

    def record_loaded(self, model: ModelInfo) -> None:
        """A model is ready: create all its series."""
        labels = (model.name, model.task)
        self._remove_info(model.name)
        self._models.add(model.name)
        self._drift.expect(model.name, model.calibration)
        self._unloaded.pop(model.name, None)
        self._info_labels[model.name] = (*labels, model.family, model.dtype, model.executor)
        self._gauge("model_info", *self._info_labels[model.name]).set(1)
        self._gauge("model_ready", model.name).set(1)
        for name, *others in initial_series(model):
            self._series.create(name, *labels, *others)

    def record_unloaded(self, model: ModelInfo) -> None:
        """A model was unloaded.  Its counters stay, for rates, until MAX_UNLOADED_MODELS others were unloaded after it.

        Names of the settings stay forever; others are removed, because an administrator could fill the page with them.
        """
        labels = (model.name, model.task)
        self._remove_info(model.name)
        self._gauge("model_ready", model.name).set(0)
        cached = model.task == "generate" and not base_model_name(model.name)
        sizes = ("kv_blocks", "kv_window_blocks", "recurrent_states", "recurrent_states_cached") if cached else ()
        for gauge in ("requests_running", "requests_waiting", *sizes):
            self._gauge(gauge, *labels).set(0)
        if model.name not in self._configured:
            self._unloaded.pop(model.name, None)
            self._unloaded[model.name] = None
        while len(self._unloaded) > MAX_UNLOADED_MODELS:
            oldest = next(iter(self._unloaded))
            del self._unloaded[oldest]
            self._models.discard(oldest)
            self._drift.remove(oldest)
            self._inference.remove(oldest)
            self._series.remove_model(oldest)

    def _remove_info(self, name: str) -> None:
        if name in self._info_labels:
            self._gauge.remove("model_info", *self._info_labels.pop(name))

    def render(self, accept: str) -> tuple[bytes, str]:
        """The page and its content type: OpenMetrics if `accept` asks for it, the Prometheus text format otherwise."""
        self._poll()
        return self._series.render(accepts_openmetrics(accept))

    def read_samples(self, names: Iterable[str]) -> list[Sample]:
        """The samples with these names, as they are on the page."""
        self._poll()
        return self._series.read(names)

    async def render_on_thread(self, accept: str, *, packed: bool = False) -> tuple[bytes, str]:
        """The same on a thread, so that the event loop is not blocked; gzipped if `packed`.

        All who ask while a page waits for the thread get that page: it is collected after they asked.
        """
        self._poll()
        kind = accepts_openmetrics(accept), packed
        if (page := self._waiting_pages.get(kind)) is None:
            page = self._waiting_pages[kind] = asyncio.create_task(
                run_on_thread(partial(self._render_page, *kind), self._render_thread)
            )
            page.add_done_callback(partial(self._forget_page, kind))
        return await asyncio.shield(page)

    def _forget_page(self, kind: tuple[bool, bool], page: "asyncio.Task[tuple[bytes, str]]") -> None:
        """Forget a page that no thread has begun, since none could be started: the next who asks tries again."""
        if self._waiting_pages.get(kind) is page:
            del self._waiting_pages[kind]

    def _render_page(self, is_openmetrics: bool, packed: bool) -> tuple[bytes, str]:
        self._waiting_pages.pop((is_openmetrics, packed), None)
        return self._series.render_gzipped(is_openmetrics) if packed else self._series.render(is_openmetrics)

    def _poll(self) -> None:
        for ask in self._polls:
            ask()

    def _label_of(self, model: str) -> str:
        return model if model in self._models else ""


def initial_series(model: ModelInfo) -> Iterator[tuple[str, ...]]:
    """The series of a model.  Steps are counted for the base model, not for its adapters."""
    generates, steps = model.task == "generate", not base_model_name(model.name)
    yield from REQUEST_SERIES
    yield from ANSWER_SERIES if generates else ()
    yield from STEP_SERIES if steps else ()
    yield from GENERATION_SERIES if generates and steps else ()


def trace_exemplar(trace: str) -> dict[str, str] | None:
    """The exemplar of a trace, by which it is found from a bucket."""
    return {"trace_id": trace} if trace else None

"""The table of all metrics.  The metrics page and docs/metrics.md are both made from it, so they agree.

Names follow Prometheus's conventions (base units, `_total` for counters).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

MetricKind = Literal["counter", "gauge", "histogram"]
METRIC_PREFIX = "polyhead_"

SECOND_BUCKETS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0),
)
SEQUENCE_BUCKETS = tuple(float(1 << power) for power in range(0, 11))
STEP_TOKEN_BUCKETS = tuple(float(1 << power) for power in range(0, 17, 2))
LENGTH_BUCKETS = tuple(digit * 10.0**power for power in range(6) for digit in (1, 2, 5))  # of one prompt or answer
SHARE_BUCKETS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
MODEL_LABELS = ("model", "task")
REPLICA_SECTION = "Replicas"  # the section of metrics that only an ingress has


@dataclass(frozen=True)
class Metric:
    """`name` is without the prefix and without a counter's `_total`; `alert` names the alert rules that use it.

    A histogram has `buckets`; with `exemplars` its buckets name traces.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    unit: str
    text: str
    alert: str = ""
    buckets: tuple[float, ...] = ()
    exemplars: bool = False

    @property
    def exposed_name(self) -> str:
        """The name on the page; a histogram's series add `_bucket`, `_sum` and `_count` to it."""
        return f"{METRIC_PREFIX}{self.name}{'_total' if self.kind == 'counter' else ''}"


def counter(name: str, labels: tuple[str, ...], unit: str, text: str, alert: str = "") -> Metric:
    return Metric(name, "counter", labels, unit, text, alert)


def gauge(name: str, labels: tuple[str, ...], unit: str, text: str, alert: str = "") -> Metric:
    return Metric(name, "gauge", labels, unit, text, alert)


def seconds_histogram(
    name: str, labels: tuple[str, ...], text: str, alert: str = "", exemplars: bool = False
) -> Metric:
    return Metric(name, "histogram", labels, "seconds", text, alert, SECOND_BUCKETS, exemplars)


def size_histogram(name: str, buckets: tuple[float, ...], unit: str, text: str) -> Metric:
    return Metric(name, "histogram", MODEL_LABELS, unit, text, buckets=buckets)


def share_histogram(name: str, text: str) -> Metric:
    """Of shares from 0 to 1, by the kind of a question."""
    return Metric(name, "histogram", ("model", "question"), "1", text, buckets=SHARE_BUCKETS)


SECTIONS: Mapping[str, tuple[Metric, ...]] = {
    "Requests": (
        counter(
            "requests",
            (*MODEL_LABELS, "outcome"),
            "requests",
            "Texts and prompts by how they ended; HTTP requests that ended before there were any count once.",
            "PolyheadErrorBudgetBurn, PolyheadOverloaded",
        ),
        counter(
            "requests_received",
            MODEL_LABELS,
            "requests",
            "Texts and prompts submitted; as many as have ended when idle.",
        ),
        counter(
            "failures",
            (*MODEL_LABELS, "reason"),
            "requests",
            "Texts and prompts that failed or expired, by the code of their error.",
            "PolyheadErrorBudgetBurn",
        ),
        counter(
            "rejections",
            ("code",),
            "requests",
            "HTTP requests answered with an error, by its code.",
            "PolyheadErrorBudgetBurn, PolyheadOverloaded",
        ),
        counter(
            "answers", (*MODEL_LABELS, "finish"), "requests", "Generated answers that are done, by what ended them."
        ),
        gauge(
            "requests_waiting",
            MODEL_LABELS,
            "requests",
            "Texts and prompts that wait for their first step.",
            "PolyheadQueueGrows, PolyheadCacheExhausted",
        ),
        gauge("requests_running", MODEL_LABELS, "requests", "Texts and prompts being computed."),
        seconds_histogram(
            "request_seconds",
            MODEL_LABELS,
            "From submission to the last event.",
            "PolyheadLatencyObjective",
            exemplars=True,
        ),
        seconds_histogram(
            "time_to_first_token_seconds",
            MODEL_LABELS,
            "From submission to the first token.",
            "PolyheadLatencyObjective",
            exemplars=True,
        ),
        seconds_histogram("inter_token_seconds", MODEL_LABELS, "Between one token of a request and its next."),
        seconds_histogram(
            "stage_seconds",
            (*MODEL_LABELS, "stage"),
            "Time in a stage: tokenise and queue a request, forward and sample a step.",
        ),
        counter(
            "tokens",
            (*MODEL_LABELS, "kind"),
            "tokens",
            "Tokens that came (prompt) and were answered (generated), counted when a request ends; and went through "
            "the network (computed).",
        ),
        size_histogram("request_prompt_tokens", LENGTH_BUCKETS, "tokens", "Tokens of a prompt or text."),
        size_histogram("request_generated_tokens", LENGTH_BUCKETS, "tokens", "Tokens of a generated answer."),
    ),
    "Decisions": (
        counter(
            "decision_questions",
            ("model", "question", "outcome"),
            "questions",
            "Questions about a text by their kind, and whether they were answered or, being too uncertain, refused.",
        ),
        share_histogram("decision_confidence_ratio", "Confidence in the answer to a question."),
        share_histogram(
            "decision_label_mass_ratio", "Probability of all options of a question among what the model may answer."
        ),
    ),
    "HTTP": (
        counter("http_requests", ("method", "route", "status"), "requests", "HTTP requests by route and status."),
        gauge(
            "http_requests_in_flight",
            (),
            "requests",
            "HTTP requests let in and not answered yet, those that still send their bodies included.",
            "PolyheadDrainTooLong",
        ),
        counter("connections_cut", (), "connections", "Connections of clients that did not read what they were sent."),
    ),
    "Keys": (
        counter("key_requests", ("key", "status"), "requests", "HTTP requests with a key, by its name and by status."),
        counter(
            "key_tokens",
            ("key", "kind"),
            "tokens",
            "Tokens that came with a key (prompt) and were answered to it (generated), counted when a request ends.",
        ),
    ),
    "Steps of the engine": (
        counter("engine_steps", MODEL_LABELS, "steps", "Steps of the engine."),
        gauge(
            "engine_stalled_seconds",
            (),
            "seconds",
            "Time without a step while a request waits for one.",
            "PolyheadEngineStalled",
        ),
        gauge(
            "tokens_in_flight",
            (),
            "tokens",
            "Prompt tokens of open requests whose clients read: the load of a replica.",
            "PolyheadReplicaImbalance",
        ),
        size_histogram("batch_sequences", SEQUENCE_BUCKETS, "sequences", "Sequences in a step."),
        size_histogram("batch_tokens", STEP_TOKEN_BUCKETS, "tokens", "Tokens in a step."),
        counter("padding_tokens", MODEL_LABELS, "tokens", "Token slots computed without a token (padding)."),
        gauge("kv_blocks", MODEL_LABELS, "blocks", "Blocks in the cache.", "PolyheadCacheExhausted"),
        gauge(
            "kv_blocks_used", MODEL_LABELS, "blocks", "Blocks that running sequences hold.", "PolyheadCacheExhausted"
        ),
        gauge(
            "kv_window_blocks",
            MODEL_LABELS,
            "blocks",
            "Blocks in the cache that are of windowed layers only; 0: these use the blocks of the others.",
        ),
        gauge(
            "kv_window_blocks_used", MODEL_LABELS, "blocks", "Blocks of windowed layers that running sequences hold."
        ),
        gauge(
            "recurrent_states",
            MODEL_LABELS,
            "states",
            "Slots for states of recurrent layers; 0 for networks without such layers.",
        ),
        gauge("recurrent_states_used", MODEL_LABELS, "states", "State slots that running sequences hold."),
        gauge(
            "recurrent_states_cached",
            MODEL_LABELS,
            "states",
            "State slots that a prompt with the same beginning can go on from, held or not.",
        ),
        counter(
            "preemptions",
            MODEL_LABELS,
            "sequences",
            "Sequences preempted: they lost their cache blocks to others.",
            "PolyheadCacheExhausted",
        ),
        counter("prefix_cached_tokens", MODEL_LABELS, "tokens", "Prompt tokens found in the cache."),
        counter("draft_tokens", MODEL_LABELS, "tokens", "Draft tokens that were computed."),
        counter("accepted_tokens", MODEL_LABELS, "tokens", "Draft tokens that were accepted."),
    ),
    REPLICA_SECTION: (
        gauge("replicas", ("model",), "replicas", "Replicas that take requests.", "PolyheadReplicasMissing"),
        gauge(
            "wanted_replicas",
            ("model",),
            "replicas",
            "Target number of replicas, as Ray reports it.",
            "PolyheadReplicasMissing",
        ),
        gauge(
            "replica_queued_tokens",
            ("model", "replica"),
            "tokens",
            "Tokens of prompts and answers that a replica has yet to compute, as its router estimates.",
            "PolyheadReplicaImbalance",
        ),
        counter(
            "replicas_lost",
            ("model",),
            "connections",
            "Connections to replicas that broke; one that shuts down is not counted.",
            "PolyheadReplicasLost",
        ),
        counter("routed", ("model", "why"), "requests", "Texts and prompts sent to a replica, by why it was chosen."),
        counter(
            "rerouted",
            ("model",),
            "requests",
            "Texts and prompts sent to another replica: the first was lost before its first event.",
        ),
    ),
    "The server and its models": (
        gauge("build_info", ("version",), "1", "The version that runs; always 1."),
        gauge("model_info", (*MODEL_LABELS, "family", "dtype", "executor"), "1", "A served model; always 1."),
        gauge(
            "model_ready",
            ("model",),
            "1",
            "1 if the model is loaded and warm.",
            "PolyheadModelNotReady, PolyheadReplicasMissing",
        ),
        gauge(
            "decision_confidence_drift_ratio",
            ("model", "question"),
            "1",
            "Population stability index of the confidence in recent calibrated answers, against the answers that the "
            "calibration was fitted for; above 0.25 calibrate again. 0 before 200 answers.",
            "PolyheadConfidenceDrift",
        ),
        counter(
            "log_lines_dropped",
            (),
            "lines",
            "Lines of the log that were not written: the reader was too slow, or the disk was full.",
        ),
        gauge("batches_in_flight", (), "batches", "Batches that have not ended (/v1/batches)."),
        gauge(
            "draining_seconds",
            (),
            "seconds",
            "Time since the shutdown began; 0 before.",
            "PolyheadDrainTooLong, PolyheadReplicasMissing",
        ),
        gauge(
            "draining_limit_seconds",
            (),
            "seconds",
            "Time that open requests have during a shutdown: the setting drain_seconds.",
            "PolyheadDrainTooLong",
        ),
    ),
}

ALL_METRICS: tuple[Metric, ...] = tuple(metric for section in SECTIONS.values() for metric in section)

# Metrics of prometheus_client for any process, by the beginning of their names.
PROCESS_METRICS: Mapping[str, str] = {
    "process_": "memory, processor time, open files and start of the process",
    "python_gc_": "objects that Python's garbage collector looked through, by generation",
}

# The values of each label.  None comes from a client: no path, no name that is not served, no key.
LABEL_VALUES: Mapping[str, str] = {
    "model": "a name that is served, an adapter's (`base:name`) too; empty where a request named none that is",
    "task": "`generate`, `classify`, `rank`, `embed`, `tag`, `span`, `fill`; empty where the model is not known",
    "outcome": "`done`, `failed` (an error of the server), `aborted` (the client left), `expired` (its deadline "
    "passed), `rejected` (nothing of it reached the engine); of questions `answered` or `refused`",
    "question": "`predicate`, `choice` or `score`",
    "reason": "the code of an error (`step_failed`, `expired`, `stopped`, ...), as in its answer",
    "code": "the code of an error (`invalid_request`, `overloaded`, `not_found`, ...), as in its answer",
    "finish": "`stop` (the model ended it, or a stop string) or `length`",
    "stage": "`tokenise`, `queue`, `forward`, `sample`",
    "kind": "`prompt`, `generated`, `computed`",
    "method": "`GET`, `HEAD`, `POST`, `PUT`, `PATCH`, `DELETE`, `OPTIONS`, `other`",
    "route": "the template of a route (`/models/{name:path}/predict`), not the path; empty where there is none",
    "status": "the status of the answer",
    "key": "the name that the settings give a key, never the key; empty, as one sum of all keys, where everybody may "
    "read the page (`metrics_access: public`); no series where no keys are asked for",
    "family": "of architectures",
    "dtype": "in which the model is computed",
    "executor": "`native` or `torch`",
    "version": "of the distribution",
    "replica": "host and port at which a replica is asked; removed with it",
    "why": "`affinity` (the prompt's beginning is in its cache), `load` (less is queued there), `only` (there is one)",
}

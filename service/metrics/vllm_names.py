"""The metrics of generators under the names of vLLM (v1), for dashboards and autoscalers made for it.

They are translated from our metrics when the page is rendered, so nothing is counted twice.  Metrics without a
counterpart are left out.  Histograms have our buckets.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

from prometheus_client import Metric
from prometheus_client.samples import Sample

from ..core.names import base_model_name
from .metric_table import METRIC_PREFIX, MetricKind
from .series import Families

VLLM_LABELS = ("model_name", "engine")
ENGINE = "0"  # there is one engine
FINISHED_REASONS = {"failed": "error", "aborted": "abort", "expired": "abort"}  # outcomes to vLLM's finished_reason


@dataclass(frozen=True)
class VllmMetric:
    """A metric of vLLM, made from ours: `read_samples` returns its samples, `text` says from which."""

    name: str
    kind: MetricKind
    text: str
    read_samples: Callable[[Families], Iterable[Sample]]
    labels: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        return f"vllm:{self.name}{'_total' if self.kind == 'counter' else ''}"


def vllm_families(ours: Families) -> Iterator[Metric]:
    """The families of VLLM_METRICS, made from our families by name."""
    for one in VLLM_METRICS:
        family = Metric(f"vllm:{one.name}", one.text, one.kind)
        family.samples = [sample._replace(name=family.name + sample.name) for sample in one.read_samples(ours)]
        yield family


def generator_samples(ours: Families, name: str, **labels: str) -> Iterator[Sample]:
    """The samples of a metric that are of generators and have these labels."""
    wanted = {"task": "generate", **labels}.items()
    return (one for one in ours[METRIC_PREFIX + name].samples if wanted <= one.labels.items() and one.labels["model"])


def to_vllm_sample(sample: Sample, of: str, value: float | None = None, **labels: str) -> Sample:
    """A sample of the metric `of` with vLLM's labels; its name is only the suffix after the metric's name."""
    named = {"model_name": sample.labels["model"], "engine": ENGINE, **labels}
    named |= {label: sample.labels[label] for label in ("le",) if label in sample.labels}
    ending = sample.name.removeprefix(METRIC_PREFIX + of)
    return sample._replace(name=ending, labels=named, value=sample.value if value is None else value)


def copy_metric(of: str, **labels: str) -> Callable[[Families], Iterable[Sample]]:
    """The metric `of` unchanged."""
    return lambda ours: (to_vllm_sample(sample, of) for sample in generator_samples(ours, of, **labels))


def cache_usage(ours: Families) -> Iterator[Sample]:
    """The used fraction of a model's cache: 0 before its first step.  An adapter has that of its base model."""
    blocks = {one.labels["model"]: one.value for one in generator_samples(ours, "kv_blocks")}
    taken = {one.labels["model"]: one.value for one in generator_samples(ours, "kv_blocks_used")}
    for sample in generator_samples(ours, "requests_running"):
        name = base_model_name(sample.labels["model"]) or sample.labels["model"]
        most = blocks.get(name, 0.0)
        yield to_vllm_sample(sample, "requests_running", taken.get(name, 0.0) / most if most else 0.0)


def generated_tokens(ours: Families) -> Iterator[Sample]:
    """Generated tokens: first ones and further ones."""
    sums: dict[str, float] = {}
    for of in ("time_to_first_token_seconds", "inter_token_seconds"):
        for sample in generator_samples(ours, of):
            if sample.name.endswith("_count"):
                name = sample.labels["model"]
                sums[name] = sums.get(name, 0.0) + sample.value
    for name, count in sums.items():
        yield Sample("_total", {"model_name": name, "engine": ENGINE}, count)


def finished_requests(ours: Families) -> Iterator[Sample]:
    """Answers by what ended them, and requests that failed or were aborted."""
    sums: dict[tuple[str, str], float] = {}
    finished = ((one, one.labels["finish"]) for one in generator_samples(ours, "answers"))
    broken = ((one, FINISHED_REASONS.get(one.labels["outcome"], "")) for one in generator_samples(ours, "requests"))
    for sample, reason in chain(finished, broken):
        if reason:
            key = sample.labels["model"], reason
            sums[key] = sums.get(key, 0.0) + sample.value
    for (name, reason), count in sums.items():
        yield Sample("_total", {"model_name": name, "engine": ENGINE, "finished_reason": reason}, count)


VLLM_METRICS: tuple[VllmMetric, ...] = (
    VllmMetric("num_requests_running", "gauge", "polyhead_requests_running.", copy_metric("requests_running")),
    VllmMetric("num_requests_waiting", "gauge", "polyhead_requests_waiting.", copy_metric("requests_waiting")),
    VllmMetric(
        "kv_cache_usage_perc", "gauge", "polyhead_kv_blocks_used / polyhead_kv_blocks, from 0 to 1.", cache_usage
    ),
    VllmMetric("gpu_cache_usage_perc", "gauge", "The same, as older dashboards call it, on any device.", cache_usage),
    VllmMetric(
        "prefix_cache_queries",
        "counter",
        "polyhead_tokens_total of the kind prompt: every prompt is looked up; counted when a request ends.",
        copy_metric("tokens", kind="prompt"),
    ),
    VllmMetric("prefix_cache_hits", "counter", "polyhead_prefix_cached_tokens.", copy_metric("prefix_cached_tokens")),
    VllmMetric(
        "prompt_tokens_cached", "counter", "polyhead_prefix_cached_tokens.", copy_metric("prefix_cached_tokens")
    ),
    VllmMetric("num_preemptions", "counter", "polyhead_preemptions.", copy_metric("preemptions")),
    VllmMetric(
        "prompt_tokens",
        "counter",
        "polyhead_tokens_total of the kind prompt, counted when a request ends.",
        copy_metric("tokens", kind="prompt"),
    ),
    VllmMetric(
        "generation_tokens",
        "counter",
        "The counts of polyhead_time_to_first_token_seconds and polyhead_inter_token_seconds: tokens as they come, "
        "without those that stop an answer.",
        generated_tokens,
    ),
    VllmMetric(
        "request_success",
        "counter",
        "polyhead_answers_total (stop, length); polyhead_requests_total that failed (error), were aborted or expired "
        "(abort).",
        finished_requests,
        ("finished_reason",),
    ),
    VllmMetric(
        "time_to_first_token_seconds",
        "histogram",
        "polyhead_time_to_first_token_seconds.",
        copy_metric("time_to_first_token_seconds"),
    ),
    VllmMetric(
        "inter_token_latency_seconds", "histogram", "polyhead_inter_token_seconds.", copy_metric("inter_token_seconds")
    ),
    VllmMetric(
        "time_per_output_token_seconds",
        "histogram",
        "The same, as older dashboards call it.",
        copy_metric("inter_token_seconds"),
    ),
    VllmMetric("e2e_request_latency_seconds", "histogram", "polyhead_request_seconds.", copy_metric("request_seconds")),
    VllmMetric(
        "request_queue_time_seconds",
        "histogram",
        "polyhead_stage_seconds of the stage queue.",
        copy_metric("stage_seconds", stage="queue"),
    ),
    VllmMetric(
        "request_prompt_tokens", "histogram", "polyhead_request_prompt_tokens.", copy_metric("request_prompt_tokens")
    ),
    VllmMetric(
        "request_generation_tokens",
        "histogram",
        "polyhead_request_generated_tokens.",
        copy_metric("request_generated_tokens"),
    ),
    VllmMetric("iteration_tokens_total", "histogram", "polyhead_batch_tokens.", copy_metric("batch_tokens")),
    VllmMetric("spec_decode_num_draft_tokens", "counter", "polyhead_draft_tokens.", copy_metric("draft_tokens")),
    VllmMetric(
        "spec_decode_num_accepted_tokens", "counter", "polyhead_accepted_tokens.", copy_metric("accepted_tokens")
    ),
)

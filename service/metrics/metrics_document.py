"""Writes docs/metrics.md from the tables of metrics."""

from collections.abc import Iterable, Iterator, Sequence

from . import vllm_names
from .metric_table import (
    LABEL_VALUES,
    LENGTH_BUCKETS,
    PROCESS_METRICS,
    SECOND_BUCKETS,
    SECTIONS,
    SEQUENCE_BUCKETS,
    STEP_TOKEN_BUCKETS,
    Metric,
)

INTRODUCTION = """# Metrics

Metrics of `GET /metrics`. Written by `python -m polyhead.service.metrics > docs/metrics.md` from the tables that the
page itself is made of ([metric_table](../service/metrics/metric_table.py),
[vllm_names](../service/metrics/vllm_names.py)); a [test](../tests/service/metrics/test_metrics_document.py) compares it
with the page of a server after real traffic.

- The page has the text format of Prometheus or, if `Accept` asks for it, OpenMetrics; gzipped if `Accept-Encoding`
  allows it.
- All series of a model exist from the moment it is ready, at zero; the size of its cache from its first step on. The
  counters of a model stay after it was unloaded.
- No label takes its value from a client: names that are not served, paths, methods and keys add no series.
- The metrics under Replicas are those of an ingress, which sends requests to replicas; each replica has a page of its
  own.
- Times are in seconds, sizes in tokens. Counters end in `_total`.
- In OpenMetrics the histograms marked * have exemplars, `{trace_id="..."}`, of requests whose trace is kept.
- **alert**: the rules in deploy/prometheus that use the metric. `PolyheadDown` uses Prometheus's own `up`."""

VLLM_SECTION = """## Under vLLM's names

With `--vllm-metrics true` the page also has the metrics of generators under the names of vLLM (v1), so that dashboards
and autoscalers made for it work unchanged (`vllm:num_requests_waiting`, `vllm:kv_cache_usage_perc`, ...). They are
translated when the page is read; nothing is counted twice. The labels are `model_name`, a served name, and `engine`,
always "0". The buckets are ours, not vLLM's. Encoders are left out, and so is what has no counterpart here: times of a
prefill and a decode phase (there are none), vLLM's configuration, its lists of adapters.

`promtool check metrics` complains about the colons in these names; without the option it reports nothing."""


def render_document() -> str:
    """The whole file."""
    sections = [INTRODUCTION]
    for title, metrics in SECTIONS.items():
        rows = (metric_row(metric) for metric in metrics)
        sections += [f"## {title}", markdown_table(("name", "type", "labels", "unit", "meaning", "alert"), rows)]
    sections += ["## Buckets", markdown_table(("unit", "of", "up to"), bucket_rows())]
    sections += ["## Labels", markdown_table(("label", "value"), label_rows())]
    sections += [
        "## The process",
        "Those of prometheus_client for any Python process.",
        markdown_table(PROCESS_COLUMNS, process_rows()),
    ]
    sections += [VLLM_SECTION, markdown_table(("name", "type", "labels", "made of"), vllm_rows())]
    return "\n\n".join(sections) + "\n"


PROCESS_COLUMNS = ("names", "meaning")


def metric_row(metric: Metric) -> Sequence[str]:
    kind = f"{metric.kind}*" if metric.exemplars else metric.kind
    return f"`{metric.exposed_name}`", kind, quote_names(metric.labels), metric.unit, metric.text, metric.alert


def bucket_rows() -> Iterator[Sequence[str]]:
    for unit, of, bounds in (
        ("seconds", "every `_seconds`", SECOND_BUCKETS),
        ("sequences", "`polyhead_batch_sequences`", SEQUENCE_BUCKETS),
        ("tokens", "`polyhead_batch_tokens`", STEP_TOKEN_BUCKETS),
        ("tokens", "`polyhead_request_*_tokens`", LENGTH_BUCKETS),
    ):
        yield unit, of, ", ".join(f"{bound:.10g}" for bound in bounds)


def label_rows() -> Iterator[Sequence[str]]:
    return ((f"`{label}`", values) for label, values in LABEL_VALUES.items())


def process_rows() -> Iterator[Sequence[str]]:
    return ((f"`{begin}*`", text) for begin, text in PROCESS_METRICS.items())


def vllm_rows() -> Iterator[Sequence[str]]:
    for one in vllm_names.VLLM_METRICS:
        yield f"`{one.exposed_name}`", one.kind, quote_names((*vllm_names.VLLM_LABELS, *one.labels)), one.text


def quote_names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(cells)} |".replace("|  |", "| |") for cells in lines)

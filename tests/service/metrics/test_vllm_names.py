"""Metrics under vLLM's names: those that vLLM (v1) has, of the same types and labels, with the values of our own
metrics."""

from collections.abc import Callable, Iterator

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as plain_text

from polyhead.service.metrics import Metrics
from tests.support.busy_metrics import TRACE, Known, busy_metrics

# As on vLLM's own page (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py). It calls gpu_cache_usage_perc and
# time_per_output_token_seconds deprecated; dashboards still use them.
OF_MODEL = frozenset({"model_name", "engine"})
VLLM = {
    "vllm:num_requests_running": ("gauge", OF_MODEL),
    "vllm:num_requests_waiting": ("gauge", OF_MODEL),
    "vllm:kv_cache_usage_perc": ("gauge", OF_MODEL),
    "vllm:gpu_cache_usage_perc": ("gauge", OF_MODEL),
    "vllm:prefix_cache_queries_total": ("counter", OF_MODEL),
    "vllm:prefix_cache_hits_total": ("counter", OF_MODEL),
    "vllm:prompt_tokens_cached_total": ("counter", OF_MODEL),
    "vllm:num_preemptions_total": ("counter", OF_MODEL),
    "vllm:prompt_tokens_total": ("counter", OF_MODEL),
    "vllm:generation_tokens_total": ("counter", OF_MODEL),
    "vllm:request_success_total": ("counter", OF_MODEL | {"finished_reason"}),
    "vllm:time_to_first_token_seconds": ("histogram", OF_MODEL),
    "vllm:inter_token_latency_seconds": ("histogram", OF_MODEL),
    "vllm:time_per_output_token_seconds": ("histogram", OF_MODEL),
    "vllm:e2e_request_latency_seconds": ("histogram", OF_MODEL),
    "vllm:request_queue_time_seconds": ("histogram", OF_MODEL),
    "vllm:request_prompt_tokens": ("histogram", OF_MODEL),
    "vllm:request_generation_tokens": ("histogram", OF_MODEL),
    "vllm:iteration_tokens_total": ("histogram", OF_MODEL),
    "vllm:spec_decode_num_draft_tokens_total": ("counter", OF_MODEL),
    "vllm:spec_decode_num_accepted_tokens_total": ("counter", OF_MODEL),
}
FORMATS = [("", plain_text), ("application/openmetrics-text; version=1.0.0", open_metrics)]
Parse = Callable[[str], Iterator[Metric]]


def vllm_families(metrics: Metrics, accept: str = "", parse: Parse = plain_text) -> dict[str, Metric]:
    page, _ = metrics.render(accept)
    return {
        family.name + ("_total" if family.type == "counter" else ""): family
        for family in parse(page.decode())
        if family.name.startswith("vllm")
    }


@pytest.fixture(scope="module")
def page() -> dict[str, Metric]:
    return vllm_families(busy_metrics(vllm=True))


def value(page: dict[str, Metric], name: str, **labels: str) -> float:
    """Of the only sample of that name that has these labels."""
    wanted = {"model_name": "chat", "engine": "0", **labels}.items()
    samples = (sample for family in page.values() for sample in family.samples)
    [found] = [sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items()]
    return found


@pytest.mark.parametrize(("accept", "parse"), FORMATS, ids=["text", "OpenMetrics"])
def test_names_types_and_labels_are_vllms(accept: str, parse: Parse) -> None:
    found = {
        name: (family.type, frozenset(label for sample in family.samples for label in sample.labels) - {"le"})
        for name, family in vllm_families(busy_metrics(vllm=True), accept, parse).items()
    }
    assert found == VLLM


def test_they_are_on_the_page_if_the_setting_is_on() -> None:
    assert not vllm_families(busy_metrics())


def test_they_exist_from_the_start_and_for_generators_only() -> None:
    metrics = Metrics(["chat", "judge"], vllm=True)
    metrics.record_loaded(Known())
    metrics.record_loaded(Known("judge", "classify"))
    page = vllm_families(metrics)
    assert {name for name, family in page.items() if not family.samples} == set()
    assert {sample.labels["model_name"] for family in page.values() for sample in family.samples} == {"chat"}
    assert not any(sample.value for family in page.values() for sample in family.samples)


def test_their_values_are_those_of_our_metrics(page: dict[str, Metric]) -> None:
    said = {
        name: value(page, name) for name, (kind, labels) in VLLM.items() if kind != "histogram" and len(labels) == 2
    }
    assert said == {
        "vllm:num_requests_running": 2,
        "vllm:num_requests_waiting": 5,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:gpu_cache_usage_perc": 0.25,
        "vllm:prefix_cache_queries_total": 28,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:prompt_tokens_cached_total": 16,
        "vllm:num_preemptions_total": 1,
        "vllm:prompt_tokens_total": 28,
        "vllm:generation_tokens_total": 3,
        "vllm:spec_decode_num_draft_tokens_total": 6,
        "vllm:spec_decode_num_accepted_tokens_total": 4,
    }


def test_an_adapters_cache_is_its_models(page: dict[str, Metric]) -> None:
    assert value(page, "vllm:kv_cache_usage_perc", model_name="chat:dressed") == 0.25


@pytest.mark.parametrize(("reason", "count"), [("stop", 1), ("length", 1), ("abort", 2), ("error", 1)])
def test_ends_by_vllms_reasons(page: dict[str, Metric], reason: str, count: int) -> None:
    """Two expired requests, one of them before it reached the engine, count as aborted: no client waits for them."""
    assert value(page, "vllm:request_success_total", finished_reason=reason) == count


@pytest.mark.parametrize(
    ("name", "count", "total"),
    [
        ("time_to_first_token_seconds", 2, 0.75),
        ("inter_token_latency_seconds", 1, 0.125),
        ("time_per_output_token_seconds", 1, 0.125),
        ("e2e_request_latency_seconds", 4, 8.0),
        ("request_queue_time_seconds", 1, 0.5),
        ("request_prompt_tokens", 4, 28.0),
        ("request_generation_tokens", 4, 13.0),
        ("iteration_tokens_total", 1, 40.0),
    ],
)
def test_histograms_are_ours(page: dict[str, Metric], name: str, count: int, total: float) -> None:
    assert value(page, f"vllm:{name}_count") == value(page, f"vllm:{name}_bucket", le="+Inf") == count
    assert value(page, f"vllm:{name}_sum") == total


def test_exemplars_come_along() -> None:
    page = vllm_families(busy_metrics(vllm=True), *FORMATS[1])
    samples = page["vllm:time_to_first_token_seconds"].samples
    assert [one.exemplar.labels for one in samples if one.exemplar is not None] == [{"trace_id": TRACE}]

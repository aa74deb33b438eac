"""The metrics page: its samples, their names, and its bounded size."""

import asyncio
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, exposition
from prometheus_client.openmetrics import exposition as open_exposition
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families

from polyhead.service.core.calibration import Calibration
from polyhead.service.core.errors import Unavailable
from polyhead.service.core.request import Terms
from polyhead.service.engine.worker import RequestOutcome
from polyhead.service.metrics import Metrics, observer
from polyhead.service.metrics.confidence_drift import MIN_ANSWERS
from polyhead.service.metrics.exposition import openmetrics_text as in_open_metrics
from polyhead.service.metrics.exposition import prometheus_text
from polyhead.service.metrics.metric_table import SECOND_BUCKETS
from tests.support.busy_metrics import TRACE, Busy, Few, Known, busy_metrics, ended, report
from tests.support.calibrations import served_map
from tests.support.threads import no_new_threads

UNITS = (
    *("_seconds", "_tokens", "_info", "_sequences", "_blocks", "_used"),
    *("_ready", "_running", "_waiting", "_replicas", "_states", "_cached", "_ratio"),
)


def families(metrics: Metrics) -> dict[str, Metric]:
    page, _ = metrics.render("")
    return {family.name: family for family in text_string_to_metric_families(page.decode())}


def value(metrics: Metrics, sample: str, **labels: str) -> float:
    found = [
        one.value
        for family in families(metrics).values()
        for one in family.samples
        if one.name == sample and labels.items() <= one.labels.items()
    ]
    assert len(found) == 1, f"{sample} {labels}: {found}"
    return found[0]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(["chat", "judge"])


def test_a_step_is_observed_once_everywhere(metrics: Metrics) -> None:
    metrics.record_step(report())
    assert value(metrics, "polyhead_engine_steps_total", model="chat") == 1
    assert value(metrics, "polyhead_batch_sequences_sum", model="chat") == 3
    assert value(metrics, "polyhead_batch_tokens_sum", model="chat") == 40
    assert value(metrics, "polyhead_tokens_total", model="chat", kind="computed") == 40
    assert value(metrics, "polyhead_padding_tokens_total", model="chat") == 2
    assert value(metrics, "polyhead_kv_blocks", model="chat") == 64
    assert value(metrics, "polyhead_kv_blocks_used", model="chat") == 16
    assert value(metrics, "polyhead_kv_window_blocks", model="chat") == 48
    assert value(metrics, "polyhead_kv_window_blocks_used", model="chat") == 12
    for name, count in (("recurrent_states", 34), ("recurrent_states_used", 8), ("recurrent_states_cached", 21)):
        assert value(metrics, f"polyhead_{name}", model="chat") == count
    assert value(metrics, "polyhead_preemptions_total", model="chat") == 1
    assert value(metrics, "polyhead_prefix_cached_tokens_total", model="chat") == 16
    assert value(metrics, "polyhead_stage_seconds_sum", model="chat", stage="forward") == 0.25
    assert value(metrics, "polyhead_stage_seconds_sum", model="chat", stage="sample") == 0.0625
    assert value(metrics, "polyhead_stage_seconds_sum", model="chat", stage="queue") == 0.5
    assert value(metrics, "polyhead_time_to_first_token_seconds_count", model="chat") == 2
    assert value(metrics, "polyhead_inter_token_seconds_sum", model="chat") == 0.125


def test_an_encoder_has_no_cache_and_no_tokens_to_wait_for(metrics: Metrics) -> None:
    metrics.record_step(report(model="judge", task="classify"))
    page = metrics.render("")[0].decode()
    assert 'polyhead_engine_steps_total{model="judge",task="classify"} 1.0' in page
    assert 'polyhead_kv_blocks{model="judge"' not in page
    assert 'inter_token_seconds_sum{model="judge"' not in page


def test_the_drift_of_confidences_is_that_of_the_last_load(metrics: Metrics) -> None:
    applied = served_map(confidences=[0.0] * 9 + [1.0])
    calibrated = replace(Known(), calibration=Calibration((applied,)))
    metrics.record_loaded(calibrated)
    for _ in range(MIN_ANSWERS):
        metrics.record_calibrated("chat", "choice", applied.name, 0.35)
    drift = {"model": "chat", "question": "choice"}
    assert value(metrics, "polyhead_decision_confidence_drift_ratio", **drift) > 5
    metrics.record_loaded(calibrated)
    assert value(metrics, "polyhead_decision_confidence_drift_ratio", **drift) == 0


@pytest.mark.parametrize("outcome", ["done", "failed", "aborted", "expired"])
def test_every_end_is_counted_under_its_outcome(metrics: Metrics, outcome: RequestOutcome) -> None:
    metrics.record_end(ended(outcome))
    assert value(metrics, "polyhead_requests_total", model="chat", outcome=outcome) == 1
    assert value(metrics, "polyhead_request_seconds_sum", model="chat") == 2
    assert value(metrics, "polyhead_tokens_total", model="chat", kind="prompt") == 7
    assert value(metrics, "polyhead_tokens_total", model="chat", kind="generated") == 5


def test_rejections_and_answers_before_a_dialect(metrics: Metrics) -> None:
    metrics.record_early_end("rejected", "overloaded")
    metrics.record_early_end("rejected", "not_found")
    metrics.record_response("POST", "/v1/completions", 429)
    in_flight = [3]
    metrics.watch_in_flight(lambda: in_flight[0])
    assert value(metrics, "polyhead_rejections_total", code="overloaded") == 1
    assert value(metrics, "polyhead_requests_total", outcome="rejected", model="") == 2
    assert value(metrics, "polyhead_http_requests_total", route="/v1/completions", status="429", method="POST") == 1
    assert value(metrics, "polyhead_http_requests_in_flight") == 3
    in_flight[0] = 0
    assert value(metrics, "polyhead_http_requests_in_flight") == 0


def test_received_and_ended_requests_are_equal(metrics: Metrics) -> None:
    metrics.record_submitted("chat", "generate", 3)
    for outcome in ("done", "failed", "aborted"):
        metrics.record_end(ended(outcome))
    metrics.record_early_end("aborted", "client_gone", "chat", "generate")
    metrics.record_early_end("expired", "expired", "chat", "generate")
    metrics.record_early_end("rejected", "overloaded")
    counted = {name: sum(sample.value for sample in family.samples) for name, family in families(metrics).items()}
    assert counted["polyhead_requests_received"] == counted["polyhead_requests"] == 6
    assert counted["polyhead_rejections"] == 1
    assert value(metrics, "polyhead_requests_total", model="chat", outcome="expired") == 1


@pytest.mark.parametrize(("outcome", "reason"), [("failed", "step_failed"), ("expired", "expired")])
def test_failures_have_a_reason(metrics: Metrics, outcome: RequestOutcome, reason: str) -> None:
    metrics.record_loaded(Known())
    assert value(metrics, "polyhead_failures_total", model="chat", reason=reason) == 0
    metrics.record_end(ended(outcome, reason=reason))
    assert value(metrics, "polyhead_failures_total", model="chat", task="generate", reason=reason) == 1


def test_as_many_failures_as_requests_that_failed_or_expired() -> None:
    page = families(busy_metrics())
    counted = [one for one in page["polyhead_requests"].samples if one.labels["outcome"] in ("failed", "expired")]
    failures = page["polyhead_failures"].samples
    assert sum(one.value for one in failures) == sum(one.value for one in counted) == 3


def test_ends_of_answers_are_counted_by_reason(metrics: Metrics) -> None:
    metrics.record_end(ended("done", finish="length"))
    metrics.record_end(ended("done", model="judge", task="classify", finish="encoded"))
    metrics.record_end(ended("aborted"))
    assert value(metrics, "polyhead_answers_total", model="chat", finish="length") == 1
    assert len(families(metrics)["polyhead_answers"].samples) == 1


def test_keys_are_counted_by_name_if_the_settings_know_it() -> None:
    metrics = Metrics(["chat"], ["alice"])
    assert value(metrics, "polyhead_key_tokens_total", key="alice", kind="generated") == 0
    for owner in ("alice", "mallory", ""):
        metrics.record_response("POST", "/v1/completions", 200, owner)
        metrics.record_end(ended("done", terms=Terms(owner)))
    assert value(metrics, "polyhead_key_requests_total", key="alice", status="200") == 1
    assert value(metrics, "polyhead_key_tokens_total", key="alice", kind="prompt") == 7
    assert value(metrics, "polyhead_key_tokens_total", key="alice", kind="generated") == 5
    page = families(metrics)
    assert {one.labels["key"] for name in ("requests", "tokens") for one in page[f"polyhead_key_{name}"].samples} == {
        "alice"
    }


def test_a_page_that_everybody_may_read_has_no_names_of_keys() -> None:
    metrics = Metrics(["chat"], ["alice", "bob"], names_keys=False)
    for owner in ("alice", "bob", "mallory", ""):
        metrics.record_response("POST", "/v1/completions", 200, owner)
        metrics.record_end(ended("done", terms=Terms(owner)))
    assert value(metrics, "polyhead_key_requests_total", key="", status="200") == 2
    assert value(metrics, "polyhead_key_tokens_total", key="", kind="prompt") == 14
    page, _ = metrics.render("")
    assert b"alice" not in page
    assert b"bob" not in page


def test_without_keys_there_is_no_key_metric(metrics: Metrics) -> None:
    metrics.record_response("GET", "/livez", 200, "")
    metrics.record_end(ended("done"))
    assert not families(metrics)["polyhead_key_requests"].samples
    assert not families(metrics)["polyhead_key_tokens"].samples


def test_how_long_the_server_has_been_stopping(metrics: Metrics) -> None:
    since = [0.0]
    metrics.watch_drain(lambda: since[0], 30)
    assert value(metrics, "polyhead_draining_seconds") == 0
    assert value(metrics, "polyhead_draining_limit_seconds") == 30
    since[0] = 31.5
    assert value(metrics, "polyhead_draining_seconds") == 31.5


def test_open_metrics_has_exemplars_of_traces() -> None:
    """Buckets with a traced request have an exemplar, and no others."""
    page, _ = busy_metrics().render("application/openmetrics-text; version=1.0.0")
    found = {
        (sample.name, sample.labels["le"]): sample.exemplar
        for family in open_metrics(page.decode())
        for sample in family.samples
        if sample.exemplar is not None
    }
    assert {name: exemplar.labels for name, exemplar in found.items()} == {
        ("polyhead_request_seconds_bucket", "2.5"): {"trace_id": TRACE},
        ("polyhead_time_to_first_token_seconds_bucket", "0.25"): {"trace_id": TRACE},
    }
    assert found["polyhead_request_seconds_bucket", "2.5"].value == 2.0


def test_metrics_of_the_base_model_are_not_repeated_for_adapters() -> None:
    """Steps are counted for the base model, so the page stays short with a hundred adapters."""
    page = families(busy_metrics())
    names = {
        name
        for name, family in page.items()
        if any(one.labels.get("model") == "chat:dressed" for one in family.samples)
    }
    assert {"polyhead_requests", "polyhead_request_seconds", "polyhead_answers", "polyhead_model_info"} <= names
    assert not {name for name in names if "batch" in name or "step" in name or "kv" in name or "token_s" in name}


def test_counts_of_an_adapter_stay_after_its_unload() -> None:
    metrics = busy_metrics()
    metrics.record_unloaded(Known("chat:dressed"))
    assert value(metrics, "polyhead_model_ready", model="chat:dressed") == 0
    assert value(metrics, "polyhead_requests_total", model="chat:dressed", outcome="aborted") == 1
    assert "chat:dressed" not in {one.labels["model"] for one in families(metrics)["polyhead_kv_blocks"].samples}


def test_gauges_are_read_when_the_page_is_rendered(metrics: Metrics) -> None:
    engine = Busy()
    metrics.watch_engine(engine)
    metrics.record_step(report(running=9, waiting=9))
    assert value(metrics, "polyhead_requests_waiting", model="chat") == 5
    assert value(metrics, "polyhead_requests_running", model="chat") == 2
    assert value(metrics, "polyhead_tokens_in_flight") == 70
    assert value(metrics, "polyhead_engine_stalled_seconds") == 1.5
    engine.open["chat", "generate"] = Few(0, 0)
    assert value(metrics, "polyhead_requests_waiting", model="chat") == 0


def test_unknown_model_names_are_no_labels(metrics: Metrics) -> None:
    for number in range(100):
        metrics.record_tokenisation(f"made-up-{number}", "generate", 0.001)
        metrics.record_end(ended("failed", model=f"made-up-{number}"))
    page = metrics.render("")[0].decode()
    assert "made-up" not in page
    assert value(metrics, "polyhead_stage_seconds_count", stage="tokenise", model="") == 100


def test_a_loaded_model_is_there_at_once_at_zero(metrics: Metrics) -> None:
    assert value(metrics, "polyhead_model_ready", model="chat") == 0
    metrics.record_loaded(Known())
    assert value(metrics, "polyhead_model_ready", model="chat") == 1
    assert value(metrics, "polyhead_model_info", model="chat", family="llama", dtype="float32", executor="torch") == 1
    assert value(metrics, "polyhead_requests_total", model="chat", outcome="aborted") == 0
    assert value(metrics, "polyhead_time_to_first_token_seconds_count", model="chat") == 0


def test_two_servers_in_one_process_do_not_add_up(metrics: Metrics) -> None:
    metrics.record_step(report())
    assert 'model="chat",task="generate"' not in Metrics(["chat"]).render("")[0].decode()


def test_names_follow_the_conventions() -> None:
    for name, family in families(busy_metrics()).items():
        if not name.startswith("polyhead_"):
            assert name.startswith(("process_", "python_gc_")), name
            continue
        assert re.fullmatch(r"[a-z][a-z_]*", name)
        assert family.documentation.endswith("."), name
        assert not (name.endswith("_total") and family.type != "counter"), "_total is for counters"
        assert family.type == "counter" or name.endswith((*UNITS, "_in_flight")), name


def test_times_are_visible_from_100_microseconds_to_minutes(metrics: Metrics) -> None:
    assert SECOND_BUCKETS[0] == 0.0001
    assert SECOND_BUCKETS[-1] >= 120
    assert list(SECOND_BUCKETS) == sorted(set(SECOND_BUCKETS))
    metrics.record_tokenisation("chat", "generate", 0.00009)
    assert value(metrics, "polyhead_stage_seconds_bucket", stage="tokenise", le="0.0001") == 1


def test_the_page_has_the_accepted_format(metrics: Metrics) -> None:
    page, content_type = metrics.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    page, content_type = metrics.render("")
    assert content_type.startswith("text/plain")
    assert b"process_resident_memory_bytes" in page


@pytest.mark.parametrize(
    ("accept", "opened"),
    [
        ("application/openmetrics-text", True),
        ("application/openmetrics-text; version=2.0.0; escaping=foo", True),
        ("text/plain, application/openmetrics-text;version=0.0.1, application/openmetrics-text;version=1.0.0", True),
        ("application/openmetrics-text;version=0.0.1;q=0.75", False),
        ("application/openmetrics-text; version=x.y", False),
        ("application/openmetrics-text; version=", False),
        ("application/openmetrics-text; version=" + "9" * 5000, False),
        ('application/openmetrics-text; version="1.0.0', False),
        ("text/plain; version=x.y", False),
        (";;;,=,", False),
    ],
)
def test_any_accept_gets_a_page(metrics: Metrics, accept: str, opened: bool) -> None:
    page, content_type = metrics.render(accept)
    assert content_type.startswith("application/openmetrics-text" if opened else "text/plain")
    assert page.endswith(b"# EOF\n") == opened


def test_the_page_remembers_a_bounded_number_of_unloaded_models(
    metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of the settings stay; of others the last `most`, with all their counts."""
    most = 16
    monkeypatch.setattr(observer, "MAX_UNLOADED_MODELS", most)

    def come_and_go(name: str) -> None:
        known = Known(name)
        metrics.record_loaded(known)
        metrics.record_step(report(model=name))
        metrics.record_end(ended("done", model=name))
        metrics.record_submitted(name, "generate", 1)
        metrics.record_unloaded(known)

    come_and_go("chat")
    for number in range(most):
        come_and_go(f"n{number:04}")
    come_and_go("n0000")  # again: n0001 is the oldest now
    full = len(metrics.render("")[0])
    for number in range(most, 3 * most):
        come_and_go(f"n{number:04}")
        metrics.record_end(ended("done", model="n0001"))  # a late end of a forgotten model has no label
    page = metrics.render("")[0].decode()
    there = set(re.findall(r'model="(n\d{4})"', page))
    assert there == {f"n{number:04}" for number in range(2 * most, 3 * most)}
    assert len(page) < 1.1 * full
    assert value(metrics, "polyhead_requests_total", model="chat", outcome="done") == 1
    come_and_go("n0001")
    assert value(metrics, "polyhead_requests_total", model="n0001", outcome="done") == 1, "it counts from zero again"


def test_scrapes_that_wait_together_share_a_page(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that is being written is not shared: it may have been collected before they asked."""
    pages, is_free, write = list[int](), threading.Event(), metrics._series.render

    def render(is_openmetrics: bool) -> tuple[bytes, str]:
        pages.append(1)
        is_free.wait(60)
        return write(is_openmetrics)

    async def scrape() -> list[tuple[bytes, str]]:
        tasks = [asyncio.create_task(metrics.render_on_thread(""))]
        while not pages:
            await asyncio.sleep(0.001)
        tasks += [asyncio.create_task(metrics.render_on_thread(f"text/plain;v={number}")) for number in range(50)]
        await asyncio.sleep(0)
        tasks[1].cancel()
        is_free.set()
        return [await task for task in (tasks[0], *tasks[2:])]

    monkeypatch.setattr(metrics._series, "render", render)
    found = asyncio.run(scrape())
    assert len(pages) == 2
    assert {kind for _, kind in found} == {found[0][1]}


class Splits(str):
    """A header that counts how often it is split."""

    splits = 0

    def split(self, *args: Any, **options: Any) -> list[str]:
        self.splits += 1
        return super().split(*args, **options)


@pytest.mark.parametrize("packed", [False, True])
def test_the_header_accept_is_read_once(metrics: Metrics, packed: bool) -> None:
    accept = Splits("text/plain, application/openmetrics-text; version=1.0.0")
    _, kind = asyncio.run(metrics.render_on_thread(accept, packed=packed))
    assert (accept.splits, kind.partition(";")[0]) == (1, "application/openmetrics-text")


def test_text_is_what_prometheus_client_would_write() -> None:
    registry = CollectorRegistry()
    counter = Counter("c", 'Says "x" \\ y\nz.', ["b", "a"], registry=registry)
    for text in ("plain", 'a "quoted" one', "back\\slash", "two\nlines", "ümlaut", ""):
        counter.labels(text, "x").inc(1e21)
    Gauge("vllm:g", "Of nothing.", registry=registry).set(float("nan"))
    histogram = Histogram("h", "Of all.", ["model"], registry=registry, buckets=(0.5, 1e6)).labels("chat")
    histogram.observe(0.25, {"trace_id": TRACE})
    histogram.observe(7)
    families = list(registry.collect())
    assert prometheus_text(families) == exposition.generate_latest(registry, open_exposition.ALLOWUTF8)
    assert in_open_metrics(families) == open_exposition.generate_latest(registry, open_exposition.ALLOWUTF8)
    assert b"vllm:g NaN" in prometheus_text(families)


def test_metrics_are_there_again_after_no_thread_could_be_started(metrics: Metrics) -> None:
    """The page that no thread had begun was waited for by all who came later: each got its error."""

    async def run() -> None:
        with no_new_threads():
            for _ in range(2):
                with pytest.raises(Unavailable, match="no thread can be started"):
                    await metrics.render_on_thread("")
        for _ in range(3):
            page, _ = await metrics.render_on_thread("")
            assert page

    asyncio.run(run())

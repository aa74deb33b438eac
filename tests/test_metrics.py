"""The metrics page: what is on it, how it is named, and that nobody can fill it."""

import re
from dataclasses import dataclass

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from service.engine.worker import Ended, Outcome, StepReport
from service.metrics import SECONDS, Metrics
from service.request import Task

UNITS = ("_seconds", "_tokens", "_info", "_sequences", "_blocks", "_used", "_ready", "_running", "_waiting")


@dataclass(frozen=True)
class Known:
    name: str = "chat"
    task: Task = "generate"
    family: str = "llama"
    dtype: str = "float32"
    executor: str = "torch"


def report(**changes: object) -> StepReport:
    known: dict[str, object] = {
        "model": "chat",
        "task": "generate",
        "sequences": 3,
        "tokens": 40,
        "padding": 2,
        "forward_s": 0.25,
        "sample_s": 0.0625,
        "running": 3,
        "waiting": 1,
        "blocks_total": 64,
        "blocks_used": 9,
        "preemptions": 1,
        "cached_tokens": 16,
        "queue_s": [0.5],
        "first_token_s": [0.5, 0.25],
        "inter_token_s": [0.125],
    }
    return StepReport(**(known | changes))  # type: ignore[arg-type]


def ended(outcome: Outcome, **changes: object) -> Ended:
    known = {"model": "chat", "task": "generate", "seconds": 2.0, "prompt_tokens": 7, "completion_tokens": 5}
    return Ended(outcome=outcome, **(known | changes))  # type: ignore[arg-type]


def families(metrics: Metrics) -> dict[str, Metric]:
    page, _ = metrics.page("")
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
    metrics.step(report())
    assert value(metrics, "polyhead_engine_steps_total", model="chat") == 1
    assert value(metrics, "polyhead_batch_sequences_sum", model="chat") == 3
    assert value(metrics, "polyhead_batch_tokens_sum", model="chat") == 40
    assert value(metrics, "polyhead_tokens_total", model="chat", kind="computed") == 40
    assert value(metrics, "polyhead_padding_tokens_total", model="chat") == 2
    assert value(metrics, "polyhead_kv_blocks", model="chat") == 64
    assert value(metrics, "polyhead_kv_blocks_used", model="chat") == 9
    assert value(metrics, "polyhead_preemptions_total", model="chat") == 1
    assert value(metrics, "polyhead_prefix_cached_tokens_total", model="chat") == 16
    assert value(metrics, "polyhead_stage_seconds_sum", model="chat", stage="forward") == 0.25
    assert value(metrics, "polyhead_stage_seconds_sum", model="chat", stage="sample") == 0.0625
    assert value(metrics, "polyhead_stage_seconds_sum", model="chat", stage="queue") == 0.5
    assert value(metrics, "polyhead_time_to_first_token_seconds_count", model="chat") == 2
    assert value(metrics, "polyhead_inter_token_seconds_sum", model="chat") == 0.125


def test_an_encoder_has_no_cache_and_no_tokens_to_wait_for(metrics: Metrics) -> None:
    metrics.step(report(model="judge", task="classify"))
    page = metrics.page("")[0].decode()
    assert 'polyhead_engine_steps_total{model="judge",task="classify"} 1.0' in page
    assert 'polyhead_kv_blocks{model="judge"' not in page
    assert 'inter_token_seconds_sum{model="judge"' not in page


@pytest.mark.parametrize("outcome", ["done", "failed", "aborted", "expired"])
def test_every_end_is_counted_under_its_outcome(metrics: Metrics, outcome: Outcome) -> None:
    metrics.ended(ended(outcome))
    assert value(metrics, "polyhead_requests_total", model="chat", outcome=outcome) == 1
    assert value(metrics, "polyhead_request_seconds_sum", model="chat") == 2
    assert value(metrics, "polyhead_tokens_total", model="chat", kind="prompt") == 7
    assert value(metrics, "polyhead_tokens_total", model="chat", kind="generated") == 5


def test_refusals_and_answers_of_the_door(metrics: Metrics) -> None:
    metrics.missed("rejected", "overloaded")
    metrics.missed("rejected", "not_found")
    metrics.answered("POST", "/v1/completions", 429)
    in_flight = [3]
    metrics.watch_in_flight(lambda: in_flight[0])
    assert value(metrics, "polyhead_rejections_total", code="overloaded") == 1
    assert value(metrics, "polyhead_requests_total", outcome="rejected", model="") == 2
    assert value(metrics, "polyhead_http_requests_total", route="/v1/completions", status="429", method="POST") == 1
    assert value(metrics, "polyhead_http_requests_in_flight") == 3
    in_flight[0] = 0
    assert value(metrics, "polyhead_http_requests_in_flight") == 0


def test_what_came_is_what_ended(metrics: Metrics) -> None:
    metrics.received("chat", "generate", 3)
    for outcome in ("done", "failed", "aborted"):
        metrics.ended(ended(outcome))
    metrics.missed("aborted", "client_gone", "chat", "generate")
    metrics.missed("expired", "expired", "chat", "generate")
    metrics.missed("rejected", "overloaded")
    counted = {name: sum(sample.value for sample in family.samples) for name, family in families(metrics).items()}
    assert counted["polyhead_requests_received"] == counted["polyhead_requests"] == 6
    assert counted["polyhead_rejections"] == 1
    assert value(metrics, "polyhead_requests_total", model="chat", outcome="expired") == 1


@dataclass(frozen=True)
class Few:
    waiting: int
    running: int


class Busy:
    tokens = 70

    def __init__(self) -> None:
        self.open: dict[tuple[str, Task], Few] = {("chat", "generate"): Few(5, 2)}

    def stalled(self) -> float:
        return 1.5

    def counts(self) -> dict[tuple[str, Task], Few]:
        return self.open


def test_what_is_under_way_is_asked_for_when_the_page_is_read(metrics: Metrics) -> None:
    engine = Busy()
    metrics.watch_engine(engine)
    metrics.step(report(running=9, waiting=9))
    assert value(metrics, "polyhead_requests_waiting", model="chat") == 5
    assert value(metrics, "polyhead_requests_running", model="chat") == 2
    assert value(metrics, "polyhead_tokens_in_flight") == 70
    assert value(metrics, "polyhead_engine_stalled_seconds") == 1.5
    engine.open["chat", "generate"] = Few(0, 0)
    assert value(metrics, "polyhead_requests_waiting", model="chat") == 0


def test_names_that_are_not_served_here_are_no_labels(metrics: Metrics) -> None:
    for number in range(100):
        metrics.tokenised(f"made-up-{number}", "generate", 0.001)
        metrics.ended(ended("failed", model=f"made-up-{number}"))
    page = metrics.page("")[0].decode()
    assert "made-up" not in page
    assert value(metrics, "polyhead_stage_seconds_count", stage="tokenise", model="") == 100


def test_a_loaded_model_is_there_at_once_at_zero(metrics: Metrics) -> None:
    assert value(metrics, "polyhead_model_ready", model="chat") == 0
    metrics.loaded(Known())
    assert value(metrics, "polyhead_model_ready", model="chat") == 1
    assert value(metrics, "polyhead_model_info", model="chat", family="llama", dtype="float32", executor="torch") == 1
    assert value(metrics, "polyhead_requests_total", model="chat", outcome="aborted") == 0
    assert value(metrics, "polyhead_time_to_first_token_seconds_count", model="chat") == 0


def test_two_servers_in_one_process_do_not_add_up(metrics: Metrics) -> None:
    metrics.step(report())
    assert 'model="chat",task="generate"' not in Metrics(["chat"]).page("")[0].decode()


def test_names_follow_the_conventions(metrics: Metrics) -> None:
    metrics.step(report())
    metrics.ended(ended("done"))
    for name, family in families(metrics).items():
        if not name.startswith("polyhead_"):
            assert name.startswith(("process_", "python_gc_")), name
            continue
        assert re.fullmatch(r"[a-z][a-z_]*", name)
        assert family.documentation.endswith("."), name
        assert not (name.endswith("_total") and family.type != "counter"), "_total is for counters"
        assert family.type == "counter" or name.endswith((*UNITS, "_in_flight")), name


def test_times_are_visible_from_100_microseconds_to_minutes(metrics: Metrics) -> None:
    assert SECONDS[0] == 0.0001
    assert SECONDS[-1] >= 120
    assert list(SECONDS) == sorted(set(SECONDS))
    metrics.tokenised("chat", "generate", 0.00009)
    assert value(metrics, "polyhead_stage_seconds_bucket", stage="tokenise", le="0.0001") == 1


def test_the_page_comes_as_it_is_asked_for(metrics: Metrics) -> None:
    page, content_type = metrics.page("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert page.endswith(b"# EOF\n")
    page, content_type = metrics.page("")
    assert content_type.startswith("text/plain")
    assert b"process_resident_memory_bytes" in page

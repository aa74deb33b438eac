"""The samples of the last five minutes: their figures, and their bounded number."""

import pytest

from polyhead.service.metrics import Metrics
from polyhead.service.metrics.history import INTERVAL_S, KEPT_SAMPLES, WINDOW, MetricHistory
from polyhead.service.metrics.metric_table import SECOND_BUCKETS
from tests.support.busy_metrics import ended, report


def test_rates_are_of_the_time_since_the_sample_before() -> None:
    metrics = Metrics(["chat"])
    history = MetricHistory(metrics)
    history.record(100.0)
    metrics.record_step(report())  # 40 tokens, 16 blocks
    history.record(104.0)
    history.record(108.0)
    first, second, third = history.read(110.0)
    assert [each["seconds_ago"] for each in (first, second, third)] == [10.0, 6.0, 2.0]
    rates = [each["computed_tokens_per_second"] for each in (first, second, third)]
    assert rates == [None, 10.0, 0.0]
    assert second["kv_blocks_used"] == third["kv_blocks_used"] == 16.0
    assert all(isinstance(each["resident_memory_bytes"], float) for each in (first, second, third))


def test_percentiles_are_of_the_last_minute() -> None:
    metrics = Metrics(["chat"])
    history = MetricHistory(metrics)
    history.record(0.0)
    assert history.read(0.0)[0]["request_seconds_p50"] is None
    metrics.record_end(ended("done"))  # 2 s
    history.record(INTERVAL_S)
    found = history.read(INTERVAL_S)[-1]["request_seconds_p50"]
    assert found is not None
    below, above = max(each for each in SECOND_BUCKETS if each < 2.0), min(each for each in SECOND_BUCKETS if each >= 2)
    assert found == pytest.approx((below + above) / 2), "the middle of the bucket"
    for count in range(2, WINDOW + 1):
        history.record(count * INTERVAL_S)
        assert history.read(0.0)[-1]["request_seconds_p50"] is not None
    history.record((WINDOW + 1) * INTERVAL_S)
    assert history.read(0.0)[-1]["request_seconds_p50"] is None, "the request ended more than a minute ago"


def test_five_minutes_are_kept() -> None:
    history = MetricHistory(Metrics(["chat"]))
    for count in range(2 * KEPT_SAMPLES):
        history.record(count * INTERVAL_S)
    samples = history.read(2 * KEPT_SAMPLES * INTERVAL_S)
    assert len(samples) == KEPT_SAMPLES
    assert samples[0]["seconds_ago"] == KEPT_SAMPLES * INTERVAL_S == 300.0

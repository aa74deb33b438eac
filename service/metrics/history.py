"""The figures of the last five minutes: a sample every INTERVAL_S, for people without a Prometheus server.

A sample has sums over all models. Rates are of the time since the sample before, percentiles of the last minute.
"""

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

from ..resources.process_info import resident_memory
from .metric_table import METRIC_PREFIX
from .observer import Metrics

INTERVAL_S = 5.0
KEPT_SAMPLES = 60  # five minutes
WINDOW = 12  # samples of a percentile: one minute
Sample = Mapping[str, float | None]
Key = tuple[str, str]  # the name of a series without the prefix, and its label `kind` or `stage`
GAUGES = ("http_requests_in_flight", "requests_running", "requests_waiting", "kv_blocks_used")
RATES: Mapping[str, Key] = {
    "computed_tokens_per_second": ("tokens_total", "computed"),
    "generated_tokens_per_second": ("tokens_total", "generated"),
}
PERCENTILES: Mapping[str, tuple[Key, float]] = {
    "request_seconds_p50": (("request_seconds_bucket", ""), 0.5),
    "request_seconds_p95": (("request_seconds_bucket", ""), 0.95),
    "request_seconds_p99": (("request_seconds_bucket", ""), 0.99),
    "time_to_first_token_seconds_p95": (("time_to_first_token_seconds_bucket", ""), 0.95),
    "inter_token_seconds_p50": (("inter_token_seconds_bucket", ""), 0.5),
    "queue_seconds_p95": (("stage_seconds_bucket", "queue"), 0.95),
}
SERIES = sorted({*GAUGES, *(name for name, _ in (*RATES.values(), *(key for key, _ in PERCENTILES.values())))})


@dataclass(frozen=True)
class Totals:
    """The values of the page at one time: `values` by series, `buckets` by histogram and upper bound, cumulative."""

    at: float  # seconds of `time.monotonic`
    values: Mapping[Key, float]
    buckets: Mapping[Key, Mapping[float, float]]


class MetricHistory:
    """The last KEPT_SAMPLES samples of `metrics`.  Used on the event loop thread only."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._totals: deque[Totals] = deque(maxlen=WINDOW)  # before the sample that is taken
        self._samples: deque[tuple[float, Sample]] = deque(maxlen=KEPT_SAMPLES)

    def record(self, now: float) -> None:
        """Take a sample at `now`, in seconds of `time.monotonic`."""
        totals = self._read_totals(now)
        before = self._totals[-1] if self._totals else totals
        first = self._totals[0] if self._totals else totals
        self._totals.append(totals)
        sample: dict[str, float | None] = {name: totals.values.get((name, ""), 0.0) for name in GAUGES}
        sample |= {name: rate(before, totals, key) for name, key in RATES.items()}
        sample |= {name: percentile(first, totals, key, share) for name, (key, share) in PERCENTILES.items()}
        self._samples.append((now, sample | {"resident_memory_bytes": float(resident_memory())}))

    def read(self, now: float) -> list[dict[str, float | None]]:
        """The samples, the oldest first, each with its age in seconds."""
        return [{"seconds_ago": round(now - at, 3), **sample} for at, sample in self._samples]

    def _read_totals(self, now: float) -> Totals:
        values: defaultdict[Key, float] = defaultdict(float)
        buckets: defaultdict[Key, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
        for sample in self._metrics.read_samples([METRIC_PREFIX + name for name in SERIES]):
            key = sample.name.removeprefix(METRIC_PREFIX), sample.labels.get("kind", sample.labels.get("stage", ""))
            if "le" in sample.labels:
                buckets[key][float(sample.labels["le"])] += sample.value
            else:
                values[key] += sample.value
        return Totals(now, values, buckets)


def rate(before: Totals, after: Totals, key: Key) -> float | None:
    """The increase per second; None without an earlier sample."""
    seconds = after.at - before.at
    return max(0.0, after.values.get(key, 0.0) - before.values.get(key, 0.0)) / seconds if seconds > 0 else None


def percentile(before: Totals, after: Totals, key: Key, share: float) -> float | None:
    """The quantile `share` of what was observed between two samples, by linear interpolation in a bucket; None if
    nothing was.
    """
    earlier = before.buckets.get(key, {})
    counts = sorted((bound, count - earlier.get(bound, 0.0)) for bound, count in after.buckets.get(key, {}).items())
    wanted = share * counts[-1][1] if counts else 0.0
    lower = below = 0.0
    for bound, count in counts if wanted > 0 else ():
        if count >= wanted:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - below) / (count - below)
        lower, below = bound, count
    return None


async def sample_forever(history: MetricHistory) -> None:
    """Take a sample every INTERVAL_S."""
    while True:
        history.record(time.monotonic())
        await asyncio.sleep(INTERVAL_S)

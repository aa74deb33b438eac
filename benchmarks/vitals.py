"""The state of an idle server: memory, descriptors, threads, metrics page; and conclusions from many such states.

A server is checked without load. Then everything that it still holds is a leak, so a check is either exact (complete
counts, gauges at zero) or finds the growth by leaked memory and nothing else.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

MIB = 1 << 20
PER = 10_000  # requests, to which growth is scaled
OUTCOMES = ("done", "failed", "aborted", "rejected", "expired")
RECEIVED, ENDED = "polyhead_requests_received_total", "polyhead_requests_total"
GAUGES = (
    "polyhead_http_requests_in_flight",
    "polyhead_requests_waiting",
    "polyhead_requests_running",
    "polyhead_tokens_in_flight",
    "polyhead_kv_blocks_used",
    "polyhead_engine_stalled_seconds",
)


class Page:
    """A metrics page, read."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of all series of that name with these labels."""
        return sum(sample.value for sample in self._named(name) if labels.items() <= sample.labels.items())

    def unrest(self) -> Iterator[str]:
        """Gauges that are not zero, or not there."""
        for name in GAUGES:
            values = [sample.value for sample in self._named(name)]
            if not values:
                yield f"{name} is not on the page"
            elif any(values):
                yield f"{name} is {max(values, key=abs):g} at rest"

    def imbalance(self) -> Iterator[str]:
        """Models of which not as many requests ended as were received."""
        received, ended = self._by_model(RECEIVED), self._by_model(ENDED)
        for model in sorted({*received, *ended}):
            if received[model] != ended[model]:
                name = " ".join(model).strip() or "no model"
                yield f"{name}: {received[model]:g} requests received, {ended[model]:g} ended"

    def _named(self, name: str) -> list[Sample]:
        return [sample for sample in self._samples if sample.name == name]

    def _by_model(self, name: str) -> defaultdict[tuple[str, str], float]:
        sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        for sample in self._named(name):
            if sample.labels.get("outcome", "done") in OUTCOMES:
                sums[sample.labels["model"], sample.labels["task"]] += sample.value
        return sums


@dataclass(frozen=True)
class Vitals:
    """Of a process at rest, after so many requests."""

    requests: int
    memory: int  # bytes that are its own: pages of files come and go as the kernel likes
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int, requests: int) -> "Vitals":
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        memory = sum(int(fields[kind].split()[0]) * 1024 for kind in ("RssAnon", "RssShmem"))
        return cls(requests, memory, len(list(Path(f"/proc/{pid}/fd").iterdir())), int(fields["Threads"]))


@dataclass(frozen=True)
class Bounds:
    """What may grow over a soak by how much."""

    memory: float = 1.0  # MiB in 10,000 requests
    descriptors: int = 2  # one or two may come late; a leak would be of hundreds
    threads: int = 2


def growth(vitals: Sequence[Vitals]) -> float:
    """MiB in 10,000 requests: the median of the slopes between all pairs (Theil 1950, Sen 1968), which a jump here
    and there does not move.  Nothing can be said of a single look: 0."""
    slopes = [(b.memory - a.memory) / (b.requests - a.requests) for a, b in combinations(vitals, 2)]
    return statistics.median(slopes or [0.0]) * PER / MIB


def risen(values: Sequence[int]) -> int:
    """By how much the last third is above the first, medians both."""
    third = max(len(values) // 3, 1)
    return int(statistics.median(values[-third:]) - statistics.median(values[:third]))


def leaks(vitals: Sequence[Vitals], bounds: Bounds) -> Iterator[str]:
    """What grew by more than it may."""
    if (slope := growth(vitals)) > bounds.memory:
        yield f"memory grew by {slope:.2f} MiB in {PER:,} requests, at most {bounds.memory:g} is right"
    for name in ("descriptors", "threads"):
        rise, most = risen([getattr(one, name) for one in vitals]), getattr(bounds, name)
        if rise > most:
            yield f"{name} grew by {rise}, at most {most} is right"

"""A panel of the Grafana dashboard, and the queries that several panels use."""

from collections.abc import Sequence
from dataclasses import dataclass

TOGETHER = 'job=~"$job"'  # series recorded for all servers of a job
JOB = f'{TOGETHER},instance=~"$instance"'
MODEL = f'{JOB},model=~"$model",task=~"$task"'
ASKED = f'{JOB},model=~"$model"'  # series of questions about texts, which have no task
ROUTED = f'{TOGETHER},model=~"$model"'  # series of an ingress; their instance label is the ingress, not a replica

Query = tuple[str, str]  # PromQL, and the legend of its series


@dataclass(frozen=True)
class Panel:
    """`width` is in columns of 24; `red` the threshold that is shown red."""

    title: str
    unit: str
    about: str
    queries: Sequence[Query]
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    red: float | None = None


def per_second(counter: str, by: str, matching: str = MODEL) -> str:
    return f"sum by ({by}) (rate({counter}{{{matching}}}[$__rate_interval]))"


def total(gauge: str, by: str, matching: str = MODEL) -> str:
    return f"sum by ({by}) ({gauge}{{{matching}}})"


def largest(gauge: str, by: str, matching: str = MODEL) -> str:
    return f"max by ({by}) ({gauge}{{{matching}}})"


def quantiles(histogram: str, by: str = "model, task", extra: str = "", matching: str = MODEL) -> list[Query]:
    return percentiles(histogram, (50, 95, 99), by, matching + extra)


def percentiles(histogram: str, which: Sequence[int], by: str, matching: str) -> list[Query]:
    series = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    rates = per_second(f"{histogram}_bucket", f"le, {by}", matching)
    return [(f"histogram_quantile({q / 100}, {rates})", f"{series} p{q}") for q in which]


def mean(histogram: str) -> str:
    above, below = (per_second(f"{histogram}_{part}", "model, task") for part in ("sum", "count"))
    return f"{above} / {below}"


def stat(title: str, unit: str, about: str, query: Query, red: float | None = None) -> Panel:
    return Panel(title, unit, about, [query], "stat", 4, red=red)

"""The figures of one run."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

from benchmarks.simulation.fleet import Fleet, Plan


@dataclass(frozen=True)
class Figures:
    """Times in seconds; rates a second of simulated time."""

    requests: int
    wait_p50: float  # from a request's coming to its first token
    wait_p95: float
    wait_p99: float
    gap_p50: float  # from token to token
    gap_p95: float
    gap_p99: float
    tokens_s: float  # said
    hit: float  # part of the prompts' tokens that was found stored
    uneven: float  # deviation of the replicas' queues over their mean, on average over time
    ingress: float  # part of the time that the busiest ingress was busy
    replica: float  # part of the time that replicas were, on average
    preempted: int
    took: float  # seconds that the simulation ran


def figures(plan: Plan) -> Figures:
    began = perf_counter()
    fleet = Fleet(plan)
    log = fleet.run()
    waits, gaps = sorted(log.waits), sorted(log.gaps)
    seconds = plan.traffic.seconds - plan.warm_up_s
    replicas = list(fleet.replicas.values())
    return Figures(
        len(waits),
        *(share(waits, part) for part in (0.5, 0.95, 0.99)),
        *(share(gaps, part) for part in (0.5, 0.95, 0.99)),
        tokens_s=log.tokens / seconds,
        hit=log.cached / max(log.prompts, 1),
        uneven=fmean(log.uneven),
        ingress=log.ingress,
        replica=log.replica,
        preempted=sum(replica.preemptions for replica in replicas),
        took=perf_counter() - began,
    )


def share(ordered: Sequence[float], part: float) -> float:
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0

"""A fleet whose size follows its queue, counted in tokens or in requests.

The rule is that of an autoscaler with a target for each replica: the number of replicas that keeps the queue at the
target. It is applied every `look_s` seconds. A new replica takes requests `start_s` seconds later. A replica is stopped
when fewer were needed for `patience_s` seconds. Requests continue to arrive meanwhile.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from benchmarks.simulation.fleet import Fleet, Plan
from benchmarks.simulation.replica import Visit
from benchmarks.simulation.traffic import Traffic, Turn


@dataclass(frozen=True)
class Rule:
    """`target` tokens that are still to be computed for each replica, or requests that are open."""

    by: str
    target: float
    least: int = 2
    most: int = 64
    look_s: float = 5.0
    start_s: float = 15.0
    patience_s: float = 60.0


@dataclass(frozen=True)
class Waves(Traffic):
    """One traffic after the other; rate and shape are those of the first."""

    parts: tuple[Traffic, ...] = ()

    def arrivals(self) -> Iterator[tuple[float, list[Turn]]]:
        start = 0.0
        for place, part in enumerate(self.parts):
            for when, turns in part.arrivals():
                yield start + when, [replace(turn, conversation=turn.conversation + (place << 20)) for turn in turns]
            start += part.seconds


class Elastic(Fleet):
    """`sizes` says when there were how many, `waited` when each request came and how long it waited."""

    def __init__(self, plan: Plan, rule: Rule) -> None:
        super().__init__(plan)
        self.rule, self.here = rule, list(self.replicas)
        self.starting = 0
        self._enough = 0.0  # since when fewer were wanted
        self.sizes: list[tuple[float, int]] = [(0.0, plan.replicas)]
        self.waited: list[tuple[float, float]] = []
        self.cost = 0.0  # replicas times seconds, those that start included
        self.world.at(rule.look_s, self._decide)

    def wanted(self) -> int:
        candidates = [one for ingress in self.ingresses for one in ingress.candidates]
        queued = sum(
            one.queued_tokens - one.queued_by_others if self.rule.by == "tokens" else one.open_requests
            for one in candidates
        )
        return min(max(ceil(queued / self.rule.target), self.rule.least), self.rule.most)

    def _decide(self) -> None:
        rule, now = self.rule, self.world.now
        wanted, there = self.wanted(), len(self.here) + self.starting
        self.cost += there * rule.look_s
        for _ in range(wanted - there):
            self.starting += 1
            self.world.at(now + rule.start_s, self._started)
        if wanted >= there:
            self._enough = now
        elif now - self._enough >= rule.patience_s and len(self.here) > rule.least:
            self.retire(self.here.pop())
            self.sizes.append((now, len(self.here)))
        if not self.over:
            self.world.at(now + rule.look_s, self._decide)

    def _started(self) -> None:
        self.starting -= 1
        self.here.append(self.add())
        self.sizes.append((self.world.now, len(self.here)))

    def _end(self, visit: Visit, counts: bool) -> None:
        super()._end(visit, counts)
        self.waited.append((visit.came, visit.first))

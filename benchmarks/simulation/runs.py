"""The studies of docs/scaling.md: each study is a list of runs, each run a line of figures.

Load is given as a fraction of a replica's maximum throughput, which is simulated first (with all requests present from
the beginning). So a thousand replicas get a thousand times the load of one, and never more than they can compute.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

from benchmarks.simulation.costs import IngressCosts, Measured
from benchmarks.simulation.elastic import Elastic, Rule, Waves
from benchmarks.simulation.figures import figures, share
from benchmarks.simulation.fleet import Fleet, Plan
from benchmarks.simulation.traffic import CODE, CONVERSATION, Shape, Traffic, many

FREE = IngressCosts(0.0, 0.0, 0.0)
SIZES = (1, 2, 4, 10, 30, 100, 300, 1000)  # replicas
POLICIES = ("random", "round-robin", "shortest", "two-choices", "affinity")
REQUESTS = 4000  # that come in a run, about, its warm-up included
LEAST_S, WARM_UP = 60.0, 0.3  # seconds of a run at least; the part before anything counts
PER_INGRESS = 25  # replicas for each ingress, where ingresses are not what is studied
TENANTS = many(CONVERSATION, beginnings=100, beginning=2048)


@dataclass(frozen=True)
class Line:
    """`study` and `case` name it; `figures` are Figures."""

    study: str
    case: dict[str, Any]
    figures: dict[str, Any]


Study = Callable[["Studies"], Iterator[Line]]


class Studies:
    """`measured` are the costs; `short` makes runs shorter, for a first look."""

    def __init__(self, measured: Measured, short: float = 1.0) -> None:
        self.measured, self.short = measured, short
        self._most: dict[str, float] = {}

    def most(self, shape: Shape) -> float:
        """Requests a second that one replica can answer."""
        if shape.name not in self._most:
            fleet = Fleet(Plan(Traffic(shape, 400.0, 1.0, 7), self.measured.step, FREE))
            log = fleet.run()
            self._most[shape.name] = log.ended / fleet.world.now
        return self._most[shape.name]

    def plan(self, replicas: int, load: float, shape: Shape = CONVERSATION, **settings: Any) -> Plan:
        rate = load * self.most(shape) * replicas
        seconds = max(LEAST_S, REQUESTS / rate) * self.short
        ingresses = settings.pop("ingresses", ceil(replicas / PER_INGRESS))
        return Plan(
            Traffic(shape, rate, seconds, 1),
            self.measured.step,
            self.measured.ingress,
            replicas=replicas,
            ingresses=ingresses,
            warm_up_s=seconds * WARM_UP,
            **settings,
        )

    def line(self, study: str, plan: Plan, **case: Any) -> Line:
        return Line(study, case, asdict(figures(plan)))


def sizes(studies: Studies) -> Iterator[Line]:
    """As much for each replica, from one to a thousand."""
    for replicas in SIZES:
        for policy in POLICIES if replicas <= 100 else ("random", "two-choices", "affinity"):
            plan = studies.plan(replicas, 0.7, policy=policy, sticky=True)
            yield studies.line("sizes", plan, replicas=replicas, policy=policy)


def loads(studies: Studies) -> Iterator[Line]:
    """More and more for each of ten."""
    for load in (0.3, 0.5, 0.7, 0.9):
        for policy in POLICIES:
            plan = studies.plan(10, load, policy=policy)
            yield studies.line("loads", plan, load=load, policy=policy)


def shapes(studies: Studies) -> Iterator[Line]:
    """Other traffic: in bursts, and of many applications."""
    for shape in (CONVERSATION, CODE, TENANTS):
        for policy in POLICIES:
            plan = studies.plan(10, 0.6, shape, policy=policy)
            yield studies.line("shapes", plan, shape=shape.name, policy=policy)


def routers(studies: Studies) -> Iterator[Line]:
    """Several ingresses, each of which knows of the others only what replicas report."""
    for ingresses, sticky in ((1, True), (2, False), (2, True), (8, False), (8, True)):
        for policy in ("shortest", "two-choices", "affinity"):
            plan = studies.plan(32, 0.7, ingresses=ingresses, sticky=sticky, policy=policy)
            yield studies.line("routers", plan, ingresses=ingresses, sticky=sticky, policy=policy)


def reports(studies: Studies) -> Iterator[Line]:
    """Eight of them, told sooner or later."""
    for report in (0.05, 0.5, 2.0, 10.0):
        for policy in ("shortest", "two-choices", "affinity"):
            plan = studies.plan(32, 0.7, ingresses=8, report_s=report, policy=policy)
            yield studies.line("reports", plan, report_s=report, policy=policy)


def narrow(studies: Studies) -> Iterator[Line]:
    """More and more replicas behind one ingress."""
    share = studies.plan(1, 0.7)
    tokens = share.traffic.rate * 53
    costs = studies.measured.ingress
    full = 1 / (share.traffic.rate * costs.request + tokens * costs.token)
    for part in (0.25, 0.5, 0.75, 1.0, 1.25):
        replicas = max(round(full * part), 1)
        plan = replace(studies.plan(replicas, 0.7, ingresses=1), policy="two-choices")
        yield studies.line("narrow", plan, replicas=replicas)


def scaling(studies: Studies) -> Iterator[Line]:
    """Talk, then longer prompts at the same number of requests, then talk; the size of the fleet follows."""
    rate, seconds = 8 * 0.6 * studies.most(CONVERSATION), 400.0 * studies.short
    long = replace(CODE, gap_cv=CONVERSATION.gap_cv, minute_cv=CONVERSATION.minute_cv)
    parts = tuple(Traffic(shape, rate, seconds, 5) for shape in (CONVERSATION, long, CONVERSATION))
    traffic = Waves(CONVERSATION, rate, 3 * seconds, parts=parts)
    plan = Plan(traffic, studies.measured.step, studies.measured.ingress, replicas=10)
    for by, targets in (("tokens", (150.0, 300.0, 600.0)), ("requests", (1.0, 2.0, 4.0))):
        for target in targets:
            fleet = Elastic(plan, Rule(by, target))
            fleet.run()
            yield Line("scaling", {"policy": f"by {by}", "target": target}, scaled(fleet))


def scaled(fleet: Elastic) -> dict[str, Any]:
    """What it took, who waited, and both over time."""
    window, waits = fleet.plan.traffic.seconds / 40, sorted(wait for _, wait in fleet.waited)
    over = []
    for place in range(40):
        there = sorted(wait for came, wait in fleet.waited if place * window <= came < (place + 1) * window)
        over.append(((place + 0.5) * window, share(there, 0.95)))
    return {
        "wait_p50": share(waits, 0.5),
        "wait_p95": share(waits, 0.95),
        "replicas": fleet.cost / fleet.world.now,
        "replicas_over_time": fleet.sizes,
        "waits_over_time": over,
    }


STUDIES: dict[str, Study] = {
    "shapes": shapes,
    "loads": loads,
    "routers": routers,
    "reports": reports,
    "narrow": narrow,
    "scaling": scaling,
    "sizes": sizes,
}

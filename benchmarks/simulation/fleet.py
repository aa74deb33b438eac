"""Ingresses that route, replicas that compute, and the path of a request between them.

Routing is the product's: every ingress has its own `Candidate`s. It counts its own requests at once; it gets the queues
of other ingresses only from the replicas' periodic reports. An ingress is one core: new work waits for earlier work.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from statistics import fmean, pstdev

from benchmarks.simulation.costs import IngressCosts, StepCosts
from benchmarks.simulation.replica import Limits, Replica, Visit
from benchmarks.simulation.traffic import Traffic, Turn
from benchmarks.simulation.world import World
from polyhead.service.engine.block_allocator import BlockKey, child_key, root_key
from polyhead.service.fleet.routing import POLICIES, AnswerLengths, Candidate, RoutingPolicy, RoutingRequest

MOST = 1 << 20  # tokens of an answer that nobody bounds
SAMPLE_S = 1.0  # how often it is looked how full the replicas are


@dataclass(frozen=True)
class Plan:
    """A run."""

    traffic: Traffic
    step: StepCosts
    ingress: IngressCosts
    replicas: int = 1
    ingresses: int = 1
    sticky: bool = False  # whether a conversation stays with its ingress
    policy: str = "affinity"
    report_s: float = 0.5  # how often a replica says what others have queued there
    warm_up_s: float = 0.0  # who came before is not in the figures
    bounded: bool = False  # whether clients say how long an answer may be, and it is that long
    limits: Limits = field(default_factory=Limits)
    seed: int = 0


@dataclass
class Log:
    """What the clients of a run saw."""

    waits: "array[float]" = field(default_factory=lambda: array("d"))  # seconds to the first token
    gaps: "array[float]" = field(default_factory=lambda: array("f"))  # and from token to token
    came: int = 0
    ended: int = 0
    tokens: int = 0  # said while requests came
    prompts: int = 0  # tokens of prompts,
    cached: int = 0  # those of them that were found stored
    uneven: list[float] = field(default_factory=list)  # how unlike the replicas' queues were, each time it was looked
    ingress: float = 0.0  # part of the time that the busiest was, while requests came
    replica: float = 0.0  # the same of replicas, on average


class Ingress:
    """Takes requests, chooses a replica for each, passes tokens on."""

    def __init__(self, world: World, costs: IngressCosts, policy: RoutingPolicy) -> None:
        self.world, self.costs, self.policy = world, costs, policy
        self.candidates: list[Candidate] = []
        self.replica_of: dict[str, Replica] = {}
        self.answers = AnswerLengths()
        self.free_at = 0.0  # when it will have done what it has to do
        self.seconds = 0.0  # what it did

    def spend(self, seconds: float) -> float:
        """When that is done."""
        self.free_at = max(self.free_at, self.world.now) + seconds
        self.seconds += seconds
        return self.free_at

    def add(self, name: str, replica: Replica, kept: int) -> None:
        self.candidates.append(Candidate(name, kept))
        self.replica_of[name] = replica

    def remove(self, name: str) -> None:
        self.candidates = [candidate for candidate in self.candidates if candidate.name != name]
        del self.replica_of[name]

    def choose(self, visit: Visit, plan: Plan) -> Replica:
        most = visit.turn.answer if plan.bounded else MOST
        ask = RoutingRequest(visit.turn.prompt, self.answers.expected_tokens(most), visit.keys, plan.limits.block)
        candidate, _ = self.policy.choose(ask, self.candidates)
        candidate.add_request(visit.turn.id, ask)
        visit.candidate = candidate
        return self.replica_of[candidate.name]


class Fleet:
    """All of them, from the first request of a run to the last answer."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.world, self.log = plan, World(), Log()
        self.replicas: dict[str, Replica] = {}
        self._random = Random(plan.seed)
        policies = (POLICIES[plan.policy](Random(self._random.random())) for _ in range(plan.ingresses))
        self.ingresses = [Ingress(self.world, plan.ingress, policy) for policy in policies]
        self._arrivals = plan.traffic.arrivals()
        self._open, self.last = 0, 0.0  # when the last token was heard
        for _ in range(plan.replicas):
            self.add()

    def add(self) -> str:
        """One more replica, empty."""
        name = str(len(self.replicas))
        self.replicas[name] = replica = Replica(self.plan.step, self.plan.limits)
        for ingress in self.ingresses:
            ingress.add(name, replica, self.plan.limits.blocks)
        return name

    def retire(self, name: str) -> None:
        """It gets no more requests, and answers those it has."""
        for ingress in self.ingresses:
            ingress.remove(name)

    @property
    def over(self) -> bool:
        return not self._open and self.world.now >= self.plan.traffic.seconds

    def run(self) -> Log:
        """Until the last answer is heard."""
        self._await_next()
        if len(self.ingresses) > 1:
            self._report()
        self.world.at(self.plan.warm_up_s, self._look)
        self.world.at(self.plan.traffic.seconds, self._mark)
        self.world.run()
        return self.log

    def _await_next(self) -> None:
        found = next(self._arrivals, None)
        if found is not None:
            self.world.at(found[0], self._begin, found[1])

    def _begin(self, turns: list[Turn]) -> None:
        self._await_next()
        self._come(turns, 0)

    def _come(self, turns: list[Turn], number: int) -> None:
        """A turn of a conversation reaches an ingress."""
        turn, self._open = turns[number], self._open + 1
        self.log.came += 1
        place = turn.conversation if self.plan.sticky else self._random.getrandbits(30)
        ingress = self.ingresses[place % len(self.ingresses)]
        keys = named(turn.tokens(), self.plan.limits.block)
        visit = Visit(turn, turns, self.world.now, ingress, keys)
        self.world.at(ingress.spend(self.plan.ingress.request), self._route, visit)

    def _route(self, visit: Visit) -> None:
        replica = visit.ingress.choose(visit, self.plan)
        self.world.at(self.world.now + self.plan.ingress.hop, self._submit, replica, visit)

    def _submit(self, replica: Replica, visit: Visit) -> None:
        replica.submit(visit)
        if not replica.stepping:
            self._step(replica)

    def _step(self, replica: Replica) -> None:
        self.world.at(self.world.now + replica.begin(), self._stepped, replica)

    def _stepped(self, replica: Replica) -> None:
        spoke = replica.finish()
        if replica.busy:
            self._step(replica)
        self._hear(spoke)

    def _hear(self, spoke: Sequence[Visit]) -> None:
        """What one step said reaches the ingresses, and then the clients."""
        log, ingress_costs = self.log, self.plan.ingress
        for visit in spoke:
            ingress, counts = visit.ingress, visit.came >= self.plan.warm_up_s
            heard = ingress.spend(ingress_costs.token) + ingress_costs.hop
            visit.candidate.count_token(visit.turn.id)
            if not visit.last:
                visit.first = heard - visit.came
            if counts:
                (log.gaps if visit.last else log.waits).append(heard - (visit.last or visit.came))
                log.tokens += heard <= self.plan.traffic.seconds
            visit.last = self.last = heard
            if visit.said == visit.turn.answer:
                self._end(visit, counts)

    def _end(self, visit: Visit, counts: bool) -> None:
        turn, log = visit.turn, self.log
        visit.candidate.remove_request(turn.id)
        visit.ingress.answers.add(turn.answer)
        self._open -= 1
        log.ended += 1
        if counts:
            log.prompts += turn.prompt
            log.cached += visit.cached
        following = turn.number + 1
        if following < len(visit.turns) and self.world.now + turn.pause < self.plan.traffic.seconds:
            self.world.at(max(visit.last, self.world.now) + turn.pause, self._come, visit.turns, following)

    def _report(self) -> None:
        """Every replica says to every ingress what the others have queued there."""
        rows = list(zip(*(ingress.candidates for ingress in self.ingresses), strict=True))
        for row in rows:
            own = [one.queued_tokens - one.queued_by_others for one in row]
            whole = sum(own)
            for one, mine in zip(row, own, strict=True):
                one.queued_by_others = whole - mine
        if not self.over:
            self.world.at(self.world.now + self.plan.report_s, self._report)

    def _look(self) -> None:
        queues = [replica.queued for replica in self.replicas.values()]
        if self.world.now < self.plan.traffic.seconds:
            self.log.uneven.append(pstdev(queues) / max(fmean(queues), 1.0))
            self.world.at(self.world.now + SAMPLE_S, self._look)

    def _mark(self) -> None:
        """No more requests come: what was done so far was done in that time."""
        seconds = self.world.now or 1.0
        self.log.ingress = max(ingress.seconds for ingress in self.ingresses) / seconds
        self.log.replica = fmean(replica.seconds for replica in self.replicas.values()) / seconds


def named(tokens: Sequence[int], block: int) -> tuple[BlockKey, ...]:
    """The names of a prompt's full blocks."""
    keys: list[BlockKey] = []
    parent = root_key(0)
    for start in range(0, len(tokens) - block + 1, block):
        parent = child_key(parent, tokens[start : start + block])
        keys.append(parent)
    return tuple(keys)

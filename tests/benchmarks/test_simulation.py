"""The simulated fleet: each request ends once, its times add up, and mean waits agree with queueing theory."""

from dataclasses import replace
from itertools import pairwise
from random import Random
from statistics import fmean, pstdev, quantiles

import pytest

from benchmarks.simulation import costs
from benchmarks.simulation.costs import IngressCosts, StepCosts
from benchmarks.simulation.fleet import Fleet, Plan, named
from benchmarks.simulation.replica import Limits
from benchmarks.simulation.traffic import CODE, CONVERSATION, SHARES, Shape, Traffic, Turn, drawn, many, turns_expected
from polyhead.service.engine.scheduler import Scheduler, TokenSequence

STEP = StepCosts((0, 1, 8, 64, 512), (0.006, 0.006, 0.01, 0.06, 0.5), 1e-4, 1e-7, 2e-5)
FREE = IngressCosts(0.0, 0.0, 0.0)
BUSY = IngressCosts(300e-6, 60e-6, 200e-6)
ONE = Shape("one", prompt=(8,) * 12, answer=(1,) * 12, gap_cv=1.0, minute_cv=0.0, more=(0.0,), beginning=0, scale=1.0)


def planned(rate: float, seconds: float, *, shape: Shape = CONVERSATION, seed: int = 1, **settings: object) -> Plan:
    plan = Plan(Traffic(shape, rate, seconds, seed), STEP, BUSY)
    return replace(plan, **settings)  # type: ignore[arg-type]


def p95(values: object) -> float:
    return quantiles(values, n=20)[-1]  # type: ignore[call-overload]


@pytest.mark.parametrize("policy", ["two-choices", "affinity"])
def test_every_request_ends_once_and_leaves_nothing_behind(policy: str) -> None:
    tight = Limits(blocks=48)
    shape = replace(CONVERSATION, answer=[2 * tokens for tokens in CONVERSATION.answer], context=1024)
    fleet = Fleet(planned(8, 12, shape=shape, replicas=3, ingresses=2, policy=policy, limits=tight))
    log = fleet.run()
    assert log.came == log.ended == len(log.waits) > 40
    assert log.prompts > log.cached > 0
    assert sum(replica.preemptions for replica in fleet.replicas.values()) > 0
    for replica in fleet.replicas.values():
        replica.scheduler.check()
        assert not replica.busy
        assert not replica.scheduler.blocks.used_count
    for ingress in fleet.ingresses:
        assert all(one.queued_tokens == one.queued_by_others and not one.open_requests for one in ingress.candidates)


def test_a_seed_determines_a_run() -> None:
    def run(seed: int) -> list[float]:
        return list(Fleet(planned(4, 6, replicas=2, policy="random", seed=seed)).run().waits)

    assert run(1) == run(1) != run(2)


def test_a_single_request_takes_the_time_of_its_steps_and_hops() -> None:
    turn = Turn(0, 0, 0, shared=100, own=500, answer=3, pause=0.0)
    fleet = Fleet(planned(1, 0))
    fleet.world.at(1.0, fleet._come, [turn], 0)
    log = fleet.run()
    attended = [256 * 257 // 2, 256 * 256 + 256 * 257 // 2, 88 * 512 + 88 * 89 // 2]
    chunks = [STEP.of(256, 0, attended[0], 1), STEP.of(256, 0, attended[1], 1), STEP.of(88, 1, attended[2], 1)]
    assert log.waits[0] == pytest.approx(sum(chunks) + BUSY.request + BUSY.token + 2 * BUSY.hop)
    assert list(log.gaps) == pytest.approx([STEP.of(1, 1, 601, 1), STEP.of(1, 1, 602, 1)])


def test_waits_of_a_single_server_queue_agree_with_theory() -> None:
    """The Pollaczek-Khinchine formula, for steps of constant time and Poisson arrivals."""
    step_seconds, load = 0.1, 0.6
    plan = Plan(
        Traffic(ONE, load / step_seconds, 1200, 5), costs.flat(step_seconds, 512), FREE, limits=Limits(max_running=1)
    )
    waits = Fleet(plan).run().waits
    assert len(waits) == pytest.approx(1200 * load / step_seconds, rel=0.05)
    assert fmean(waits) == pytest.approx(step_seconds + load * step_seconds / (2 * (1 - load)), rel=0.05)


def test_two_choices_wait_less_than_random_routing() -> None:
    random, choices = (Fleet(planned(14, 25, replicas=8, policy=name)).run() for name in ("random", "two-choices"))
    assert p95(choices.waits) < 0.8 * p95(random.waits)
    assert fmean(choices.uneven) < fmean(random.uneven)


def test_affinity_finds_the_cached_prefix_of_a_conversation() -> None:
    shape = many(CONVERSATION, beginnings=20, beginning=1024)
    choices, affine = (
        Fleet(planned(6, 25, shape=shape, replicas=6, policy=name)).run() for name in ("two-choices", "affinity")
    )
    assert affine.cached / affine.prompts > 1.2 * choices.cached / choices.prompts


def test_requests_wait_for_a_busy_ingress() -> None:
    slow = IngressCosts(request=0.05, token=0.0, hop=0.0)
    quick, late = (Fleet(planned(8, 10, replicas=4, ingress=cost)).run() for cost in (FREE, slow))
    assert fmean(late.waits) > fmean(quick.waits) + slow.request


@pytest.mark.parametrize("shape", [CONVERSATION, CODE], ids=lambda shape: shape.name)
def test_traffic_has_the_lengths_and_the_bursts_of_its_trace(shape: Shape) -> None:
    random = Random(1)
    found = sorted(drawn(random, shape.answer) for _ in range(4000))
    for share, value in list(zip(SHARES, shape.answer, strict=True))[3:8]:
        assert found[round(share * 4000)] == pytest.approx(value, rel=0.15, abs=1)
    times = [when for when, _ in Traffic(shape, 50, 60).arrivals()]
    gaps = [after - before for before, after in pairwise(times)]
    assert len(times) * turns_expected(shape) == pytest.approx(50 * 60, rel=0.35)
    assert pstdev(gaps) / fmean(gaps) > 0.95 * shape.gap_cv


def test_a_turn_begins_with_all_earlier_tokens() -> None:
    traffic = Traffic(CONVERSATION, 1, 1)
    turns = next(turns for number in range(100) if len(turns := traffic.conversation(number)) > 2)
    for before, after in pairwise(turns):
        answer_tokens = [before.said(place) for place in range(before.answer)]
        assert after.tokens()[: before.prompt + before.answer] == before.tokens() + answer_tokens
    lost = replace(turns[0], kept=False)
    assert lost.said(0) not in turns[1].tokens()


def test_block_keys_equal_those_of_the_scheduler() -> None:
    tokens = list(range(100))
    fleet = Fleet(planned(1, 0))
    scheduler: Scheduler = next(iter(fleet.replicas.values())).scheduler
    scheduler.add(sequence := TokenSequence(tokens))
    scheduler.commit(scheduler.schedule().chunks)
    assert tuple(sequence.block_keys) == named(tokens, 16)


def test_measured_costs_are_complete_and_plausible() -> None:
    measured = costs.read()
    step = measured.step
    assert measured.machine
    assert step.base(3) == pytest.approx((step.base(2) + step.base(4)) / 2)
    assert 0 < step.base(1) < step.base(64) < step.base(512) < 2
    assert min(step.at) > 0

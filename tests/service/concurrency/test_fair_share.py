"""The order of turns between owners, and the order of the queue."""

import pytest

from polyhead.service.concurrency.fair_queue import Deadlines, FairQueue
from polyhead.service.concurrency.fair_share import FairScheduler
from polyhead.service.engine.fault_bisection import FaultBisector


def shares(turns: FairScheduler[str], wanting: list[str], costs: dict[str, float], rounds: int) -> dict[str, float]:
    """What each has used after so many turns."""
    used = dict.fromkeys(wanting, 0.0)
    for _ in range(rounds):
        party = turns.next(wanting)
        assert party is not None
        turns.charge(party, costs[party])
        used[party] += costs[party]
    return used


def test_turns_are_taken_by_cost_and_weight() -> None:
    turns: FairScheduler[str] = FairScheduler()
    turns.add("dear")
    turns.add("cheap")
    turns.add("heavy", 3.0)
    used = shares(turns, ["dear", "cheap", "heavy"], {"dear": 0.1, "cheap": 0.01, "heavy": 0.02}, 2000)
    assert used["dear"] == pytest.approx(used["cheap"], rel=0.05)
    assert used["heavy"] == pytest.approx(3 * used["cheap"], rel=0.05)


def test_idle_time_earns_no_credit() -> None:
    turns: FairScheduler[str] = FairScheduler()
    for party in ("a", "b"):
        turns.add(party)
    costs = {"a": 1.0, "b": 1.0, "late": 1.0}
    shares(turns, ["a"], costs, 1000)
    turns.rejoin("b")
    turns.rejoin("late")
    used = shares(turns, ["a", "b", "late"], costs, 30)
    assert used == {"a": 10, "b": 10, "late": 10}
    for party in costs:
        turns.remove(party)
    assert turns.next(turns.parties()) is None
    turns.charge("a", 1.0)


def test_the_queue_goes_by_priority_then_owner_then_arrival() -> None:
    queue: FairQueue[str] = FairQueue()
    for entry, owner, priority in (("a1", "a", 0), ("a2", "a", 0), ("b1", "b", 0), ("c1", "c", 9), ("a0", "a", -1)):
        queue.add(entry, owner, priority)
    assert len(queue) == 5
    order = []
    while (entry := queue.peek()) is not None:
        assert entry in queue
        queue.remove(entry)
        queue.charge(entry[0], 10)
        order.append(entry)
    assert order == ["c1", "a1", "b1", "a2", "a0"]
    assert not len(queue)


def test_an_entry_that_is_put_back_is_the_next_of_its_owner() -> None:
    queue: FairQueue[str] = FairQueue()
    for entry in ("a", "b", "c"):
        queue.add(entry, "", 0)
    queue.remove("b")
    queue.put_back("b", "", 0)
    assert queue.peek() == "b"
    assert set(queue) == {"a", "b", "c"}


def test_deadlines() -> None:
    deadlines: Deadlines[str] = Deadlines()
    for entry, until in (("soon", 1.0), ("late", 5.0), ("never", float("inf"))):
        deadlines.add(entry, until)
    assert len(deadlines) == 2
    assert deadlines.expired(0.9) == []
    assert deadlines.expired(1.0) == deadlines.expired(1.5) == ["soon"]
    deadlines.remove("soon")
    deadlines.remove("never")
    assert deadlines.expired(4.0) == []
    assert deadlines.expired(6.0) == ["late"]


@pytest.mark.parametrize("faulty", [set(), {3}, {0, 7}, set(range(8))])
def test_bisection_finds_exactly_the_entries_that_make_a_step_fail(faulty: set[int]) -> None:
    trials: FaultBisector[int] = FaultBisector()
    blamed = trials.split(list(range(8)))
    good: list[int] = []
    tries = 0
    while trials:
        batch = trials.next_batch()
        tries += 1
        if faulty & set(batch):
            blamed += trials.split(batch)
        else:
            good += batch
    assert blamed == sorted(faulty)
    assert sorted(good) == sorted(set(range(8)) - faulty)
    assert tries <= 14 if len(faulty) != 1 else tries == 6

"""Turns of a shared thread by cost and weight."""

import pytest

from polyhead.service.concurrency.fair_share import FairScheduler


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


def test_a_party_that_rejoins_does_not_wait_for_what_another_used_out_of_turn() -> None:
    turns: FairScheduler[str] = FairScheduler()
    for party in ("a", "b"):
        turns.add(party)
    for _ in range(1000):
        turns.charge("a", 1.0, in_turn=turns.next(["a", "b"]) == "a")
    turns.rejoin("late")
    assert shares(turns, ["a", "b", "late"], {"a": 1.0, "b": 1.0, "late": 1.0}, 30) == {"a": 0, "b": 15, "late": 15}

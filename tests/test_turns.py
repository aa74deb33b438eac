"""Whose turn it is."""

import pytest

from service.engine.turns import Turns


def test_turns_are_taken_by_cost() -> None:
    class Busy:
        busy = True

    dear, cheap, late = Busy(), Busy(), Busy()
    turns = Turns()
    for worker in (dear, cheap):
        turns.add(worker)  # type: ignore[arg-type]
    went = []
    for _ in range(110):
        went.append(turns.next())
        turns.charge(went[-1], 0.1 if went[-1] is dear else 0.01)  # type: ignore[arg-type]
    assert went.count(dear) == pytest.approx(10, abs=1)  # type: ignore[arg-type]
    turns.add(late)  # type: ignore[arg-type]
    dear.busy = False
    for _ in range(1000):
        turns.charge(turns.next(), 0.01)  # type: ignore[arg-type]
    dear.busy = True
    turns.rejoin(dear)  # type: ignore[arg-type]
    went = []
    for _ in range(30):
        went.append(turns.next())
        turns.charge(went[-1], 0.01)  # type: ignore[arg-type]
    for worker in (dear, cheap, late):
        assert went.count(worker) == pytest.approx(10, abs=1), "rest earns no credit"  # type: ignore[arg-type]
    turns.remove(dear)  # type: ignore[arg-type]
    turns.remove(cheap)  # type: ignore[arg-type]
    late.busy = False
    assert turns.next() is None

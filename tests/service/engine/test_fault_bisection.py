"""Bisection of a failed batch."""

import pytest

from polyhead.service.engine.fault_bisection import FaultBisector


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

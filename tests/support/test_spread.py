"""Cases that are spread over targets: none is lost, and each target after the first has a part of each axis."""

import pytest

from tests.support.spread import PART, spread

NAMES, PRECISIONS = [f"network {number}" for number in range(8)], ("float32", "int8")


def test_the_first_target_has_all_cases_and_each_other_a_part_of_them() -> None:
    found = spread(["fast", "slow", "slower"], NAMES, PRECISIONS)
    assert len({each.values for each in found}) == 3 * len(NAMES) * len(PRECISIONS)
    run = [each.values for each in found if not each.marks]
    counts = [sum(case[0] == target for case in run) for target in ("fast", "slow", "slower")]
    assert counts[0] == len(NAMES) * len(PRECISIONS)
    assert all(counts[0] // PART <= count <= counts[0] // PART + 1 for count in counts[1:])
    assert {case[1:] for case in run if case[0] == "slow"} != {case[1:] for case in run if case[0] == "slower"}
    assert all(each.marks == [pytest.mark.thorough] for each in found if each.values not in run)


@pytest.mark.parametrize("values", [2, 3, 4])
def test_a_target_with_a_part_of_the_cases_has_every_value_of_the_last_axis(values: int) -> None:
    """Also where an axis has as many values as a part has cases."""
    run = [each.values for each in spread("ab", range(9), range(values)) if not each.marks]
    assert {case[2] for case in run if case[0] == "b"} == set(range(values))

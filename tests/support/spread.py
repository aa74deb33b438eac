"""Parameters of tests on several targets that share most of their code: on the first all cases, on others a part."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

PART = 3  # a target after the first has one case of so many; they take turns


def spread(targets: Iterable[Any], *axes: Iterable[Any]) -> list[Any]:
    """All combinations of a target and a value of each axis.

    The first target runs all of them, each other target every third one, beginning with another one. The rest is
    left to `make thorough`.
    """
    cases, found = list(product(*axes)), []
    for turn, target in enumerate(targets):
        for number, case in enumerate(cases):
            left_out = turn > 0 and (number + number // PART + turn) % PART > 0
            found.append(pytest.param(target, *case, marks=[pytest.mark.thorough] if left_out else []))
    return found

"""The part of a limit that one key may have."""

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class KeyShare:
    """A key may have the part `fraction` of a limit, where there are several keys.

    `owners` are the names of the keys; the collection may change.
    """

    owners: Collection[str] = ()
    fraction: float = 1.0

    def of(self, limit: float) -> float:
        """How much of `limit` one key may have: a whole number, at least 1, unless it is all."""
        if len(self.owners) < 2 or limit == math.inf:
            return limit
        return max(math.floor(limit * self.fraction), 1)


NO_SHARES = KeyShare()

"""How far confidences of served decisions are from those of the labelled answers that their calibration was fitted for.

The measure is the population stability index over CONFIDENCE_BINS bins, the sum of (served - expected) * ln(served /
expected) over shares of answers. Below 0.1 it is usually taken for no drift, above 0.25 for a large one (Siddiqi 2006).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..core.calibration import CONFIDENCE_BINS, Calibration

RECENT_ANSWERS = 1000  # an answer this long ago counts 1 / e
MIN_ANSWERS = 200  # until then the index is 0, since that of few answers is chance
LEAST_SHARE = 1e-3  # is added to every share, since an empty bin would have an infinite index


@dataclass
class RecentConfidences:
    """Confidences of the answers of one map, the newest with the largest weights."""

    expected: Sequence[float]
    answers: int = 0
    weights: list[float] = field(default_factory=lambda: [0.0] * CONFIDENCE_BINS)

    def add(self, confidence: float) -> None:
        self.answers += 1
        self.weights = [weight * (1 - 1 / RECENT_ANSWERS) for weight in self.weights]
        self.weights[min(int(confidence * CONFIDENCE_BINS), CONFIDENCE_BINS - 1)] += 1

    @property
    def stability_index(self) -> float:
        if self.answers < MIN_ANSWERS:
            return 0.0
        total = sum(self.weights)
        shares = [
            (weight / total + LEAST_SHARE, each + LEAST_SHARE)
            for weight, each in zip(self.weights, self.expected, strict=True)
        ]
        return sum((served - expected) * math.log(served / expected) for served, expected in shares)


class ConfidenceDrift:
    """The drift of all models, by the maps of their calibrations."""

    def __init__(self) -> None:
        self._maps: dict[tuple[str, str], dict[str, RecentConfidences]] = {}  # by model and kind, then by map

    def expect(self, model: str, calibration: Calibration) -> None:
        """A model was loaded with a calibration: forget the answers before."""
        self._maps |= {of: {} for of in self._maps if of[0] == model}
        for each in calibration.maps:
            self._maps.setdefault((model, each.kind), {})[each.name] = RecentConfidences(each.confidences)

    def record(self, model: str, kind: str, map: str, confidence: float) -> None:
        """Count an answer to which this map was applied. One of a calibration that was replaced is not counted."""
        known = self._maps.get((model, kind), {})
        if map in known:
            known[map].add(confidence)

    def remove(self, model: str) -> None:
        """Forget a model."""
        self._maps = {of: maps for of, maps in self._maps.items() if of[0] != model}

    def indexes(self) -> Mapping[tuple[str, str], float]:
        """The largest index of the maps, by model and kind of question."""
        return {
            of: max((each.stability_index for each in maps.values()), default=0.0) for of, maps in self._maps.items()
        }

"""The costs of a replica's step and of an ingress's work on a request: measured once, kept in costs.json.

A step's time is that of its rows through the weights (a curve: few rows wait for memory, many for arithmetic), and a
fixed time for each row whose logits are needed, for each key that a row attends to, and for each sequence. `measure`
fits these four to steps of the real worker.
"""

import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

KEPT = Path(__file__).parent / "costs.json"


@dataclass(frozen=True)
class Work:
    """A step in numbers."""

    rows: int  # tokens computed
    wanted: int  # of them, those whose logits are made
    looked: int  # keys that all rows together look at
    sequences: int


@dataclass(frozen=True)
class StepCosts:
    """Seconds: at `knots` rows the step takes `at`, between them in proportion."""

    knots: tuple[int, ...]
    at: tuple[float, ...]
    wanted: float
    looked: float
    sequence: float

    def of(self, rows: int, wanted: int, looked: int, sequences: int) -> float:
        return self.base(rows) + self.wanted * wanted + self.looked * looked + self.sequence * sequences

    def base(self, rows: int) -> float:
        place = min(max(bisect_right(self.knots, rows), 1), len(self.knots) - 1)
        left, right = self.knots[place - 1], self.knots[place]
        share = (rows - left) / (right - left)
        return self.at[place - 1] * (1 - share) + self.at[place] * share


@dataclass(frozen=True)
class IngressCosts:
    """Seconds of one core of an ingress, and of the way to a replica and back."""

    request: float  # taking it in, its answer's end included
    token: float  # passing one on
    hop: float  # from the ingress to a replica, or back


@dataclass(frozen=True)
class Measured:
    """What costs.json holds: `machine` and `model` say of what, `error` how well the steps are fitted."""

    machine: str
    model: str
    error: str
    step: StepCosts
    beside: float  # times as long a step takes while a replica computes on the machine's other core, too
    ingress: IngressCosts


def read(path: Path = KEPT) -> Measured:
    kept = json.loads(path.read_text("utf-8"))
    step = {name: tuple(value) if isinstance(value, list) else value for name, value in kept["step"].items()}
    return Measured(**kept | {"step": StepCosts(**step), "ingress": IngressCosts(**kept["ingress"])})


def write(measured: Measured, path: Path = KEPT) -> None:
    path.write_text(json.dumps(asdict(measured), indent=1) + "\n", "utf-8")


def flat(seconds: float, most: int) -> StepCosts:
    """A step that takes as long whatever is in it: for checks against what is known of queues."""
    return StepCosts((0, most), (seconds, seconds), 0.0, 0.0, 0.0)


def summed(steps: Sequence[Work], costs: StepCosts) -> float:
    return sum(costs.of(step.rows, step.wanted, step.looked, step.sequences) for step in steps)


def times(costs: StepCosts, factor: float) -> StepCosts:
    """Of a machine that is so much slower."""
    rest = (factor * each for each in (costs.wanted, costs.looked, costs.sequence))
    return StepCosts(costs.knots, tuple(factor * each for each in costs.at), *rest)

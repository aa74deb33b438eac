"""How long a task is trained, at which rate, and in which precision.

Knows neither networks nor data.  The one idea: everything here is a number that a recipe names; what follows from it in
a given step is computed from the step alone, so that a run that is taken up again goes on where it was.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

Schedule = Literal["linear", "inverse-sqrt", "constant"]


def linear(step: int, steps: int, rise: int) -> float:
    """Up to 1, then down towards 0."""
    return min((step + 1) / rise, max(0, steps - step) / max(1, steps - rise))


def inverse_sqrt(step: int, steps: int, rise: int) -> float:  # noqa: ARG001 - it has no end
    """Up to 1, then down as one over the root of the step (Vaswani et al. 2017, arXiv:1706.03762, section 5.3).

    Their formula, but for a factor that is the recipe's rate: theirs is (width * rise) ** -0.5.
    """
    return min((step + 1) / rise, math.sqrt(rise / (step + 1)))


def constant(step: int, steps: int, rise: int) -> float:  # noqa: ARG001
    """Up to 1, and there it stays."""
    return min((step + 1) / rise, 1.0)


SCHEDULES: Mapping[Schedule, Callable[[int, int, int], float]] = {
    "linear": linear,
    "inverse-sqrt": inverse_sqrt,
    "constant": constant,
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How a task is trained.

    `warm_up` is the share of all steps over which the rate rises to `rate`; `warm_up_steps`, if given, says how many
    they are.  A step learns from `accumulate` batches.  Training ends after `epochs`, after `steps` or `minutes` (0: no
    limit; what evaluations take is not counted), or when the figure `watch` has not got better for `patience`
    evaluations (0: it never ends so).  With `watch`, the weights with which that was best are taken.  There is an
    evaluation every `evaluate_every` steps; 0: once an epoch.
    """

    epochs: PositiveInt
    rate: float
    schedule: Schedule = "linear"
    warm_up: float = 0.06
    warm_up_steps: NonNegativeInt = 0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    clip: float = 1.0
    accumulate: PositiveInt = 1
    steps: NonNegativeInt = 0
    minutes: NonNegativeFloat = 0.0
    evaluate_every: NonNegativeInt = 0
    watch: str = ""
    better: Literal["lower", "higher"] = "lower"
    patience: NonNegativeInt = 0
    precision: Literal["float32", "bfloat16", "auto"] = "float32"

    def rate_factor(self, step: int, steps: int) -> float:
        """What the rate is multiplied by in `step` of `steps`."""
        rise = self.warm_up_steps or max(1, round(self.warm_up * steps))
        return SCHEDULES[self.schedule](step, steps, rise)

    def smoke_plan(self) -> "TrainingPlan":
        """The same in a few steps."""
        return replace(self, steps=4, minutes=0.0, accumulate=1, evaluate_every=2, warm_up_steps=1)

    def is_better(self, figure: float, best: float) -> bool:
        return figure < best if self.better == "lower" else figure > best

    def autocast(self, device: torch.device) -> torch.autocast:
        """Products in bfloat16 where they are asked for, or, with "auto", where the device is made for them.

        Weights, sums of losses and the optimizer stay float32 (Micikevicius et al. 2018, arXiv:1710.03740).
        """
        wanted = self.precision == "bfloat16" or (self.precision == "auto" and has_bfloat16(device))
        return torch.autocast(device.type, torch.bfloat16, enabled=wanted)


def has_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster there: a CPU without instructions for them is ten times as slow."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(device.type == "cpu" and torch.cpu._is_amx_tile_supported())

"""The training plan: length, learning rate and precision.

Everything in it is a number of the recipe.  The rate of a step depends on the step's number only, so a resumed run
continues with the same rates.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

Schedule = Literal["linear", "inverse-sqrt", "constant"]


def linear(step: int, steps: int, rise: int) -> float:
    """Rise to 1, then fall to 0."""
    return min((step + 1) / rise, max(0, steps - step) / max(1, steps - rise))


def inverse_sqrt(step: int, steps: int, rise: int) -> float:  # noqa: ARG001 - it has no end
    """Rise to 1, then fall with the inverse square root of the step (Vaswani et al. 2017, arXiv:1706.03762, section
    5.3).

    Their formula has the factor (width * rise) ** -0.5 where this one has the recipe's rate.
    """
    return min((step + 1) / rise, math.sqrt(rise / (step + 1)))


def constant(step: int, steps: int, rise: int) -> float:  # noqa: ARG001
    """Rise to 1 and stay."""
    return min((step + 1) / rise, 1.0)


SCHEDULES: Mapping[Schedule, Callable[[int, int, int], float]] = {
    "linear": linear,
    "inverse-sqrt": inverse_sqrt,
    "constant": constant,
}


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """How a network is trained.

    `warm_up` is the share of steps in which the rate rises to `rate`; `warm_up_steps`, if set, is their number.  A step
    uses `accumulate` batches.  Training ends after `epochs`, after `steps` or `minutes` (0: no limit; evaluations do
    not count), or when the figure `watch` has not improved for `patience` evaluations (0: never).  With `watch`, the
    weights of its best value are the result.  An evaluation is run every `evaluate_every` steps; 0: once an epoch.
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
        """Return the factor of the rate in `step` of `steps`."""
        rise = self.warm_up_steps or max(1, round(self.warm_up * steps))
        return SCHEDULES[self.schedule](step, steps, rise)

    def smoke_plan(self) -> "TrainingPlan":
        """Return the plan changed to a few steps."""
        return replace(self, steps=4, minutes=0.0, accumulate=1, evaluate_every=2, warm_up_steps=1)

    def is_better(self, figure: float, best: float) -> bool:
        return figure < best if self.better == "lower" else figure > best

    def autocast(self, device: torch.device) -> torch.autocast:
        """Return autocast to bfloat16 if the plan sets it, or, with "auto", if the device is fast with it.

        Weights, sums of losses and the optimizer stay float32 (Micikevicius et al. 2018, arXiv:1710.03740).
        """
        enabled = self.precision == "bfloat16" or (self.precision == "auto" and has_bfloat16(device))
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def has_bfloat16(device: torch.device) -> bool:
    """Whether products in bfloat16 are faster on a device: a CPU without instructions for them is ten times slower."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(device.type == "cpu" and torch.cpu._is_amx_tile_supported())

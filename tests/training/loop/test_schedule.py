"""The training plan: learning rates and autocast."""

import pytest
import torch

from polyhead.training.loop.schedule import TrainingPlan


def test_rates_follow_their_schedules() -> None:
    steps = 100
    linear = [TrainingPlan(epochs=1, rate=1, warm_up=0.1).rate_factor(step, steps) for step in (0, 9, 10, 55, 99)]
    assert linear == pytest.approx([0.1, 1.0, 1.0, 0.5, 1 / 90])
    vaswani = TrainingPlan(epochs=1, rate=1, schedule="inverse-sqrt", warm_up_steps=4000)
    width = 512
    for step in (1, 100, 4000, 16000):
        theirs = width**-0.5 * min(step**-0.5, step * 4000**-1.5)
        assert vaswani.rate_factor(step - 1, 0) * (width * 4000) ** -0.5 == pytest.approx(theirs)
    constant = TrainingPlan(epochs=1, rate=1, schedule="constant", warm_up_steps=2)
    assert [constant.rate_factor(step, steps) for step in (0, 1, 2, 99)] == [0.5, 1, 1, 1]


def test_autocast_is_used_only_if_configured() -> None:
    x = torch.ones(2, 2)
    for precision, kind in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        with TrainingPlan(epochs=1, rate=1, precision=precision).autocast(torch.device("cpu")):  # type: ignore[arg-type]
            assert (x @ x).dtype == kind

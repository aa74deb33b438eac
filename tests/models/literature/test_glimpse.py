"""Soft and hard attention: one score, two ways to look, and both find the cell that a question is about."""

from typing import Any

import pytest
import torch
from torch import Tensor

from polyhead.models.literature.glimpse import Glimpse, HardAttention, ReinforceLoss, SoftAttention
from polyhead.models.literature.score_functions import Dot, ScoreWidths
from polyhead.training.experiments.grid import (
    ATTENTIONS,
    GlimpseNetwork,
    measure_network,
    sample_questions,
    train_network,
)

ASKED = sample_questions(500, torch.Generator().manual_seed(9))
STEPS = {"soft": 110, "hard": 200}


class Fixed(Dot):
    """Scores that are given as the places' first feature."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return keys[..., 0][:, None]


def looks(kind: type[SoftAttention], odds: list[float], count: int = 1) -> Glimpse:
    places = torch.stack((torch.tensor(odds).log(), torch.arange(1.0, len(odds) + 1)), dim=1).expand(count, -1, -1)
    made = kind(Fixed(ScoreWidths(query=2, key=2)))
    seen: Glimpse = made(torch.zeros(count, 2), places, torch.ones(count, len(odds), dtype=torch.bool))
    return seen


def test_soft_sees_the_mean_and_hard_one_place() -> None:
    soft, hard = (looks(kind, [0.5, 0.3, 0.2], 4000) for kind in (SoftAttention, HardAttention))
    assert torch.allclose(soft.weights[0], torch.tensor([0.5, 0.3, 0.2]))
    assert float(soft.context[0, 1]) == pytest.approx(0.5 * 1 + 0.3 * 2 + 0.2 * 3)
    assert set(hard.weights.flatten().tolist()) == {0.0, 1.0}
    assert (hard.weights.sum(1) == 1).all()
    assert torch.equal(hard.context[:, 1], hard.weights.argmax(1) + 1.0)
    assert torch.allclose(hard.weights.mean(0), torch.tensor([0.5, 0.3, 0.2]), atol=0.05), "as often as the odds say"


def test_hard_looks_at_the_likeliest_place_once_it_has_learned() -> None:
    look = HardAttention(Fixed(ScoreWidths(query=2, key=2))).eval()
    glimpse = look(torch.zeros(50, 2), torch.randn(1, 4, 2).expand(50, -1, -1), torch.tensor([True, True, False, True]))
    assert (glimpse.weights == glimpse.weights[0]).all()
    assert torch.equal(glimpse.weights.argmax(1), glimpse.odds.argmax(1))
    assert (glimpse.weights[:, 2] == 0).all()


def gradient(reward: list[float], reinforcement: ReinforceLoss) -> list[float]:
    """By scores, of places 0 and 1 that were drawn by even odds."""
    scores = torch.zeros(2, 2, requires_grad=True)
    glimpse = Glimpse(torch.zeros(2, 1), torch.eye(2), scores.softmax(-1))
    reinforcement.loss(glimpse, torch.tensor(reward, requires_grad=True)).backward()
    assert scores.grad is not None
    return [round(number, 6) for number in scores.grad.flatten().tolist()]


def test_what_went_better_than_of_late_is_drawn_more_often() -> None:
    learning = ReinforceLoss(kept=0.5, entropy=0.0)
    assert gradient([1.0, 0.0], learning) == [-0.25, 0.25, 0.0, 0.0]
    assert learning.baseline == 0.25
    assert gradient([0.25, 0.25], learning) == [0.0] * 4, "as ever: nothing to learn"
    assert gradient([1.25, -0.75], learning) == [-0.25, 0.25, -0.25, 0.25], "the worse one less often"


def test_looking_elsewhere_is_worth_something() -> None:
    scores = torch.tensor([[2.0, 0.0]], requires_grad=True)
    learning = ReinforceLoss(entropy=0.5)
    learning.loss(Glimpse(torch.zeros(1, 1), torch.eye(2)[:1], scores.softmax(-1)), torch.zeros(1)).backward()
    assert scores.grad is not None
    assert scores.grad[0, 0] > 0 > scores.grad[0, 1]
    sure = torch.tensor([[500.0, 0.0]], requires_grad=True)
    learning.loss(Glimpse(torch.zeros(1, 1), torch.eye(2)[:1], sure.softmax(-1)), torch.ones(1)).backward()
    assert sure.grad is not None
    assert sure.grad.isfinite().all()


@pytest.mark.parametrize("look", ATTENTIONS)
def test_both_learn_to_look_where_the_answer_stands(look: Any) -> None:
    torch.manual_seed(0)
    looker = GlimpseNetwork(look)
    assert measure_network(looker, ASKED)[0] < 0.5
    train_network(looker, STEPS[look])
    right, there = measure_network(looker, ASKED)
    assert right > 0.9
    assert there > (0.6 if look == "soft" else 0.9)
    if look == "hard":
        _, glimpse = looker(ASKED)
        assert set(glimpse.weights.flatten().tolist()) == {0.0, 1.0}

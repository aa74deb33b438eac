"""Soft and hard attention over the same scores: both learn to find the cell that a question asks for."""

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

QUESTIONS = sample_questions(500, torch.Generator().manual_seed(9))
STEPS = {"soft": 110, "hard": 200}


class Fixed(Dot):
    """A score function that returns the first feature of each key."""

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        return keys[..., 0][:, None]


def glimpse_of(kind: type[SoftAttention], odds: list[float], count: int = 1) -> Glimpse:
    places = torch.stack((torch.tensor(odds).log(), torch.arange(1.0, len(odds) + 1)), dim=1).expand(count, -1, -1)
    attention = kind(Fixed(ScoreWidths(query=2, key=2)))
    seen: Glimpse = attention(torch.zeros(count, 2), places, torch.ones(count, len(odds), dtype=torch.bool))
    return seen


def test_soft_attention_averages_and_hard_attention_samples() -> None:
    soft, hard = (glimpse_of(kind, [0.5, 0.3, 0.2], 4000) for kind in (SoftAttention, HardAttention))
    assert torch.allclose(soft.weights[0], torch.tensor([0.5, 0.3, 0.2]))
    assert float(soft.context[0, 1]) == pytest.approx(0.5 * 1 + 0.3 * 2 + 0.2 * 3)
    assert set(hard.weights.flatten().tolist()) == {0.0, 1.0}
    assert (hard.weights.sum(1) == 1).all()
    assert torch.equal(hard.context[:, 1], hard.weights.argmax(1) + 1.0)
    assert torch.allclose(hard.weights.mean(0), torch.tensor([0.5, 0.3, 0.2]), atol=0.05), (
        "sampled with the given probabilities"
    )


def test_hard_attention_takes_the_most_likely_place_in_evaluation() -> None:
    look = HardAttention(Fixed(ScoreWidths(query=2, key=2))).eval()
    glimpse = look(torch.zeros(50, 2), torch.randn(1, 4, 2).expand(50, -1, -1), torch.tensor([True, True, False, True]))
    assert (glimpse.weights == glimpse.weights[0]).all()
    assert torch.equal(glimpse.weights.argmax(1), glimpse.odds.argmax(1))
    assert (glimpse.weights[:, 2] == 0).all()


def gradient(reward: list[float], reinforcement: ReinforceLoss) -> list[float]:
    """The gradient of the loss by the scores, where places 0 and 1 were drawn with even odds."""
    scores = torch.zeros(2, 2, requires_grad=True)
    glimpse = Glimpse(torch.zeros(2, 1), torch.eye(2), scores.softmax(-1))
    reinforcement.loss(glimpse, torch.tensor(reward, requires_grad=True)).backward()
    assert scores.grad is not None
    return [round(number, 6) for number in scores.grad.flatten().tolist()]


def test_rewards_above_the_moving_baseline_make_a_place_more_likely() -> None:
    loss = ReinforceLoss(kept=0.5, entropy=0.0)
    assert gradient([1.0, 0.0], loss) == [-0.25, 0.25, 0.0, 0.0]
    assert loss.baseline == 0.25
    assert gradient([0.25, 0.25], loss) == [0.0] * 4, "a reward equal to the baseline gives no gradient"
    assert gradient([1.25, -0.75], loss) == [-0.25, 0.25, -0.25, 0.25], (
        "a reward below the baseline makes a place less likely"
    )


def test_the_entropy_term_rewards_even_odds() -> None:
    scores = torch.tensor([[2.0, 0.0]], requires_grad=True)
    loss = ReinforceLoss(entropy=0.5)
    loss.loss(Glimpse(torch.zeros(1, 1), torch.eye(2)[:1], scores.softmax(-1)), torch.zeros(1)).backward()
    assert scores.grad is not None
    assert scores.grad[0, 0] > 0 > scores.grad[0, 1]
    certain = torch.tensor([[500.0, 0.0]], requires_grad=True)
    loss.loss(Glimpse(torch.zeros(1, 1), torch.eye(2)[:1], certain.softmax(-1)), torch.ones(1)).backward()
    assert certain.grad is not None
    assert certain.grad.isfinite().all()


@pytest.mark.parametrize("look", ATTENTIONS)
def test_both_learn_to_attend_to_the_answer(look: Any) -> None:
    torch.manual_seed(0)
    network = GlimpseNetwork(look)
    assert measure_network(network, QUESTIONS)[0] < 0.5
    train_network(network, STEPS[look])
    right, there = measure_network(network, QUESTIONS)
    assert right > 0.9
    assert there > (0.6 if look == "soft" else 0.9)
    if look == "hard":
        _, glimpse = network(QUESTIONS)
        assert set(glimpse.weights.flatten().tolist()) == {0.0, 1.0}

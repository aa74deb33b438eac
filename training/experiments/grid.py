"""Questions about grids of coloured cells with a digit in each: which digit is in the cell of a colour?

The answer is in one cell, so attention that finds it is enough, soft over all cells or hard on one
(models.literature.glimpse).  `python -m polyhead.training.experiments.grid` trains both.
"""

import sys
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polyhead.models.literature.glimpse import Glimpse, HardAttention, ReinforceLoss, SoftAttention
from polyhead.models.literature.score_functions import SCORE_FUNCTIONS, ScoreWidths

from ..loop.descent import descend

TEST_QUESTIONS = 1000  # questions that are measured
ATTENTIONS: dict[str, type[SoftAttention]] = {"soft": SoftAttention, "hard": HardAttention}


@dataclass(frozen=True)
class GridQuestions:
    """N grids of P cells with different colours; for each a colour, its cell, and the digit in it."""

    cells: Tensor  # [N, P, P + digits], each a colour and a digit, one-hot
    colours: Tensor  # [N, P], one-hot
    places: Tensor  # [N]
    answers: Tensor  # [N]


def sample_questions(count: int, generator: torch.Generator, cells: int = 6, digits: int = 5) -> GridQuestions:
    colours = torch.rand(count, cells, generator=generator).argsort(dim=1)
    written = torch.randint(digits, (count, cells), generator=generator)
    places = torch.randint(cells, (count,), generator=generator)
    picture = torch.cat((F.one_hot(colours, cells), F.one_hot(written, digits)), dim=-1).float()
    rows = torch.arange(count)
    return GridQuestions(picture, F.one_hot(colours[rows, places], cells).float(), places, written[rows, places])


class GlimpseNetwork(nn.Module):
    """Answers a question from one glimpse."""

    def __init__(self, look: str, cells: int = 6, digits: int = 5) -> None:
        super().__init__()
        self.look = ATTENTIONS[look](SCORE_FUNCTIONS["general"](ScoreWidths(query=cells, key=cells + digits)))
        self.answer = nn.Linear(cells + digits, digits)

    def forward(self, questions: GridQuestions) -> tuple[Tensor, Glimpse]:
        """Return scores [N, digits], and the glimpse."""
        glimpse = self.look(questions.colours, questions.cells, torch.ones(questions.cells.shape[:2], dtype=torch.bool))
        return self.answer(glimpse.context), glimpse


def train_network(network: GlimpseNetwork, steps: int, size: int = 64, seed: int = 0) -> list[float]:
    """Train on `steps` batches of `size` questions, and return the losses.  The reward of a hard glimpse is the
    log-likelihood.
    """
    generator, reinforcement = torch.Generator().manual_seed(seed), ReinforceLoss()

    def loss() -> Tensor:
        questions = sample_questions(size, generator)
        scores, glimpse = network(questions)
        each = F.cross_entropy(scores, questions.answers, reduction="none")
        return each.mean() + (reinforcement.loss(glimpse, -each) if isinstance(network.look, HardAttention) else 0.0)

    return descend(network, loss, steps, 0.03, sys.stderr.write)


@torch.no_grad()
def measure_network(network: GlimpseNetwork, questions: GridQuestions) -> tuple[float, float]:
    """Return the accuracy, and the mean attention weight on the right cell."""
    scores, glimpse = network(questions)
    right = (scores.argmax(dim=-1) == questions.answers).float().mean()
    return float(right), float(glimpse.weights.gather(1, questions.places[:, None]).mean())


def main() -> None:
    questions = sample_questions(TEST_QUESTIONS, torch.Generator().manual_seed(1))
    for look in ATTENTIONS:
        torch.manual_seed(0)
        network = GlimpseNetwork(look)
        train_network(network, 1000)
        right, weight = measure_network(network, questions)
        sys.stdout.write(f"{look}: {right:.3f} right, {weight:.3f} of the weight where the answer stands\n")


if __name__ == "__main__":
    main()

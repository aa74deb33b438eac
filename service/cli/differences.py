"""How far outputs and states of one network are from those of another, the reference, text by text: the figures of
`polyhead quality`.
"""

from dataclasses import asdict, dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from polyhead.models.quantization.divergence import Divergence


@dataclass(frozen=True)
class EncodedText:
    """The token ids of a text or a pair of texts."""

    tokens: list[int]
    segments: list[int]  # empty: all 0


@dataclass(frozen=True)
class ModelOutput:
    """What a network computes for one text: next-token logits [T, V], probabilities [N, L], or a vector [1, W].

    `predicted_labels` [N, ..] follow from probabilities; empty for other outputs.
    """

    values: Tensor
    predicted_labels: Tensor = field(default_factory=lambda: torch.empty(0))


class Comparison(Protocol):
    """Collects the outputs of two networks, text by text, and computes figures of their differences."""

    def add(self, passage: EncodedText, expected: ModelOutput, actual: ModelOutput) -> None:
        """Add the outputs of both for one text."""

    def figures(self) -> dict[str, float]:
        """Return the figures by name."""

    def table_rows(self) -> list[tuple[str, str]]:
        """Return rows of a name and formatted figures."""


class LayerErrors:
    """The relative error of each layer's output states: distance to the reference's over its norm.

    It is the mean of each token's own ratio, since a few tokens have states a hundred times as long as the others.
    """

    def __init__(self) -> None:
        self._sums, self._count = torch.zeros(0), 0

    def add(self, expected: Tensor, actual: Tensor) -> None:
        """Add states [depth, T, W] of both."""
        ratios = (actual - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
        sums = ratios.double().sum(-1)
        self._sums = sums if not self._count else self._sums + sums
        self._count += ratios.size(1)

    def means(self) -> list[float]:
        """Return the mean error of each layer, [depth]."""
        means: list[float] = (self._sums / self._count).tolist()
        return means


class NextTokenComparison:
    """Compares next-token distributions."""

    def __init__(self) -> None:
        self._divergence = Divergence()

    def add(self, passage: EncodedText, expected: ModelOutput, actual: ModelOutput) -> None:
        self._divergence.add(expected.values[:-1], actual.values[:-1], torch.tensor(passage.tokens[1:]))

    def figures(self) -> dict[str, float]:
        actual = asdict(self._divergence.figures)
        return {"predictions": actual.pop("tokens"), **actual}

    def table_rows(self) -> list[tuple[str, str]]:
        actual = self._divergence.figures
        return [
            ("KL divergence, nats", f"mean {actual.kl_mean:.5f}  p99 {actual.kl_p99:.5f}  largest {actual.kl_max:.5f}"),
            ("same most likely token", f"{actual.top1_agreement:.2%} of {actual.tokens}"),
            ("perplexity", f"{actual.perplexity:.4f}, of the reference {actual.reference_perplexity:.4f}"),
            (
                "change of log p of the next token",
                f"mean {actual.logprob_change_mean:.5f}  largest {actual.logprob_change_max:.5f}",
            ),
        ]


class LabelComparison:
    """Compares labels and their probabilities, of texts, of tokens, or of the start and end of a span."""

    def __init__(self) -> None:
        self._changes: list[Tensor] = []
        self._agreements: list[Tensor] = []

    def add(self, passage: EncodedText, expected: ModelOutput, actual: ModelOutput) -> None:  # noqa: ARG002
        self._changes.append((actual.values - expected.values).abs().flatten(1).amax(1))
        self._agreements.append((actual.predicted_labels == expected.predicted_labels).all(-1))

    def figures(self) -> dict[str, float]:
        changes, agrees = torch.cat(self._changes), torch.cat(self._agreements)
        return {
            "texts": len(self._agreements),
            "answers": len(agrees),
            "label_agreement": float(agrees.double().mean()),
            "probability_change_mean": float(changes.mean()),
            "probability_change_max": float(changes.max()),
        }

    def table_rows(self) -> list[tuple[str, str]]:
        actual = self.figures()
        mean, most = actual["probability_change_mean"], actual["probability_change_max"]
        return [
            ("same label", f"{actual['label_agreement']:.2%} of {actual['answers']}, in {actual['texts']} texts"),
            ("change of a probability", f"mean of each answer's largest {mean:.5f}  largest {most:.5f}"),
        ]


class ScoreComparison:
    """Compares one score per pair of texts: the changes, and whether two pairs are ranked alike."""

    def __init__(self) -> None:
        self._expected: list[float] = []
        self._found: list[float] = []

    def add(self, passage: EncodedText, expected: ModelOutput, actual: ModelOutput) -> None:  # noqa: ARG002
        self._expected.append(expected.values.flatten()[-1].item())
        self._found.append(actual.values.flatten()[-1].item())

    def figures(self) -> dict[str, float]:
        expected, actual = torch.tensor(self._expected), torch.tensor(self._found)
        first, second = torch.triu_indices(len(expected), len(expected), 1)
        order = [(scores[first] - scores[second]).sign() for scores in (expected, actual)]
        change = (actual - expected).abs()
        return {
            "texts": len(expected),
            "order_agreement": float((order[0] == order[1]).double().mean()),
            "score_change_mean": float(change.mean()),
            "score_change_max": float(change.max()),
        }

    def table_rows(self) -> list[tuple[str, str]]:
        actual = self.figures()
        return [
            ("same order of two pairs of texts", f"{actual['order_agreement']:.2%}, of {actual['texts']} pairs"),
            ("change of a score", f"mean {actual['score_change_mean']:.5f}  largest {actual['score_change_max']:.5f}"),
        ]


class VectorComparison:
    """Compares one vector per text."""

    def __init__(self) -> None:
        self._cosines: list[float] = []

    def add(self, passage: EncodedText, expected: ModelOutput, actual: ModelOutput) -> None:  # noqa: ARG002
        one, other = expected.values.flatten().double(), actual.values.flatten().double()
        self._cosines.append(torch.cosine_similarity(one, other, dim=0).item())

    def figures(self) -> dict[str, float]:
        cosines = torch.tensor(self._cosines, dtype=torch.float64)
        return {
            "texts": len(cosines),
            "cosine_mean": float(cosines.mean()),
            "cosine_p1": float(cosines.quantile(0.01)),
            "cosine_min": float(cosines.min()),
        }

    def table_rows(self) -> list[tuple[str, str]]:
        actual = self.figures()
        cosines = "mean {cosine_mean:.6f}  p1 {cosine_p1:.6f}  least {cosine_min:.6f}".format(**actual)
        return [("cosine with the reference's vector", f"{cosines}, of {actual['texts']} texts")]


COMPARISONS: dict[str, type[NextTokenComparison | LabelComparison | ScoreComparison | VectorComparison]] = {
    "generate": NextTokenComparison,
    "rank": ScoreComparison,
    "choose": ScoreComparison,
    "embed": VectorComparison,
}


def new_comparison(task: str) -> Comparison:
    return COMPARISONS.get(task, LabelComparison)()

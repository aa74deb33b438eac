"""Classes that are named when they are asked for: whether a text entails "This example is {class}".

Knows the logits of a classifier of pairs, no model and no HTTP.  The one idea (Yin et al. 2019, arXiv:1909.00161): one
pair of text and hypothesis for each class, and how likely the pairs are entailments, beside each other or each beside
its contradiction.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

PLACEHOLDER = "{}"


def find_entailment_label(labels: Sequence[str]) -> int | None:
    """Which of a classifier's labels says that one text follows from the other, if one does."""
    return next((index for index, label in enumerate(labels) if label.lower().startswith("entail")), None)


def fill_hypothesis(template: str, name: str) -> str:
    """The class in the template's hole."""
    return template.replace(PLACEHOLDER, name)


def class_probabilities(logits: NDArray[np.float64], entails: int, *, several: bool) -> list[float]:
    """[classes, labels] to one each: together they are 1, or, where `several` may be true, each is between 0 and 1."""
    if several or len(logits) == 1:
        contradicts = -1 if entails == 0 else 0
        return [float(share) for share in softmax(logits[:, [contradicts, entails]])[:, 1]]
    return [float(share) for share in softmax(logits[:, entails])]


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

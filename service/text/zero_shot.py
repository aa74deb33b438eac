"""Zero-shot classification: whether a text entails "This example is {class}" (Yin et al. 2019, arXiv:1909.00161).

Each class makes one pair of text and hypothesis. The entailment scores of the pairs are compared with each other, or
each with the pair's own contradiction score.
"""

import numpy as np
from numpy.typing import NDArray

PLACEHOLDER = "{}"


def fill_hypothesis(template: str, name: str) -> str:
    """Put the class name into the template."""
    return template.replace(PLACEHOLDER, name)


def class_probabilities(logits: NDArray[np.float64], entails: int, *, several: bool) -> list[float]:
    """Return the probability of each class from logits [classes, labels]. With `several`, classes are independent; else
    they sum to 1.
    """
    if several or len(logits) == 1:
        contradicts = -1 if entails == 0 else 0
        return [float(share) for share in softmax(logits[:, [contradicts, entails]])[:, 1]]
    return [float(share) for share in softmax(logits[:, entails])]


def softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    """Over the last axis."""
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

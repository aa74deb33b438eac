"""Similarity of texts that were encoded one by one: the cosine of their vectors."""

from collections.abc import Sequence

import numpy as np

from .encoder_outputs import ScoreOutput


def cosine_similarities(answers: Sequence[ScoreOutput]) -> list[float]:
    """Return the cosines of the first of N unit vectors with each of the others, [N - 1]."""
    vectors = np.array([answer.values for answer in answers], dtype=np.float32)
    found: list[float] = (vectors[1:] @ vectors[0]).tolist()
    return found

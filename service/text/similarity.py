"""Similarity of texts that were encoded one by one: the cosine of their vectors, or of the vectors of their tokens."""

from collections.abc import Sequence

import numpy as np

from polyhead.models.core.late_interaction import LateInteraction

from .encoder_outputs import ScoreOutput, TokenVectors


def cosine_similarities(answers: Sequence[ScoreOutput]) -> list[float]:
    """Return the cosines of the first of N unit vectors with each of the others, [N - 1]."""
    vectors = np.array([answer.values for answer in answers], dtype=np.float32)
    found: list[float] = (vectors[1:] @ vectors[0]).tolist()
    return found


def late_similarities(late: LateInteraction, answers: Sequence[TokenVectors]) -> list[float]:
    """Return the scores of N - 1 documents for a query, which is the first answer: for each vector of the query the
    largest product with a vector of the document, summed or averaged (MaxSim).
    """
    query, *documents = (np.asarray(answer.rows) for answer in answers)
    largest = [(query @ document.T).max(axis=1) for document in documents]  # [Q] each
    return [float(found.mean() if late.averages else found.sum()) for found in largest]

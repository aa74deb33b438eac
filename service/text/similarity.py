"""Similarity of texts that were encoded one by one: the cosine of their vectors, or of the vectors of their tokens."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from polyhead.models.core.late_interaction import LateInteraction

from .encoder_outputs import ScoreOutput, TokenVectors

QUERY_ROWS = 128  # vectors of a query that are compared with a document at a time


def cosine_similarities(query: ScoreOutput, others: Sequence[ScoreOutput]) -> list[float]:
    """Return the cosines of a unit vector with each of N others, [N]."""
    vector = np.asarray(query.values, np.float32)
    return [float(np.asarray(other.values, np.float32) @ vector) for other in others]


def late_similarities(late: LateInteraction, query: TokenVectors, documents: Sequence[TokenVectors]) -> list[float]:
    """Return the scores of N documents for a query: for each vector of the query the largest product with a vector of
    the document, summed or averaged (MaxSim).
    """
    largest = [largest_products(np.asarray(query.rows), np.asarray(document.rows)) for document in documents]
    return [float(found.mean() if late.averages else found.sum()) for found in largest]


def largest_products(query: NDArray[np.float32], document: NDArray[np.float32]) -> NDArray[np.float32]:
    """[Q, W] and [D, W] to [Q]."""
    starts = range(0, len(query), QUERY_ROWS)
    return np.concatenate([largest_of(query[start : start + QUERY_ROWS] @ document.T) for start in starts])


def largest_of(products: NDArray[np.float32]) -> NDArray[np.float32]:
    """[Q, D] to [Q]."""
    return np.asarray(products.max(axis=1))

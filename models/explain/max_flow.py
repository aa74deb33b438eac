"""Attention through all layers at once: what a row of the last one has of each token (Abnar and Zuidema 2020,
arXiv:2005.00928).

Knows no network and no torch: matrices in, a matrix out, in any thread.  The one idea, theirs: a layer hands on half of
what it mixes and half of what was there, so that layers make a graph of pipes from rows down to tokens.  The extra
`explain` brings scipy, which finds how much can flow through it; rollout needs none.
"""

from collections.abc import Generator
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UnsupportedError

HAS_SCIPY = find_spec("scipy") is not None
if HAS_SCIPY:
    import scipy  # its parts are imported when they are first named

Floats = NDArray[np.float32]
FULL_CAPACITY = (
    1 << 28
)  # capacities are multiples of one part in so many; what leaves a row, the whole, is an int32 still
FLOWS_BETWEEN_YIELDS = 8  # flows after which others may compute


def layer_shares(weights: Floats) -> NDArray[np.float64]:
    """[L, Q, Q] means over heads to shares that add up to one in each row, what goes straight on added."""
    mixed = weights.astype(np.float64) / 2 + np.eye(weights.shape[-1]) / 2
    shares: NDArray[np.float64] = mixed / mixed.sum(axis=-1, keepdims=True)
    return shares


def rollout(weights: Floats) -> Floats:
    """[L, Q, Q] means over heads, the first layer's first, to [Q, Q]: shares along all ways added up."""
    shares = layer_shares(weights)
    through = shares[0]
    for layer in shares[1:]:
        through = layer @ through
    found: Floats = through.astype(np.float32)
    return found


def maximum_flows(weights: Floats) -> Generator[None, None, Floats]:
    """[L, Q, Q] means over heads to [Q, Q]: how much of each token alone could flow up to each row, as shares that add
    up to one in each row.

    Exact but for rounding: a capacity is off by 2^-29 at most, so a flow by that times the pipes of its narrowest cut.
    It takes Q^2 flows through some L Q^2 pipes, and yields after each few.
    """
    if not HAS_SCIPY:
        message = "attention_flow needs an extra: pip install 'polyhead[explain]'; attention_rollout needs none"
        raise UnsupportedError(message)
    shares, reached = layer_shares(weights), rollout(weights) > 0
    found = np.zeros(reached.shape)
    for row, seen in enumerate(map(np.flatnonzero, reached)):
        network = build_flow_graph(shares[:, seen[:, None], seen], int(np.searchsorted(seen, row)))
        for count, token in enumerate(seen.tolist()):
            found[row, token] = scipy.sparse.csgraph.maximum_flow(network, network.shape[0] - 1, count).flow_value
            if count % FLOWS_BETWEEN_YIELDS == 0:
                yield
    whole: Floats = (found / found.sum(axis=1, keepdims=True)).astype(np.float32)
    return whole


def build_flow_graph(shares: NDArray[np.float64], row: int) -> "scipy.sparse.csr_array":
    """Of [L, n, n] shares: n tokens, n rows a layer but the last, and of that one the row, as the last node.

    A row sees all that a row sees that it sees, so those n are the same in all layers.
    """
    layers, size, _ = shares.shape
    ways = np.concatenate([shares[:-1].reshape(-1, size), shares[-1:, row]])  # out of each node that is no token
    below = np.arange(len(ways))[:, None] // size * size + np.arange(size)
    ends = np.concatenate([np.zeros(size, np.int32), np.arange(len(ways) + 1, dtype=np.int32) * size])
    capacities = np.rint(ways * FULL_CAPACITY).astype(np.int32)
    found = scipy.sparse.csr_array((capacities.ravel(), below.ravel().astype(np.int32), ends), (layers * size + 1,) * 2)
    found.eliminate_zeros()
    return found

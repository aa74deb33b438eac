"""Attention over all layers: rollout and maximum flow (Abnar and Zuidema 2020, arXiv:2005.00928).

Each layer passes on half of what attention mixes and half of its input, so the layers form a graph from the last rows
down to the tokens. Maximum flow needs scipy, which the extra `explain` installs; rollout does not.
"""

from collections.abc import Generator
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray

from ..core.errors import UnsupportedError
from .explain_types import Share

HAS_SCIPY = find_spec("scipy") is not None
if HAS_SCIPY:
    import scipy  # its submodules are imported at their first use

Floats = NDArray[np.float32]
FULL_CAPACITY = 1 << 28  # the capacity of a whole row; capacities are integers, and this one still fits an int32
FLOWS_BETWEEN_YIELDS = 8  # flows computed between two yields


def layer_shares(weights: Floats) -> NDArray[np.float64]:
    """[L, Q, Q] shares from the mean weights [L, Q, Q]: half attention, half residual; each row sums to one."""
    mixed = weights.astype(np.float64) / 2 + np.eye(weights.shape[-1]) / 2
    shares: NDArray[np.float64] = mixed / mixed.sum(axis=-1, keepdims=True)
    return shares


def rollout(weights: Floats) -> Floats:
    """[Q, Q] the products of the shares of all layers, from mean weights [L, Q, Q], the first layer first."""
    shares = layer_shares(weights)
    through = shares[0]
    for layer in shares[1:]:
        through = layer @ through
    found: Floats = through.astype(np.float32)
    return found


def maximum_flows(weights: Floats) -> Generator[Share, None, Floats]:
    """[Q, Q] the maximum flow from each row to each token, from mean weights [L, Q, Q], scaled so that each row sums to
    one.

    It is exact up to rounding: a capacity is off by 2^-29 at most, and a flow by that times the edges of its minimum
    cut. There are Q^2 flows through about L Q^2 edges each; it yields after every few flows,
    with the share of them that is done.
    """
    if not HAS_SCIPY:
        message = "attention_flow needs an extra: pip install 'polyhead[explain]'; attention_rollout needs none"
        raise UnsupportedError(message)
    shares, reached = layer_shares(weights), rollout(weights) > 0
    found, done = np.zeros(reached.shape), 0
    for row, seen in enumerate(map(np.flatnonzero, reached)):
        network = build_flow_graph(shares[:, seen[:, None], seen], int(np.searchsorted(seen, row)))
        for count, token in enumerate(seen.tolist()):
            found[row, token] = scipy.sparse.csgraph.maximum_flow(network, network.shape[0] - 1, count).flow_value
            done += 1
            if count % FLOWS_BETWEEN_YIELDS == 0:
                yield done / int(reached.sum())
    whole: Floats = (found / found.sum(axis=1, keepdims=True)).astype(np.float32)
    return whole


def build_flow_graph(shares: NDArray[np.float64], row: int) -> "scipy.sparse.csr_array":
    """The flow graph of [L, n, n] shares: n nodes for the tokens, n for each layer but the last, and the row as the
    last node.

    A row sees everything that the rows it sees can see, so the n nodes are the same in all layers.
    """
    layers, size, _ = shares.shape
    # The edges out of each node that is no token.
    ways = np.concatenate([shares[:-1].reshape(-1, size), shares[-1:, row]])
    below = np.arange(len(ways))[:, None] // size * size + np.arange(size)
    ends = np.concatenate([np.zeros(size, np.int32), np.arange(len(ways) + 1, dtype=np.int32) * size])
    capacities = np.rint(ways * FULL_CAPACITY).astype(np.int32)
    found = scipy.sparse.csr_array((capacities.ravel(), below.ravel().astype(np.int32), ends), (layers * size + 1,) * 2)
    found.eliminate_zeros()
    return found

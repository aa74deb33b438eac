"""Measures how much two models' next-token distributions differ over the same tokens, from their logits. The reference
is called p, the other q; all figures are in nats."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROWS_AT_ONCE = 64  # rows of log-probabilities in memory at once: a vocabulary may be large
TAIL_QUANTILE = 0.99  # the quantile reported beside the mean and the maximum


@dataclass(frozen=True)
class DivergenceFigures:
    """The result of a Divergence. `logprob` figures are of the tokens that actually followed."""

    tokens: int
    kl_mean: float  # nats
    kl_p99: float
    kl_max: float
    top1_agreement: float  # fraction of rows with the same largest logit
    perplexity: float
    reference_perplexity: float
    logprob_change_mean: float  # |log q - log p|
    logprob_change_max: float


@dataclass
class Divergence:
    """Accumulates windows of logits: `add` those of both models, then read `figures`.

    The Kullback-Leibler divergence KL(p || q) is computed over the whole vocabulary, row by row.
    """

    _kl: list[Tensor] = field(default_factory=list)  # each [T] float64
    _agrees: list[Tensor] = field(default_factory=list)  # each [T] bool
    _reference_logprobs: list[Tensor] = field(default_factory=list)  # each [T], log p of the following tokens
    _other_logprobs: list[Tensor] = field(default_factory=list)  # the same of q

    def add(self, reference: Tensor, other: Tensor, following: Tensor) -> None:
        """`reference` and `other` are [T, V] logits, `following` the [T] tokens after them."""
        assert reference.shape == other.shape
        assert following.shape == reference.shape[:1]
        for start in range(0, len(following), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            self._add(reference[rows], other[rows], following[rows])

    def _add(self, reference: Tensor, other: Tensor, following: Tensor) -> None:
        log_p, log_q = reference.float().log_softmax(-1), other.float().log_softmax(-1)
        # Rounding may make a sum that should be zero slightly negative.
        self._kl.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).clamp(min=0))
        self._agrees.append(reference.argmax(-1) == other.argmax(-1))
        for kept, log in ((self._reference_logprobs, log_p), (self._other_logprobs, log_q)):
            kept.append(log.gather(1, following[:, None])[:, 0].double())

    @property
    def tokens(self) -> int:
        """The number of rows added."""
        return sum(map(len, self._kl))

    @property
    def figures(self) -> DivergenceFigures:
        """The figures of all rows added so far; there must be at least one."""
        kl, expected, found = (torch.cat(each) for each in (self._kl, self._reference_logprobs, self._other_logprobs))
        change = (found - expected).abs()
        return DivergenceFigures(
            tokens=len(kl),
            kl_mean=float(kl.mean()),
            kl_p99=float(kl.quantile(TAIL_QUANTILE)),
            kl_max=float(kl.max()),
            top1_agreement=float(torch.cat(self._agrees).double().mean()),
            perplexity=perplexity(found),
            reference_perplexity=perplexity(expected),
            logprob_change_mean=float(change.mean()),
            logprob_change_max=float(change.max()),
        )


def perplexity(logprobs: Tensor) -> float:
    """The perplexity of [T] log-probabilities of the following tokens; infinite if it does not fit a float."""
    nats = -float(logprobs.mean())
    return math.exp(nats) if nats < math.log(torch.finfo(torch.float64).max) else math.inf

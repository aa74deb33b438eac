"""How far one model's next-token distributions are from another's, over the same tokens.

Knows logits only, not what computed them.  The reference is called p, the other q; all figures are in nats.
"""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

ROWS_AT_ONCE = 64  # of which log-probabilities are held at once: a vocabulary may be large
TAIL_QUANTILE = 0.99  # the quantile that is reported beside the mean and the largest


@dataclass(frozen=True)
class DivergenceFigures:
    """What a Divergence comes to.  `logprob` figures are of the tokens that did follow."""

    tokens: int
    kl_mean: float  # nats
    kl_p99: float
    kl_max: float
    top1_agreement: float  # share of rows whose largest logit is the same
    perplexity: float
    reference_perplexity: float
    logprob_change_mean: float  # |log q - log p|
    logprob_change_max: float


@dataclass
class Divergence:
    """Grows window by window: `add` the logits of both, then read `figures`.

    The Kullback-Leibler divergence KL(p || q) is taken over the whole vocabulary, row by row.
    """

    _kl: list[Tensor] = field(default_factory=list)  # each [T] float64
    _agrees: list[Tensor] = field(default_factory=list)  # each [T] bool
    _reference_logprobs: list[Tensor] = field(default_factory=list)  # each [T], log p of the tokens that followed
    _other_logprobs: list[Tensor] = field(default_factory=list)  # the same of q

    def add(self, reference: Tensor, other: Tensor, following: Tensor) -> None:
        """`reference` and `other` are [T, V] logits, before the [T] tokens that followed."""
        assert reference.shape == other.shape
        assert following.shape == reference.shape[:1]
        for start in range(0, len(following), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            self._add(reference[rows], other[rows], following[rows])

    def _add(self, reference: Tensor, other: Tensor, following: Tensor) -> None:
        log_p, log_q = reference.float().log_softmax(-1), other.float().log_softmax(-1)
        # Rounding may leave a sum that should be zero a little below it.
        self._kl.append((log_p.exp() * (log_p - log_q)).sum(-1, dtype=torch.float64).clamp(min=0))
        self._agrees.append(reference.argmax(-1) == other.argmax(-1))
        for kept, log in ((self._reference_logprobs, log_p), (self._other_logprobs, log_q)):
            kept.append(log.gather(1, following[:, None])[:, 0].double())

    @property
    def tokens(self) -> int:
        """How many rows were added."""
        return sum(map(len, self._kl))

    @property
    def figures(self) -> DivergenceFigures:
        """Of all rows added so far; there must be one."""
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
    """Of [T] log-probabilities of the tokens that followed; infinite where the number has no room."""
    nats = -float(logprobs.mean())
    return math.exp(nats) if nats < math.log(torch.finfo(torch.float64).max) else math.inf

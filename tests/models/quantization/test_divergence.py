"""Kullback-Leibler divergence and perplexity equal values that were computed by hand."""

import math

import pytest
import torch

from polyhead.models.quantization.divergence import Divergence

P = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]])
Q = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.8, 0.1]])
FOLLOWING = torch.tensor([0, 1])


def test_figures_equal_values_computed_by_hand() -> None:
    divergence = Divergence()
    divergence.add(P.log() + 3.0, Q.log() - 1.0, FOLLOWING)  # a constant added to logits changes nothing
    found = divergence.figures
    kl = 0.5 * math.log(2) - 0.25 * math.log(2)  # of the first row; the second is the same in both
    assert found.tokens == divergence.tokens == 2
    assert found.kl_mean == pytest.approx(kl / 2, abs=1e-6)
    assert found.kl_max == pytest.approx(kl, abs=1e-6)
    assert found.kl_p99 == pytest.approx(0.99 * kl, abs=1e-6)
    assert found.top1_agreement == 0.5
    assert found.reference_perplexity == pytest.approx((0.5 * 0.8) ** -0.5, abs=1e-5)
    assert found.perplexity == pytest.approx((0.25 * 0.8) ** -0.5, abs=1e-5)
    assert found.logprob_change_mean == pytest.approx(math.log(2) / 2, abs=1e-6)
    assert found.logprob_change_max == pytest.approx(math.log(2), abs=1e-6)


def test_the_divergence_is_from_the_reference_to_the_other() -> None:
    forward, backward = Divergence(), Divergence()
    one, other = torch.tensor([[0.9, 0.1]]).log(), torch.tensor([[0.5, 0.5]]).log()
    forward.add(one, other, torch.tensor([0]))
    backward.add(other, one, torch.tensor([0]))
    assert forward.figures.kl_mean == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2), abs=1e-6)
    assert backward.figures.kl_mean == pytest.approx(0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(5), abs=1e-6)


def test_figures_of_windows_equal_those_of_the_full_text() -> None:
    torch.manual_seed(0)
    p, q, next_tokens = torch.randn(150, 40), torch.randn(150, 40), torch.randint(40, (150,))
    full, parts = Divergence(), Divergence()
    full.add(p, q, next_tokens)
    for rows in (slice(0, 1), slice(1, 90), slice(90, 150)):
        parts.add(p[rows], q[rows], next_tokens[rows])
    assert full.figures == parts.figures


def test_equal_logits_have_no_divergence() -> None:
    torch.manual_seed(0)
    logits = torch.randn(100, 1000) * 10
    divergence = Divergence()
    divergence.add(logits, logits.clone(), torch.zeros(100, dtype=torch.int64))
    found = divergence.figures
    assert (found.kl_mean, found.kl_p99, found.kl_max, found.logprob_change_max) == (0, 0, 0, 0)
    assert found.top1_agreement == 1
    assert found.perplexity == found.reference_perplexity


def test_a_perplexity_may_be_infinite() -> None:
    divergence = Divergence()
    divergence.add(torch.tensor([[0.0, 2000.0]]), torch.tensor([[0.0, 2000.0]]), torch.tensor([0]))
    assert divergence.figures.perplexity == math.inf

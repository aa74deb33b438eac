"""Sampling equals transformers' in distribution, is exact where it is greedy, and never depends on the batch."""

import random

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from service.engine import sampler
from service.engine.sampler import finite, sample, score
from service.request import Sampling

DRAWS = 2000


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] transformers would draw from."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    scores: Tensor = warpers(torch.zeros(1, 0, dtype=torch.long), logits[None].double())
    return scores.softmax(dim=-1)[0]


def drawn(logits: Tensor, sampling: Sampling, draws: int = DRAWS) -> Tensor:
    """The distribution [V] drawn from, with evenly spread uniforms: true to 1 / draws in every word."""
    uniforms = [(index + 0.5) / draws for index in range(draws)]
    tokens = sample(logits.expand(draws, -1), [sampling] * draws, uniforms)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)) / draws


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.3),
        Sampling(temperature=2.5),
        Sampling(top_k=1),
        Sampling(top_k=7),
        Sampling(top_k=7, temperature=1.7),
        Sampling(top_k=10_000),
        Sampling(top_p=0.1),
        Sampling(top_p=0.9),
        Sampling(top_p=0.999, temperature=3.0),
        Sampling(min_p=0.2),
        Sampling(min_p=1.0),
        Sampling(top_k=40, top_p=0.8),
        Sampling(top_k=40, min_p=0.1),
        Sampling(top_p=0.7, min_p=0.15, temperature=1.5),
        Sampling(top_k=30, top_p=0.9, min_p=0.05, temperature=0.8),
    ],
)
@pytest.mark.parametrize("words", [11, 128, 700])
def test_the_distribution_is_that_of_transformers(words: int, sampling: Sampling) -> None:
    logits = torch.randn(words, generator=torch.Generator().manual_seed(words)) * 2
    wanted = reference(logits, sampling)
    found = drawn(logits, sampling)
    assert float((found - wanted).abs().max()) <= 2 / DRAWS
    assert not found[wanted == 0].any(), "a word that was cut off"


@pytest.mark.parametrize("sampling", [Sampling(top_p=0.97), Sampling(top_k=600), Sampling(top_k=600, top_p=0.9)])
def test_a_cut_beyond_the_candidates_sorts_more(monkeypatch: pytest.MonkeyPatch, sampling: Sampling) -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = drawn(logits, sampling, 500)
    monkeypatch.setattr(sampler, "CANDIDATES", (4, 32))
    assert torch.equal(drawn(logits, sampling, 500), whole)
    assert float((whole - reference(logits, sampling)).abs().max()) <= 2 / 500


def test_words_as_likely_as_the_last_of_top_k_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    wanted = reference(logits, Sampling(top_k=2))
    assert (wanted > 0).sum() == 4
    assert float((drawn(logits, Sampling(top_k=2)) - wanted).abs().max()) <= 2 / DRAWS
    flat = torch.zeros(300)
    assert len(set(sample(flat.expand(600, -1), [Sampling(top_k=2)] * 600, [i / 600 for i in range(600)]))) == 300


@pytest.mark.parametrize("words", [1000, 16384, 20_001])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_top_is_topk(words: int, count: int) -> None:
    logits = torch.randperm(3 * words, generator=torch.Generator().manual_seed(count)).view(3, words).float()
    logits[1, -1] = 1e6  # in a block that is short
    values, columns = sampler._top(logits, count)
    wanted = logits.topk(count)
    assert torch.equal(values, wanted.values)
    assert torch.equal(columns, wanted.indices)
    flat = sampler._top(torch.zeros(2, words), count)[1]
    assert all(len(set(row)) == count for row in flat.tolist()), "a column twice"


@pytest.mark.parametrize("words", [1, 2, 63, 64, 65, 1000])
def test_greedy_is_the_first_of_the_largest(words: int) -> None:
    logits = torch.randint(0, 4, (50, words), generator=torch.Generator().manual_seed(words)).float()
    tokens = sample(logits, [Sampling(temperature=0)] * 50, [0.0] * 50)
    assert tokens == [row.index(max(row)) for row in logits.tolist()]
    assert tokens == logits.argmax(dim=1).tolist()


def test_the_ends_of_the_unit_interval_draw_no_impossible_word() -> None:
    logits = torch.full((1, 600), -200.0)
    logits[0, 17] = 0.0
    samplings = [Sampling(), Sampling(top_p=0.5), Sampling(min_p=0.1), Sampling(top_k=3), Sampling(top_p=0.0)]
    for sampling in samplings:
        for uniform in (0.0, 1 - 2**-53, 0.5):
            assert sample(logits, [sampling], [uniform]) == [17]


def test_a_temperature_near_zero_is_finite() -> None:
    logits = torch.tensor([[1.0, 500.0, 499.0]])
    for temperature in (1e-3, 1e-8, 1e-300):
        assert sample(logits, [Sampling(temperature=temperature)], [0.999]) == [1]
        assert sample(logits, [Sampling(temperature=temperature, top_p=0.9)], [0.999]) == [1]


def test_a_row_is_drawn_as_if_it_were_alone() -> None:
    choice = random.Random(0)
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(0)) * 3
    samplings = [
        Sampling(
            temperature=choice.choice([0.0, 0.5, 1.0, 1.5]),
            top_k=choice.choice([0, 0, 5, 500]),
            top_p=choice.choice([1.0, 0.5, 0.999]),
            min_p=choice.choice([0.0, 0.1]),
        )
        for _ in range(64)
    ]
    uniforms = [choice.random() for _ in range(64)]
    together = sample(logits, samplings, uniforms)
    alone = [sample(logits[row : row + 1], samplings[row : row + 1], uniforms[row : row + 1])[0] for row in range(64)]
    assert together == alone
    assert len(set(together)) > 20


def test_a_row_is_scored_as_if_it_were_alone() -> None:
    """Ties, of which half precision makes many, come in the same order however many others ask for."""
    choice = random.Random(0)
    logits = (torch.randn(64, 3000, generator=torch.Generator().manual_seed(0)) * 3).to(torch.bfloat16).float()
    counts = [choice.choice([-1, 0, 1, 5, 20]) for _ in range(64)]
    tokens = [choice.randrange(3000) for _ in range(64)]
    together = score(logits, tokens, counts)
    alone = [score(logits[row : row + 1], tokens[row : row + 1], counts[row : row + 1])[0] for row in range(64)]
    assert together == alone


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    scores = score(logits, [3, 4, 5, 6, 7], [-1, 0, 2, 5, 100])
    wanted = logits.log_softmax(dim=-1)
    assert scores[0] == (0.0, ())
    for row, count in ((1, 0), (2, 2), (3, 5), (4, 40)):
        logprob, top = scores[row]
        assert logprob == pytest.approx(float(wanted[row, row + 3]), abs=1e-6)
        assert len(top) == count
        assert [token for token, _ in top] == wanted[row].argsort(descending=True)[:count].tolist()
        assert [value for _, value in top] == pytest.approx(wanted[row].sort(descending=True).values[:count].tolist())
    assert score(logits, [0] * 5, [-1] * 5) == [(0.0, ())] * 5


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_finds_the_rows_that_are_not(bad: float) -> None:
    logits = torch.randn(4, 1000)
    logits[1, 999] = bad
    logits[3, 0], logits[3, 1] = float("inf"), float("-inf")
    assert finite(logits) == [True, False, True, False]
    assert finite(torch.empty(0, 10)) == []

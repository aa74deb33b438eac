"""Sampling equals transformers' in distribution, is exact where it is greedy, and never depends on the batch.

Tested with torch, which sorts, and with the compiled code of each instruction set of this machine."""

import random
from functools import cache

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from polyhead.models.native.library import runnable_targets
from polyhead.service.core.request import Sampling
from polyhead.service.engine import sampler
from polyhead.service.engine.native_sampling import CompiledSampler
from polyhead.service.engine.sampler import Sampler, SampleRow, TorchSampler, finite_rows, score_targets, score_tokens

DRAWS = 1000
IMPLEMENTATIONS = ["torch", *runnable_targets()]
by_all = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@cache
def sampler_by(implementation: str) -> Sampler:
    return TorchSampler() if implementation == "torch" else CompiledSampler(implementation, 2)


def sample(logits: Tensor, samplings: list[Sampling], uniforms: list[float], implementation: str) -> list[int]:
    asks = [SampleRow(row, way, uniform) for row, (way, uniform) in enumerate(zip(samplings, uniforms, strict=True))]
    return [token for token, _ in sampler_by(implementation).sample(logits, asks)]


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] from which transformers would sample."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.typical_p < 1:
        warpers.append(TypicalLogitsWarper(sampling.typical_p))
    scores: Tensor = warpers(torch.zeros(1, 0, dtype=torch.long), logits[None].double())
    return scores.softmax(dim=-1)[0]


def drawn(logits: Tensor, sampling: Sampling, implementation: str, draws: int = DRAWS) -> Tensor:
    """The sampled distribution [V], with evenly spread uniforms."""
    asks = [SampleRow(0, sampling, uniform) for uniform in spread(draws)]
    return shares([token for token, _ in sampler_by(implementation).sample(logits[None], asks)], len(logits))


def spread(draws: int) -> list[float]:
    return [(index + 0.5) / draws for index in range(draws)]


def shares(tokens: list[int], words: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=words) / len(tokens)


def close(found: Tensor, wanted: Tensor, draws: int = DRAWS) -> bool:
    """Tokens that are sampled again because one was cut off come at random: within five standard deviations."""
    return bool(((found - wanted).abs() <= 2 / draws + 5 * (wanted * (1 - wanted) / draws).sqrt()).all())


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
        Sampling(typical_p=0.2),
        Sampling(typical_p=0.9, temperature=0.4),
        Sampling(typical_p=0.5, top_p=0.8),
        Sampling(typical_p=0.95, top_k=30, top_p=0.9, min_p=0.02),
    ],
)
@pytest.mark.parametrize("words", [11, 128, 700])
def test_the_distribution_is_that_of_transformers(words: int, sampling: Sampling) -> None:
    logits = torch.randn(words, generator=torch.Generator().manual_seed(words)) * 2
    wanted = reference(logits, sampling)
    for implementation in IMPLEMENTATIONS:
        found = drawn(logits, sampling, implementation)
        assert close(found, wanted)
        if implementation == "torch" or sampling.top_p == sampling.typical_p == 1:  # nothing is sampled again
            assert float((found - wanted).abs().max()) <= 2 / DRAWS
        assert not found[wanted == 0].any(), "a token that was cut off was sampled"
        assert found[wanted > 0.02].all(), "a token that was not cut off was not sampled"


@by_all
def test_tokens_tied_with_the_last_of_top_k_stay(implementation: str) -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    wanted = reference(logits, Sampling(top_k=2))
    assert (wanted > 0).sum() == 4
    assert close(drawn(logits, Sampling(top_k=2), implementation), wanted)
    assert (drawn(torch.zeros(300), Sampling(top_k=2), implementation, 600) > 0).all()


@pytest.mark.parametrize("words", [1000, 16384, 20_001])
@pytest.mark.parametrize("count", [1, 5, 64])
def test_top_is_topk(words: int, count: int) -> None:
    logits = torch.randperm(3 * words, generator=torch.Generator().manual_seed(count)).view(3, words).float()
    logits[1, -1] = 1e6  # the last block is short
    values, columns = sampler._top_k(logits, count)
    wanted = logits.topk(count)
    assert torch.equal(values, wanted.values)
    assert torch.equal(columns, wanted.indices)
    flat = sampler._top_k(torch.zeros(2, words), count)[1]
    assert all(len(set(row)) == count for row in flat.tolist()), "a column twice"


@by_all
@pytest.mark.parametrize("words", [1, 2, 63, 64, 65, 1000])
def test_greedy_is_the_first_of_the_largest(words: int, implementation: str) -> None:
    logits = torch.randint(0, 4, (50, words), generator=torch.Generator().manual_seed(words)).float()
    tokens = sample(logits, [Sampling(temperature=0)] * 50, [0.0] * 50, implementation)
    assert tokens == [row.index(max(row)) for row in logits.tolist()]
    assert tokens == logits.argmax(dim=1).tolist()


@by_all
def test_uniforms_of_0_and_almost_1_sample_no_impossible_token(implementation: str) -> None:
    logits = torch.full((1, 600), -200.0)
    logits[0, 17] = 0.0
    samplings = [Sampling(), Sampling(top_p=0.5), Sampling(min_p=0.1), Sampling(top_k=3), Sampling(top_p=0.0)]
    for sampling in samplings:
        for uniform in (0.0, 1 - 2**-53, 0.5):
            assert sample(logits, [sampling], [uniform], implementation) == [17]


@by_all
def test_a_temperature_near_zero_is_finite(implementation: str) -> None:
    logits = torch.tensor([[1.0, 500.0, 499.0]])
    for temperature in (1e-3, 1e-8, 1e-300):
        assert sample(logits, [Sampling(temperature=temperature)], [0.999], implementation) == [1]
        assert sample(logits, [Sampling(temperature=temperature, top_p=0.9)], [0.999], implementation) == [1]


@by_all
def test_a_sampled_row_does_not_depend_on_the_other_rows(implementation: str) -> None:
    choice = random.Random(0)
    logits = torch.randn(64, 3000, generator=torch.Generator().manual_seed(0)) * 3
    samplings = [
        Sampling(
            temperature=choice.choice([0.0, 0.5, 1.0, 1.5]),
            top_k=choice.choice([0, 0, 5, 500]),
            top_p=choice.choice([1.0, 0.5, 0.999]),
            min_p=choice.choice([0.0, 0.1]),
            typical_p=choice.choice([1.0, 1.0, 0.5]),
        )
        for _ in range(64)
    ]
    uniforms = [choice.random() for _ in range(64)]
    together = sample(logits, samplings, uniforms, implementation)
    alone = [
        sample(logits[row : row + 1], samplings[row : row + 1], uniforms[row : row + 1], implementation)[0]
        for row in range(64)
    ]
    assert together == alone
    assert len(set(together)) > 20


def test_a_scored_row_does_not_depend_on_the_other_rows() -> None:
    """Ties, of which half precision has many, come in the same order, however many tokens other requests want."""
    choice = random.Random(0)
    logits = (torch.randn(64, 3000, generator=torch.Generator().manual_seed(0)) * 3).to(torch.bfloat16).float()
    counts = [choice.choice([-1, 0, 1, 5, 20]) for _ in range(64)]
    tokens = [choice.randrange(3000) for _ in range(64)]
    together = score_tokens(logits, tokens, counts)
    alone = [score_tokens(logits[row : row + 1], tokens[row : row + 1], counts[row : row + 1])[0] for row in range(64)]
    assert together == alone


def test_logprobs_are_of_the_raw_logits() -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    scores = score_tokens(logits, [3, 4, 5, 6, 7], [-1, 0, 2, 5, 100])
    wanted = logits.log_softmax(dim=-1)
    assert scores[0] == (0.0, ())
    for row, count in ((1, 0), (2, 2), (3, 5), (4, 40)):
        logprob, top = scores[row]
        assert logprob == pytest.approx(float(wanted[row, row + 3]), abs=1e-6)
        assert len(top) == count
        assert [token for token, _ in top] == wanted[row].argsort(descending=True)[:count].tolist()
        assert [value for _, value in top] == pytest.approx(wanted[row].sort(descending=True).values[:count].tolist())
    assert score_tokens(logits, [0] * 5, [-1] * 5) == [(0.0, ())] * 5
    assert score_tokens(logits, [-1, 4, 5, 6, -1], [5, 0, 2, 5, 0]) == [(0.0, ()), *scores[1:4], (0.0, ())]


def test_targets_are_scored_whatever_their_rank() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5))
    expected = logits.log_softmax(dim=-1).tolist()
    score, targets = score_targets(logits, 7, (39, 0, 7, 39))
    assert score == expected[7]
    assert targets == tuple((token, expected[token]) for token in (39, 0, 7, 39))
    assert score_targets(logits, -1, (1,)) == (0.0, ())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_finds_the_rows_that_are_not(bad: float) -> None:
    logits = torch.randn(4, 1000)
    logits[1, 999] = bad
    logits[3, 0], logits[3, 1] = float("inf"), float("-inf")
    assert finite_rows(logits) == [True, False, True, False]
    assert finite_rows(torch.empty(0, 10)) == []


@by_all
def test_only_allowed_tokens_are_sampled(implementation: str) -> None:
    """As a grammar leaves it: minus infinity nearly everywhere, in every way of sampling."""
    choice = random.Random(0)
    ways = [Sampling(temperature=t, **how) for t in (0, 0.1, 0.7, 1) for how in HOW]  # type: ignore[arg-type]
    logits = torch.full((len(ways), 49_152), float("-inf"))
    allowed = [choice.sample(range(49_152), choice.choice([1, 2, 10])) for _ in ways]
    for row, words in zip(logits, allowed, strict=True):
        row[words] = torch.randn(len(words)) * 3 - 40
    for uniform in (0.0, 0.4, 1 - 2**-53):
        tokens = sample(logits, ways, [uniform] * len(ways), implementation)
        assert all(token in words for token, words in zip(tokens, allowed, strict=True))


HOW: list[dict[str, float]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"top_p": 0.5, "typical_p": 0.5},
]


@by_all
def test_a_row_without_allowed_tokens_samples_none_and_other_rows_are_sampled(implementation: str) -> None:
    ways = [Sampling(temperature=t, **how) for t in (0, 0.1, 1) for how in HOW]  # type: ignore[arg-type]
    logits = torch.randn(2 * len(ways), 700, generator=torch.Generator().manual_seed(0))
    logits[::2] = float("-inf")
    both = [way for way in ways for _ in range(2)]
    tokens = sample(logits, both, [0.3] * len(both), implementation)
    assert tokens[::2] == [-1] * len(ways)
    assert tokens[1::2] == sample(logits[1::2], ways, [0.3] * len(ways), implementation)
    assert -1 not in tokens[1::2]


@by_all
@pytest.mark.parametrize("far", [-400.0, 90.0, 4000.0])
def test_logits_may_have_any_offset(far: float, implementation: str) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for how in HOW:
        sampling = Sampling(**how)  # type: ignore[arg-type]
        assert close(drawn(logits + far, sampling, implementation, 300), reference(logits + far, sampling), 300)


@pytest.mark.parametrize("implementation", runnable_targets())
def test_of_equals_typical_and_top_p_keep_all(implementation: str) -> None:
    for sampling in (Sampling(typical_p=0.1), Sampling(top_p=0.1), Sampling(top_p=0.5, typical_p=0.5)):
        assert (drawn(torch.zeros(64), sampling, implementation, 640) > 0).all()


@by_all
def test_rows_may_be_in_any_order_and_not_contiguous(implementation: str) -> None:
    """As the executor has them: rows have spare elements behind them, and answers of a group share one."""
    whole = torch.randn(5, 800, generator=torch.Generator().manual_seed(0)) * 3
    logits, rows = whole[:, :700], [3, 3, 0, 4, 4, 4, 1]
    asks = [SampleRow(row, Sampling(top_p=0.9), 0.1 + number / 10, logprobs=3) for number, row in enumerate(rows)]
    alone = [sampler_by(implementation).sample(logits[ask.row].clone()[None], [ask._replace(row=0)])[0] for ask in asks]
    assert sampler_by(implementation).sample(logits, asks) == alone


@pytest.mark.parametrize("implementation", runnable_targets())
@pytest.mark.parametrize("words", [40, 700, 49_152])
def test_compiled_scores_are_those_of_torch(words: int, implementation: str) -> None:
    choice = random.Random(0)
    logits = (torch.randn(30, words, generator=torch.Generator().manual_seed(0)) * 3).to(torch.bfloat16).float()
    counts = [choice.choice([-1, 0, 1, 5, 20, 1000]) for _ in range(30)]
    ways = [Sampling(temperature=choice.choice([0, 0.5, 1.0]), top_k=choice.choice([0, 9])) for _ in counts]
    asks = [SampleRow(row, way, choice.random(), logprobs=counts[row]) for row, way in enumerate(ways)]
    found = sampler_by(implementation).sample(logits, asks)
    wanted = score_tokens(
        logits.double(), [token for token, _ in found], counts
    )  # torch itself differs by 5e-6 in float32
    for row, ((token, (value, tops)), (right, theirs)) in enumerate(zip(found, wanted, strict=True)):
        assert value == pytest.approx(right, abs=2e-6)
        assert len(tops) == len(theirs)
        assert [one for _, one in tops] == pytest.approx([one for _, one in theirs], abs=2e-6)
        ranks = [(-float(logits[row, word]), word) for word, _ in tops]
        assert ranks == sorted(ranks), "the most likely first, of equals the first"
        assert 0 <= token < words

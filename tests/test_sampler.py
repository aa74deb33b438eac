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
    TypicalLogitsWarper,
)

from service.engine import sampler
from service.engine.sampler import draw_sorted, finite, sample, score
from service.request import Sampling

DRAWS = 1000


def reference(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] transformers would draw from."""
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


def drawn(logits: Tensor, sampling: Sampling, draws: int = DRAWS) -> Tensor:
    """The distribution [V] drawn from, with evenly spread uniforms."""
    return shares(sample(logits.expand(draws, -1), [sampling] * draws, spread(draws)), len(logits))


def spread(draws: int) -> list[float]:
    return [(index + 0.5) / draws for index in range(draws)]


def shares(tokens: list[int], words: int) -> Tensor:
    return torch.bincount(torch.tensor(tokens), minlength=words) / len(tokens)


def close(found: Tensor, wanted: Tensor, draws: int = DRAWS) -> bool:
    """What is drawn again, since a word was cut off, is drawn by chance: within five of its deviations."""
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
    found = drawn(logits, sampling)
    assert close(found, wanted)
    if sampling.top_k + sampling.min_p == 0 and sampling.top_p == sampling.typical_p == 1:
        assert float((found - wanted).abs().max()) <= 2 / DRAWS
    assert not found[wanted == 0].any(), "a word that was cut off"
    assert found[wanted > 0.02].all(), "one that was not"
    together = shares(draw_sorted(logits.expand(DRAWS, -1), [sampling] * DRAWS, spread(DRAWS)), words)
    assert float((together - wanted).abs().max()) <= 2 / DRAWS, "as other devices draw"


def test_words_as_likely_as_the_last_of_top_k_stay() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, 2.0, 2.0, 0.0])
    wanted = reference(logits, Sampling(top_k=2))
    assert (wanted > 0).sum() == 4
    assert close(drawn(logits, Sampling(top_k=2)), wanted)
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
            typical_p=choice.choice([1.0, 1.0, 0.5]),
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
    assert score(logits, [-1, 4, 5, 6, -1], [5, 0, 2, 5, 0]) == [(0.0, ()), *scores[1:4], (0.0, ())]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_finite_finds_the_rows_that_are_not(bad: float) -> None:
    logits = torch.randn(4, 1000)
    logits[1, 999] = bad
    logits[3, 0], logits[3, 1] = float("inf"), float("-inf")
    assert finite(logits) == [True, False, True, False]
    assert finite(torch.empty(0, 10)) == []


def test_where_few_words_may_come_one_of_them_does() -> None:
    """As a grammar leaves it: minus infinity nearly everywhere, in every way of drawing."""
    choice = random.Random(0)
    ways = [Sampling(temperature=t, **how) for t in (0, 0.1, 0.7, 1) for how in HOW]  # type: ignore[arg-type]
    logits = torch.full((len(ways), 49_152), float("-inf"))
    allowed = [choice.sample(range(49_152), choice.choice([1, 2, 10])) for _ in ways]
    for row, words in zip(logits, allowed, strict=True):
        row[words] = torch.randn(len(words)) * 3 - 40
    for uniform in (0.0, 0.4, 1 - 2**-53):
        tokens = sample(logits, ways, [uniform] * len(ways))
        assert all(token in words for token, words in zip(tokens, allowed, strict=True))
        drawn = [row for row, way in enumerate(ways) if way.temperature]
        tokens = draw_sorted(logits[drawn], [ways[row] for row in drawn], [uniform] * len(drawn))
        assert all(token in allowed[row] for row, token in zip(drawn, tokens, strict=True))


HOW: list[dict[str, float]] = [
    {},
    {"top_k": 5},
    {"top_p": 0.9},
    {"top_p": 0.0},
    {"min_p": 0.1},
    {"typical_p": 0.5},
    {"top_p": 0.5, "typical_p": 0.5},
]


def test_where_no_word_may_come_none_does_and_the_neighbours_are_drawn() -> None:
    ways = [Sampling(temperature=t, **how) for t in (0, 0.1, 1) for how in HOW]  # type: ignore[arg-type]
    logits = torch.randn(2 * len(ways), 700, generator=torch.Generator().manual_seed(0))
    logits[::2] = float("-inf")
    both = [way for way in ways for _ in range(2)]
    tokens = sample(logits, both, [0.3] * len(both))
    assert tokens[::2] == [-1] * len(ways)
    assert tokens[1::2] == sample(logits[1::2], ways, [0.3] * len(ways))
    warm = [row for row, way in enumerate(both) if way.temperature]
    sorted_ = draw_sorted(logits[warm], [both[row] for row in warm], [0.3] * len(warm))
    assert sorted_[::2] == [-1] * (len(warm) // 2)
    assert -1 not in sorted_[1::2]


@pytest.mark.parametrize("far", [-400.0, 90.0, 4000.0])
def test_logits_may_be_anywhere(far: float) -> None:
    logits = torch.randn(300, generator=torch.Generator().manual_seed(0))
    for how in HOW:
        sampling = Sampling(**how)  # type: ignore[arg-type]
        assert close(drawn(logits + far, sampling, 300), reference(logits + far, sampling), 300)


def test_of_equals_typical_and_top_p_keep_all_or_enough() -> None:
    flat = torch.zeros(64)
    assert len(set(sample(flat.expand(640, -1), [Sampling(typical_p=0.1)] * 640, spread(640)))) == 64
    assert len(set(sample(flat.expand(640, -1), [Sampling(top_p=0.1)] * 640, spread(640)))) == 64


def test_what_is_likeliest_need_not_be_looked_for_where_it_is_known() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    greedy, warm = Sampling(temperature=0), Sampling()
    samplings, uniforms = [greedy, greedy, warm, warm], [0.5] * 4
    assert sample(logits, samplings, uniforms, [7, -1, 7, -1]) == [7, *sample(logits, samplings, uniforms)[1:]]

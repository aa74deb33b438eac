"""Score functions equal published examples and their formulas in plain loops; masked keys have no weight."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from polyhead.models.literature.score_functions import (
    SCORE_FUNCTIONS,
    Additive,
    Concatenated,
    Cosine,
    Dot,
    ScaledDot,
    ScoreFunction,
    ScoreWidths,
    masked_softmax,
    weighted_sum,
)

ALL = torch.ones(1, dtype=torch.bool)
WIDTHS = ScoreWidths(query=5, key=5, hidden=4, places=9)


def sample(name: str, dtype: torch.dtype = torch.float64) -> tuple[ScoreFunction, Tensor, Tensor]:
    """A score function, queries [2, 3, 5] and keys [2, 7, 5]."""
    generator = torch.Generator().manual_seed(3)
    score = SCORE_FUNCTIONS[name](WIDTHS).to(dtype)
    for parameter in score.parameters():
        parameter.data.normal_(generator=generator)
    query, keys = (torch.randn(2, count, 5, generator=generator, dtype=dtype) for count in (3, 7))
    return score, query, keys


def test_self_attention_equals_a_published_example() -> None:
    words = np.array([[1, 0, 0], [0, 1, 0], [1, 1, 0], [0, 0, 1]])
    generator = np.random.RandomState(42)
    query, key, value = (torch.tensor(words @ generator.randint(3, size=(3, 3))).double() for _ in range(3))
    mixed, _ = weighted_sum(query, key, value, ScaledDot(ScoreWidths(query=3, key=3)), ALL)
    printed = [
        [0.98522025, 1.74174051, 0.75652026],
        [0.90965265, 1.40965265, 0.5],
        [0.99851226, 1.75849334, 0.75998108],
        [0.99560386, 1.90407309, 0.90846923],
    ]
    assert torch.allclose(mixed, torch.tensor(printed).double(), rtol=0, atol=1e-7)


def test_dot_attention_equals_a_published_example() -> None:
    query = torch.tensor([[0.6, 1.2, -1.2, 1.8]])
    keys = torch.tensor([[-0.2, 0.4, 1.2, 0.8], [0.2, 0.4, -0.6, 0.6], [-0.6, 0, 0, 0], [0.6, 0, 0, 0]])
    values = torch.tensor([[4.0, 5, 6, 7], [1, 2, 3, 4], [5, 6, 7, 8], [6, 7, 8, 9]])
    score = Dot(ScoreWidths(query=4, key=4))
    assert torch.allclose(score(query, keys), torch.tensor([[0.36, 2.4, -0.36, 0.36]]))
    mixed, weights = weighted_sum(query, keys, values, score, ALL)
    assert torch.allclose(weights, torch.tensor([[0.098, 0.756, 0.048, 0.098]]), rtol=0, atol=0.001)
    assert torch.allclose(mixed, torch.tensor([[1.98, 2.98, 3.98, 4.98]]), rtol=0, atol=0.01)


def formula(score: ScoreFunction, q: Tensor, k: Tensor, place: int) -> float:
    """The score of one query and one key by the formula of the paper."""
    own = {name: value.detach() for name, value in score.named_parameters()}
    match type(score).__name__:
        case "Dot":
            number = sum(a * b for a, b in zip(q, k, strict=True))
        case "ScaledDot":
            number = sum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))
        case "Cosine":
            number = own["strength"] * q.dot(k) / math.sqrt(q.dot(q)) / math.sqrt(k.dot(k))
        case "General":
            number = q.dot(own["match.weight"] @ k)
        case "Additive":
            number = own["out.weight"][0].dot((own["of_query.weight"] @ q + own["of_key.weight"] @ k).tanh())
        case "Concatenated":
            number = own["out.weight"][0].dot((own["of_both.weight"] @ torch.cat((q, k))).tanh())
        case "Location":
            number = own["of_place.weight"][place].dot(q)
        case "Gaussian":
            number = -((q - k) ** 2).sum() / 2
        case _:
            number = -(((q - k) * own["narrow"]) ** 2).sum() / 2
    return float(number)


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_each_score_is_its_formula(name: str) -> None:
    score, query, keys = sample(name)
    scores = score(query, keys)
    assert scores.shape == (2, 3, 7)
    for (n, q, k), number in np.ndenumerate(scores.detach().numpy()):
        assert number == pytest.approx(formula(score, query[n, q], keys[n, k], k), rel=1e-9)


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_a_score_takes_any_leading_dimensions(name: str) -> None:
    score, query, keys = sample(name)
    alone = score(query[0], keys[0])
    nested = score(query.expand(4, -1, -1, -1), keys.expand(4, -1, -1, -1))
    assert torch.allclose(alone, score(query, keys)[0])
    assert torch.allclose(nested[3], score(query, keys))


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_gradients_are_finite_and_reach_every_parameter(name: str) -> None:
    score, query, keys = sample(name, torch.float32)
    keys = torch.cat((keys, query[:, :1]), dim=1).requires_grad_()  # one key equals a query: their distance is zero
    mask = torch.rand(2, 3, 8, generator=torch.Generator().manual_seed(1)) < 0.7
    mask[1, 2] = False
    mixed, _ = weighted_sum(query.requires_grad_(), keys, torch.randn(2, 8, 3), score, mask)
    mixed.square().sum().backward()
    inputs = [query] if name == "location" else [query, keys]
    for leaf in [*inputs, *score.parameters()]:
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        assert leaf.grad.abs().max() > 0


def test_both_additive_forms_are_equal_for_equal_matrices() -> None:
    widths = ScoreWidths(query=5, key=3, hidden=6)
    two, one = Additive(widths), Concatenated(widths)
    one.of_both.weight.data = torch.cat((two.of_query.weight, two.of_key.weight), dim=1).detach()
    one.out.weight = two.out.weight
    query, keys = torch.randn(2, 4, 5), torch.randn(2, 7, 3)
    assert torch.allclose(one(query, keys), two(query, keys), atol=1e-6)


def test_the_cosine_does_not_depend_on_lengths() -> None:
    score, query, keys = sample("cosine")
    assert isinstance(score, Cosine)
    assert torch.allclose(score(query * 7, keys / 3), score(query, keys))
    assert score(torch.zeros(1, 5).double(), keys).abs().max() == 0


@pytest.mark.parametrize("name", ["dot", "scaled_dot", "cosine", "gaussian", "learned_gaussian"])
def test_scores_that_need_equal_widths_refuse_others(name: str) -> None:
    with pytest.raises(ValueError, match="queries and keys of one width, not 5 and 3"):
        SCORE_FUNCTIONS[name](ScoreWidths(query=5, key=3))


def test_location_scores_need_the_number_of_places() -> None:
    with pytest.raises(ValueError, match="give their number"):
        SCORE_FUNCTIONS["location"](ScoreWidths(query=5, key=5))
    score, query, _ = sample("location")
    with pytest.raises(ValueError, match="10 keys are more than the 9 places"):
        score(query, torch.zeros(2, 10, 5))


def test_masked_keys_have_no_weight_whatever_their_score() -> None:
    scores = torch.tensor([[1.0, 2.0, 3.0], [5.0, float("nan"), float("inf")]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    weights = masked_softmax(scores, mask)
    assert torch.allclose(weights[0, :2], torch.tensor([1.0, 2.0]).softmax(0))
    assert weights[~mask].tolist() == [0.0, 0.0, 0.0]
    assert weights[1, 0] == 1


def test_a_fully_masked_row_has_zero_weights_and_gradients() -> None:
    scores = torch.randn(2, 3, 4).requires_grad_()
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1] = False
    weights = masked_softmax(scores, mask)
    with torch.autograd.set_detect_anomaly(True):  # no NaN in intermediate gradients either
        (weights * torch.arange(4.0)).sum().backward()
    assert (weights[:, 1] == 0).all()
    assert torch.allclose(weights[:, [0, 2]].sum(-1), torch.ones(2, 2))
    assert scores.grad is not None
    assert (scores.grad[:, 1] == 0).all()
    assert scores.grad.isfinite().all()
    assert scores.grad[:, 0].abs().max() > 0


@pytest.mark.parametrize("name", SCORE_FUNCTIONS)
def test_prepared_keys_have_the_same_scores(name: str) -> None:
    score, query, keys = sample(name)
    prepared = score.prepare(keys)
    for at in range(3):
        one = score.score_prepared(query[:, at : at + 1], prepared)
        assert torch.allclose(one, score(query, keys)[:, at : at + 1], rtol=0, atol=1e-12)

"""Attention pooling: what is near counts, and how near is near can be learned."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from polyhead.models.literature.score_functions import Gaussian, LearnedGaussian
from polyhead.training.experiments import kernel_regression as kernel
from polyhead.training.experiments.kernel_regression import ONE, Even, Seen, fitted, foretold, learned, left_out, wrong


@pytest.fixture(scope="module", params=range(2))
def seen(request: pytest.FixtureRequest) -> Seen:
    return Seen.drawn(50, torch.Generator().manual_seed(request.param))


def test_a_kernel_weighs_as_its_formula_says() -> None:
    seen = Seen(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [2.0], [5.0]]))
    weights = [torch.tensor(-((x - 2.0) ** 2) / 2).exp() for x in (0, 1, 3)]
    mean = sum(w * y for w, y in zip(weights, (1, 2, 5), strict=True)) / sum(weights)
    assert torch.allclose(foretold(Gaussian(ONE), seen, torch.tensor([[2.0]])), mean)
    assert torch.allclose(foretold(Even(ONE), seen, torch.tensor([[2.0]])), seen.y.mean())
    narrow = LearnedGaussian(ONE)
    narrow.narrow.data.fill_(100.0)
    assert torch.allclose(foretold(narrow, seen, seen.x), seen.y)
    assert left_out(narrow, seen).item() == pytest.approx((1 + 1 + 9) / 3)  # each as its nearest, left out itself


def test_what_is_near_says_more_than_all_alike(seen: Seen) -> None:
    scores = fitted(seen)
    plain, gaussian, fitting = (wrong(score, seen) for score in scores.values())
    assert fitting < gaussian < plain / 1.3
    assert fitting < plain / 3


def test_learning_the_width_makes_the_loss_fall(seen: Seen) -> None:
    score = LearnedGaussian(ONE)
    losses = learned(score, seen)
    assert losses[-1] < losses[0] * 0.8
    assert score.narrow.item() > 1.2


def test_it_is_drawn_for_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(kernel, "PICTURE", tmp_path / "kernel-regression.svg")
    kernel.main()
    told, drawn = capsys.readouterr().out, kernel.PICTURE.read_text()
    for name in kernel.WAYS:
        assert f"{name}: off by 0." in told
        assert f"{name}: off by 0." in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert len(drawn) < 40_000
    monkeypatch.setattr(kernel, "PRESENT", False)
    kernel.main()
    assert "pip install 'polyhead[explain]'" in capsys.readouterr().out

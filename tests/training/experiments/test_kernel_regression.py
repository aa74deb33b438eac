"""Attention pooling: what is near counts, and how near is near can be learned."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from polyhead.models.literature.score_functions import Gaussian, LearnedGaussian
from polyhead.training.experiments import kernel_regression as kernel
from polyhead.training.experiments.kernel_regression import (
    SCALAR_WIDTHS,
    Observations,
    UniformScore,
    fit_kernels,
    learn_width,
    leave_one_out_loss,
    mean_squared_error,
    predict,
)


@pytest.fixture(scope="module", params=range(2))
def seen(request: pytest.FixtureRequest) -> Observations:
    return Observations.sample(50, torch.Generator().manual_seed(request.param))


def test_a_kernel_weighs_as_its_formula_says() -> None:
    seen = Observations(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [2.0], [5.0]]))
    weights = [torch.tensor(-((x - 2.0) ** 2) / 2).exp() for x in (0, 1, 3)]
    mean = sum(w * y for w, y in zip(weights, (1, 2, 5), strict=True)) / sum(weights)
    assert torch.allclose(predict(Gaussian(SCALAR_WIDTHS), seen, torch.tensor([[2.0]])), mean)
    assert torch.allclose(predict(UniformScore(SCALAR_WIDTHS), seen, torch.tensor([[2.0]])), seen.y.mean())
    narrow = LearnedGaussian(SCALAR_WIDTHS)
    narrow.narrow.data.fill_(100.0)
    assert torch.allclose(predict(narrow, seen, seen.x), seen.y)
    assert leave_one_out_loss(narrow, seen).item() == pytest.approx(
        (1 + 1 + 9) / 3
    )  # each as its nearest, left out itself


def test_what_is_near_says_more_than_all_alike(seen: Observations) -> None:
    scores = fit_kernels(seen)
    plain, gaussian, fitting = (mean_squared_error(score, seen) for score in scores.values())
    assert fitting < gaussian < plain / 1.3
    assert fitting < plain / 3


def test_learning_the_width_makes_the_loss_fall(seen: Observations) -> None:
    score = LearnedGaussian(SCALAR_WIDTHS)
    losses = learn_width(score, seen)
    assert losses[-1] < losses[0] * 0.8
    assert score.narrow.item() > 1.2


def test_it_is_drawn_for_the_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(kernel, "FIGURE_FILE", tmp_path / "kernel-regression.svg")
    kernel.main()
    told, drawn = capsys.readouterr().out, kernel.FIGURE_FILE.read_text()
    for name in kernel.KERNELS:
        assert f"{name}: off by 0." in told
        assert f"{name}: off by 0." in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert len(drawn) < 40_000
    monkeypatch.setattr(kernel, "HAS_MATPLOTLIB", False)
    kernel.main()
    assert "pip install 'polyhead[explain]'" in capsys.readouterr().out

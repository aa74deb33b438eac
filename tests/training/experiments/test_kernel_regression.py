"""Attention pooling (Nadaraya-Watson kernel regression), with fixed and learned kernel widths."""

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
def observations(request: pytest.FixtureRequest) -> Observations:
    return Observations.sample(50, torch.Generator().manual_seed(request.param))


def test_kernel_weights_equal_the_formula() -> None:
    observations = Observations(torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[1.0], [2.0], [5.0]]))
    weights = [torch.tensor(-((x - 2.0) ** 2) / 2).exp() for x in (0, 1, 3)]
    mean = sum(w * y for w, y in zip(weights, (1, 2, 5), strict=True)) / sum(weights)
    assert torch.allclose(predict(Gaussian(SCALAR_WIDTHS), observations, torch.tensor([[2.0]])), mean)
    assert torch.allclose(
        predict(UniformScore(SCALAR_WIDTHS), observations, torch.tensor([[2.0]])), observations.y.mean()
    )
    narrow = LearnedGaussian(SCALAR_WIDTHS)
    narrow.narrow.data.fill_(100.0)
    assert torch.allclose(predict(narrow, observations, observations.x), observations.y)
    assert leave_one_out_loss(narrow, observations).item() == pytest.approx(
        (1 + 1 + 9) / 3
    )  # each gets the value of its nearest neighbour, itself excluded


def test_a_gaussian_kernel_predicts_better_than_the_mean(observations: Observations) -> None:
    scores = fit_kernels(observations)
    plain, gaussian, fitting = (mean_squared_error(score, observations) for score in scores.values())
    assert fitting < gaussian < plain / 1.3
    assert fitting < plain / 3


def test_learning_the_width_lowers_the_loss(observations: Observations) -> None:
    score = LearnedGaussian(SCALAR_WIDTHS)
    losses = learn_width(score, observations)
    assert losses[-1] < losses[0] * 0.8
    assert score.narrow.item() > 1.2


def test_the_figure_of_the_documents_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(kernel, "FIGURE_FILE", tmp_path / "kernel-regression.svg")
    kernel.main()
    printed, drawn = capsys.readouterr().out, kernel.FIGURE_FILE.read_text()
    for name in kernel.KERNELS:
        assert f"{name}: off by 0." in printed
        assert f"{name}: off by 0." in drawn
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert len(drawn) < 40_000
    monkeypatch.setattr(kernel, "HAS_MATPLOTLIB", False)
    kernel.main()
    assert "pip install 'polyhead[explain]'" in capsys.readouterr().out

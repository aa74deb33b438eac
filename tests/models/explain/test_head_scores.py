"""Heads that score labels or options beside the text: attributions to their scores, and the size of these heads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polyhead.models.checkpoint import Checkpoint, load
from polyhead.models.explain import (
    FEW_CELLS,
    ExplanationRequest,
    InputTokens,
    InstrumentedNetwork,
    estimate_bytes,
    estimate_operations,
    explain,
    measure_head,
)
from polyhead.models.explain import cost_estimate as estimate
from polyhead.models.network.label_heads import TextLabelHead
from polyhead.models.network.ragged import RaggedBatch
from tests.support import decision_models, label_models
from tests.support.explained import count_operations, explained, measure_peak

MAKERS: dict[str, Callable[[str, Path], Path]] = {
    **dict.fromkeys(label_models.TEXT_VARIANTS, label_models.make_variant),
    **dict.fromkeys(decision_models.VARIANTS, decision_models.make_variant),
}
ROWS = 14
TEXT_ROWS = range(7, ROWS - 1)
# The rows of two labels or options, and of the text, between tokens of the prompt.
TEXT = InputTokens(tuple(range(5, 5 + ROWS)), label_rows=(2, 4), text_rows=(*TEXT_ROWS,), question="score")
KEPT = frozenset(range(ROWS)) - frozenset(TEXT_ROWS)
GOALS = (((0, 1),), ((0, 0),))


@pytest.fixture(scope="module", params=MAKERS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("heads") / request.param
    return load(str(MAKERS[request.param](request.param, folder)))


@pytest.fixture(scope="module")
def instrumented(loaded: Checkpoint) -> InstrumentedNetwork:
    return InstrumentedNetwork(loaded.network, loaded.head)


def build_request(method: Any, **more: Any) -> ExplanationRequest:
    return ExplanationRequest(TEXT, method, GOALS, baseline=3, kept_rows=KEPT, **more)


def score(loaded: Checkpoint, embedded: torch.Tensor) -> torch.Tensor:
    """[C] the scores of the text from its embeddings [T, E], by the network and the head as they are served."""
    batch = RaggedBatch.of([TEXT.tokens], [(0,) * ROWS] if loaded.config.segments else None)
    states = loaded.network(RaggedBatch(batch.tokens, batch.positions, batch.starts, batch.segments, embedded=embedded))
    asked: Any = TEXT.text_rows if isinstance(loaded.head, TextLabelHead) else 1  # the number of "score" among kinds
    found: torch.Tensor = loaded.head.score(states, TEXT.label_rows, asked)  # type: ignore[operator]
    return found


def test_gradients_are_those_of_autograd(loaded: Checkpoint, instrumented: InstrumentedNetwork) -> None:
    """Of the whole computation at once."""
    start = instrumented.embed_sides((), (3,) * ROWS)
    path = instrumented.embeddings(TEXT) - start
    middle = (start + path / 2).requires_grad_()
    scores = score(loaded, middle)
    request = replace(build_request("integrated_gradients", steps=1), kept_rows=frozenset())  # one point, in the middle
    found = explained(explain(instrumented, request)).attributions
    for ((_, column),), got in zip(GOALS, found, strict=True):
        (slope,) = torch.autograd.grad(scores[column], middle, retain_graph=True)
        expected = (slope * path).sum(dim=-1)
        size = float(expected.abs().max())
        assert size > 1e-3
        torch.testing.assert_close(torch.from_numpy(got.values), expected, atol=1e-5 * max(size, 1), rtol=1e-4)
        assert got.score == pytest.approx(float(score(loaded, start + path)[column]), rel=1e-5, abs=1e-5)


def test_integrated_gradients_are_complete_over_the_text(loaded: Checkpoint, instrumented: InstrumentedNetwork) -> None:
    request = replace(build_request("integrated_gradients", steps=200), goals=GOALS[:1])
    [got] = explained(explain(instrumented, request)).attributions
    change = got.score - got.baseline
    assert abs(change) > 1e-3
    # Heads with ReLU are not smooth.
    assert float(got.values[list(TEXT_ROWS)].sum()) == pytest.approx(change, abs=0.02 * max(1.0, abs(change)))
    assert not got.values[list(KEPT)].any(), "labels and prompts are the same in the baseline"
    assert got.score == pytest.approx(float(instrumented.scores(TEXT)[0, 1]), abs=1e-5)


def test_gradients_times_input_are_near_zero_where_a_norm_comes_first(
    loaded: Checkpoint, instrumented: InstrumentedNetwork
) -> None:
    """Networks that add positions before the norm are different, so integrated gradients are the default."""
    sizes = []
    for method in ("gradient_x_input", "integrated_gradients"):
        request = replace(build_request(method, steps=10), goals=GOALS[:1])
        [got] = explained(explain(instrumented, request)).attributions
        sizes.append(float(abs(got.values[list(TEXT_ROWS)]).max()))
    assert (sizes[0] < 0.05 * sizes[1]) == (loaded.config.position != "learned")


def test_occlusion_is_the_change_of_the_score(loaded: Checkpoint, instrumented: InstrumentedNetwork) -> None:
    embedded = instrumented.embeddings(TEXT)
    [got, _] = explained(explain(instrumented, build_request("occlusion"))).attributions
    hidden = embedded.clone()
    hidden[TEXT_ROWS[2]] = instrumented.embed_sides((), (3,))[0]
    with torch.no_grad():
        expected = score(loaded, embedded)[1] - score(loaded, hidden)[1]
    assert float(got.values[TEXT_ROWS[2]]) == pytest.approx(float(expected), abs=1e-4)
    assert not got.values[list(KEPT)].any()


def test_the_work_of_a_head_with_layers_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations as torch counts them, and memory as it is allocated; without the head both estimates are too low."""
    monkeypatch.setattr(estimate, "LAYER_OVERHEAD", 0)
    loaded = load(str(decision_models.laya(tmp_path / "marks", head_layers=6)))
    instrumented, head, config = (
        InstrumentedNetwork(loaded.network, loaded.head),
        measure_head(loaded.head),
        loaded.config,
    )
    request = build_request("integrated_gradients", steps=18)

    def run() -> None:
        explained(explain(instrumented, request))

    counted, peak = count_operations(run), measure_peak(run)
    assert (
        estimate_operations(config, config, request)
        < counted
        <= 1.1 * estimate_operations(config, config, request, head=head)
    )
    assert estimate_bytes(config, config, request) < peak <= estimate_bytes(config, config, request, head=head)
    assert estimate_bytes(config, config, request, head=head) <= 5 * peak


def test_other_heads_compute_few_cells(tiny_classifier: Path) -> None:
    assert measure_head(load(str(tiny_classifier)).head) == FEW_CELLS

"""Attributions of tokens: equal to captum and transformers, to a plain loop, and in pieces of any size."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerIntegratedGradients

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.explain import Explanation, ExplanationRequest, InputTokens, InstrumentedNetwork, explain
from polyhead.models.explain.cost_estimate import SLACK_BYTES, estimate_bytes
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator
from tests.families.test_encoder_decoders import ROWS, save_reference
from tests.support.explained import TOKENS, both, driven, explained, measure_peak
from tests.support.translators import translator

PAD, STEPS = 0, 12
TEXT, IDS = InputTokens(TOKENS), torch.tensor([TOKENS])
KEPT = frozenset({0, len(TOKENS) - 1})
# For each kind: the path of the token embedding in transformers, and goals. A goal is a list of logits (row, column).
CASES: dict[str, tuple[str, list[list[tuple[int, int]]]]] = {
    "bert": ("bert.embeddings.word_embeddings", [[(0, 1)], [(0, 0)]]),
    "bert-tags": ("bert.embeddings.word_embeddings", [[(3, 1)]]),
    "gpt2": ("transformer.wte", [[(4, 33)], [(6, 3)]]),
}


def build_request(method: Any, goals: list[list[tuple[int, int]]], **more: Any) -> ExplanationRequest:
    return ExplanationRequest(TEXT, method, tuple(map(tuple, goals)), **more)


def cells(logits: torch.Tensor, goal: list[tuple[int, int]]) -> torch.Tensor:
    """[N], the sum of a goal's logits. Transformers' logits are [N, C] where a text has one row."""
    rows = logits[:, None] if logits.dim() == 2 else logits
    return sum(rows[:, row, column] for row, column in goal)  # type: ignore[return-value]


def close(some: Any, other: Any, most: float = 1e-4) -> bool:
    some, other = np.asarray(some), np.asarray(other)
    return some.shape == other.shape and float(np.abs(some - other).max()) < most


@pytest.mark.parametrize("kept", [frozenset(), KEPT])
@pytest.mark.parametrize("kind", CASES)
def test_integrated_gradients_equal_captum(kind: str, kept: frozenset[int], tmp_path: Path) -> None:
    theirs, instrumented = both(kind, tmp_path)
    embedding, goals = CASES[kind]
    baseline = [token if row in kept else PAD for row, token in enumerate(TOKENS)]
    found = explained(
        explain(instrumented, build_request("integrated_gradients", goals, steps=STEPS, baseline=PAD, kept_rows=kept))
    )
    for goal, got in zip(goals, found.attributions, strict=True):
        method = LayerIntegratedGradients(
            lambda ids, goal=goal: cells(theirs(ids).logits, goal), theirs.get_submodule(embedding)
        )
        reference = method.attribute(IDS, torch.tensor([baseline]), n_steps=STEPS).sum(-1)[0]
        assert close(got.values, reference.detach())
        with torch.no_grad():
            ends = [float(cells(theirs(torch.tensor([ids])).logits, goal)) for ids in (list(TOKENS), baseline)]
        assert close([got.score, got.baseline], ends)
        assert float(np.abs(got.values).max()) > 0.01


@pytest.mark.parametrize("kind", CASES)
def test_gradient_x_input_equals_transformers(kind: str, tmp_path: Path) -> None:
    theirs, instrumented = both(kind, tmp_path)
    embedding, goals = CASES[kind]
    reference = theirs.get_submodule(embedding)(IDS).detach().requires_grad_()
    found = explained(explain(instrumented, build_request("gradient_x_input", goals)))
    for goal, got in zip(goals, found.attributions, strict=True):
        score = cells(theirs(inputs_embeds=reference).logits, goal)
        (slope,) = torch.autograd.grad(score, reference)
        assert close(got.values, (slope * reference).sum(-1)[0].detach())
        assert close(got.score, score.detach()[0])
        assert np.isnan(got.baseline)


def test_source_and_target_have_separate_gradients(tmp_path: Path) -> None:
    """In an encoder-decoder whose encoder and decoder share the token embedding."""
    theirs = translator(tmp_path, "t5-1.1")
    loaded = load(str(tmp_path))
    instrumented, text = (
        InstrumentedNetwork(loaded.network, loaded.head),
        InputTokens((1, 7, 8), source=(5, 6, 7, 9, 2)),
    )
    read, written = (theirs.shared(torch.tensor([ids])).detach().requires_grad_() for ids in (text.source, text.tokens))
    score = theirs(inputs_embeds=read, decoder_inputs_embeds=written).logits[0, 1, 8]
    slopes = torch.autograd.grad(score, (read, written))
    expected = torch.cat([(slope * at).sum(-1)[0] for slope, at in zip(slopes, (read, written), strict=True)], dim=0)
    (got,) = explained(explain(instrumented, ExplanationRequest(text, "gradient_x_input", (((1, 8),),)))).attributions
    assert close(got.values, expected.detach(), 1e-4 * float(expected.detach().abs().max()))
    assert got.values[-1] == 0, "later target tokens have no influence"


def test_sides_with_embeddings_of_their_own_have_gradients_of_their_own(tmp_path: Path) -> None:
    """In T5Gemma. If their widths differ, only attention is explained."""
    row = ROWS["t5gemma"]
    theirs = save_reference(row, tmp_path)
    loaded = load(str(tmp_path))
    instrumented, text = (
        InstrumentedNetwork(loaded.network, loaded.head),
        InputTokens((0, 7, 8), source=(5, 6, 7, 9, 2)),
    )
    sides = ((theirs.model.encoder, text.source), (theirs.model.decoder, text.tokens))
    read, written = (side.embed_tokens(torch.tensor([ids])).detach().requires_grad_() for side, ids in sides)
    score = theirs(inputs_embeds=read, decoder_inputs_embeds=written).logits[0, 1, 8]
    slopes = torch.autograd.grad(score, (read, written))
    expected = torch.cat([(slope * at).sum(-1)[0] for slope, at in zip(slopes, (read, written), strict=True)], dim=0)
    (got,) = explained(explain(instrumented, ExplanationRequest(text, "gradient_x_input", (((1, 8),),)))).attributions
    assert close(got.values, expected.detach(), 1e-4 * float(expected.detach().abs().max()))
    assert close(got.score, score.detach())
    save_reference(ROWS["t5gemma-narrow"], tmp_path / "narrow")
    loaded = load(str(tmp_path / "narrow"))
    with pytest.raises(UnsupportedError, match="two sides have embeddings of different widths"):
        InstrumentedNetwork(loaded.network, loaded.head).embeddings(text)


def recurrent() -> InstrumentedNetwork:
    torch.manual_seed(1)
    network = RecurrentTranslator(
        RecurrentConfig(vocab_size=60, width=8, hidden=8, start=0, end=2, pad=0, attention="bahdanau")
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return InstrumentedNetwork(network, network)


def instrumented_network(kind: str, folder: Path) -> InstrumentedNetwork:
    if kind == "recurrent":
        return recurrent()
    if kind == "bart":
        translator(folder, kind)
        loaded = load(str(folder))
        return InstrumentedNetwork(loaded.network, loaded.head)
    return both(kind, folder)[1]


COMPLETENESS_CASES: dict[str, tuple[InputTokens, list[list[tuple[int, int]]]]] = {
    "bert": (TEXT, [[(0, 0), (0, 1)]]),
    "bert-words": (TEXT, [[(4, 99)], [(2, 7)]]),
    "bert-span": (TEXT, [[(2, 0), (4, 1)]]),
    "bert-vector": (TEXT, [[(0, 0)]]),
    "electra": (TEXT, [[(0, 1)]]),
    "deberta": (replace(TEXT, segments=(0, 0, 0, 0, 0, 0, 0, 0)), [[(0, 1)]]),
    "modernbert": (TEXT, [[(0, 1)]]),
    "gpt2-labels": (TEXT, [[(0, 1)]]),
    "qwen3": (TEXT, [[(6, 3)]]),
    "gemma3": (TEXT, [[(6, 3)]]),
    "bart": (InputTokens((1, 7, 8), source=(5, 6, 7, 9, 2)), [[(1, 8)], [(2, 2)]]),
    "recurrent": (InputTokens((0, 7, 8), source=(5, 6, 7, 9, 2)), [[(2, 2)]]),
}


@pytest.mark.parametrize("kind", COMPLETENESS_CASES)
def test_integrated_gradients_are_complete(kind: str, tmp_path: Path) -> None:
    """The completeness axiom, for every kind of head and network."""
    instrumented = instrumented_network(kind, tmp_path)
    text, goals = COMPLETENESS_CASES[kind]
    compared = InputTokens((2, 77, 10, 3)) if kind == "bert-vector" else None
    steps = 200 if kind == "recurrent" else 50  # it is not smooth
    request = ExplanationRequest(
        text, "integrated_gradients", tuple(map(tuple, goals)), baseline=3, compared_text=compared, steps=steps
    )
    for got, goal in zip(explained(explain(instrumented, request, piece=2000)).attributions, goals, strict=True):
        scores = instrumented.scores(text, beside=compared)
        assert close(got.score, sum(float(scores[row, column]) for row, column in goal))
        change = abs(got.score - got.baseline)
        assert change > 1e-3
        assert abs(float(got.values.sum()) - (got.score - got.baseline)) < 1e-3 * max(1.0, change)


def test_segments_are_used_and_not_interpolated(tmp_path: Path) -> None:
    instrumented = both("bert", tmp_path)[1]
    other = replace(TEXT, segments=(0, 0, 0, 0, 1, 1, 1, 1))
    assert not close(instrumented.scores(TEXT), instrumented.scores(other), 1e-3)
    for text in (TEXT, other):
        request = ExplanationRequest(text, "integrated_gradients", (((0, 1),),))
        (got,) = explained(explain(instrumented, request)).attributions
        assert close(got.score, instrumented.scores(text)[0, 1], 1e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_occlusion_is_the_change_of_the_score(kind: str, tmp_path: Path) -> None:
    theirs, instrumented = both(kind, tmp_path)
    _, goals = CASES[kind]
    found = explained(
        explain(instrumented, build_request("occlusion", goals, baseline=PAD, kept_rows=KEPT))
    ).attributions
    for goal, got in zip(goals, found, strict=True):
        expected = [0.0]
        for row in range(1, len(TOKENS) - 1):
            hidden = torch.tensor([[PAD if at == row else token for at, token in enumerate(TOKENS)]])
            with torch.no_grad():
                lost = cells(theirs(IDS).logits, goal) - cells(theirs(hidden).logits, goal)
            expected.append(float(lost))
        assert close(got.values, [*expected, 0.0])
        assert max(map(abs, expected)) > 0.01


def test_occlusion_windows_share_the_change_of_the_score(tmp_path: Path) -> None:
    """Three rows between kept ones, then two more: windows of two rows at 1, 2 and 5."""
    instrumented = both("bert", tmp_path)[1]
    kept = frozenset({0, 4, 7})
    (got,) = explained(
        explain(instrumented, build_request("occlusion", [[(0, 1)]], baseline=PAD, kept_rows=kept, window=2))
    ).attributions
    score_changes = []
    for rows in ((1, 2), (2, 3), (5, 6)):
        hidden = tuple(PAD if at in rows else token for at, token in enumerate(TOKENS))
        score_changes.append(got.score - float(instrumented.scores(InputTokens(hidden))[0, 1]))
    one, two, three = (number / 2 for number in score_changes)
    assert close(got.values, [0, one, (one + two) / 2, two, 0, three, three, 0])


def test_no_occlusion_window_spans_source_and_target() -> None:
    instrumented, text = recurrent(), InputTokens((0, 7, 8), source=(5, 6, 7))
    request = ExplanationRequest(text, "occlusion", (((2, 2),),), baseline=1, window=9)
    (got,) = explained(explain(instrumented, request)).attributions
    score_changes = [got.score - float(instrumented.scores(replace(text, **hidden))[2, 2]) for hidden in (
        {"source": (1, 1, 1)}, {"tokens": (1, 1, 1)})]  # fmt: skip
    assert close(got.values, [score_changes[0] / 3] * 3 + [score_changes[1] / 3] * 3)


@pytest.mark.parametrize("method", ["gradient_x_input", "integrated_gradients", "occlusion"])
def test_other_work_may_run_after_every_piece(method: Any, tmp_path: Path) -> None:
    instrumented = both("gpt2", tmp_path)[1]
    request, rows, seen = build_request(method, CASES["gpt2"][1], steps=STEPS, baseline=PAD), [0], list[int]()

    def counted(module: Any, inputs: Any) -> None:
        rows[0] += len(inputs[0])

    instrumented.network.blocks[0].register_forward_pre_hook(counted)  # type: ignore[union-attr, index]

    def watching() -> Any:
        steps = explain(instrumented, request, piece=20)
        while True:
            before = rows[0]
            try:
                next(steps)
            except StopIteration as last:
                return last.value
            finally:
                seen.append(rows[0] - before)
            yield

    in_pieces: Explanation = driven(watching())[0]
    assert max(seen) <= 2 * len(TOKENS) <= 20
    assert sum(seen) >= len(TOKENS) * {"gradient_x_input": 1, "integrated_gradients": STEPS, "occlusion": 9}[method]
    together = explained(explain(instrumented, request, piece=1000))
    for some, other in zip(in_pieces.attributions, together.attributions, strict=True):
        assert close(some.values, other.values, 1e-5), "the piece size changes nothing"


@pytest.mark.parametrize("kind", ["gpt2", "bert", "bart"])
@pytest.mark.parametrize("method", ["gradient_x_input", "integrated_gradients", "occlusion"])
def test_other_work_may_run_after_every_layer_of_a_long_text(method: Any, kind: str, tmp_path: Path) -> None:
    """The forward and the backward pass both yield after each layer."""
    instrumented, (text, goals) = instrumented_network(kind, tmp_path), COMPLETENESS_CASES.get(kind, (TEXT, [[(6, 3)]]))
    request = ExplanationRequest(text, method, tuple(map(tuple, goals)), steps=STEPS, baseline=PAD)
    layers, seen = [0], list[int]()

    def counted(*_: Any) -> None:
        layers[0] += 1

    network: Any = instrumented.seq2seq
    bodies: list[Any] = [instrumented.network] if network is None else [network.encoder, network.decoder]
    for block in [block for body in bodies for block in body.blocks]:
        block.register_forward_pre_hook(counted)
        block.mlp.register_full_backward_hook(counted)

    steps = explain(instrumented, request, piece=1)
    with contextlib.suppress(StopIteration):
        while True:
            before = layers[0]
            next(steps)
            seen.append(layers[0] - before)
    assert max(seen) == 1


def test_explanations_do_not_change_the_network_or_torch_s_modes(tmp_path: Path) -> None:
    """No gradients are stored, tied weights stay tied, and torch's modes are restored at each yield."""
    instrumented = both("gpt2", tmp_path)[1]
    embedding, output = instrumented.network.tokens.weight, instrumented.head.output.weight  # type: ignore[union-attr]
    assert embedding is output
    assert not any(p.requires_grad or p.is_inference() for p in instrumented.network.parameters())
    steps = explain(instrumented, build_request("integrated_gradients", CASES["gpt2"][1], steps=STEPS, baseline=PAD))
    for modes in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with modes():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            next(steps)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert embedding.grad is None


SMALL = ModelConfig(
    vocab_size=61, width=64, depth=4, heads=4, kv_heads=4, head_width=16, mlp_width=160, max_positions=256, causal=False
)
SIZES = {
    "plain": SMALL,
    "grouped": replace(
        SMALL, causal=True, kv_heads=1, gated_mlp=True, position="rotary", norm="rms", norm_order="sandwich",
        query_key_norm="shared", window=40, windowed=(True, False) * 2,
    ),
    "distance": replace(SMALL, position="distance", distances=16, farthest=64),
    "relative": replace(SMALL, position="relative", farthest=16),
    "alibi": replace(SMALL, position="alibi"),
    "global": replace(SMALL, window=20, global_tokens="before_separator", separator=50),
}  # fmt: skip


@pytest.mark.parametrize("method", ["attention", "integrated_gradients"])
@pytest.mark.parametrize("name", SIZES)
def test_the_memory_estimate_is_an_upper_bound_and_close(name: str, method: Any) -> None:
    config = SIZES[name]
    instrumented = InstrumentedNetwork(Transformer(config), LanguageHead(config))
    request = ExplanationRequest(
        InputTokens(tuple(range(60)) * 2), method, (((7, 3),),), steps=2, baseline=1, kept_rows=frozenset(range(3, 120))
    )
    if method == "attention":
        request = replace(request, layers=(1, 2))
    found = explained(explain(instrumented, request))
    peak = measure_peak(lambda: explained(explain(instrumented, request)))
    peak += sum(weights.values.nbytes for weights in found.weights)
    estimated = estimate_bytes(config, config, request) - SLACK_BYTES
    assert peak <= estimated + SLACK_BYTES / 4
    assert estimated <= 5 * peak

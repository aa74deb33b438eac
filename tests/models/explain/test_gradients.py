"""What each token did: as captum and transformers have it, as the plain loop has it, and in pieces."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from captum.attr import LayerIntegratedGradients
from torch.profiler import ProfilerActivity, profile

from polyhead.models.checkpoint import load
from polyhead.models.explain import Explanation, ExplanationRequest, InputTokens, InstrumentedNetwork, explain
from polyhead.models.explain.cost_estimate import SLACK_BYTES, estimate_bytes
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator
from tests.support.explained import TOKENS, both, driven, explained
from tests.support.translators import translator

PAD, STEPS = 0, 12
TEXT, IDS = InputTokens(TOKENS), torch.tensor([TOKENS])
KEPT = frozenset({0, len(TOKENS) - 1})
# A kind, where its table of tokens is in transformers, and goals: each a list of cells (row, column).
CASES: dict[str, tuple[str, list[list[tuple[int, int]]]]] = {
    "bert": ("bert.embeddings.word_embeddings", [[(0, 1)], [(0, 0)]]),
    "bert-tags": ("bert.embeddings.word_embeddings", [[(3, 1)]]),
    "gpt2": ("transformer.wte", [[(4, 33)], [(6, 3)]]),
}


def asked(method: Any, goals: list[list[tuple[int, int]]], **more: Any) -> ExplanationRequest:
    return ExplanationRequest(TEXT, method, tuple(map(tuple, goals)), **more)


def cells(logits: torch.Tensor, goal: list[tuple[int, int]]) -> torch.Tensor:
    """[N] of transformers' logits, which are [N, C] where a text has one row."""
    rows = logits[:, None] if logits.dim() == 2 else logits
    return sum(rows[:, row, column] for row, column in goal)  # type: ignore[return-value]


def close(some: Any, other: Any, most: float = 1e-4) -> bool:
    some, other = np.asarray(some), np.asarray(other)
    return some.shape == other.shape and float(np.abs(some - other).max()) < most


@pytest.mark.parametrize("kept", [frozenset(), KEPT])
@pytest.mark.parametrize("kind", CASES)
def test_integrated_gradients_are_those_of_captum(kind: str, kept: frozenset[int], tmp_path: Path) -> None:
    theirs, watched = both(kind, tmp_path)
    table, goals = CASES[kind]
    nothing = [token if row in kept else PAD for row, token in enumerate(TOKENS)]
    found = explained(explain(watched, asked("integrated_gradients", goals, steps=STEPS, baseline=PAD, kept_rows=kept)))
    for goal, got in zip(goals, found.attributions, strict=True):
        method = LayerIntegratedGradients(
            lambda ids, goal=goal: cells(theirs(ids).logits, goal), theirs.get_submodule(table)
        )
        there = method.attribute(IDS, torch.tensor([nothing]), n_steps=STEPS).sum(-1)[0]
        assert close(got.values, there.detach())
        with torch.no_grad():
            ends = [float(cells(theirs(torch.tensor([ids])).logits, goal)) for ids in (list(TOKENS), nothing)]
        assert close([got.score, got.baseline], ends)
        assert float(np.abs(got.values).max()) > 0.01


@pytest.mark.parametrize("kind", CASES)
def test_gradients_times_input_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs, watched = both(kind, tmp_path)
    table, goals = CASES[kind]
    there = theirs.get_submodule(table)(IDS).detach().requires_grad_()
    found = explained(explain(watched, asked("gradient_x_input", goals)))
    for goal, got in zip(goals, found.attributions, strict=True):
        score = cells(theirs(inputs_embeds=there).logits, goal)
        (slope,) = torch.autograd.grad(score, there)
        assert close(got.values, (slope * there).sum(-1)[0].detach())
        assert close(got.score, score.detach()[0])
        assert np.isnan(got.baseline)


def test_what_is_read_and_what_is_written_have_derivatives_of_their_own(tmp_path: Path) -> None:
    """Of an encoder-decoder, whose halves have one table."""
    theirs = translator(tmp_path, "t5-1.1")
    loaded = load(str(tmp_path))
    watched, text = InstrumentedNetwork(loaded.network, loaded.head), InputTokens((1, 7, 8), source=(5, 6, 7, 9, 2))
    read, written = (theirs.shared(torch.tensor([ids])).detach().requires_grad_() for ids in (text.source, text.tokens))
    score = theirs(inputs_embeds=read, decoder_inputs_embeds=written).logits[0, 1, 8]
    slopes = torch.autograd.grad(score, (read, written))
    expected = torch.cat([(slope * at).sum(-1)[0] for slope, at in zip(slopes, (read, written), strict=True)], dim=0)
    (got,) = explained(explain(watched, ExplanationRequest(text, "gradient_x_input", (((1, 8),),)))).attributions
    assert close(got.values, expected.detach(), 1e-4 * float(expected.detach().abs().max()))
    assert got.values[-1] == 0, "what is written later has no part in it"


def recurrent() -> InstrumentedNetwork:
    torch.manual_seed(1)
    network = RecurrentTranslator(
        RecurrentConfig(vocab_size=60, width=8, hidden=8, start=0, end=2, pad=0, attention="bahdanau")
    )
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return InstrumentedNetwork(network, network)


def watched_as(kind: str, folder: Path) -> InstrumentedNetwork:
    if kind == "recurrent":
        return recurrent()
    if kind == "bart":
        translator(folder, kind)
        loaded = load(str(folder))
        return InstrumentedNetwork(loaded.network, loaded.head)
    return both(kind, folder)[1]


WHOLE: dict[str, tuple[InputTokens, list[list[tuple[int, int]]]]] = {
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


@pytest.mark.parametrize("kind", WHOLE)
def test_all_that_tokens_did_is_all_that_was_done(kind: str, tmp_path: Path) -> None:
    """The axiom of completeness, for every kind of head and body."""
    watched = watched_as(kind, tmp_path)
    text, goals = WHOLE[kind]
    beside = InputTokens((2, 77, 10, 3)) if kind == "bert-vector" else None
    steps = 200 if kind == "recurrent" else 50  # it has kinks
    about = ExplanationRequest(
        text, "integrated_gradients", tuple(map(tuple, goals)), baseline=3, compared_text=beside, steps=steps
    )
    for got, goal in zip(explained(explain(watched, about, piece=2000)).attributions, goals, strict=True):
        scores = watched.scores(text, beside=beside)
        assert close(got.score, sum(float(scores[row, column]) for row, column in goal))
        moved = abs(got.score - got.baseline)
        assert moved > 1e-3
        assert abs(float(got.values.sum()) - (got.score - got.baseline)) < 1e-3 * max(1.0, moved)


def test_segments_are_read_and_not_moved(tmp_path: Path) -> None:
    watched = both("bert", tmp_path)[1]
    other = replace(TEXT, segments=(0, 0, 0, 0, 1, 1, 1, 1))
    assert not close(watched.scores(TEXT), watched.scores(other), 1e-3)
    for text in (TEXT, other):
        about = ExplanationRequest(text, "integrated_gradients", (((0, 1),),))
        (got,) = explained(explain(watched, about)).attributions
        assert close(got.score, watched.scores(text)[0, 1], 1e-5)


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_what_is_lost_with_a_hidden_token_is_its_own(kind: str, tmp_path: Path) -> None:
    theirs, watched = both(kind, tmp_path)
    _, goals = CASES[kind]
    found = explained(explain(watched, asked("occlusion", goals, baseline=PAD, kept_rows=KEPT))).attributions
    for goal, got in zip(goals, found, strict=True):
        expected = [0.0]
        for row in range(1, len(TOKENS) - 1):
            hidden = torch.tensor([[PAD if at == row else token for at, token in enumerate(TOKENS)]])
            with torch.no_grad():
                lost = cells(theirs(IDS).logits, goal) - cells(theirs(hidden).logits, goal)
            expected.append(float(lost))
        assert close(got.values, [*expected, 0.0])
        assert max(map(abs, expected)) > 0.01


def test_a_window_is_hidden_at_once_and_shares_what_is_lost(tmp_path: Path) -> None:
    """Three rows between those that are kept, and two more: windows of two at 1 and 2, and at 5."""
    watched = both("bert", tmp_path)[1]
    kept = frozenset({0, 4, 7})
    (got,) = explained(
        explain(watched, asked("occlusion", [[(0, 1)]], baseline=PAD, kept_rows=kept, window=2))
    ).attributions
    lost = []
    for rows in ((1, 2), (2, 3), (5, 6)):
        hidden = tuple(PAD if at in rows else token for at, token in enumerate(TOKENS))
        lost.append(got.score - float(watched.scores(InputTokens(hidden))[0, 1]))
    one, two, three = (number / 2 for number in lost)
    assert close(got.values, [0, one, (one + two) / 2, two, 0, three, three, 0])


def test_no_window_lies_over_the_end_of_what_is_read() -> None:
    watched, text = recurrent(), InputTokens((0, 7, 8), source=(5, 6, 7))
    about = ExplanationRequest(text, "occlusion", (((2, 2),),), baseline=1, window=9)
    (got,) = explained(explain(watched, about)).attributions
    lost = [got.score - float(watched.scores(replace(text, **hidden))[2, 2]) for hidden in (
        {"source": (1, 1, 1)}, {"tokens": (1, 1, 1)})]  # fmt: skip
    assert close(got.values, [lost[0] / 3] * 3 + [lost[1] / 3] * 3)


@pytest.mark.parametrize("method", ["gradient_x_input", "integrated_gradients", "occlusion"])
def test_others_may_compute_after_every_piece(method: Any, tmp_path: Path) -> None:
    watched = both("gpt2", tmp_path)[1]
    about, rows, seen = asked(method, CASES["gpt2"][1], steps=STEPS, baseline=PAD), [0], list[int]()

    def counted(module: Any, inputs: Any) -> None:
        rows[0] += len(inputs[0])

    watched.network.blocks[0].register_forward_pre_hook(counted)  # type: ignore[union-attr, index]

    def watching() -> Any:
        steps = explain(watched, about, piece=20)
        while True:
            before = rows[0]
            try:
                next(steps)
            except StopIteration as last:
                return last.value
            finally:
                seen.append(rows[0] - before)
            yield

    whole: Explanation = driven(watching())[0]
    assert max(seen) <= 2 * len(TOKENS) <= 20
    assert sum(seen) >= len(TOKENS) * {"gradient_x_input": 1, "integrated_gradients": STEPS, "occlusion": 9}[method]
    together = explained(explain(watched, about, piece=1000))
    for some, other in zip(whole.attributions, together.attributions, strict=True):
        assert close(some.values, other.values, 1e-5), "pieces change nothing"


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
@pytest.mark.parametrize("method", ["gradient_x_input", "integrated_gradients", "occlusion"])
def test_of_a_text_that_is_longer_than_a_piece_others_may_compute_after_every_layer(
    method: Any, kind: str, tmp_path: Path
) -> None:
    """Forward and backward: both pass through the layers one at a time."""
    watched = both(kind, tmp_path)[1]
    about, layers, seen = asked(method, CASES[kind][1], steps=STEPS, baseline=PAD), [0], list[int]()

    def counted(*_: Any) -> None:
        layers[0] += 1

    for block in watched.network.blocks:  # type: ignore[union-attr]
        block.register_forward_pre_hook(counted)
        block.mlp.register_full_backward_hook(counted)

    steps = explain(watched, about, piece=1)
    with contextlib.suppress(StopIteration):
        while True:
            before = layers[0]
            next(steps)
            seen.append(layers[0] - before)
    assert max(seen) == 1


def test_a_network_is_left_as_it_can_be_shared(tmp_path: Path) -> None:
    """Nothing learns, what is tied stays tied, and who drives it finds torch's modes as they were."""
    watched = both("gpt2", tmp_path)[1]
    table, output = watched.network.tokens.weight, watched.head.output.weight  # type: ignore[union-attr]
    assert table is output
    assert not any(p.requires_grad or p.is_inference() for p in watched.network.parameters())
    steps = explain(watched, asked("integrated_gradients", CASES["gpt2"][1], steps=STEPS, baseline=PAD))
    for modes in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with modes():
            before = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
            next(steps)
            assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == before
    assert table.grad is None


SMALL = ModelConfig(
    vocab_size=61, width=64, depth=4, heads=4, kv_heads=4, head_width=16, mlp_width=160, max_positions=256, causal=False
)
SIZES = {
    "plain": SMALL,
    "grouped": replace(
        SMALL, causal=True, kv_heads=1, gated_mlp=True, position="rotary", norm="rms", norm_order="sandwich",
        query_key_norm=True, window=40, windowed=(True, False) * 2,
    ),
    "distance": replace(SMALL, position="distance", distances=16, farthest=64),
    "relative": replace(SMALL, position="relative", farthest=16),
    "alibi": replace(SMALL, position="alibi"),
}  # fmt: skip


@pytest.mark.parametrize("method", ["attention", "integrated_gradients"])
@pytest.mark.parametrize("name", SIZES)
def test_it_takes_no_more_than_was_told_and_not_much_less(name: str, method: Any) -> None:
    config = SIZES[name]
    watched = InstrumentedNetwork(Transformer(config), LanguageHead(config))
    about = ExplanationRequest(
        InputTokens(tuple(range(60)) * 2), method, (((7, 3),),), steps=2, baseline=1, kept_rows=frozenset(range(3, 120))
    )
    if method == "attention":
        about = replace(about, layers=(1, 2))
    explained(explain(watched, about))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        found = explained(explain(watched, about))
    alive = most = 0
    for event in seen.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            alive += event.nbytes()
            most = max(most, alive)
    most += sum(weights.values.nbytes for weights in found.weights)
    told = estimate_bytes(config, config, about) - SLACK_BYTES
    assert most <= told + SLACK_BYTES / 4
    assert told <= 5 * most

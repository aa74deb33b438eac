"""Attention that is shown is the attention that was computed, as transformers shows it; and all layers together."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.explain import Explanation, ExplanationRequest, InputTokens, InstrumentedNetwork, explain, max_flow
from polyhead.models.network.attention import RelativeAttention
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator
from tests.support.explained import KINDS, TOKENS, both, driven, explained
from tests.support.translators import translator

CLOSE = 1e-5
SOURCE, WRITTEN = (5, 6, 7, 8, 9, 2), (1, 7, 8, 9)
SHOWN = [kind for kind in KINDS if kind not in ("bert-tags", "bert-words", "bert-span", "bert-vector", "gpt2-labels")]


def apart(ours: Any, theirs: Any) -> float:
    """By how much arrays of the same shape differ at most."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())


@pytest.mark.parametrize("kind", SHOWN)
def test_weights_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs, watched = both(kind, tmp_path)
    with torch.no_grad():
        out = theirs(torch.tensor([TOKENS]), output_attentions=True)
    expected = torch.cat(out.attentions).numpy()  # [L, H, Q, K]
    asked = ExplanationRequest(InputTokens(TOKENS), "attention")
    (weights,) = explained(explain(watched, asked)).weights
    layers, heads = watched.layout["self"]
    assert (weights.kind, weights.layers, weights.heads) == ("self", tuple(range(layers)), tuple(range(heads)))
    assert weights.values.dtype == np.float32
    assert apart(weights.values, expected) < CLOSE
    assert expected.std() > 0.02, "weights differ"
    (some,) = explained(explain(watched, replace(asked, layers=(1,), heads=(3, 0)))).weights
    assert apart(some.values, expected[[1]][:, [3, 0]]) < CLOSE, "and of those alone that are asked for"
    assert apart(watched.scores(InputTokens(TOKENS)), out.logits.detach().view(-1, out.logits.size(-1))) < 2e-5


@pytest.mark.parametrize("kind", ["t5", "t5-1.1", "bart", "marian"])
def test_all_three_attentions_of_an_encoder_decoder_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    theirs = translator(tmp_path, kind)
    theirs.set_attn_implementation("eager")
    loaded = load(str(tmp_path))
    watched = InstrumentedNetwork(loaded.network, loaded.head)
    with torch.no_grad():
        out = theirs(torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([WRITTEN]), output_attentions=True)
    text = InputTokens(WRITTEN, source=SOURCE)
    found = {
        weights.kind: weights.values
        for weights in explained(explain(watched, ExplanationRequest(text, "attention"))).weights
    }
    assert list(found) == ["encoder", "decoder", "cross"]
    for part, expected in zip(
        found, (out.encoder_attentions, out.decoder_attentions, out.cross_attentions), strict=True
    ):
        assert apart(found[part], torch.cat(expected)) < CLOSE
    size = float(out.logits.abs().max())
    assert apart(watched.scores(text), out.logits[0].detach()) < CLOSE * size
    assert apart(watched.scores(text, rows=[2]), out.logits[0, 2:3].detach()) < CLOSE * size
    (rolled,) = explained(explain(watched, ExplanationRequest(text, "attention_rollout"))).weights
    assert rolled.values.shape == (1, 1, len(SOURCE), len(SOURCE)), "of an encoder-decoder, of what it reads"


def test_long_texts_are_looked_at_layer_by_layer(tmp_path: Path) -> None:
    """And whoever asks something else of the network in between disturbs nothing."""
    translator(tmp_path, "bart")
    loaded = load(str(tmp_path))
    watched = InstrumentedNetwork(loaded.network, loaded.head)
    asked = ExplanationRequest(InputTokens(WRITTEN, source=SOURCE), "attention")
    layers = {part: layers for part, (layers, _) in watched.layout.items()}
    whole, yields = driven(explain(watched, asked))
    assert (layers, yields) == ({"encoder": 2, "decoder": 3, "cross": 3}, 0)
    steps, count = explain(watched, asked, piece=1), 0
    while True:
        try:
            next(steps)
        except StopIteration as last:
            parts: Explanation = last.value
            break
        count += 1
        watched.scores(InputTokens((1, 4), source=(8, 4)))
        explained(explain(watched, ExplanationRequest(InputTokens((1, 9), source=(3, 4)), "attention")))
    assert count == 2 + 3
    for some, other in zip(whole.weights, parts.weights, strict=True):
        assert (some.kind, some.values.tolist()) == (other.kind, other.values.tolist())


RELATIVE = ModelConfig(
    vocab_size=61, width=16, depth=2, heads=4, kv_heads=2, head_width=4, mlp_width=20, max_positions=64, causal=True,
    position="relative", farthest=3,
)  # fmt: skip


def wild(config: ModelConfig) -> tuple[Transformer, LanguageHead]:
    torch.manual_seed(0)
    network = Transformer(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network, LanguageHead(config)


def test_shaws_relative_attention_is_seen_as_well() -> None:
    """It mixes distances' vectors, too: what it mixes is worked out from the weights that are shown."""
    network, head = wild(RELATIVE)
    attention = network.blocks[0].attention
    assert isinstance(attention, RelativeAttention)
    mixed = []
    attention.output.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
    values: list[torch.Tensor] = []
    attention.value.register_forward_hook(lambda module, inputs, out: values.append(out))
    (weights,) = explained(
        explain(InstrumentedNetwork(network, head), ExplanationRequest(InputTokens(tuple(range(3, 12))), "attention"))
    ).weights
    seen, place = torch.tensor(weights.values[0]), torch.arange(9)
    by = attention.relative.values(attention.relative.bucket(place[:, None] - place))  # [Q, K, D]
    kept = values[0].view(9, 2, 4).repeat_interleave(2, dim=1)  # [K, H, D]
    expected = torch.einsum("hqk,khd->qhd", seen, kept) + torch.einsum("hqk,qkd->qhd", seen, by)
    assert apart(mixed[0], expected.flatten(1).detach()) < CLOSE


@pytest.mark.parametrize("config", [RELATIVE, replace(RELATIVE, position="alibi")])
def test_a_silent_head_mixes_nothing(config: ModelConfig) -> None:
    network, head = wild(config)
    watched, text, mixed = InstrumentedNetwork(network, head), InputTokens(tuple(range(3, 12))), list[torch.Tensor]()
    whole = watched.scores(text)
    watched.silenced = {("self", 1, 2), ("self", 1, 0)}
    network.blocks[1].attention.output.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
    less = watched.scores(text)
    assert mixed[0].view(9, 4, 4).abs().amax(dim=(0, 2)).gt(0).tolist() == [False, True, False, True]
    with torch.no_grad():
        for silent in (0, 2):
            network.blocks[1].attention.output.weight[:, 4 * silent : 4 * silent + 4] = 0
    watched.silenced.clear()
    assert apart(less, watched.scores(text)) < CLOSE, "as if what it wrote were not read"
    assert apart(less, whole) > 100 * CLOSE


def recurrent(**options: Any) -> RecurrentTranslator:
    torch.manual_seed(1)
    network = RecurrentTranslator(RecurrentConfig(vocab_size=40, width=8, hidden=8, start=0, end=2, pad=0, **options))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


@pytest.mark.parametrize("options", [{"attention": "bahdanau"}, {"attention": "luong", "score": "general", "depth": 2}])
def test_a_recurrent_network_shows_its_alignment(options: dict[str, Any]) -> None:
    network = recurrent(**options)
    watched, looked = InstrumentedNetwork(network, network), list[torch.Tensor]()
    assert watched.layout == {"cross": (1, 1)}
    text = InputTokens((0, 7, 8), source=(5, 6, 7, 9, 2))
    (weights,) = explained(explain(watched, ExplanationRequest(text, "attention"))).weights
    assert (weights.kind, weights.values.shape) == ("cross", (1, 1, 3, 5))
    assert apart(weights.values.sum(-1), np.ones((1, 1, 3))) < CLOSE
    network.decoder.looking.register_forward_hook(lambda module, inputs, out: looked.append(out[1]))
    watched.scores(text)
    assert apart(weights.values[0], torch.cat(looked, dim=1)) < CLOSE, "as it does when all of the target is given"
    assert weights.values.std(axis=-2).max() > 1e-3, "from row to row it looks elsewhere"
    with pytest.raises(UnsupportedError, match="ask for attention"):
        explained(explain(watched, ExplanationRequest(text, "attention_flow")))


def test_what_has_no_attention_says_so() -> None:
    network = recurrent(attention="none")
    with pytest.raises(UnsupportedError, match="it has no attention;"):
        explained(
            explain(
                InstrumentedNetwork(network, network), ExplanationRequest(InputTokens((0, 7), source=(5,)), "attention")
            )
        )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_rollout_and_flow_share_a_row_out(kind: str, tmp_path: Path) -> None:
    _, watched = both(kind, tmp_path)
    (seen,) = explained(explain(watched, ExplanationRequest(InputTokens(TOKENS), "attention"))).weights
    means = seen.values.mean(axis=1)
    for method, least in (("attention_rollout", 0), ("attention_flow", len(TOKENS))):
        found, yields = driven(explain(watched, ExplanationRequest(InputTokens(TOKENS), method)))  # type: ignore[arg-type]
        (weights,) = found.weights
        assert (weights.values.shape, yields >= least) == ((1, 1, len(TOKENS), len(TOKENS)), True)
        shares = weights.values[0, 0]
        assert apart(shares.sum(axis=1), np.ones(len(TOKENS))) < CLOSE
        assert shares.min() >= 0
        assert kind == "bert" or apart(np.triu(shares, 1), np.zeros_like(shares)) == 0, "nobody sees what is to come"
        if method == "attention_rollout":
            mixed = (means + np.eye(len(TOKENS))) / 2
            assert apart(shares, mixed[1] @ mixed[0]) < CLOSE


def test_flow_is_what_goes_through_the_narrowest_pipes() -> None:
    """Two tokens, two layers, by hand.  With what goes straight on, the first layer's rows are (3/4, 1/4) and
    (1/4, 3/4), the second's (1, 0) and (1/2, 1/2).

    The upper second row reaches the first token by way of the first row, where 1/2 comes and 3/4 could go on, and of
    the second, where 1/2 comes and 1/4 goes on: 3/4; the second token by 1/4 and 1/2: 3/4.  The upper first row has but
    the way over the first: 3/4 and 1/4.
    """
    weights = np.array([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]], np.float32)
    found, _ = driven(max_flow.maximum_flows(weights))
    assert apart(found, np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)) < 1e-6
    assert apart(max_flow.rollout(weights), np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)) < 1e-6


def test_flow_is_not_rollout() -> None:
    """What two ways could bring together rollout takes for their share, by hand.

    Three tokens, two layers: the upper last row sees (1/4, 1/4, 1/2), below every row sees (1/2, 0, 0) and half of
    itself, but the first, which sees itself alone.  So the first token could have 1/4 + 1/4 + 1/2 = 1, of which the
    pipes of the second row let through 1/2 and bring 1/4, those of the third 1/2; the second 1/4, the third 1/2.
    """
    first = np.array([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
    second = np.array([[1.0, 0, 0], [0, 1.0, 0], [0.5, 0.5, 0]])
    found, _ = driven(max_flow.maximum_flows(np.array([first, second], np.float32)))
    assert apart(found[2], np.array([1.0, 0.25, 0.5], np.float32) / 1.75) < 1e-6
    rolled = max_flow.rollout(np.array([first, second], np.float32))
    assert apart(rolled[2], np.array([0.625, 0.125, 0.25], np.float32)) < 1e-6


def test_without_scipy_flow_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_flow, "HAS_SCIPY", False)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyhead\[explain\]'"):
        driven(max_flow.maximum_flows(np.ones((1, 1, 1), np.float32)))

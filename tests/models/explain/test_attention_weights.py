"""Explained attention weights equal those of transformers and those of the step; rollout and flow over all layers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from polyhead.models.checkpoint import load
from polyhead.models.core.errors import UnsupportedError
from polyhead.models.explain import Explanation, ExplanationRequest, InputTokens, InstrumentedNetwork, explain, max_flow
from polyhead.models.network.attention import GlobalAttention, RelativeAttention
from polyhead.models.network.encoder_decoder import EncoderDecoder
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import EncoderDecoderConfig, ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator
from tests.support.explained import KINDS, TOKENS, both, driven, explained
from tests.support.translators import translator

CLOSE = 1e-5
SOURCE, WRITTEN = (5, 6, 7, 8, 9, 2), (1, 7, 8, 9)
EXPLAINED = [
    kind for kind in KINDS if kind not in ("bert-tags", "bert-words", "bert-span", "bert-vector", "gpt2-labels")
]


def max_difference(ours: Any, theirs: Any) -> float:
    """The largest absolute difference of two arrays of the same shape."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max())


@pytest.mark.parametrize("kind", EXPLAINED)
def test_weights_equal_transformers(kind: str, tmp_path: Path) -> None:
    theirs, instrumented = both(kind, tmp_path)
    with torch.no_grad():
        out = theirs(torch.tensor([TOKENS]), output_attentions=True)
    expected = torch.cat(out.attentions).numpy()  # [L, H, Q, K]
    request = ExplanationRequest(InputTokens(TOKENS), "attention")
    (weights,) = explained(explain(instrumented, request)).weights
    layers, heads = instrumented.layout["self"]
    assert (weights.kind, weights.layers, weights.heads) == ("self", tuple(range(layers)), tuple(range(heads)))
    assert weights.values.dtype == np.float32
    assert max_difference(weights.values, expected) < CLOSE
    assert expected.std() > 0.02, "the attention weights are not uniform"
    (some,) = explained(explain(instrumented, replace(request, layers=(1,), heads=(3, 0)))).weights
    assert max_difference(some.values, expected[[1]][:, [3, 0]]) < CLOSE, "of the requested layers and heads"
    assert (
        max_difference(instrumented.scores(InputTokens(TOKENS)), out.logits.detach().view(-1, out.logits.size(-1)))
        < 2e-5
    )


def test_a_decoder_with_two_rows_for_each_token_is_refused() -> None:
    side = ModelConfig(
        vocab_size=9, width=8, depth=1, heads=2, kv_heads=2, head_width=4, mlp_width=8, max_positions=8, causal=False
    )
    decoder = replace(side, causal=True, distances=4, two_streams=True)
    network = EncoderDecoder(Transformer(side), EncoderDecoderConfig(encoder=side, decoder=decoder, start=0))
    with pytest.raises(UnsupportedError, match="two rows for each token are not explained"):
        InstrumentedNetwork(network.encoder, network)


@pytest.mark.parametrize("kind", ["t5", "t5-1.1", "bart", "marian"])
def test_all_attentions_of_an_encoder_decoder_equal_transformers(kind: str, tmp_path: Path) -> None:
    theirs = translator(tmp_path, kind)
    theirs.set_attn_implementation("eager")
    loaded = load(str(tmp_path))
    instrumented = InstrumentedNetwork(loaded.network, loaded.head)
    with torch.no_grad():
        out = theirs(torch.tensor([SOURCE]), decoder_input_ids=torch.tensor([WRITTEN]), output_attentions=True)
    text = InputTokens(WRITTEN, source=SOURCE)
    found = {
        weights.kind: weights.values
        for weights in explained(explain(instrumented, ExplanationRequest(text, "attention"))).weights
    }
    assert list(found) == ["encoder", "decoder", "cross"]
    for part, expected in zip(
        found, (out.encoder_attentions, out.decoder_attentions, out.cross_attentions), strict=True
    ):
        assert max_difference(found[part], torch.cat(expected)) < CLOSE
    size = float(out.logits.abs().max())
    assert max_difference(instrumented.scores(text), out.logits[0].detach()) < CLOSE * size
    assert max_difference(instrumented.scores(text, rows=[2]), out.logits[0, 2:3].detach()) < CLOSE * size
    (rollout,) = explained(explain(instrumented, ExplanationRequest(text, "attention_rollout"))).weights
    assert rollout.values.shape == (1, 1, len(SOURCE), len(SOURCE)), (
        "for an encoder-decoder, rollout is over the encoder"
    )


def test_long_texts_are_explained_layer_by_layer(tmp_path: Path) -> None:
    """Other explanations of the same network in between change nothing."""
    translator(tmp_path, "bart")
    loaded = load(str(tmp_path))
    instrumented = InstrumentedNetwork(loaded.network, loaded.head)
    request = ExplanationRequest(InputTokens(WRITTEN, source=SOURCE), "attention")
    layers = {part: layers for part, (layers, _) in instrumented.layout.items()}
    expected, yields = driven(explain(instrumented, request))
    assert (layers, yields) == ({"encoder": 2, "decoder": 3, "cross": 3}, 0)
    steps, count = explain(instrumented, request, piece=1), 0
    while True:
        try:
            next(steps)
        except StopIteration as last:
            parts: Explanation = last.value
            break
        count += 1
        instrumented.scores(InputTokens((1, 4), source=(8, 4)))
        explained(explain(instrumented, ExplanationRequest(InputTokens((1, 9), source=(3, 4)), "attention")))
    assert count == 2 + 3
    for some, other in zip(expected.weights, parts.weights, strict=True):
        assert (some.kind, some.values.tolist()) == (other.kind, other.values.tolist())


RELATIVE = ModelConfig(
    vocab_size=61, width=16, depth=2, heads=4, kv_heads=2, head_width=4, mlp_width=20, max_positions=64, causal=True,
    position="relative", farthest=3,
)  # fmt: skip


def random_network(config: ModelConfig) -> tuple[Transformer, LanguageHead]:
    torch.manual_seed(0)
    network = Transformer(config)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return network, LanguageHead(config)


def test_weights_of_relative_attention_give_its_output() -> None:
    """It also mixes distance vectors. Its output is computed again from the explained weights."""
    network, head = random_network(RELATIVE)
    attention = network.blocks[0].attention
    assert isinstance(attention, RelativeAttention)
    mixed = []
    attention.output.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
    values: list[torch.Tensor] = []
    attention.value.register_forward_hook(lambda module, inputs, out: values.append(out))
    (weights,) = explained(
        explain(InstrumentedNetwork(network, head), ExplanationRequest(InputTokens(tuple(range(3, 12))), "attention"))
    ).weights
    shown, place = torch.tensor(weights.values[0]), torch.arange(9)
    by = attention.relative.values(attention.relative.bucket(place[:, None] - place))  # [Q, K, D]
    kept = values[0].view(9, 2, 4).repeat_interleave(2, dim=1)  # [K, H, D]
    expected = torch.einsum("hqk,khd->qhd", shown, kept) + torch.einsum("hqk,qkd->qhd", shown, by)
    assert max_difference(mixed[0], expected.flatten(1).detach()) < CLOSE


@pytest.mark.parametrize(
    ("kind", "rows"), [("first", range(1)), ("before_separator", range(4)), ("after_separator", range(6, 9))]
)
def test_weights_of_global_attention_give_its_output(kind: Any, rows: range) -> None:
    """Those of global tokens, of the rows in `rows`, are over the values of the second projection."""
    network, head = random_network(
        replace(RELATIVE, position="learned", causal=False, window=2, global_tokens=kind, separator=7)
    )
    attention = network.blocks[0].attention
    assert isinstance(attention, GlobalAttention)
    mixed, values = list[torch.Tensor](), list[torch.Tensor]()
    attention.output.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
    for part in (attention.value, attention.global_value):
        part.register_forward_hook(lambda module, inputs, out: values.append(out))
    (weights,) = explained(
        explain(InstrumentedNetwork(network, head), ExplanationRequest(InputTokens(tuple(range(3, 12))), "attention"))
    ).weights
    shown = torch.tensor(weights.values[0])  # [H, Q, K]
    own, second = (
        torch.einsum("hqk,khd->qhd", shown, each.view(9, 2, 4).repeat_interleave(2, dim=1)) for each in values
    )
    is_global = torch.tensor([place in rows for place in range(9)])
    expected = torch.where(is_global[:, None, None], second, own)
    assert max_difference(mixed[0], expected.flatten(1).detach()) < CLOSE
    seen = (shown > 0).all(dim=0)
    near = (torch.arange(9)[:, None] - torch.arange(9)).abs() < 2
    assert torch.equal(seen, near | is_global | is_global[:, None])


@pytest.mark.parametrize("config", [RELATIVE, replace(RELATIVE, position="alibi")])
def test_a_silenced_head_has_no_output(config: ModelConfig) -> None:
    network, head = random_network(config)
    instrumented, text, mixed = (
        InstrumentedNetwork(network, head),
        InputTokens(tuple(range(3, 12))),
        list[torch.Tensor](),
    )
    full = instrumented.scores(text)
    instrumented.silenced = {("self", 1, 2), ("self", 1, 0)}
    network.blocks[1].attention.output.register_forward_pre_hook(lambda module, inputs: mixed.append(inputs[0]))
    silenced = instrumented.scores(text)
    assert mixed[0].view(9, 4, 4).abs().amax(dim=(0, 2)).gt(0).tolist() == [False, True, False, True]
    with torch.no_grad():
        for silent in (0, 2):
            network.blocks[1].attention.output.weight[:, 4 * silent : 4 * silent + 4] = 0
    instrumented.silenced.clear()
    assert max_difference(silenced, instrumented.scores(text)) < CLOSE, "as if its output weights were zero"
    assert max_difference(silenced, full) > 100 * CLOSE


def recurrent(**options: Any) -> RecurrentTranslator:
    torch.manual_seed(1)
    network = RecurrentTranslator(RecurrentConfig(vocab_size=40, width=8, hidden=8, start=0, end=2, pad=0, **options))
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return network


@pytest.mark.parametrize("options", [{"attention": "bahdanau"}, {"attention": "luong", "score": "general", "depth": 2}])
def test_a_recurrent_network_shows_its_alignment(options: dict[str, Any]) -> None:
    network = recurrent(**options)
    instrumented, alignments = InstrumentedNetwork(network, network), list[torch.Tensor]()
    assert instrumented.layout == {"cross": (1, 1)}
    text = InputTokens((0, 7, 8), source=(5, 6, 7, 9, 2))
    (weights,) = explained(explain(instrumented, ExplanationRequest(text, "attention"))).weights
    assert (weights.kind, weights.values.shape) == ("cross", (1, 1, 3, 5))
    assert max_difference(weights.values.sum(-1), np.ones((1, 1, 3))) < CLOSE
    network.decoder.looking.register_forward_hook(lambda module, inputs, out: alignments.append(out[1]))
    instrumented.scores(text)
    assert max_difference(weights.values[0], torch.cat(alignments, dim=1)) < CLOSE, (
        "as with the whole target in one call"
    )
    assert weights.values.std(axis=-2).max() > 1e-3, "the alignment differs from row to row"
    with pytest.raises(UnsupportedError, match="ask for attention"):
        explained(explain(instrumented, ExplanationRequest(text, "attention_flow")))


def test_a_network_without_attention_is_refused() -> None:
    network = recurrent(attention="none")
    with pytest.raises(UnsupportedError, match="it has layers without attention;"):
        explained(
            explain(
                InstrumentedNetwork(network, network), ExplanationRequest(InputTokens((0, 7), source=(5,)), "attention")
            )
        )


@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_rows_of_rollout_and_flow_sum_to_one(kind: str, tmp_path: Path) -> None:
    _, instrumented = both(kind, tmp_path)
    (attention,) = explained(explain(instrumented, ExplanationRequest(InputTokens(TOKENS), "attention"))).weights
    means = attention.values.mean(axis=1)
    for method, least in (("attention_rollout", 0), ("attention_flow", len(TOKENS))):
        found, yields = driven(explain(instrumented, ExplanationRequest(InputTokens(TOKENS), method)))  # type: ignore[arg-type]
        (weights,) = found.weights
        assert (weights.values.shape, yields >= least) == ((1, 1, len(TOKENS), len(TOKENS)), True)
        shares = weights.values[0, 0]
        assert max_difference(shares.sum(axis=1), np.ones(len(TOKENS))) < CLOSE
        assert shares.min() >= 0
        assert kind == "bert" or max_difference(np.triu(shares, 1), np.zeros_like(shares)) == 0, (
            "no token attends to later ones"
        )
        if method == "attention_rollout":
            mixed = (means + np.eye(len(TOKENS))) / 2
            assert max_difference(shares, mixed[1] @ mixed[0]) < CLOSE


def test_flow_is_the_maximum_flow_through_the_layers() -> None:
    """Two tokens, two layers, by hand.  With residual connections, the rows of the first layer are (3/4, 1/4) and
    (1/4, 3/4), those of the second (1, 0) and (1/2, 1/2).

    Row 2 of layer 2 sends 1/2 to row 1 of layer 1 and 1/2 to row 2.  The flow to token 1 is min(1/2, 3/4) +
    min(1/2, 1/4) = 3/4, that to token 2 is min(1/2, 1/4) + min(1/2, 3/4) = 3/4.  Row 1 of layer 2 reaches only row 1 of
    layer 1: its flows are 3/4 and 1/4.
    """
    weights = np.array([[[0.5, 0.5], [0.5, 0.5]], [[1.0, 0.0], [1.0, 0.0]]], np.float32)
    found, _ = driven(max_flow.maximum_flows(weights))
    assert max_difference(found, np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)) < 1e-6
    assert max_difference(max_flow.rollout(weights), np.array([[0.75, 0.25], [0.5, 0.5]], np.float32)) < 1e-6


def test_flow_differs_from_rollout() -> None:
    """Three tokens, two layers, by hand.

    With residual connections, row 3 of layer 2 has the weights (1/4, 1/4, 1/2).  In layer 1, row 1 has only itself; the
    other rows have 1/2 for token 1 and 1/2 for themselves.  The flow to token 1 is min(1/4, 1) + min(1/4, 1/2) +
    min(1/2, 1/2) = 1, that to token 2 is 1/4, that to token 3 is 1/2.  Rollout multiplies the weights instead.
    """
    first = np.array([[1.0, 0, 0], [1.0, 0, 0], [1.0, 0, 0]])
    second = np.array([[1.0, 0, 0], [0, 1.0, 0], [0.5, 0.5, 0]])
    found, _ = driven(max_flow.maximum_flows(np.array([first, second], np.float32)))
    assert max_difference(found[2], np.array([1.0, 0.25, 0.5], np.float32) / 1.75) < 1e-6
    rolled = max_flow.rollout(np.array([first, second], np.float32))
    assert max_difference(rolled[2], np.array([0.625, 0.125, 0.25], np.float32)) < 1e-6


def test_the_error_of_flow_without_scipy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(max_flow, "HAS_SCIPY", False)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyhead\[explain\]'"):
        driven(max_flow.maximum_flows(np.ones((1, 1, 1), np.float32)))


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_states_of_an_encoder_decoder_are_computed_layer_by_layer(kind: str, tmp_path: Path) -> None:
    """Without gradients, as in occlusion: for several texts at once, after each layer of both stacks."""
    translator(tmp_path, kind)
    loaded = load(str(tmp_path))
    instrumented = InstrumentedNetwork(loaded.network, loaded.head)
    texts = [InputTokens(WRITTEN, source=(token, *SOURCE[1:])) for token in (5, 11, 12)]
    with torch.no_grad():
        expected = instrumented.states(texts)
    found, yields = driven(instrumented.states_in_pieces(texts, piece=1))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert yields == 2 + 3

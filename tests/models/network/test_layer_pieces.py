"""Layers that are computed in pieces: no piece is large however long a text is, and the pieces change no number."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from polyhead.models.architectures.bart import seq2seq_config
from polyhead.models.invariant import make_invariant
from polyhead.models.network import attention, cross_attention
from polyhead.models.network.attention import AttentionContext
from polyhead.models.network.encoder_decoder import SharedTextTransformer
from polyhead.models.network.lora import AdapterTiles, AdapterUpdates, LowRank, name_linears
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.positions import DistanceVectors
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.transformer import Transformer

LENGTH, WINDOW = 700, 33
BASE = ModelConfig(
    vocab_size=97, width=32, depth=2, heads=4, kv_heads=4, head_width=8, mlp_width=64, max_positions=2048,
    position="learned", causal=False, norm_order="post",
)  # fmt: skip
DISTANCES = {"distances": 32, "farthest": 64}
CONFIGS: dict[str, ModelConfig] = {
    "full": BASE,
    "windowed": replace(BASE, window=WINDOW),
    "some windowed": replace(BASE, window=WINDOW, windowed=(False, True)),
    "causal": replace(BASE, causal=True, norm_order="pre", kv_heads=2, gated_mlp=True),
    "causal windowed": replace(BASE, causal=True, norm_order="sandwich", window=WINDOW),
    "parallel": replace(BASE, norm_order="parallel", sinks=True),
    "distance": replace(BASE, **DISTANCES, position="distance", convolution=3),
    "relative": replace(BASE, position="relative", farthest=16),
    "alibi": replace(BASE, position="alibi"),
    "bias of layers": replace(BASE, **DISTANCES, position="layer_bias"),
    "bias": replace(BASE, **DISTANCES, position="none"),
    "a global token": replace(BASE, window=WINDOW, global_tokens="first"),
    "many global tokens": replace(BASE, window=WINDOW, global_tokens="after_separator", separator=90),
    "bottleneck": replace(BASE, bottleneck=16),
}


def build(name: str) -> Transformer:
    torch.manual_seed(0)
    if name == "both sides":
        sides = dict(encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
        bart = tf.BartConfig(**sides, vocab_size=97, d_model=32, encoder_ffn_dim=64, decoder_ffn_dim=64)
        return spread(SharedTextTransformer(seq2seq_config(bart.to_dict(), 2)))
    return spread(Transformer(CONFIGS[name]))


def spread(network: Transformer) -> Transformer:
    for parameter in network.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return network.eval()


def batch(*lengths: int) -> RaggedBatch:
    return RaggedBatch.of([[(7 * place + length) % 97 for place in range(length)] for length in lengths])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Pieces of few products, and ranges of few rows."""
    products = 1 << 18
    for module in (attention, cross_attention):
        monkeypatch.setattr(module, "LAYER_PRODUCTS", products)
        monkeypatch.setattr(module, "ATTENDING_ROWS", 64)
    monkeypatch.setattr(attention, "KEY_BORDER", 16)
    return products


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One number, to which the products of linear layers and of attention are added."""
    total, attend = [0], nn.functional.scaled_dot_product_attention

    def count(layer: nn.Module, given: tuple[Any, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Linear):
            total[0] += given[0].numel() * out.size(-1)

    def counted(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        total[0] += 2 * query.numel() * key.size(-2)
        return attend(query, key, value, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", counted)
    hook = nn.modules.module.register_module_forward_hook(count)
    yield total
    hook.remove()


def whole_states(network: Transformer, texts: RaggedBatch) -> Tensor:
    """The states with each layer at once."""
    x, frame = network.embed(texts)
    for block in network.blocks:
        x = block(x, frame)
    return network.close(x)


@pytest.mark.parametrize("name", [*CONFIGS, "both sides"])
@torch.inference_mode()
def test_a_long_text_is_many_pieces_of_bounded_work(name: str, small_pieces: int, products: list[int]) -> None:
    network, texts = build(name), batch(LENGTH, LENGTH - 1, 5)
    largest, pieces, most, before = 0, network.forward_in_pieces(texts), 0, 0
    while True:
        try:
            next(pieces)
        except StopIteration as over:
            found = over.value
            break
        largest = max(largest, products[0] - before)
        most, before = most + 1, products[0]
    assert most > 40
    assert largest <= 4 * 128 * LENGTH * 8, "at most a head of the longest range of rows of two texts"
    torch.testing.assert_close(network(texts), found, rtol=0, atol=0)
    if name != "both sides":
        torch.testing.assert_close(found, whole_states(network, texts), rtol=1e-4, atol=1e-4)
    assert largest > small_pieces // 8


@torch.inference_mode()
def test_a_windowed_layer_multiplies_only_keys_that_rows_see(small_pieces: int, products: list[int]) -> None:
    found = {}
    for name in ("full", "windowed"):
        network = build(name)
        products[0] = 0
        network(batch(LENGTH))
        found[name] = products[0]
    row = 2 * BASE.heads * BASE.head_width * BASE.depth
    linear = BASE.depth * LENGTH * (4 * BASE.width**2 + 2 * BASE.width * BASE.mlp_width)
    assert found["full"] == linear + row * LENGTH**2
    assert found["windowed"] <= linear + row * LENGTH * (128 + 2 * (WINDOW + 16))


@torch.inference_mode()
def test_short_texts_are_computed_as_before() -> None:
    """One group of whole texts, and each layer's products of all rows at once."""
    network, texts = build("windowed"), batch(LENGTH, 30)
    x, frame = network.embed(texts)
    pieces = network.embed_in_pieces(texts, in_pieces=True)
    while True:
        try:
            next(pieces)
        except StopIteration as over:
            _, cut = over.value
            break
    assert isinstance(cut, AttentionContext)
    assert [group.rows for group in cut.groups] == [group.rows for group in frame.groups]
    assert len(x) == LENGTH + 30


@pytest.mark.parametrize("name", ["full", "windowed", "causal windowed", "some windowed", "many global tokens"])
@torch.inference_mode()
def test_pieces_change_no_bit_where_the_batch_changes_none(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = build(name)
    make_invariant(network, nn.Identity())
    whole = whole_states(network, batch(1200))
    for module in (attention, cross_attention):
        monkeypatch.setattr(module, "LAYER_PRODUCTS", 1 << 18)
        monkeypatch.setattr(module, "ATTENDING_ROWS", 64)
    alone, beside = network(batch(1200)), network(batch(300, 1200, 1200, 7))
    assert torch.equal(alone, whole)
    assert torch.equal(beside[300:1500], whole)
    assert torch.equal(beside[1500:2700], whole)


@torch.inference_mode()
def test_rows_of_adapters_are_those_of_all_rows(small_pieces: int) -> None:
    network, texts = build("windowed"), batch(400, 300)
    names = name_linears(network, network.config)
    generator = torch.Generator().manual_seed(0)
    lora = {
        name: LowRank(*(torch.randn(*shape, generator=generator) * 0.3 for shape in shapes))
        for linear, name in names.items()
        if isinstance(linear, nn.Linear)
        for shapes in [((2, linear.in_features), (linear.out_features, 2))]
    }
    tiles = AdapterTiles.of([1] * 400 + [0] * 300, torch.device("cpu"))
    updated = replace(texts, additions=AdapterUpdates(names, {1: lora}, tiles, tiles))
    found, plain = network(updated), network(texts)
    torch.testing.assert_close(found, whole_states(network, updated), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found[:400], plain[:400], atol=0.1)
    assert torch.equal(found[400:], plain[400:])


@pytest.mark.parametrize("is_log", [True, False])
def test_buckets_of_distances_are_those_of_all_pairs(is_log: bool) -> None:
    config = replace(BASE, position="distance", distances=512, farthest=512, has_log_distances=is_log)
    vectors = DistanceVectors(config)
    for length in (1, 63, 64, 700, 2000):
        place = torch.arange(length)
        before = place[:, None] - place
        assert torch.equal(vectors.look_up(before, length), vectors.bucket(before))


def test_a_step_with_gradients_or_a_cache_is_not_cut(small_pieces: int) -> None:
    network = build("windowed")
    assert not attention.has_pieces(batch(LENGTH))
    network(batch(LENGTH)).sum().backward()
    with torch.no_grad():
        assert attention.has_pieces(batch(LENGTH))

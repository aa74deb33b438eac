"""Four-bit weights in the compiled step: packed without change, multiplied exactly, and calibrated."""

import random
from pathlib import Path
from typing import cast

import numpy
import pytest
import torch
import transformers as tf
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from torch import Tensor, nn

from polyhead.models.checkpoint import gguf_header as metadata
from polyhead.models.checkpoint import load
from polyhead.models.checkpoint.gguf_header import ENCODINGS
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import BLOCK_KINDS, load_library, runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import INT4, INT4_SHIFTED, INT8, PackedNetwork, Precision
from polyhead.models.network.attention import attend
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.network.scoring import Scoring
from polyhead.models.network.transformer import PreBlock, Transformer
from polyhead.models.quantization.quantize import INT4_GROUP, QUERY_STRIDE, calibrate, measure_hessians
from tests.models.native import test_packed_network as test_native_packing
from tests.models.native.test_packed_network import linear_of
from tests.models.native.test_step import (
    BLOCKS,
    GENERATORS,
    LENGTHS,
    LLAMA,
    all_logits,
    head,
    network,
    rows_of,
    tables,
    texts,
)
from tests.support import gguf_files
from tests.support.spread import spread

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")

SETS = runnable_targets()


def unpacked(weights: Tensor, instructions: str = SETS[-1]) -> tuple[NDArray[numpy.uint8], NDArray[numpy.float16]]:
    """Codes [N, K], 0 to 15, and scales [N, K / INT4_GROUP] that the packer computed for weights [N, K]."""
    found = test_native_packing.packed(weights, "int4", instructions)
    assert found.format == INT4
    return (found.codes + 8).astype(numpy.uint8), found.scales.astype(numpy.float16)


def value(codes: NDArray[numpy.uint8], scales: NDArray[numpy.float16]) -> Tensor:
    wide = scales.astype(numpy.float32).repeat(INT4_GROUP, 1)[:, : codes.shape[1]]
    return torch.from_numpy((codes.astype(numpy.float32) - 8) * wide)


def on_grid(choice: torch.Generator, count: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Random codes minus 8, and scales that are powers of two."""
    codes = torch.randint(-8, 8, (count, inputs), generator=choice).float()
    scales = 2.0 ** torch.randint(-3, 3, (count, -(-inputs // INT4_GROUP)), generator=choice)
    return codes, scales * (torch.randint(0, 2, scales.shape, generator=choice) * 2 - 1)


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 32), (192, 77), (100, 33)])
@pytest.mark.parametrize("shifted", [False, True])
def test_four_bits_are_multiplied_exactly(instructions: str, inputs: int, outputs: int, shifted: bool) -> None:
    """The same bits as plain torch for the same integers, the largest and smallest codes and bytes included."""
    choice = torch.Generator().manual_seed(2)
    codes, scales = on_grid(choice, outputs, inputs)
    weights = codes * scales.repeat_interleave(INT4_GROUP, 1)[:, :inputs]
    if shifted:
        least = 2.0 ** torch.randint(-4, 2, scales.shape, generator=choice) * 3
        weights = weights + least.repeat_interleave(INT4_GROUP, 1)[:, :inputs]
    pack = PackedNetwork(load_library(instructions), LLAMA, "int4")
    packed = pack.pack_linear([linear_of(weights)])
    assert packed.format == (INT4_SHIFTED if shifted else INT4)
    for rows in (1, 2, 3, 4, 7, 8, 9, 12, 13, 40):
        x = torch.zeros(rows, packed.inputs)
        x[:, :inputs] = torch.randint(-127, 128, (rows, inputs), generator=choice)
        x[:, :inputs:16] = 127
        out = torch.empty(rows, packed.outputs)
        pack.library.polyhead_multiply(packed, x.data_ptr(), rows, out.data_ptr())
        expected = (x[:, :inputs].double() @ weights.double().T).float()
        assert torch.equal(out[:, :outputs], expected)


@pytest.mark.parametrize("instructions", SETS)
def test_weights_on_a_grid_are_packed_exactly(instructions: str) -> None:
    """For any half-precision scale, subnormal ones too, and any subset of the codes."""
    choice = torch.Generator().manual_seed(4)
    codes = torch.randint(-8, 8, (256, 128), generator=choice).float()
    codes[::3] = codes[::3].clamp(-3, 2)
    codes[1::7] = (codes[1::7] / 4).trunc() * 4
    codes[5] = 0
    scales = (torch.randn(256, 4, generator=choice) * 10.0 ** torch.randint(-7, 3, (256, 4), generator=choice)).half()
    weights = codes * scales.float().repeat_interleave(INT4_GROUP, 1)
    assert torch.equal(value(*unpacked(weights, instructions)), weights)


def round_to_nearest(weights: Tensor) -> Tensor:
    """Weights rounded to the nearest code, without calibration."""
    inputs = weights.size(1)
    groups = nn.functional.pad(weights, (0, -inputs % INT4_GROUP)).unflatten(1, (-1, INT4_GROUP))
    scales = (groups.abs().amax(-1, keepdim=True) / 7).half().float()
    return ((groups / scales).round() * scales).flatten(1)[:, :inputs]


def round_weights(net: Transformer, last: LanguageHead) -> None:
    with torch.no_grad():
        for linear in [*net.blocks.modules(), last.output]:
            if isinstance(linear, nn.Linear):
                linear.weight.copy_(round_to_nearest(linear.weight))


@pytest.mark.parametrize("instructions", SETS)
def test_weights_that_do_not_fit_four_bits_keep_eight(instructions: str) -> None:
    """A single weight that four bits cannot hold keeps its matrix at eight bits.

    Weights within a 32nd of a scale fit the format with a least weight.
    """
    pack = PackedNetwork(load_library(instructions), LLAMA, "int4")
    weights = round_to_nearest(torch.randn(40, 100, generator=torch.Generator().manual_seed(3)))
    assert pack.pack_linear([linear_of(weights)]).format == INT4
    for row, column in ((0, 0), (39, 99), (17, 50)):
        other = weights.clone()
        for wrong, format in ((1e-6, INT4_SHIFTED), (0.05, INT8), (3.0e38, INT8), (float("nan"), INT8)):
            other[row, column] = weights[row, column] + wrong
            assert pack.pack_linear([linear_of(other)]).format == format


@pytest.mark.parametrize("threads", [1, 2])
def test_a_matrix_that_falls_back_to_eight_bits_uses_no_more_memory(threads: int) -> None:
    """If only the last output does not fit four bits, memory equals that of packing in eight bits from the start."""
    weights = round_to_nearest(torch.randn(64, 128, generator=torch.Generator().manual_seed(3)))
    weights[63, 127] += 0.05
    packs = [PackedNetwork(load_library(SETS[0]), LLAMA, precision, threads) for precision in ("int4", "int8")]
    linears = [pack.pack_linear([linear_of(weights)]) for pack in packs]
    assert [linear.format for linear in linears] == [INT8] * 2
    for four, eight in zip(packs[0].arrays, packs[1].arrays, strict=True):
        assert numpy.array_equal(four, eight)
    assert packs[0].memory._used == packs[1].memory._used


def test_the_blocks_of_a_q4_0_file_are_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=384,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = tf.LlamaForCausalLM(config)
    path = gguf_files.write(
        tmp_path / "narrow.gguf",
        "llama",
        gguf_files.decoder_metadata(config),
        gguf_files.converted("llama", model),
        lambda _, tensor: "Q4_0" if tensor.dim() > 1 else "F32",
    )
    loaded = load(str(path))
    for block, theirs in zip(loaded.network.blocks, model.model.layers, strict=True):
        for linear in (module for module in block.modules() if isinstance(module, nn.Linear)):
            assert torch.equal(value(*unpacked(linear.weight.detach())), linear.weight)
        weights = theirs.mlp.down_proj.weight.detach().numpy()
        blocks = quantize(weights, GGMLQuantizationType.Q4_0).reshape(-1, 18)
        codes, scales = unpacked(block.mlp.down.weight.detach())  # type: ignore[union-attr, arg-type]
        assert (scales.reshape(-1).view(numpy.uint16) == blocks[:, :2].copy().view(numpy.uint16)[:, 0]).all()
        pairs = blocks[:, 2:]
        assert (codes.reshape(-1, INT4_GROUP) == numpy.concatenate([pairs & 15, pairs >> 4], 1)).all()


@pytest.mark.parametrize(
    ("instructions", "name"), spread(SETS, ["llama", "gpt2", "gemma", "qwen, experts", "gpt-oss, experts"])
)
def test_the_batch_and_threads_change_nothing(name: str, instructions: str) -> None:
    config = GENERATORS[name]
    net, last = network(config), head(config)
    round_weights(net, last)
    threaded = NativeExecutor(net, last, precision="int4", block_count=BLOCKS, threads=3, instructions=instructions)
    expected = all_logits(config, threaded)
    single = NativeExecutor(net, last, precision="int4", block_count=BLOCKS, instructions=instructions)
    first = 0
    for tokens, table in zip(texts(config), tables(LENGTHS, random.Random(1)), strict=True):
        half = len(tokens) // 2
        for start, end in ((0, half), (half, len(tokens))):
            if start < end:
                rows = rows_of([(tokens[start:end], start, table[: -(-end // 16)])], last_only=False)
                assert torch.equal(single.step(rows), expected[first + start : first + end])
        first += len(tokens)


def error(config: ModelConfig, net: Transformer, last: LanguageHead, expected: Tensor) -> float:
    return float(
        (all_logits(config, TorchExecutor(net, last, block_count=BLOCKS, block_size=16)) - expected).square().mean()
    )


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_calibration_loses_less_than_rounding(name: str) -> None:
    """Measured on other texts than those of the calibration. The packer finds the codes and scales that it chose."""
    config = GENERATORS[name]
    net, last = network(config), head(config)
    expected = all_logits(config, TorchExecutor(net, last, block_count=BLOCKS, block_size=16))
    nearest, nearest_head = network(config), head(config)
    round_weights(nearest, nearest_head)
    choice = random.Random(8)
    calibration_texts = [[choice.randrange(config.vocab_size) for _ in range(64)] for _ in range(60)]
    found = calibrate(net, last, calibration_texts)
    assert error(config, net, last, expected) < 0.9 * error(config, nearest, nearest_head, expected)
    parameters = {**dict(net.named_parameters()), "head.output.weight": last.output.weight}
    assert len(found) == sum(isinstance(module, nn.Linear) for module in net.modules()) + 1
    for key, grid in found.items():
        weights = parameters[key].detach()
        assert torch.equal(value(grid.codes.numpy(), grid.scales.numpy()), weights)
        assert torch.equal(value(*unpacked(weights)), weights)


def test_calibration_unties_the_head_from_the_embeddings() -> None:
    net = network(LLAMA)
    last = LanguageHead(LLAMA, net.tokens)
    before = net.tokens.weight.detach().clone()
    calibrate(net, last, [list(range(70))])
    assert torch.equal(net.tokens.weight, before)
    assert not torch.equal(last.output.weight, before)


def test_the_hessian_of_values_is_that_of_attention_outputs() -> None:
    """The Hessian of the value projection is that of attention outputs.

    Here only the last row has an output; its attention weights are read with identity values.
    """
    net = network(LLAMA)
    block = cast(PreBlock, net.blocks[0])
    attention = block.attention
    x, frame = net.embed(RaggedBatch.of([list(range(QUERY_STRIDE))]))
    found = measure_hessians(block, [(x, frame)], [attention.value])[0]
    inputs = block.attention_norm(x)
    attention_weights: list[Tensor] = []

    def mix(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
        places = torch.eye(QUERY_STRIDE, query.size(3)).expand_as(value)
        attention_weights.append(
            attend(query, key, places, mask, scoring).unflatten(-1, (-1, query.size(3)))[0, -1, :, :QUERY_STRIDE]
        )
        return attend(query, key, value, mask, scoring)

    attention.mix = mix
    block(x, frame)
    mixtures = attention_weights[0] @ inputs  # [H, W]
    torch.testing.assert_close(found, mixtures.T @ mixtures)


@pytest.mark.parametrize("precision", ["float32", "int8", "int4"])
@pytest.mark.parametrize("count", [7, 32, 100])
def test_threads_pack_the_same(precision: Precision, count: int) -> None:
    weights = round_to_nearest(torch.randn(count, 100, generator=torch.Generator().manual_seed(3)))

    def packed(threads: int) -> bytes:
        pack = PackedNetwork(load_library(SETS[0]), LLAMA, precision, threads)
        pack.pack_linear([linear_of(weights), linear_of(weights)], gated=True)
        return b"".join(array.tobytes() for array in pack.arrays)

    assert packed(1) == packed(3)


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_blocks_are_decoded_to_the_bit(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library decodes as the gguf package does, on every instruction set."""
    rows, columns = 3, 512
    raw = gguf_files.random_blocks(kind, rows, columns)
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[kind])).view(-1)
    for name in SETS:
        monkeypatch.setattr(metadata, "load_fastest", lambda name=name: load_library(name))
        out = torch.empty(rows * columns)
        ENCODINGS[kind].decode(bytearray(raw.tobytes()), out)
        assert torch.equal(out, expected)

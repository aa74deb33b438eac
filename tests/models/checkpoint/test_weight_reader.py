"""Weights are read part by part, when a part is packed: one part at a time, and every tensor once."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint, ignore_progress, row_orders, weight_reader
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.core import turns
from polyhead.models.core.errors import CheckpointError
from polyhead.models.executors.contract import StepInput
from polyhead.models.native.block_weights import BlockWeights
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision, free_weights
from polyhead.models.network.heads import LanguageHead
from tests.support import gguf_files
from tests.support.checkpoints import byte_level_bpe

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")


def prepared(source: Path, progress: Callable[[int, int], None] = ignore_progress) -> Checkpoint:
    what = checkpoint.describe_source(str(source))
    return checkpoint.prepare(str(source), WeightReader(what), dtype=torch.float32, device="cpu", progress=progress)


def allocated_parts(loaded: Checkpoint) -> set[str]:
    """The parts with at least one allocated parameter."""
    named = [*loaded.network.named_parameters(), *((f"head.{name}", p) for name, p in loaded.head.named_parameters())]
    return {part_of(name) for name, parameter in named if not parameter.is_meta and parameter.numel()}


def part_of(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])


def packed(loaded: Checkpoint, precision: Precision, seen: Callable[[nn.Module], None]) -> NativeExecutor:
    """Packs a network as the loader does; `seen` is called with each part while its weights are loaded."""

    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        loaded.load_blocks(part)
        seen(part)
        yield
        free_weights(part)

    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    return NativeExecutor(loaded.network, head, precision=precision, block_count=4 if head else 0, load_part=held)


def logits(executor: NativeExecutor) -> torch.Tensor:
    table = [0] if executor.block_count else []
    return executor.step(StepInput([5, 6, 7], [0, 1, 2], [0, 3], [table], [0, 1, 2])).clone()


@pytest.mark.parametrize("kind", ["generator", "classifier"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_packing_one_part_at_a_time_gives_the_same_network(
    request: pytest.FixtureRequest, kind: str, precision: Precision
) -> None:
    source = request.getfixturevalue(f"tiny_{kind}")
    loaded = prepared(source)
    assert not allocated_parts(loaded)
    parts: list[set[str]] = []
    executor = packed(loaded, precision, lambda part: parts.append(allocated_parts(loaded)))
    *single, rest = parts
    assert all(len(part - {"head"}) == 1 for part in single)  # a tied head is the token embedding under another name
    assert not any(name.startswith("blocks") or name == "tokens" for name in rest)
    assert not allocated_parts(loaded) - {"head"}
    full = checkpoint.load(str(source))
    head = full.head if isinstance(full.head, LanguageHead) else None
    other = NativeExecutor(full.network, head, precision=precision, block_count=4 if head else 0)
    assert torch.equal(logits(executor), logits(other))


def test_every_tensor_is_read_once(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied tensor too; progress goes from 0 to the total."""
    read, real = Counter[str](), TensorEntry.read
    calls: list[tuple[int, int]] = []

    def counted(self: TensorEntry, *given: Any) -> torch.Tensor:
        read[self.name] += 1
        return real(self, *given)

    monkeypatch.setattr(TensorEntry, "read", counted)
    loaded = prepared(tiny_generator, lambda done, total: calls.append((done, total)))
    packed(loaded, "int8", lambda part: None)
    assert read.keys() == load_file(tiny_generator / "model.safetensors").keys()
    assert set(read.values()) == {1}
    assert calls == sorted(calls)
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] > 0


def test_a_tied_matrix_is_shared_whichever_part_is_read_first(tiny_generator: Path) -> None:
    for first in ("head", "network"):
        loaded = prepared(tiny_generator)
        head = cast(LanguageHead, loaded.head)
        loaded.load_weights(head if first == "head" else loaded.network.tokens)
        assert head.output.weight is loaded.network.tokens.weight
        assert not head.output.weight.is_meta


def test_weights_that_are_not_finite_are_refused_by_name(tiny_generator: Path, tmp_path: Path) -> None:
    for file in tiny_generator.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = prepared(tmp_path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}"):
        packed(loaded, "int8", lambda part: None)


WIDTH, INNER, EXPERTS = 64, 96, 5


def write_mixture(path: Path, kind: str = "Q4_0", tied: bool = False, broken: str = "") -> Path:
    """A GGUF file of OLMoE: a layer with EXPERTS, whose matrices are one tensor. A scale of `broken` is infinite."""
    fields = gguf_files.byte_level_metadata(byte_level_bpe())
    vocabulary, torch_seed = len(fields[".tokenizer.ggml.tokens"]), torch.Generator().manual_seed(0)
    fields |= {"block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": INNER}
    fields |= {"attention.head_count": 4, "attention.head_count_kv": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    fields |= {"expert_count": EXPERTS, "expert_used_count": 2}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    shapes |= {} if tied else {"output.weight": (vocabulary, WIDTH)}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
        shapes[f"blk.0.{name}.weight"] = WIDTH, WIDTH
    for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
        shapes[f"blk.0.{name}.weight"] = (WIDTH,)
    shapes["blk.0.ffn_gate_inp.weight"] = EXPERTS, WIDTH
    shapes |= {f"blk.0.ffn_{name}_exps.weight": (EXPERTS, INNER, WIDTH) for name in ("gate", "up")}
    shapes["blk.0.ffn_down_exps.weight"] = EXPERTS, WIDTH, INNER
    tensors = {name: torch.randn(shape, generator=torch_seed) for name, shape in shapes.items()}
    if broken:
        tensors[broken][-1, -1, -1] = torch.inf
    plain = lambda name, tensor: "F32" if tensor.dim() == 1 or "gate_inp" in name else kind  # noqa: E731
    return gguf_files.write(path, "olmoe", fields, tensors, plain)


def packed_blocks(loaded: Checkpoint, precision: Precision, *, from_blocks: bool) -> NativeExecutor:
    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        (loaded.load_blocks if from_blocks else loaded.load_weights)(part)
        yield
        free_weights(part)

    head = cast(LanguageHead, loaded.head)
    return NativeExecutor(loaded.network, head, precision=precision, block_count=4, load_part=held)


@pytest.mark.parametrize("precision", ["int4", "int8", "float32"])
@pytest.mark.parametrize(("kind", "tied"), [("Q4_0", True), ("Q4_1", False), ("Q8_0", True)])
def test_a_file_of_blocks_is_packed_to_the_same_bits(
    tmp_path: Path, kind: str, tied: bool, precision: Precision
) -> None:
    """As from floats; progress goes from 0 to the total, and each expert is read alone."""
    calls: list[tuple[int, int]] = []
    path = write_mixture(tmp_path / "mixture.gguf", kind, tied)
    one = packed_blocks(prepared(path, lambda done, total: calls.append((done, total))), precision, from_blocks=True)
    other = packed_blocks(prepared(path), precision, from_blocks=False)
    assert torch.equal(logits(one), logits(other))
    assert calls == sorted(calls)
    assert calls[0][0] == 0
    assert calls[-1][0] == calls[-1][1] == prepared_total(path)
    steps = [after - before for (before, _), (after, _) in pairwise(calls)]
    assert max(steps) <= max(size for size in read_sizes(path) if size)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_matrices_whose_rows_are_reordered_are_read_as_floats(tmp_path: Path, kind: str) -> None:
    """Files of Llama have the rows of queries and keys in another order than the network."""
    path = write_llama(tmp_path / "llama.gguf", kind)
    one = packed_blocks(prepared(path), "float32", from_blocks=True)
    other = packed_blocks(prepared(path), "float32", from_blocks=False)
    assert torch.equal(logits(one), logits(other))
    loaded = prepared(path)
    loaded.load_blocks(loaded.network)
    attention, blocks = cast(Any, loaded.network.blocks[0]).attention, BlockWeights
    assert [isinstance(getattr(attention, name).weight, blocks) for name in ("query", "key", "value")] == [0, 0, 1]


def test_reordered_rows_are_copied_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No large matrix is put in order as a whole; the result is the same, and others have turns."""
    path, calls, given = write_llama(tmp_path / "llama.gguf", "Q8_0"), list[tuple[int, int]](), list[torch.Tensor]()
    whole = checkpoint.load(str(path)).network.state_dict()
    monkeypatch.setattr(turns, "PART_NUMBERS", 4 * WIDTH)
    monkeypatch.setattr(row_orders, "PART_NUMBERS", 4 * WIDTH)
    what = checkpoint.describe_source(str(path))

    def translate(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if not tensor.is_meta and any(each in name for each in ("attn_q", "attn_k")):
            given.append(tensor)
        return what.translate(name, tensor)

    reader = WeightReader(replace(what, translate=translate))
    reader.begin(lambda done, total: calls.append((done, total)))
    reader.load(reader.network, torch.float32, torch.device("cpu"))
    assert all(torch.equal(value, whole[name]) for name, value in reader.network.state_dict().items())
    assert [tensor.shape for tensor in given] == [(WIDTH, row_orders.PROBE_COLUMNS), (WIDTH // 2, 7)]
    unread = [after for before, after in pairwise(calls) if before == after]
    assert len(unread) == WIDTH // 4 + WIDTH // 2 // 4


@pytest.mark.parametrize(
    ("change", "is_order"),
    [
        (lambda x: x.flip(0), True),
        (lambda x: x.view(2, -1, x.size(1)).transpose(0, 1).flatten(0, 1), True),
        (lambda x: x.flip(1), False),
        (lambda x: x * 2, False),
        (lambda x: torch.cat((x, torch.zeros_like(x))), False),
        (lambda x: x.view(len(x), 2, -1).transpose(1, 2).flatten(1), False),
        (lambda x: x.t().contiguous(), False),
        (lambda x: x.float() * 1.0, False),
    ],
)
def test_only_the_order_of_rows_is_taken_apart(
    tiny_generator: Path, change: Callable[[torch.Tensor], torch.Tensor], is_order: bool
) -> None:
    what = replace(
        checkpoint.describe_source(str(tiny_generator)), translate=lambda name, tensor: [(name, change(tensor))]
    )
    matrix = torch.randn(12, 20)
    found = row_orders.find_row_orders(
        what, "w", [("w", change(torch.empty(matrix.shape, device="meta")))], matrix.shape
    )
    assert (found is not None) == is_order
    if found is not None:
        assert torch.equal(matrix[found["w"]], change(matrix))


def test_walks_over_many_parts_take_turns(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As over the thousands of experts of a layer: whoever walks over them lets others compute."""
    monkeypatch.setattr(turns, "PART_ITEMS", 4)
    path, calls, taken = write_mixture(tmp_path / "mixture.gguf"), list[int](), list[None]()
    reader = WeightReader(checkpoint.describe_source(str(path)))
    block, count = reader.network.blocks[0], len(list(reader.network.blocks[0].parameters()))
    assert count > 3 * EXPERTS
    reader.load_blocks(block)
    reader.begin(lambda done, total: calls.append(done))
    reader.load(block, torch.float32, torch.device("cpu"))  # nothing is left to be read
    assert len(calls) - 1 == count // 4
    free_weights(block, lambda: taken.append(None))
    assert len(taken) == count // 4
    calls.clear()
    reader.unload(block)
    assert len(calls) >= len(list(block.modules())) // 4


def write_llama(path: Path, kind: str) -> Path:
    """A GGUF file of a Llama with one layer and two key heads."""
    fields = gguf_files.byte_level_metadata(byte_level_bpe())
    vocabulary, torch_seed = len(fields[".tokenizer.ggml.tokens"]), torch.Generator().manual_seed(0)
    fields |= {"block_count": 1, "context_length": 64, "embedding_length": WIDTH, "feed_forward_length": INNER}
    fields |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, WIDTH), "output_norm.weight": (WIDTH,)}
    rows = {"attn_q": WIDTH, "attn_k": WIDTH // 2, "attn_v": WIDTH // 2, "attn_output": WIDTH}
    shapes |= {f"blk.0.{name}.weight": (count, WIDTH) for name, count in rows.items()}
    shapes |= {f"blk.0.{name}.weight": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.ffn_{name}.weight": (INNER, WIDTH) for name in ("gate", "up")}
    shapes["blk.0.ffn_down.weight"] = WIDTH, INNER
    tensors = {name: torch.randn(shape, generator=torch_seed) for name, shape in shapes.items()}
    return gguf_files.write(path, "llama", fields, tensors, lambda _, tensor: "F32" if tensor.dim() == 1 else kind)


def prepared_total(path: Path) -> int:
    return sum(entry.size for entry in checkpoint.describe_source(str(path)).entries.values())


def read_sizes(path: Path) -> list[int]:
    """Bytes of each tensor, of each expert's for those of experts."""
    entries = checkpoint.describe_source(str(path)).entries.values()
    return [entry.size // (EXPERTS if len(entry.shape) == 3 else 1) for entry in entries]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_blocks_that_are_not_finite_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    name = "blk.0.ffn_up_exps.weight"
    with numpy.errstate(all="ignore"):
        path = write_mixture(tmp_path / "mixture.gguf", kind, broken=name)
    with pytest.raises(CheckpointError, match=rf"mixture\.gguf.*{name}.*infinite or NaN"):
        packed_blocks(prepared(path), "int4", from_blocks=True)


def test_a_file_that_was_cut_after_its_description_is_refused(tmp_path: Path) -> None:
    path = write_mixture(tmp_path / "mixture.gguf")
    loaded = prepared(path)  # the header was compared with the length already
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    with pytest.raises(CheckpointError, match=r"mixture\.gguf: was changed or replaced"):
        packed_blocks(loaded, "int4", from_blocks=True)


def test_a_part_that_is_unloaded_can_be_loaded_again(tiny_generator: Path) -> None:
    """A tied matrix, too; afterwards nothing of it is in memory, and the network is what it was."""
    weights = WeightReader(checkpoint.describe_source(str(tiny_generator)))
    head, tokens = cast(LanguageHead, weights.head), weights.network.tokens
    names, cpu = list(weights.network.state_dict()), torch.device("cpu")
    weights.load(tokens, torch.float32, cpu)
    first = tokens.weight
    weights.unload(head)  # which shares it
    assert tokens.weight.is_meta
    assert head.output.weight is tokens.weight
    weights.load(weights.network, torch.float32, cpu)
    assert torch.equal(tokens.weight, first)
    assert head.output.weight is tokens.weight
    assert list(weights.network.state_dict()) == names
    weights.unload(weights.network)
    assert all(parameter.is_meta for parameter in (*weights.network.parameters(), *head.parameters()))


def test_checks_and_copies_of_a_matrix_are_reported_in_parts(
    tmp_path: Path, tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the engine lets others compute meanwhile: every few numbers, and the result is the same."""
    blocks, calls = write_mixture(tmp_path / "mixture.gguf"), list[int]()
    whole = prepared(blocks)
    whole.load_blocks(whole.network)
    monkeypatch.setattr(weight_reader, "PIECE_NUMBERS", 1024)
    monkeypatch.setattr(turns, "PART_NUMBERS", 1024)
    parts = prepared(blocks, lambda done, total: calls.append(done))
    parts.load_blocks(parts.network)
    for one, other in zip(whole.network.parameters(), parts.network.parameters(), strict=True):
        assert torch.equal(one, other)
    numbers = sum(each.size(0) * each.inputs for each in parts.network.parameters() if isinstance(each, BlockWeights))
    assert sum(before == after for before, after in pairwise(calls)) >= numbers / 1024

    copied, turned, reports = WeightReader(checkpoint.describe_source(str(tiny_generator))), torch.rand(64, 96).t(), []
    copied.begin(lambda done, total: reports.append(done))
    assert torch.equal(copied._copy_contiguous(turned), turned)
    assert copied._copy_contiguous(turned).is_contiguous()
    assert len(reports) > 2 * turned.numel() / 1024

"""Weights are read part by part, when a part is packed: one part at a time, and every tensor once."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint, ignore_progress
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.core.errors import CheckpointError
from polyhead.models.executors.contract import StepInput
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision, free_weights
from polyhead.models.network.heads import LanguageHead

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")


def prepared(source: Path, progress: Callable[[int, int], None] = ignore_progress) -> Checkpoint:
    what = checkpoint.describe_source(str(source))
    return checkpoint.prepare(str(source), what, dtype=torch.float32, device="cpu", progress=progress)


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
        loaded.load_weights(part)
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

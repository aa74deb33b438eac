"""Weights are read part by part, when a part is packed: never more than one part, every tensor once."""

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

pytestmark = pytest.mark.skipif(not runnable_targets(), reason="no compiler was there when polyhead was installed")


def begun(source: Path, progress: Callable[[int, int], None] = ignore_progress) -> Checkpoint:
    what = checkpoint.describe_source(str(source))
    return checkpoint.prepare(str(source), what, dtype=torch.float32, device="cpu", progress=progress)


def filled(loaded: Checkpoint) -> set[str]:
    """Parts of which a parameter has memory."""
    named = [*loaded.network.named_parameters(), *((f"head.{name}", p) for name, p in loaded.head.named_parameters())]
    return {part_of(name) for name, parameter in named if not parameter.is_meta and parameter.numel()}


def part_of(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])


def packed(loaded: Checkpoint, precision: Precision, seen: Callable[[nn.Module], None]) -> NativeExecutor:
    """As the loader does it; `seen` hears of each part while it has its numbers."""

    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        loaded.load_weights(part)
        seen(part)
        yield
        free_weights(part)

    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    return NativeExecutor(loaded.network, head, precision=precision, block_count=4 if head else 0, load_part=held)


def said(executor: NativeExecutor) -> torch.Tensor:
    table = [0] if executor.block_count else []
    return executor.step(StepInput([5, 6, 7], [0, 1, 2], [0, 3], [table], [0, 1, 2])).clone()


@pytest.mark.parametrize("kind", ["generator", "classifier"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_one_part_at_a_time_makes_the_same_network(
    request: pytest.FixtureRequest, kind: str, precision: Precision
) -> None:
    source = request.getfixturevalue(f"tiny_{kind}")
    loaded = begun(source)
    assert not filled(loaded)
    parts: list[set[str]] = []
    executor = packed(loaded, precision, lambda part: parts.append(filled(loaded)))
    *single, rest = parts
    assert all(len(part - {"head"}) == 1 for part in single)  # a tied head is the tokens' under another name
    assert not any(name.startswith("blocks") or name == "tokens" for name in rest)
    assert not filled(loaded) - {"head"}
    whole = checkpoint.load(str(source))
    head = whole.head if isinstance(whole.head, LanguageHead) else None
    other = NativeExecutor(whole.network, head, precision=precision, block_count=4 if head else 0)
    assert torch.equal(said(executor), said(other))


def test_every_tensor_is_read_once(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tied one too; and progress goes from nothing to all."""
    read, real = Counter[str](), TensorEntry.read
    heard: list[tuple[int, int]] = []

    def counted(self: TensorEntry, *given: Any) -> torch.Tensor:
        read[self.name] += 1
        return real(self, *given)

    monkeypatch.setattr(TensorEntry, "read", counted)
    loaded = begun(tiny_generator, lambda done, total: heard.append((done, total)))
    packed(loaded, "int8", lambda part: None)
    assert read.keys() == load_file(tiny_generator / "model.safetensors").keys()
    assert set(read.values()) == {1}
    assert heard == sorted(heard)
    assert heard[0][0] == 0
    assert heard[-1][0] == heard[-1][1] > 0


def test_a_tied_matrix_is_one_wherever_it_stands(tiny_generator: Path) -> None:
    for first in ("head", "network"):
        loaded = begun(tiny_generator)
        head = cast(LanguageHead, loaded.head)
        loaded.load_weights(head if first == "head" else loaded.network.tokens)
        assert head.output.weight is loaded.network.tokens.weight
        assert not head.output.weight.is_meta


def test_what_is_no_number_is_refused_by_name(tiny_generator: Path, tmp_path: Path) -> None:
    for file in tiny_generator.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = begun(tmp_path)
    with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{name}"):
        packed(loaded, "int8", lambda part: None)

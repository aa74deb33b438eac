"""Zero points of GPTQ, groups of inputs in other orders, and biases that the network does not have."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from polyhead.models import checkpoint
from polyhead.models.checkpoint.quantized import quantized_entry
from polyhead.models.checkpoint.quantized.gptq import unpack_zero_points
from polyhead.models.checkpoint.tensor_files import TensorEntry
from polyhead.models.core.errors import CheckpointError
from tests.support.edits import edited, with_tensors
from tests.support.quantized_folders import RECIPES, gptq, pack_bits, write_folders

MODULE = "model.layers.0.mlp.down_proj"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path) -> Path:
    return write_folders(tiny_generator, gptq(4, 32, reordered=True), tmp_path_factory.mktemp("gptq"))[0]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_one_is_added_to_zero_points_of_the_first_version(bits: int) -> None:
    zeros = torch.randint(1, 1 << bits, (3, 64))
    assert torch.equal(unpack_zero_points(pack_bits(zeros - 1, bits), bits, added=1), zeros.float())
    assert torch.equal(unpack_zero_points(pack_bits(zeros, bits), bits, added=0), zeros.float())


def test_an_overflow_is_carried_into_the_next_code() -> None:
    """As GPTQModel adds one to all codes of a number at once, the inverse of how it writes them."""
    stored = pack_bits(torch.tensor([[15, 3, 7, 7, 7, 7, 7, 7]]), 4)
    assert unpack_zero_points(stored, 4, added=1).tolist() == [[0, 5, 8, 8, 8, 8, 8, 8]]


@pytest.mark.parametrize("groups", [torch.full((64,), 2), torch.arange(64) // 32 - 1])
def test_a_group_that_does_not_exist_is_refused(groups: Tensor, folder: Path, tmp_path: Path) -> None:
    changed = {f"{MODULE}.g_idx": groups.int()}
    broken = with_tensors(folder, tmp_path / "broken", lambda tensors: tensors.update(changed))
    with pytest.raises(CheckpointError, match=r"g_idx.: it names group .* and there are 2, counted from 0"):
        checkpoint.describe_source(str(broken))


def test_groups_of_too_many_inputs_are_refused_unread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_entry, "MAX_INPUTS", 31)
    monkeypatch.setattr(TensorEntry, "read", None)
    with pytest.raises(CheckpointError, match=r"g_idx.: it names the groups of 64 inputs; 31 are the most"):
        checkpoint.describe_source(str(folder))


def test_groups_are_read_after_shapes_are_compared(folder: Path, tmp_path: Path) -> None:
    changed = {f"{MODULE}.g_idx": torch.full((64,), 2).int(), f"{MODULE}.scales": torch.ones(3, 32).half()}
    broken = with_tensors(folder, tmp_path / "broken", lambda tensors: tensors.update(changed))
    with pytest.raises(CheckpointError, match=r"scales.: F16 of shape \[3, 32\] should be floats of \[2, 32\]"):
        checkpoint.describe_source(str(broken))


def test_an_order_that_is_that_of_the_file_keeps_the_codes(folder: Path, tmp_path: Path) -> None:
    neighbours = {f"{MODULE}.g_idx": (torch.arange(64) // 32).int()}
    plain = with_tensors(folder, tmp_path / "plain", lambda tensors: tensors.update(neighbours))
    kinds = [checkpoint.describe_source(str(each)).entries[f"{MODULE}.weight"].kind for each in (folder, plain)]
    assert kinds == ["int4 in small groups", "int4 with zero points"]


def test_bits_may_differ_from_module_to_module(folder: Path, tmp_path: Path) -> None:
    """The number of inputs, from g_idx, says how many bits a code has."""
    parts, floats = gptq(8, 32).pack(torch.randn(32, 64))
    changed = {f"{MODULE}.{leaf}": each.contiguous() for leaf, each in parts.items()}
    mixed = with_tensors(folder, tmp_path / "mixed", lambda tensors: tensors.update(changed))
    entry = checkpoint.describe_source(str(mixed)).entries[f"{MODULE}.weight"]
    assert entry.kind == "int8"
    assert torch.equal(entry.read(torch.float32, CPU), floats)


def test_a_bias_of_zeros_is_ignored_where_the_network_has_none(folder: Path, tmp_path: Path) -> None:
    biased = with_tensors(
        folder, tmp_path / "biased", lambda tensors: tensors.update({f"{MODULE}.bias": torch.zeros(32).half()})
    )
    checkpoint.load(str(biased))
    with_tensors(biased, biased, lambda tensors: tensors[f"{MODULE}.bias"].fill_(0.5))
    with pytest.raises(CheckpointError, match=r"have no place in the network.*down_proj\.bias"):
        checkpoint.load(str(biased))


def test_a_bias_of_the_network_is_read_though_it_is_zero(tiny_generator: Path, tmp_path: Path) -> None:
    folder, _ = write_folders(tiny_generator, RECIPES["awq"], tmp_path)
    biases = {
        f"model.layers.{layer}.mlp.{name}.bias": torch.full((size,), value)
        for layer in range(2)
        for name, size, value in (("gate_proj", 64, 0.0), ("up_proj", 64, 0.25), ("down_proj", 32, 0.0))
    }
    edited(folder, folder, mlp_bias=True)
    with_tensors(folder, folder, lambda tensors: tensors.update(biases))
    parameters = dict(checkpoint.load(str(folder)).network.named_parameters())
    assert parameters["blocks.0.mlp.gate.bias"].tolist() == [0.0] * 64
    assert parameters["blocks.0.mlp.up.bias"].tolist() == [0.25] * 64

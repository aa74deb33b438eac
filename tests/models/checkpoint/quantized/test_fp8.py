"""Weights of eight bits equal the reference implementation, with scales of every kind."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

from polyhead.models.checkpoint.quantized.formats import read_quantization
from polyhead.models.checkpoint.tensor_files import TensorEntry, check_readable, read_safetensors
from polyhead.models.core.errors import CheckpointError

CPU = torch.device("cpu")
SCALES = torch.rand(2, 3, generator=torch.Generator().manual_seed(0)) / 100
CODES = (torch.randn(192, 320, generator=torch.Generator().manual_seed(1)) * 50).to(torch.float8_e4m3fn)


def entries(folder: Path, method: str, block: list[int] | None, tensors: dict[str, Tensor]) -> dict[str, TensorEntry]:
    save_file(tensors, folder / "model.safetensors")
    config = {"quant_method": method, "weight_block_size": block}
    return read_quantization(folder / "config.json", config)(read_safetensors(folder / "model.safetensors"))


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_equal_the_reference(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """The last blocks of 192 outputs and 320 inputs are smaller than 128."""
    scales = SCALES.to(dtype)
    found = entries(
        tmp_path, "fp8", [128, 128], {"m.weight": CODES, f"m.{name}": scales, "m.input_scale": torch.ones(1)}
    )
    assert found.keys() == {"m.weight"}
    expected = _dequantize_fp8_weight(CODES, scales, [128, 128], torch.float32)
    assert torch.equal(found["m.weight"].read(torch.float32, CPU), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_may_be_exponents(dtype: torch.dtype, tmp_path: Path) -> None:
    exponents = torch.randint(100, 130, (2, 3), dtype=torch.uint8)
    found = entries(tmp_path, "fp8", [128, 128], {"m.weight": CODES, "m.weight_scale_inv": exponents.view(dtype)})
    expected = _dequantize_fp8_weight(CODES, torch.exp2(exponents.float() - 127), [128, 128], torch.float32)
    assert torch.equal(found["m.weight"].read(torch.float32, CPU), expected)


@pytest.mark.parametrize("method", ["fp8", "fbgemm_fp8"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (192,), (192, 1)])
def test_a_scale_is_for_the_matrix_or_for_an_output(method: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    scales = torch.rand(shape) + 0.5
    found = entries(tmp_path, method, None, {"m.weight": CODES, "m.weight_scale": scales})
    expected = CODES.float() * (scales[:, None] if shape == (192,) else scales)
    assert torch.equal(found["m.weight"].read(torch.float32, CPU), expected)


@pytest.mark.parametrize(
    ("block", "scales", "message"),
    [
        ([128, 128], None, "its scales are missing"),
        ([128, 128], torch.ones(2, 2), r"should be .* of \[2, 3\]"),
        ([64, 128], SCALES, r"should be .* of \[3, 3\]"),
        ([128, 128], torch.ones(2, 3, dtype=torch.int32), "I32 of shape"),
        (None, SCALES, r"should be .* of \[192, 1\]"),
    ],
)
def test_other_scales_are_refused(block: list[int] | None, scales: Tensor | None, message: str, tmp_path: Path) -> None:
    tensors = {"m.weight": CODES} if scales is None else {"m.weight": CODES, "m.weight_scale_inv": scales}
    with pytest.raises(CheckpointError, match=message):
        entries(tmp_path, "fp8", block, tensors)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_eight_bits_are_read_without_a_configuration(dtype: torch.dtype, tmp_path: Path) -> None:
    numbers = torch.randn(5, 7).to(dtype)
    save_file({"m.weight": numbers}, tmp_path / "model.safetensors")
    entry = read_safetensors(tmp_path / "model.safetensors")["m.weight"]
    check_readable(entry)
    assert torch.equal(entry.read(torch.float32, CPU), numbers.float())
    assert torch.equal(entry.read(dtype, CPU).view(torch.uint8), numbers.view(torch.uint8))
    save_file({"m.weight": torch.full((2, 2), torch.nan).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        read_safetensors(tmp_path / "model.safetensors")["m.weight"].read(dtype, CPU)

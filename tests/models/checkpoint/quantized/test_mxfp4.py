"""Experts in MXFP4 equal the reference implementation."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from polyhead.models.checkpoint.quantized import mxfp4
from polyhead.models.checkpoint.quantized.formats import read_quantization
from polyhead.models.checkpoint.tensor_files import TensorEntry, read_safetensors
from polyhead.models.core.errors import CheckpointError

CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def entries(folder: Path, **tensors: torch.Tensor) -> dict[str, TensorEntry]:
    save_file(tensors, folder / "model.safetensors")
    return read_quantization(folder / "config.json", CONFIG)(read_safetensors(folder / "model.safetensors"))


@pytest.mark.parametrize("at_once", [64, 1 << 20])
def test_experts_equal_the_reference(at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mxfp4, "SLICE_NUMBERS", at_once)
    blocks = torch.randint(256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    found = entries(tmp_path, down_proj_blocks=blocks, down_proj_scales=scales, down_proj_bias=torch.ones(3, 10))
    assert found.keys() == {"down_proj", "down_proj_bias"}
    entry = found["down_proj"]
    assert (entry.kind, entry.shape, entry.size) == ("MXFP4", (3, 128, 10), 3 * 10 * 4 * 17)
    expected = _convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(entry.read(torch.float32, torch.device("cpu")), expected)


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        (torch.zeros(3, 10, 4, 8, dtype=torch.uint8), torch.zeros(3, 10, 4, dtype=torch.uint8), "should be .experts"),
        (torch.zeros(3, 10, 64, dtype=torch.uint8), torch.zeros(3, 10, 4, dtype=torch.uint8), "should be .experts"),
        (torch.zeros(3, 10, 4, 16), torch.zeros(3, 10, 4, dtype=torch.uint8), "should be U8"),
        (torch.zeros(3, 10, 4, 16, dtype=torch.uint8), torch.zeros(3, 10, 5, dtype=torch.uint8), r"of \[3, 10, 4\]"),
    ],
)
def test_wrong_shapes_are_refused(blocks: torch.Tensor, scales: torch.Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        entries(tmp_path, down_proj_blocks=blocks, down_proj_scales=scales)


def test_missing_scales_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="down_proj_scales, without which it cannot be read, is missing"):
        entries(tmp_path, down_proj_blocks=torch.zeros(1, 1, 1, 16, dtype=torch.uint8))


def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    blocks, scales = torch.full((1, 1, 1, 16), 0x77, dtype=torch.uint8), torch.full((1, 1, 1), 255, dtype=torch.uint8)
    entry = entries(tmp_path, down_proj_blocks=blocks, down_proj_scales=scales)["down_proj"]
    with pytest.raises(CheckpointError, match="infinite or NaN"):
        entry.read(torch.float32, torch.device("cpu"))

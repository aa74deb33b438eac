"""The JSON that describes a matrix of four bits is bounded and checked; bytes may be stored as other numbers."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from polyhead.models import checkpoint
from polyhead.models.checkpoint.quantized.formats import read_quantization
from polyhead.models.checkpoint.tensor_files import read_safetensors
from polyhead.models.core.errors import CheckpointError
from tests.support.edits import edited, with_tensors
from tests.support.quantized_folders import RECIPES, blockwise, write_folders

WEIGHT = "model.layers.0.mlp.down_proj.weight"
STATE = f"{WEIGHT}.quant_state.bitsandbytes__nf4"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path) -> Path:
    return write_folders(tiny_generator, RECIPES["nf4, nested"], tmp_path_factory.mktemp("nf4"))[0]


def as_bytes(text: str) -> Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"shape": None}, "shape is .* which should be two whole numbers"),
        ({"shape": [32, 64, 1]}, "shape is .* which should be two whole numbers"),
        ({"shape": [-32, -64]}, "which should be two whole numbers"),
        ({"shape": [True, 2048]}, "which should be two whole numbers"),
        ({"shape": [1 << 20, 1 << 20]}, "are not the 549755813888 bytes of shape"),
        ({"shape": [64, 32]}, r"shape is \[64, 32\]"),
        ({"blocksize": 0}, "blocksize is 0, which should be one of 32, 64"),
        ({"blocksize": 128}, r"should be U8 of \[16\]"),
        ({"nested_blocksize": -1}, "nested_blocksize is -1"),
        ({"nested_offset": "0"}, "nested_offset is .* should be a number"),
    ],
)
def test_wrong_states_are_refused(changed: dict[str, object], message: str, folder: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        state = json.loads(bytes(tensors[STATE].tolist()))
        tensors[STATE] = as_bytes(json.dumps(state | changed))

    broken = with_tensors(folder, tmp_path / "broken", change)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(str(broken))


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is no valid JSON"), ("[]", "should hold a JSON object"), (" " * 5000, "4096 bytes are the most")],
)
def test_a_state_that_is_no_object_is_refused(text: str, message: str, folder: Path, tmp_path: Path) -> None:
    broken = with_tensors(folder, tmp_path / "broken", lambda tensors: tensors.update({STATE: as_bytes(text)}))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.describe_source(str(broken))


def test_other_values_than_those_of_the_format_are_refused(folder: Path, tmp_path: Path) -> None:
    other = {f"{WEIGHT}.quant_map": torch.linspace(-1, 1, 16)}
    broken = with_tensors(folder, tmp_path / "broken", lambda tensors: tensors.update(other))
    with pytest.raises(CheckpointError, match="its values are not those of the format"):
        checkpoint.load(str(broken))


def test_bytes_may_be_stored_as_halves(folder: Path, tmp_path: Path) -> None:
    """As with bnb_4bit_quant_storage: bfloat16. The bits may be those of NaN."""

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors[WEIGHT] = tensors[WEIGHT].view(-1).view(torch.bfloat16)[:, None]

    other = with_tensors(folder, tmp_path / "other", widen)
    entries = [checkpoint.describe_source(str(each)).entries[WEIGHT] for each in (folder, other)]
    expected, found = (entry.read(torch.float32, torch.device("cpu")) for entry in entries)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(3, 5), (7, 100), (1, 1)])
def test_the_last_block_may_be_shorter(shape: tuple[int, int], tmp_path: Path) -> None:
    recipe = blockwise("fp4", nested=True)
    tensors, floats = recipe.pack(torch.randn(shape))
    save_file({f"m.{leaf}": each for leaf, each in tensors.items()}, tmp_path / "model.safetensors")
    combine = read_quantization(tmp_path / "config.json", recipe.config)
    entry = combine(read_safetensors(tmp_path / "model.safetensors"))["m.weight"]
    assert torch.equal(entry.read(torch.float32, torch.device("cpu")), floats)


def test_the_first_files_did_not_name_the_method(tiny_generator: Path, tmp_path: Path) -> None:
    folder, _ = write_folders(tiny_generator, RECIPES["bytes"], tmp_path)
    edited(folder, folder, quantization_config={"load_in_8bit": True})
    assert checkpoint.load(str(folder)).default_precision.precision == "int8"
    edited(folder, folder, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(CheckpointError, match="one of load_in_8bit and load_in_4bit should be true"):
        checkpoint.describe_source(str(folder))


def test_other_orders_of_bytes_are_refused(tiny_generator: Path, tmp_path: Path) -> None:
    folder, _ = write_folders(tiny_generator, RECIPES["bytes"], tmp_path)
    turned = {"model.layers.0.mlp.down_proj.weight_format": torch.tensor(1, dtype=torch.uint8)}
    with_tensors(folder, folder, lambda tensors: tensors.update(turned))
    with pytest.raises(CheckpointError, match="only weights in the order of rows are read"):
        checkpoint.describe_source(str(folder))

"""Folders in every format give the floats that their codes stand for; what a file may hold instead is refused."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from polyhead.models import checkpoint
from polyhead.models.checkpoint.default_precision import kind_precision
from polyhead.models.checkpoint.load_estimate import estimate_load
from polyhead.models.checkpoint.quantized import bitsandbytes, quantized_entry
from polyhead.models.checkpoint.quantized.formats import FORMATS
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.executors.contract import StepInput
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.native.step_memory import weight_bytes
from polyhead.models.network.heads import LanguageHead
from tests.support import checkpoints
from tests.support.edits import edited
from tests.support.quantized_folders import RECIPES, write_folders

compiled = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")
CPU = torch.device("cpu")
MODULE = "model.layers.0.mlp.down_proj"
IGNORED = ("input_scale", "weight_format")
# Where the groups of inputs may be missing: those of neighbours.
OPTIONAL = {(name, "g_idx") for name in RECIPES if name.startswith("gptq") and name != "gptq, reordered"}
INT4_FORMATS, INT8_FORMATS = (2, 3), (1,)


@dataclass(frozen=True)
class Folders:
    """A checkpoint in the format `name`, and one with the floats that its codes stand for."""

    name: str
    quantised: Path
    floats: Path


@pytest.fixture(scope="module", params=RECIPES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Folders:
    return Folders(request.param, *write_folders(llama, RECIPES[request.param], tmp_path_factory.mktemp("q")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a generator whose matrices have sides of 32, 64 and 128."""
    tokenizer = checkpoints.byte_level_bpe()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=2, **sizes)
    torch.manual_seed(0)
    return checkpoints.save(LlamaForCausalLM(config), tokenizer, tmp_path_factory.mktemp("llama"))


def native(source: Path, precision: Precision) -> NativeExecutor:
    loaded = checkpoint.load(str(source))
    assert isinstance(loaded.head, LanguageHead)
    return NativeExecutor(loaded.network, loaded.head, precision=precision, block_count=4)


def logits(executor: NativeExecutor) -> Tensor:
    return executor.step(StepInput([5, 6, 7, 8], [0, 1, 2, 3], [0, 4], [[0]], [0, 1, 2, 3])).clone()


def test_every_format_has_a_recipe() -> None:
    methods = {str(recipe.config["quant_method"]) for recipe in RECIPES.values()}
    assert methods == FORMATS.keys() - {"fbgemm_fp8", "mxfp4"}


def test_numbers_are_codes_times_scales(folders: Folders) -> None:
    what, expected = checkpoint.describe_source(str(folders.quantised)), load_file(folders.floats / "model.safetensors")
    assert what.entries.keys() == expected.keys()
    for name, floats in expected.items():
        assert torch.equal(what.entries[name].read(torch.float32, CPU), floats), name
    kinds = {entry.kind for entry in what.entries.values()}
    assert kinds == {"F32", RECIPES[folders.name].kind}
    assert what.default_precision.precision == kind_precision(RECIPES[folders.name].kind)


def test_slices_are_put_together(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_entry, "SLICE_NUMBERS", 100)
    monkeypatch.setattr(bitsandbytes, "SLICE_NUMBERS", 128)
    expected = load_file(folders.floats / "model.safetensors")
    entries = checkpoint.describe_source(str(folders.quantised)).entries
    for name in [name for name in expected if name.startswith("model.layers.0.")]:
        read: list[int] = []
        assert torch.equal(entries[name].read(torch.bfloat16, CPU, read.append), expected[name].bfloat16())
        assert 0 < sum(read) <= entries[name].read_size


@compiled
def test_logits_are_those_of_the_floats(folders: Folders) -> None:
    """In float32, and in the precision in which the format is served, to the bit."""
    precision = kind_precision(RECIPES[folders.name].kind)
    for each in ("float32", precision):
        found, expected = native(folders.quantised, each), native(folders.floats, each)
        assert torch.equal(logits(found), logits(expected))
    packed = {layer.down.format for layer in found._packed.plan.layers[:2]}
    assert packed <= set(INT4_FORMATS if precision == "int4" else INT8_FORMATS)


@compiled
def test_memory_is_estimated(folders: Folders) -> None:
    what = checkpoint.describe_source(str(folders.quantised))
    size, precision = estimate_load(what), kind_precision(RECIPES[folders.name].kind)
    estimated = weight_bytes(what.config, precision, True, size.tied, size.bits if precision == "int4" else {})
    assert native(folders.quantised, precision)._packed.weight_bytes <= estimated + 4096
    matrices = [entry for entry in what.entries.values() if entry.kind != "F32"]
    assert size.computed == max(entry.work_numbers for entry in matrices)


def changes(tensor: Tensor) -> dict[str, Tensor | None]:
    """What an untrusted file may hold in place of a tensor."""
    other = torch.zeros(tensor.shape, dtype=torch.int64 if tensor.is_floating_point() else torch.float16)
    found: dict[str, Tensor | None] = {"missing": None, "dtype": other, "scalar": tensor.flatten()[:1].clone()}
    found["sides"] = tensor[None].expand(2, *tensor.shape).contiguous()
    if tensor.dim():
        found |= {"short": tensor[:-1].clone(), "empty": tensor[:0].clone()}
    return found


def test_tensors_of_wrong_shape_or_dtype_are_refused(folders: Folders, tmp_path: Path) -> None:
    held = load_file(folders.quantised / "model.safetensors")
    parts = [name for name in held if name.startswith(f"{MODULE}.")]
    assert parts
    for name in parts:
        leaf = name.removeprefix(f"{MODULE}.")
        for change, tensor in changes(held[name]).items():
            if leaf in IGNORED or (change == "missing" and (folders.name, leaf) in OPTIONAL):
                continue
            if tensor is not None and held[name].numel() == 1 and tensor.dtype == held[name].dtype:
                continue  # one number may have several shapes
            if (folders.name, change) == ("fp8, exponents", "dtype"):
                continue  # scales may be floats
            broken = tmp_path / f"{leaf} {change}"
            shutil.copytree(folders.quantised, broken)
            write(folders.quantised, broken, held, {name: tensor})
            with pytest.raises(CheckpointError):
                print(leaf, change, checkpoint.load(str(broken)).family)  # what is not refused


def write(source: Path, target: Path, held: dict[str, Tensor], changed: dict[str, Tensor | None]) -> None:
    """A copy of a folder with changed tensors; None removes one. The metadata stays."""
    kept = {name: each for name, each in (held | changed).items() if each is not None}
    with (source / "model.safetensors").open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        metadata = json.loads(file.read(size))["__metadata__"]
    save_file(kept, target / "model.safetensors", metadata=metadata)


@pytest.mark.parametrize(
    ("name", "changed", "field"),
    [
        ("gptq", {"bits": 5}, "bits"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format"),
        ("gptq", {"format": "gptq_p"}, "format"),
        ("gptq", {"is_marlin_format": True}, "is_marlin_format"),
        ("gptq", {"pack_dtype": "int16"}, "pack_dtype"),
        ("gptq", {"group_size": 0}, "group_size"),
        ("gptq", {"group_size": "all"}, "group_size"),
        ("gptq", {"quant_method": "aqlm"}, "quant_method"),
        ("gptq", {"quant_method": ["gptq"]}, "quant_method"),
        ("gptq", {"quant_method": None}, "quant_method"),
        ("awq", {"bits": 8}, "bits"),
        ("awq", {"version": "gemv_fast"}, "version"),
        ("awq", {"version": ["gemm"]}, "version"),
        ("awq", {"zero_point": False}, "zero_point"),
        ("awq", {"group_size": -2}, "group_size"),
        ("fp8, blocks", {"weight_block_size": [128]}, "weight_block_size"),
        ("fp8, blocks", {"weight_block_size": [128, 0]}, "weight_block_size"),
        ("fp8, blocks", {"expert_dtype": "fp4"}, "expert_dtype"),
        ("fp8", {"scale_fmt": "log"}, "scale_fmt"),
        ("fp8", {"activation_scheme": "token"}, "activation_scheme"),
        ("nf4", {"bnb_4bit_quant_type": "nf3"}, "bnb_4bit_quant_type"),
        ("bytes", {"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight"),
    ],
)
def test_unsupported_fields_are_refused_by_name(
    name: str, changed: dict[str, object], field: str, llama: Path, tmp_path: Path
) -> None:
    """From config.json alone: the tensors are those of an unquantised folder."""
    config = RECIPES[name].config | changed
    folder = edited(llama, tmp_path / "other", quantization_config=config)
    with pytest.raises(UnsupportedError, match=rf"config\.json: .*quantization_config\.{field}\b"):
        checkpoint.describe_source(str(folder))


def test_a_configuration_that_is_no_object_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = edited(llama, tmp_path / "other", quantization_config=["gptq"])
    with pytest.raises(UnsupportedError, match="quant_method"):
        checkpoint.describe_source(str(folder))


def test_modules_that_are_not_quantised_stay_floats(llama: Path, tmp_path: Path) -> None:
    """Whatever the list says that the configuration has of them: the file decides."""
    quantised, floats = write_folders(llama, RECIPES["gptq"], tmp_path)
    kept, held = load_file(floats / "model.safetensors"), load_file(quantised / "model.safetensors")
    held = {name: each for name, each in held.items() if not name.startswith(f"{MODULE}.")}
    save_file(held | {f"{MODULE}.weight": kept[f"{MODULE}.weight"]}, quantised / "model.safetensors")
    config = RECIPES["gptq"].config | {"modules_to_not_convert": [MODULE, "re:.*down_proj"]}
    entries = checkpoint.describe_source(str(edited(quantised, quantised, quantization_config=config))).entries
    assert (entries[f"{MODULE}.weight"].kind, entries["model.layers.1.mlp.down_proj.weight"].kind) == (
        "F32",
        "int4 with zero points",
    )

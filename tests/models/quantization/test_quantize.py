"""Quantised checkpoints are read back to the same bits; other formats are refused with a reason."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

from polyhead.models import checkpoint
from polyhead.models.checkpoint import save_folder
from polyhead.models.checkpoint import saved_codes as saving
from polyhead.models.checkpoint.quantized.packed_codes import unpack_codes
from polyhead.models.core import files
from polyhead.models.core.errors import CheckpointError, ModelError, UnsupportedError
from polyhead.models.executors.contract import StepInput
from polyhead.models.native.library import load_library, runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import PackedNetwork, Precision, scale_unit
from polyhead.models.network.heads import LanguageHead
from polyhead.models.quantization.quantize import calibrate
from polyhead.service.cli import main as cli
from polyhead.service.cli import quantize_command
from polyhead.service.cli.quantize_command import quantize, read_sequences
from tests.models.native import test_packed_network as packing
from tests.models.native.test_packed_network import linear_of, unpacked
from tests.models.native.test_step import LLAMA
from tests.support import checkpoints
from tests.support.edits import edited, with_tensors

compiled = pytest.mark.skipif(not runnable_targets(), reason="polyhead was installed without a compiler")


def polyhead(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, list(arguments))


def ignore_progress(what: str, done: int, total: int) -> None:
    """Ignores progress."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog, and then it sleeps a while. " * 120)
    return file


@pytest.fixture(scope="module")
def int8(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path) -> Path:
    out = tmp_path_factory.mktemp("int8") / "out"
    quantize(str(tiny_generator), out, "int8", None, ignore_progress)
    return out


@pytest.fixture(scope="module")
def int4(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path, text: Path) -> Path:
    out = tmp_path_factory.mktemp("int4") / "out"
    quantize(str(tiny_generator), out, "int4", text, ignore_progress)
    return out


def packed(source: Path, precision: Precision) -> NativeExecutor:
    loaded = checkpoint.load(str(source))
    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    return NativeExecutor(loaded.network, head, precision=precision, block_count=4 if head else 0)


def memory(executor: NativeExecutor) -> bytes:
    """All packed memory of an executor: codes, scales and other weights."""
    return b"".join(kept.tobytes() for kept in executor._packed.arrays if isinstance(kept, np.ndarray))


def logits(executor: NativeExecutor) -> torch.Tensor:
    table = [0] if executor.block_count else []
    return executor.step(StepInput([5, 6, 7], [0, 1, 2], [0, 3], [table], [0, 1, 2])).clone()


def difficult_weights(scale: float) -> torch.Tensor:
    """Difficult rows [2048, 96]: unusual scales, ties, only zeros, and weights on a coarse grid."""
    torch.manual_seed(0)
    weights = torch.randn(2048, 96) * scale * torch.rand(2048, 1).exp2()
    weights[::7] = weights[::7].bfloat16().float()
    weights[3::5] = (weights[3::5] / scale * 4).round().clamp(-13, 13) * (scale * 0.77)
    weights[5], weights[6] = 0, torch.arange(96) * scale
    weights[9, :64] *= 1e-5
    return weights


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-3, 1.0, 1e20, 1e36])
def test_quantising_twice_changes_nothing(scale: float) -> None:
    weights = difficult_weights(scale)
    codes, scales = saving.quantize_int8(weights)
    assert codes.abs().amax() == saving.MAX_CODE
    again, same = saving.quantize_int8(saving.dequantize(codes, scales))
    assert torch.equal(again, codes)
    assert torch.equal(same, scales)


@compiled
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e20])
@pytest.mark.parametrize("neighbour", [1.0, 7.0, 1000.0])
def test_the_packer_keeps_the_codes_and_scales_of_the_file(scale: float, neighbour: float) -> None:
    """The packer computes the same codes and scales beside any other matrix.

    Excluded are groups that are negligible in the common unit.
    """
    weights, other = difficult_weights(scale), torch.full((32, 96), scale * neighbour)
    codes, scales = saving.quantize_int8(weights)
    largest = weights.unflatten(1, (-1, 32)).abs().amax(-1)
    significant = largest >= 2**-22 * max(float(largest.max()), scale * neighbour)
    assert significant.sum() > 6000
    for each in (weights, saving.dequantize(codes, scales)):
        pack = PackedNetwork(load_library(runnable_targets()[0]), LLAMA, "int8")
        found = unpacked(pack.pack_linear([linear_of(each), linear_of(other)]), *weights.shape)
        off = (torch.from_numpy(found.codes) != codes).unflatten(1, (-1, 32)).any(-1) & significant
        assert not off.any() or runnable_targets()[0] == "portable"  # which rounds ties differently
        assert torch.equal(torch.from_numpy(found.scales)[significant], scales[significant])
        assert ((found.weights() - weights).unflatten(1, (-1, 32)).abs().amax(-1) <= largest / 127).all()


@compiled
def test_a_largest_weight_that_is_rounded_above_a_power_of_two_is_packed_exactly() -> None:
    """Its unit differs from that of the exact weights."""
    weights = torch.rand(4, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    weights[2, 3] = 1
    weights *= 2 - 2**-20
    codes, scales = saving.quantize_int8(weights)
    dequantized = saving.dequantize(codes, scales)
    assert dequantized.max() >= 2
    assert (
        scale_unit(2 * float(weights.max()))
        == scale_unit(float(dequantized.max()))
        == 2 * scale_unit(float(weights.max()))
    )
    for found in (packing.packed(each, "int8") for each in (weights, dequantized)):
        assert torch.equal(torch.from_numpy(found.codes).to(torch.int8), codes)
        assert torch.equal(torch.from_numpy(found.scales), scales)


def test_a_group_with_a_weight_that_is_not_finite_stays_so() -> None:
    weights = torch.randn(3, 64)
    weights[1, 40], weights[2, 3] = torch.nan, torch.inf
    dequantized = saving.dequantize(*saving.quantize_int8(weights)).unflatten(1, (2, 32))
    assert (dequantized.isnan().all(-1) == torch.tensor([[0, 0], [0, 1], [1, 0]])).all()
    assert dequantized.isnan().sum() == 64


def test_four_bit_codes_are_packed_and_unpacked() -> None:
    codes = torch.randint(16, (5, 24), dtype=torch.uint8)
    assert torch.equal(unpack_codes(saving.pack_int4(codes), 4), codes)
    assert saving.pack_int4(codes)[0, 0].item() & 0xFF == codes[0, 0] | codes[0, 1] << 4


@compiled
@pytest.mark.parametrize("kind", ["tiny_generator", "tiny_classifier", "tiny_embedder"])
def test_saved_int8_equals_int8_packed_at_load(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    quantize(str(source), tmp_path / "out", "int8", None, ignore_progress)
    direct, saved = packed(source, "int8"), packed(tmp_path / "out", "int8")
    assert torch.equal(logits(direct), logits(saved))
    assert memory(direct) == memory(saved)
    assert not torch.equal(logits(packed(tmp_path / "out", "float32")), logits(packed(source, "float32")))


@compiled
def test_an_encoder_is_saved_in_the_groups_that_it_is_packed_in(tmp_path: Path) -> None:
    """Groups of 64 where all widths are a multiple, else of 32; both give the bits of the original."""
    for width, group in ((64, 64), (96, 32)):
        tokenizer = checkpoints.word_piece()
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
        source, out = tmp_path / str(width), tmp_path / f"{width}-int8"
        torch.manual_seed(0)
        checkpoints.save(BertModel(BertConfig(vocab_size=len(tokenizer), **sizes)), tokenizer, source)
        quantize(str(source), out, "int8", None, ignore_progress)
        weights = json.loads((out / "config.json").read_bytes())["quantization_config"]["config_groups"]["group_0"][
            "weights"
        ]
        assert weights["group_size"] == group
        direct, saved = packed(source, "int8"), packed(out, "int8")
        assert memory(direct) == memory(saved)
        assert torch.equal(logits(direct), logits(saved))


@pytest.mark.skipif(runnable_targets()[:1] in ([], ["portable"]), reason="ties are rounded by a fused multiplication")
def test_ties_are_rounded_as_in_the_packer(tiny_generator: Path, tmp_path: Path) -> None:
    def coarse(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor.copy_((tensor * 64).round() / 64)

    source = with_tensors(tiny_generator, tmp_path / "coarse", coarse)
    quantize(str(source), tmp_path / "out", "int8", None, ignore_progress)
    assert memory(packed(source, "int8")) == memory(packed(tmp_path / "out", "int8"))


def test_the_file_has_the_format_of_compressed_tensors(tiny_generator: Path, int8: Path, int4: Path) -> None:
    config = {
        folder: json.loads((folder / "config.json").read_text())["quantization_config"] for folder in (int8, int4)
    }
    assert config[int8]["format"] == "int-quantized"
    assert config[int4]["format"] == "pack-quantized"
    for folder in (int8, int4):
        assert config[folder]["config_groups"]["group_0"]["weights"]["group_size"] == 32
    assert config[int8]["ignore"] == ["model.embed_tokens", "lm_head"]
    name = "model.layers.0.mlp.down_proj.weight"
    held = {folder: load_file(folder / "model.safetensors") for folder in (tiny_generator, int8, int4)}
    assert (held[int8][name].dtype, held[int8][f"{name}_scale"].shape) == (torch.int8, (32, 2))
    assert (held[int4][f"{name}_packed"].shape, held[int4][f"{name}_scale"].dtype) == ((32, 8), torch.float16)
    assert held[int4][f"{name}_shape"].tolist() == [32, 64]
    for kept in ("model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(held[int8][kept], held[tiny_generator][kept])
    assert (int8 / "tokenizer.json").read_bytes() == (tiny_generator / "tokenizer.json").read_bytes()
    assert checkpoint.load(str(int8)).chat is not None
    kinds = {entry.kind for entry in checkpoint.describe_source(str(int4)).entries.values()}
    assert kinds == {"int4", "F32"}


@compiled
def test_saved_int4_equals_the_calibrated_weights(tiny_generator: Path, int4: Path, text: Path) -> None:
    loaded = checkpoint.load(str(tiny_generator))
    grids = calibrate(loaded.network, None, read_sequences(loaded, text))
    saved = checkpoint.load(str(int4))
    parameters = dict(saved.network.named_parameters())
    assert len(grids) == 14
    for name, grid in grids.items():
        assert torch.equal(parameters[name], grid.dequantize())
    executor = NativeExecutor(saved.network, saved.head, precision="int4", block_count=4)  # type: ignore[arg-type]
    assert {layer.down.format for layer in executor._packed.plan.layers[:2]} == {2}


def of_widths(folder: Path, hidden: int, inner: int) -> Path:
    tokenizer = checkpoints.byte_level_bpe()
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1, "num_attention_heads": 4}
    return checkpoints.save(LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)), tokenizer, folder)


@pytest.mark.parametrize("group", [0, 32, 64, 128])
def test_int8_checkpoints_of_other_tools_are_read(tmp_path: Path, group: int) -> None:
    """With a scale for each output, as in older folders, or for each group, in any float dtype."""
    int8 = tmp_path / "int8"
    quantize(str(of_widths(tmp_path / "wide", 128, 256)), int8, "int8", None, ignore_progress)
    config = json.loads((int8 / "config.json").read_text())["quantization_config"]
    weights = config["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel", "group_size": None}
    expected: dict[str, torch.Tensor] = {}

    def other(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            codes = tensors[name.removesuffix("_scale")]
            scales = torch.rand(codes.size(0), codes.size(1) // group if group else 1).bfloat16() / 64
            tensors[name] = scales
            wide = scales.float().repeat_interleave(group or codes.size(1), 1)
            expected[name.removesuffix("_scale")] = codes.float() * wide

    folder = with_tensors(edited(int8, tmp_path / "other", quantization_config=config), tmp_path / "out", other)
    entries = checkpoint.describe_source(str(folder)).entries
    assert len(expected) == 8  # including the output layer
    for name, floats in expected.items():
        assert torch.equal(entries[name].read(torch.float32, torch.device("cpu")), floats)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_inputs_that_are_no_multiple_of_a_group_are_refused(precision: str, tmp_path: Path, text: Path) -> None:
    source = of_widths(tmp_path / "odd", 48, 64)
    with pytest.raises(UnsupportedError, match=r"its 48 inputs are no multiple of 32.*serve the checkpoint as it is"):
        quantize(str(source), tmp_path / "out", precision, text if precision == "int4" else None, ignore_progress)


def test_hessians_out_of_proportion_to_the_file_are_refused(tmp_path: Path, text: Path) -> None:
    """They take the square of the inputs in memory, and the cube in time: this file has 1 MB, and asks for 2 GB."""
    with pytest.raises(UnsupportedError, match=r"down_proj.*it has 8192 inputs for 32 outputs.*choose int8"):
        quantize(str(of_widths(tmp_path / "narrow", 32, 8192)), tmp_path / "out", "int4", text, ignore_progress)


def test_hessians_that_the_machine_has_no_memory_for_are_refused(
    tiny_generator: Path, tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_command, "available_memory", lambda: iter([3 << 10]))
    with pytest.raises(UnsupportedError, match=r"int4 takes 0 MiB of memory, as it has \d+ inputs; 0 are free"):
        quantize(str(tiny_generator), tmp_path / "out", "int4", text, ignore_progress)


def test_inputs_that_overflow_are_refused_by_name(tiny_generator: Path) -> None:
    loaded = checkpoint.load(str(tiny_generator))
    mlp: Any = loaded.network.blocks[1].mlp
    mlp.gate.weight.data *= 1e30
    with pytest.raises(UnsupportedError, match=r"'blocks\.1\.mlp\.down\.weight': on this text its inputs are so large"):
        calibrate(loaded.network, None, [[5, 6, 7, 8]])


def test_a_model_that_reads_special_tokens_only_has_no_text(tiny_classifier: Path, text: Path) -> None:
    loaded = checkpoint.load(str(tiny_classifier))
    special = sum(map(len, loaded.tokenizer.boundary_tokens))
    assert special
    with pytest.raises(ModelError, match=f"{special} tokens are the most that the model reads, and its special tokens"):
        read_sequences(replace(loaded, max_tokens=special), text)


def test_an_untied_output_layer_is_quantised(tiny_generator: Path, tmp_path: Path, text: Path) -> None:
    untied = edited(tiny_generator, tmp_path / "untied", tie_word_embeddings=False)
    tokens = "model.embed_tokens.weight"
    with_tensors(untied, untied, lambda each: each.update({"lm_head.weight": torch.randn_like(each[tokens])}))
    for precision, given in (("int8", None), ("int4", text)):
        quantize(str(untied), tmp_path / precision, precision, given, ignore_progress)
        entries = checkpoint.describe_source(str(tmp_path / precision)).entries
        assert entries["lm_head.weight"].kind == precision
        config = json.loads((tmp_path / precision / "config.json").read_text())
        assert config["quantization_config"]["ignore"] == ["model.embed_tokens"]
        checkpoint.load(str(tmp_path / precision))


def changed(config: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    level = config
    for parent in parents:
        level = level[parent]
    level[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("quant_method", "hqq", ""),
        ("format", "marlin-24", ""),
        ("kv_cache_scheme", {"num_bits": 8}, ""),
        ("transform_config", {"config_groups": {"a": {}}}, ""),
        ("config_groups", {}, ""),
        ("config_groups", {"W4A16": ["Linear"]}, "weights.num_bits"),
        ("config_groups.group_0.weights", None, "weights.num_bits"),
        ("config_groups.group_0.format", "sparse-bitmask", ""),
        ("config_groups.group_0.weights.num_bits", 3, ""),
        ("config_groups.group_0.weights.num_bits", True, ""),
        ("config_groups.group_0.weights.type", "float", ""),
        ("config_groups.group_0.weights.symmetric", "no", ""),
        ("config_groups.group_0.weights.actorder", "random", ""),
        ("config_groups.group_0.weights.strategy", "token", ""),
        ("config_groups.group_0.weights.group_size", 0, ""),
        ("config_groups.group_0.weights.group_size", "32", ""),
        (
            "config_groups.group_0.input_activations",
            {"num_bits": 8, "type": "int", "dynamic": False},
            "input_activations.dynamic",
        ),
        ("config_groups.group_0.output_activations", {"num_bits": 8}, ""),
    ],
)
def test_unsupported_formats_are_refused_by_field(
    int4: Path, tmp_path: Path, path: str, value: Any, message: str
) -> None:
    config = json.loads((int4 / "config.json").read_text())["quantization_config"]
    folder = edited(int4, tmp_path / "other", quantization_config=changed(config, path, value))
    field = message or path.removeprefix("config_groups.group_0.")
    with pytest.raises(UnsupportedError, match=rf"quantization_config\.{field}\b"):
        checkpoint.describe_source(str(folder))


@pytest.mark.parametrize(
    ("leaf", "tensor", "message"),
    [
        ("weight_zero_point", torch.zeros(4, 1, dtype=torch.int32), r"should be I8 of \[32, 2\]"),
        ("weight_g_idx", torch.zeros(63, dtype=torch.int32), r"should be I32 or I64 of \[64\]"),
        ("weight_g_idx", torch.arange(64), "it names group 0 or 63, and there are 2"),
        ("weight_scale", torch.ones(32, 1), r"should be floats of \[32, 2\]"),
        ("weight_scale", torch.ones(32, 2, dtype=torch.int32), "should be floats"),
        ("input_scale", torch.ones(1), "fixed scales of integer activations are not read"),
        ("weight_packed", torch.zeros(32, 4, dtype=torch.int32), r"should be I32 of \[32, 8\]"),
        ("weight_packed", torch.zeros(32, 8), "should be I32"),
        ("weight_shape", torch.tensor([32, 64, 1]), "weight_shape"),
        ("weight_shape", torch.tensor([-1, 1 << 40]), "a side has from 0 to"),
    ],
)
def test_tensors_of_wrong_shape_or_dtype_are_refused(
    int4: Path, tmp_path: Path, leaf: str, tensor: torch.Tensor, message: str
) -> None:
    changed = {f"model.layers.0.mlp.down_proj.{leaf}": tensor}
    folder = with_tensors(int4, tmp_path / "broken", lambda tensors: tensors.update(changed))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(str(folder))


def test_integers_without_a_quantization_config_are_refused(int8: Path, tmp_path: Path) -> None:
    bare = edited(int8, tmp_path / "bare", quantization_config=None)

    def without_scales(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            del tensors[name]

    with pytest.raises(UnsupportedError, match="its numbers are I8"):
        checkpoint.load(str(with_tensors(bare, bare, without_scales)))


def test_an_adapter_is_merged_into_the_dequantised_weights(int8: Path, tmp_path: Path) -> None:
    module = "model.layers.0.mlp.down_proj"
    a, b = torch.randn(2, 64), torch.randn(32, 2)
    checkpoints.write_json(tmp_path / "adapter_config.json", {"peft_type": "LORA", "r": 2, "lora_alpha": 2})
    pair = {f"base_model.model.{module}.lora_{side}.weight": each for side, each in (("A", a), ("B", b))}
    save_file(pair, tmp_path / "adapter_model.safetensors")
    what = checkpoint.describe_source(f"{int8}+{tmp_path}")
    merged, base = what.entries[f"{module}.weight"], checkpoint.describe_source(str(int8)).entries[f"{module}.weight"]
    cpu = torch.device("cpu")
    assert torch.allclose(merged.read(torch.float32, cpu), base.read(torch.float32, cpu) + b @ a, atol=1e-5)
    assert (merged.kind, merged.size) == ("F32", base.size)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{folder}", "{folder}"], "exists already"),
        (["{folder}", "{new}", "--precision", "int4"], "int4 needs --text"),
        (["{folder}", "{new}", "--text", "{text}"], "int8 takes none"),
        (["{folder}", "{new}", "--precision", "int4", "--text", "/nowhere"], "/nowhere cannot be read"),
        (["{folder}", "{new}", "--precision", "int4", "--text", "{short}"], "tokens, and at least 256 are needed"),
        (["{int8}", "{new}"], "quantised already"),
        (["{short}", "{new}"], "only a safetensors folder"),
    ],
)
def test_errors_of_the_command(
    tiny_generator: Path, int8: Path, text: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "short.txt").write_text("too short")
    places = {"folder": tiny_generator, "new": tmp_path / "new", "text": text, "int8": int8}
    result = polyhead("quantize", *(each.format(short=tmp_path / "short.txt", **places) for each in arguments))
    assert result.exit_code == 1
    assert message in result.stderr
    assert not (tmp_path / "new").exists()


def test_the_command_reports_the_formats_of_the_weights(tiny_classifier: Path, tmp_path: Path, text: Path) -> None:
    for arguments in (["--precision", "int4", "--text", str(text)], []):
        out = tmp_path / f"out{len(arguments)}"
        result = polyhead("quantize", str(tiny_classifier), str(out), *arguments)
        assert result.exit_code == 0, result.stderr
        assert "MiB before" in result.stdout
        assert checkpoint.load(str(out)).labels == checkpoint.load(str(tiny_classifier)).labels


@pytest.mark.parametrize(
    ("name", "target", "message"),
    [
        ("vocab.json", "{secret}", "leads out of its folder"),
        ("special_tokens_map.json", "{secret}", "leads out of its folder"),
        ("notes.txt", "{secret}", "leads out of its folder"),
        ("more.model", "/dev/null", "leads out of its folder"),
        ("1_Pooling", "{outside}", "is no folder inside this one"),
        ("notes.txt", "{nothing}", "there is no such file"),
    ],
)
def test_links_out_of_a_folder_are_not_copied(
    name: str, target: str, message: str, tiny_generator: Path, tmp_path: Path
) -> None:
    outside, source, new = tmp_path / "outside", tmp_path / "source", tmp_path / "new"
    outside.mkdir()
    (outside / "config.json").write_text('{"secret": 1}')
    shutil.copytree(tiny_generator, source)
    places = {"secret": outside / "config.json", "outside": outside, "nothing": source / "nothing"}
    (source / name).unlink(missing_ok=True)
    (source / name).symlink_to(target.format(**places))
    result = polyhead("quantize", str(source), str(new))
    assert result.exit_code == 1
    assert name in result.stderr
    assert message in result.stderr
    assert not new.exists()


def test_a_large_file_or_a_pipe_is_not_copied(tiny_generator: Path, tmp_path: Path) -> None:
    source, new = tmp_path / "source", tmp_path / "new"
    shutil.copytree(tiny_generator, source)
    with (source / "notes.txt").open("wb") as file:
        file.truncate(files.MAX_VOCABULARY_BYTES + 1)
    assert "notes.txt: is longer than 64 MiB" in polyhead("quantize", str(source), str(new)).stderr
    (source / "notes.txt").unlink()
    os.mkfifo(source / "notes.txt")
    assert "notes.txt: is no regular file" in polyhead("quantize", str(source), str(new)).stderr
    assert not new.exists()


def test_copied_files_are_bounded_together(
    tiny_generator: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links inside of a folder may name one file many times."""
    source, new = tmp_path / "source", tmp_path / "new"
    shutil.copytree(tiny_generator, source)
    monkeypatch.setattr(save_folder, "MAX_COPIED_BYTES", 1 << 20)
    (source / "notes.txt").write_bytes(bytes(1 << 18))
    for number in range(4):
        (source / f"notes{number}.txt").symlink_to("notes.txt")
    stderr = polyhead("quantize", str(source), str(new)).stderr
    assert "with it, the files to copy have more than 1 MiB; leave out of the folder what a model does not" in stderr
    assert not new.exists()


def test_links_of_a_hub_cache_are_copied(tiny_generator: Path, tmp_path: Path) -> None:
    home = tmp_path / "models--some--model"
    snapshot = home / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    shutil.copytree(tiny_generator, home / "blobs")
    for file in (home / "blobs").iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    result = polyhead("quantize", str(snapshot), str(tmp_path / "new"))
    assert result.exit_code == 0, result.stderr
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == (tiny_generator / "tokenizer.json").read_bytes()
    assert not (tmp_path / "new" / "tokenizer.json").is_symlink()


@pytest.mark.parametrize(
    ("out", "message"), [("dangling", "is a link to a missing path"), ("file/new", "the folder cannot be written")]
)
def test_an_output_folder_that_cannot_be_created_is_an_error(
    out: str, message: str, tiny_classifier: Path, tmp_path: Path
) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "file").write_text("")
    result = polyhead("quantize", str(tiny_classifier), str(tmp_path / out))
    assert (result.exit_code, result.exception.__class__) == (1, SystemExit)
    assert message in result.stderr


def test_fused_and_transposed_matrices_are_refused(tmp_path: Path) -> None:
    tokenizer = checkpoints.byte_level_bpe()
    config = GPT2Config(vocab_size=len(tokenizer), n_embd=32, n_layer=1, n_head=4, n_positions=64)
    checkpoints.save(GPT2LMHeadModel(config), tokenizer, tmp_path / "gpt2")
    result = polyhead("quantize", str(tmp_path / "gpt2"), str(tmp_path / "out"))
    assert "gpt2 stores matrices transposed" in result.stderr


def test_a_quantised_folder_has_the_template_and_reads_its_own_weights(tiny_generator: Path, tmp_path: Path) -> None:
    source, new = tmp_path / "source", tmp_path / "new"
    shutil.copytree(tiny_generator, source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "default.jinja").write_text("{{ messages[0].content }} chosen")
    weights = source / "model.safetensors"
    weights.rename(source / "part.safetensors")
    parts = dict.fromkeys(load_file(source / "part.safetensors"), "part.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    config = json.loads((source / "config.json").read_text())
    config["transformers_weights"] = "model.safetensors.index.json"
    (source / "config.json").write_text(json.dumps(config))
    result = polyhead("quantize", str(source), str(new))
    assert result.exit_code == 0, result.stderr
    chats = [checkpoint.load(str(folder)).chat for folder in (source, new)]
    assert [chat.source for chat in chats if chat] == ["{{ messages[0].content }} chosen"] * 2

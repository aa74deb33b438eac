"""Weights out of ONNX graphs: those that torch exports, compared with the network's own, and damaged files."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
import transformers as tf

from polyhead.models.checkpoint import describe_source, load, onnx_weights, save_folder, tensor_files
from polyhead.models.checkpoint.onnx_weights import read_graph, read_onnx
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints, onnx_files
from tests.support.onnx_files import model, node, number, outside_tensor, part, tensor

TEXT = "the quick brown fox"
FLOATS = struct.pack("<6f", 1, 2, 3, 4, 5, 6)


def without_safetensors(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    (target / "model.safetensors").unlink()
    return target


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        (tf.BertForSequenceClassification, "model.onnx"),
        (tf.RobertaForTokenClassification, "onnx/model.onnx"),
        (tf.DistilBertForMaskedLM, "onnx/model.onnx"),
    ],
)
def test_weights_are_those_of_the_exported_network(tmp_path: Path, kind: Any, place: str) -> None:
    """Equal tensors are stored once: two norms of each network are made equal."""
    whole = checkpoints.encoder(tmp_path / "whole", kind)
    network = kind.from_pretrained(whole).eval()
    norms = [each for each in network.modules() if isinstance(each, torch.nn.LayerNorm)]
    norms[1].load_state_dict(norms[2].state_dict())
    network.save_pretrained(whole)
    folder = without_safetensors(whole, tmp_path / "exported")
    onnx_files.export(network, folder / place)
    ours, theirs = load(str(folder)), load(str(whole))
    states = [each.network(RaggedBatch.of([each.tokenizer.encode(TEXT).ids])) for each in (ours, theirs)]
    assert torch.equal(*states)
    rows, starts = theirs.head.needed_rows([0, len(states[0])])
    chosen = states[0][torch.tensor(rows)]
    assert torch.equal(ours.head(chosen, starts), theirs.head(chosen, starts))
    assert (ours.task, ours.labels) == (theirs.task, theirs.labels)


def test_an_embedder_with_modules(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = without_safetensors(tiny_embedder, tmp_path / "exported")
    onnx_files.export(tf.BertModel.from_pretrained(tiny_embedder).eval(), folder / "onnx" / "model.onnx")
    loaded = load(str(folder))
    assert (loaded.task, loaded.pooling) == ("embed", "mean")
    with pytest.raises(UnsupportedError, match="its weights are in an ONNX graph, and only safetensors are saved"):
        save_folder.write_quantized(describe_source(str(folder)), tmp_path / "out")


def test_a_graph_without_a_configuration_is_refused(tiny_embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(model())
    with pytest.raises(UnsupportedError, match=r"only an ONNX graph \(model.onnx\), which is read only as model.onnx"):
        load(str(tmp_path))
    with pytest.raises(UnsupportedError, match=r"beside the config\.json of its network; put that file there"):
        load(str(tmp_path / "model.onnx"))


def test_names_follow_from_the_graph(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    (tmp_path / "model.onnx_data").write_bytes(b"xxxx" + FLOATS)
    packed = part(5, part(1, b"\x02\x03") + number(2, 1) + part(8, "c.weight") + part(4, FLOATS))
    file.write_bytes(
        model(
            tensor("onnx::MatMul_1", (2, 3), FLOATS),
            outside_tensor("b.weight", (3, 2), location="model.onnx_data", offset="4", length="24"),
            packed,
            tensor("onnx::Reshape_2", (2,), struct.pack("<2q", 1, 2), kind=7),
            tensor("a.position_ids", (2,), struct.pack("<2q", 1, 2), kind=7),
            node("MatMul", "/a/layer.0/dense/MatMul", ("x", "onnx::MatMul_1")),
            node("MatMul", "/a/layer.0/MatMul", ("x", "y")),
            node("MatMul", "MatMul_7", ("x", "onnx::MatMul_1")),
            node("MatMul", "/a/layer.1/dense/MatMul_1", ("x", "twin")),
            node("Identity", "Identity_3", ("b.weight",), ("d.weight",)),
            node("Identity", "Identity_4", ("onnx::MatMul_1",), ("twin",)),
        )
    )
    found = {name: entry.read(torch.float32, torch.device("cpu")).tolist() for name, entry in read_onnx(file).items()}
    assert found == {
        "a.layer.0.dense.weight": [[1, 4], [2, 5], [3, 6]],
        "a.layer.1.dense.weight": [[1, 4], [2, 5], [3, 6]],
        "b.weight": [[1, 2], [3, 4], [5, 6]],
        "c.weight": [[1, 2, 3], [4, 5, 6]],
        "d.weight": [[1, 2], [3, 4], [5, 6]],
    }


WEIGHT = tensor("a.weight", (2, 3), FLOATS)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "has 0 graphs, which should be one"),
        (model() + part(7, b""), "has 2 graphs, which should be one"),
        (b"\xff" * 40, "has a number that does not end, at byte 0; it is no ONNX file, or is damaged"),
        (b"PK\x03\x04", "has a field of kind 3 at byte|has a field of kind 4 at byte|does not end|behind the end"),
        (model(WEIGHT)[:-3], "behind the end of its message"),
        (model(tensor("a" * 600, (2, 3), FLOATS)), "has a name of 600 bytes; 512 are the most"),
        (model(tensor("a.weight", (2, 4), FLOATS)), r"it has 24 bytes, its shape \[2, 4\] of F32 needs 32"),
        (model(tensor("a.weight", (1 << 40, 2), FLOATS)), r"its shape \[1099511627776\] is none"),
        (model(tensor("a.weight", (1,) * 12, FLOATS)), "is none"),
        (model(part(5, part(1, b"\x01" * 30))), "has a list of more than 8 numbers"),
        (model(outside_tensor("a", (2,), location="../b", length="8")), "'../b', which is no file of this folder"),
        (model(outside_tensor("a", (2,), location="there", length="-8")), "should be an offset and a length"),
        (
            model(outside_tensor("a", (2,), location="there", offset="1", length="8")),
            "end at byte 9 of there, which has 4",
        ),
        (model(node("MatMulInteger", "a", ())), "its weights are quantised .MatMulInteger., which is not read"),
        (model(node("SkipLayerNormalization", "a", ())), "its layers are fused .SkipLayerNormalization."),
    ],
)
def test_files_that_are_refused(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "there").write_bytes(b"1234")
    (tmp_path / "model.onnx").write_bytes(content)
    with pytest.raises(CheckpointError, match=problem) as caught:
        read_onnx(tmp_path / "model.onnx")
    assert len(str(caught.value)) < 1500


def test_names_are_bounded_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node may have many names, and Identity nodes give names to a tensor without bytes."""
    monkeypatch.setattr(onnx_weights, "MAX_TEXT", 1000)
    monkeypatch.setattr(tensor_files, "MAX_TENSORS", 3)
    file = tmp_path / "model.onnx"
    for length, count, problem in ((20, 60, "has names of more than 1000 bytes together"), (2, 3, "it has 4 tensors")):
        outputs = tuple(f"{number}.{'x' * length}" for number in range(count))
        file.write_bytes(model(WEIGHT, node("Identity", "", ("a.weight",), outputs)))
        with pytest.raises(CheckpointError, match=problem):
            read_onnx(file)


def test_bytes_with_many_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is read into memory of its own. Identity nodes and products name one tensor many times, and tensors
    beside the graph may share bytes."""
    file, outside, size, shift = tmp_path / "model.onnx", tmp_path / "model.onnx_data", 4096, 4
    outside.write_bytes(bytes(size + 2 * shift))
    names, shape = ("a.weight", "b.weight", "c.weight"), (size // 8, 2)
    products = [node("MatMul", f"/{name[0]}/MatMul", ("x", "onnx::MatMul_1")) for name in names]
    apart = [
        outside_tensor(name, shape, location=outside.name, offset=str(shift * place), length=str(size))
        for place, name in enumerate(names)
    ]
    graphs = {
        model(tensor(names[0], shape, bytes(size)), node("Identity", "", (names[0],), names[1:])): size,
        model(tensor("onnx::MatMul_1", shape, bytes(size)), *products): size,
        model(*apart): size + 2 * shift,
    }
    for graph, stored in graphs.items():
        file.write_bytes(graph)
        monkeypatch.setattr(onnx_weights, "COPIED_BYTES", 3 * size - 2 * stored)
        assert read_onnx(file).keys() == set(names)
        monkeypatch.setattr(onnx_weights, "COPIED_BYTES", 3 * size - 2 * stored - 1)
        message = f"its tensors are {stored} bytes, which have so many names that {3 * size} would be read; 2 times"
        with pytest.raises(CheckpointError, match=message):
            read_onnx(file)


def test_millions_of_fields_are_refused_and_looked_for_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A field has two bytes at least, so that a small file may have as many as take minutes."""
    file, reads = tmp_path / "model.onnx", list[int]()
    file.write_bytes(number(2, 1) * 5000 + model(tensor("a.weight", (2, 3), FLOATS)))

    class CountedFile:
        def __init__(self, opened: BinaryIO) -> None:
            self.opened, self.fileno, self.seek = opened, opened.fileno, opened.seek

        def read(self, size: int) -> bytes:
            reads.append(size)
            return self.opened.read(size)

    with file.open("rb") as opened:
        reader = onnx_weights.MessageReader(file, CountedFile(opened))  # type: ignore[arg-type]
        assert read_graph(file, reader)[1]["a.weight"].shape == (2, 3)
    assert len(reads) < 100
    monkeypatch.setattr(onnx_weights, "MAX_FIELDS", 5000)
    with pytest.raises(CheckpointError, match="more than 5000 fields"):
        read_onnx(file)


def test_any_cut_file_is_refused_or_read(tiny_embedder: Path, tmp_path: Path) -> None:
    """No cut of a small file raises anything but CheckpointError."""
    whole = model(WEIGHT, node("MatMul", "/a/dense/MatMul", ("x", "onnx::MatMul_1")), tensor("b.bias", (6,), FLOATS))
    for end in range(len(whole)):
        (tmp_path / "model.onnx").write_bytes(whole[:end])
        with pytest.raises(CheckpointError):
            read_onnx(tmp_path / "model.onnx")


def test_missing_tensors_are_named(tiny_embedder: Path, tmp_path: Path) -> None:
    folder = without_safetensors(tiny_embedder, tmp_path / "exported")
    (folder / "model.onnx").write_bytes(model(tensor("embeddings.LayerNorm.weight", (32,), bytes(128))))
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "bert"
    with pytest.raises(CheckpointError, match="it describes 2 layers, but the files hold 0 tensors of layers"):
        load(str(folder))

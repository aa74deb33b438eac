"""GGUF files in parts equal the whole file; missing, swapped and foreign parts are refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from gguf import GGUFWriter

from polyhead.models.checkpoint import describe_source, gguf_parts, load
from polyhead.models.checkpoint.gguf_header import read_header
from polyhead.models.checkpoint.source_policy import ANY_SOURCE, SourcePolicy
from polyhead.models.core.errors import CheckpointError, UnsupportedError
from polyhead.models.network.ragged import RaggedBatch
from tests.support import checkpoints, gguf_files

VOCABULARY = len(checkpoints.byte_level_bpe())
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, max_position_embeddings=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whole(tmp_path_factory.mktemp("whole") / "whole.gguf", seed=0)


def write_whole(path: Path, seed: int) -> Path:
    model = gguf_files.torch_seeded(tf.LlamaForCausalLM(tf.LlamaConfig(**SHAPE)), seed)
    fields = gguf_files.decoder_metadata(model.config)
    return gguf_files.write(path, "llama", fields, gguf_files.converted("llama", model))


def split(whole: Path, folder: Path, counts: tuple[int, ...]) -> list[Path]:
    """The whole file as parts with `counts` tensors, as the split tool writes them."""
    metadata, entries = read_header(whole)
    folder.mkdir(exist_ok=True)
    names, paths = iter(entries), []
    for number, count in enumerate(counts):
        path = folder / f"model-{number + 1:05}-of-{len(counts):05}.gguf"
        writer = GGUFWriter(path, "llama")
        if number == 0:
            for key, value in metadata.items():
                if key not in ("general.architecture", "GGUF.version"):
                    gguf_files.add(writer, key, value)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", len(counts))
        writer.add_int32("split.tensors.count", len(entries))
        for _ in range(count):
            name = next(names)
            writer.add_tensor(name, entries[name].read(torch.float32, torch.device("cpu")).numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        paths.append(path)
    assert next(names, None) is None
    return paths


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> list[Path]:
    return split(whole, tmp_path / "parts", (3, 10, len(read_header(whole)[1]) - 13))


@torch.inference_mode()
def logits(source: Path) -> torch.Tensor:
    loaded = load(str(source))
    out: torch.Tensor = loaded.head(loaded.network(RaggedBatch.of([[5, 6, 7, 8], [9, 10]])))
    return out


def test_parts_equal_the_whole_file(whole: Path, parts: list[Path]) -> None:
    expected = logits(whole)
    assert torch.equal(logits(parts[0]), expected)
    assert torch.equal(logits(parts[0].parent), expected)


def test_a_folder_is_a_file_in_parts_only_if_it_has_nothing_else(parts: list[Path], tmp_path: Path) -> None:
    folder = parts[0].parent
    assert gguf_parts.find_split_file(folder) == parts[0]
    (folder / "README.md").write_text("text")
    assert gguf_parts.find_split_file(folder) == parts[0]
    other = folder / "other.gguf"
    other.write_bytes(b"")
    assert gguf_parts.find_split_file(folder) is None
    other.unlink()
    shutil.copy(parts[0], folder / "second-00001-of-00003.gguf")
    assert gguf_parts.find_split_file(folder) is None
    (folder / "second-00001-of-00003.gguf").unlink()
    (folder / "config.json").write_text("{}")
    assert gguf_parts.find_split_file(folder) is None
    assert gguf_parts.find_split_file(tmp_path) is None


def test_another_part_than_the_first_is_refused(parts: list[Path]) -> None:
    message = r"model-00002-of-00003\.gguf: it is part 2 of 3; name the first part, model-00001-of-00003\.gguf"
    with pytest.raises(UnsupportedError, match=message):
        load(str(parts[1]))


def test_a_missing_part_is_named(parts: list[Path]) -> None:
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.gguf: part 3 of 3 is missing"):
        load(str(parts[0]))


def test_a_missing_first_part_is_named(parts: list[Path]) -> None:
    parts[0].unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.gguf: cannot be read: No such file"):
        load(str(parts[0].parent))


def test_swapped_parts_are_refused(parts: list[Path]) -> None:
    kept = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    parts[2].write_bytes(kept)
    message = r"model-00002-of-00003.*part 2 of 3, which has split\.no 1 and split\.count 3; it has 2 and 3"
    with pytest.raises(CheckpointError, match=message):
        load(str(parts[0]))


def test_parts_of_other_files_are_refused(parts: list[Path], whole: Path, tmp_path: Path) -> None:
    total = len(read_header(whole)[1])
    four = split(whole, tmp_path / "four", (3, 10, 1, total - 14))
    kept = parts[1].read_bytes()
    shutil.copy(four[1], parts[1])
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.*; it has 1 and 4"):
        load(str(parts[0]))
    longer = split(whole, tmp_path / "longer", (3, 12, total - 15))
    shutil.copy(longer[1], parts[1])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.*model-00002-of-00003\.gguf has it too"):
        load(str(parts[0]))
    parts[1].write_bytes(kept)
    shutil.copy(longer[2], parts[2])
    message = rf"split\.tensors\.count is {total}, but its 3 parts have {total - 2} tensors"
    with pytest.raises(CheckpointError, match=message):
        load(str(parts[0]))


def test_renamed_parts_are_refused(parts: list[Path], tmp_path: Path) -> None:
    other = tmp_path / "model.gguf"
    shutil.copy(parts[0], other)
    with pytest.raises(CheckpointError, match=r"one of 3 parts.*name the first one NAME-00001-of-00003\.gguf"):
        load(str(other))


def test_the_number_of_parts_is_bounded(parts: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_parts, "MAX_PARTS", 2)
    with pytest.raises(UnsupportedError, match=r"split\.count is 3; files of up to 2 parts"):
        load(str(parts[0]))


def test_a_part_that_is_a_link_out_of_its_folder_is_refused(parts: list[Path], tmp_path: Path) -> None:
    moved = tmp_path / "moved.gguf"
    parts[1].rename(moved)
    parts[1].symlink_to(moved)
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003\.gguf: is a link that leads out"):
        load(str(parts[0]))


@pytest.mark.parametrize("count", [1, 3])
def test_a_first_part_that_is_found_in_a_folder_and_leads_out_of_it_is_refused(
    parts: list[Path], whole: Path, tmp_path: Path, count: int
) -> None:
    outside, folder = tmp_path / "outside.gguf", parts[0].parent
    if count == 1:
        folder = tmp_path / "folder"
        folder.mkdir()
    shutil.copy(whole if count == 1 else parts[0], outside)
    first = folder / f"model-00001-of-{count:05}.gguf"
    first.unlink(missing_ok=True)
    first.symlink_to(outside)
    policy = SourcePolicy(tmp_path / "folder" if count == 1 else folder)
    for found in (ANY_SOURCE, policy):
        with pytest.raises(CheckpointError, match=rf"model-00001-of-{count:05}\.gguf: is a link that leads out"):
            describe_source(str(folder), found)
    first.unlink()
    inside = folder / "blob"
    shutil.copy(outside, inside)
    first.symlink_to(inside)
    assert describe_source(str(folder), policy).file == str(first)


def test_a_link_that_is_named_itself_is_followed(whole: Path, tmp_path: Path) -> None:
    link = tmp_path / "link-00001-of-00001.gguf"
    link.symlink_to(whole)
    assert describe_source(str(link)).file == str(link)

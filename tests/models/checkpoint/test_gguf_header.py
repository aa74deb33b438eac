"""Headers of GGUF files: long texts are refused, or left out where no model needs them, before they are read."""

import re
import struct
import tracemalloc
from pathlib import Path

import pytest

from polyhead.models.checkpoint import describe_source, gguf_header
from polyhead.models.checkpoint.gguf_header import read_header
from polyhead.models.core.errors import CheckpointError

TEXT, LIST, BYTE, FLOAT = 8, 9, 0, 6
LONG = 100 << 20  # bytes
LITTLE_MEMORY = 4 << 20  # bytes


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def long_text(size: int = LONG) -> tuple[bytes, int]:
    """A text of zeros, which take no place on the disk."""
    return struct.pack("<Q", size), size


def write(path: Path, fields: list[tuple[bytes, int, bytes | tuple[bytes, int]]]) -> Path:
    """A file of these fields, of a key, a kind and a value each, and no tensors."""
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)))
        for key, kind, value in fields:
            file.write(text(key) + struct.pack("<I", kind))
            given, zeros = value if isinstance(value, tuple) else (value, 0)
            file.write(given)
            file.seek(zeros, 1)
        file.write(bytes(64))
    return path


def read_measured(path: Path) -> tuple[dict[str, object], int]:
    """The metadata, and the most bytes of memory that reading it took."""
    tracemalloc.start()
    try:
        return read_header(path)[0], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("key", [b"general.name", b"general.license", b"tokenizer.huggingface.json"])
def test_a_text_that_no_model_needs_is_not_read(tmp_path: Path, key: bytes) -> None:
    after = (b"general.type", TEXT, text(b"model"))
    metadata, peak = read_measured(write(tmp_path / "a.gguf", [(key, TEXT, long_text()), after]))
    assert metadata == {key.decode(): None, "general.type": "model"}
    assert peak < LITTLE_MEMORY


def test_lists_that_no_model_needs_are_not_read(tmp_path: Path) -> None:
    texts = struct.pack("<IQ", TEXT, 2) + text(b"one"), 0
    fields = [
        (b"general.numbers", LIST, (struct.pack("<IQ", FLOAT, 1 << 20), 4 << 20)),
        (b"general.tags", LIST, texts[0] + text(b"two")),
        (b"general.type", TEXT, text(b"model")),
    ]
    metadata, peak = read_measured(write(tmp_path / "a.gguf", fields))
    assert metadata == {"general.numbers": None, "general.tags": None, "general.type": "model"}
    assert peak < LITTLE_MEMORY


@pytest.mark.parametrize(
    ("key", "most"),
    [
        (b"tokenizer.chat_template", 1 << 20),
        (b"tokenizer.chat_template.tool_use", 1 << 20),
        (b"tokenizer.ggml.pre", 1 << 16),
        (b"llama.rope.scaling.type", 1 << 16),
    ],
)
def test_a_long_text_is_refused_by_name_before_it_is_read(tmp_path: Path, key: bytes, most: int) -> None:
    message = f"'{key.decode()}' has {LONG} bytes, and {most} are the most of such a text"
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_header(write(tmp_path / "a.gguf", [(key, TEXT, long_text())]))
        assert tracemalloc.get_traced_memory()[1] < LITTLE_MEMORY
    finally:
        tracemalloc.stop()


def test_long_pieces_and_names_are_refused(tmp_path: Path) -> None:
    piece = struct.pack("<IQ", TEXT, 1) + long_text()[0]
    with pytest.raises(CheckpointError, match=rf"a value of 'tokenizer.ggml.tokens' has {LONG} bytes, and 65536 are"):
        read_header(write(tmp_path / "a.gguf", [(b"tokenizer.ggml.tokens", LIST, (piece, LONG))]))
    with pytest.raises(CheckpointError, match=r"the name of a field has 70000 bytes, and 65536 are the most"):
        read_header(write(tmp_path / "b.gguf", [(b"a" * 70_000, BYTE, b"\0")]))


def test_all_texts_together_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "MAX_VOCABULARY_BYTES", 1 << 20)
    pieces = struct.pack("<IQ", TEXT, 20) + text(b"x" * 60_000) * 20
    with pytest.raises(CheckpointError, match="its vocabulary and other texts of its header have more than 1 MiB"):
        read_header(write(tmp_path / "a.gguf", [(b"tokenizer.ggml.tokens", LIST, pieces)]))


def test_the_number_of_fields_is_bounded(tmp_path: Path) -> None:
    fields = [(b"general.%d" % number, BYTE, b"\0") for number in range((1 << 14) + 1)]
    with pytest.raises(CheckpointError, match="it has 16385 fields of metadata, and 16384 are the most"):
        read_header(write(tmp_path / "a.gguf", list(fields)))
    assert len(read_header(write(tmp_path / "b.gguf", list(fields[1:])))[0]) == 1 << 14


@pytest.mark.parametrize("value", [long_text(1 << 40), (struct.pack("<IQ", FLOAT, 1 << 20), 0)])
def test_a_value_that_is_left_out_does_not_lead_out_of_the_file(tmp_path: Path, value: tuple[bytes, int]) -> None:
    path = write(tmp_path / "a.gguf", [(b"general.name", TEXT if value[1] else LIST, (value[0], 0))])
    with pytest.raises(CheckpointError, match="its header does not fit"):
        read_header(path)


def test_a_missing_architecture_is_reported_where_its_text_is_too_long(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'general.architecture' has"):
        describe_source(str(write(tmp_path / "a.gguf", [(b"general.architecture", TEXT, long_text())])))

"""The header of a GGUF file: key-value metadata and the place of each tensor.

The gguf package's reader makes an object of every token in the vocabulary, which takes seconds and hundreds of
megabytes for a large one; here the header is read in one pass. Quantised numbers are decoded by the package. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import os
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import MAX_TEMPLATE_BYTES, MAX_VOCABULARY_BYTES, SourceFile, open_regular
from ..native.library import BLOCK_KINDS, load_fastest
from .tensor_files import (
    FLOAT_ENCODINGS,
    INTEGER_ENCODINGS,
    NumberEncoding,
    TensorEntry,
    check_name_length,
    check_tensor_count,
)

STRING, ARRAY = 8, 9
SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
MAX_GGUF_DIMENSIONS = 4  # at most, in GGML
MAX_GGUF_HEADER_BYTES = 128 << 20  # bytes
MAX_FIELDS = 1 << 14  # of the metadata; published files have some fifty
MAX_TEXT_BYTES = 1 << 16  # bytes of a key, of a text that is no template, and of a piece of a vocabulary
TEMPLATE = "tokenizer.chat_template"  # or, for further ones, this, a dot and their name
# Of the fields under these, only the others are read: the rest are descriptions, licences, a whole tokenizer.json.
UNREAD = ("general.", "tokenizer.")
READ = ("general.architecture", "general.type", "general.alignment", "general.sampling.", "tokenizer.ggml.", TEMPLATE)
MAX_VALUES = 1 << 22  # fields, items of lists and tensors, in all; large vocabularies have a quarter of that
DECODED_NUMBERS = (
    1 << 17
)  # numbers of a block format that are decoded at a time; the package takes several times their memory


def block_encoding(kind: str) -> NumberEncoding:
    """The encoding of one of GGML's block formats."""
    number = GGMLQuantizationType[kind]
    items, size = GGML_QUANT_SIZES[number]

    def decode(raw: bytearray, out: Tensor) -> None:
        library = load_fastest()
        if library and kind in BLOCK_KINDS and out.dtype == torch.float32 and out.is_cpu:  # several times as fast
            given = torch.frombuffer(raw, dtype=torch.uint8)
            library.polyhead_decode(BLOCK_KINDS[kind].code, given.data_ptr(), len(raw) // size, out.data_ptr())
            return
        blocks = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(-1, size)
        step = DECODED_NUMBERS // items
        for first in range(0, len(blocks), step):
            some = decode_blocks(kind, blocks[first : first + step])
            out[first * items : first * items + some.size].copy_(torch.from_numpy(some))

    return NumberEncoding(items, size, decode)


def decode_blocks(kind: str, blocks: NDArray[numpy.uint8]) -> NDArray[numpy.float32]:
    """The numbers [B * items] of blocks [B, bytes].

    The numbers of a damaged file may overflow; they are infinite then, and the reader of the tensor refuses them.
    """
    with numpy.errstate(over="ignore", invalid="ignore"):
        if kind == "Q1_0":
            return decode_signs(blocks)
        return dequantize(blocks.reshape(1, -1), GGMLQuantizationType[kind]).reshape(-1)


def decode_signs(blocks: NDArray[numpy.uint8]) -> NDArray[numpy.float32]:
    """Q1_0, which the gguf package does not decode: a half-precision scale, then a bit for each number, lowest first. A
    number is the scale where its bit is set, and its negative elsewhere (dequantize_row_q1_0 of ggml-quants.c)."""
    scales = blocks[:, :2].copy().view(numpy.float16).astype(numpy.float32)  # [B, 1]
    signs = numpy.unpackbits(blocks[:, 2:], axis=1, bitorder="little").astype(numpy.float32)  # [B, 128]
    return (scales * (2 * signs - 1)).reshape(-1)


BLOCK_FORMATS = (
    *("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "Q1_0"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S"),
    *("TQ2_0", "TQ1_0", "MXFP4", "NVFP4"),
)
ENCODINGS: dict[str, NumberEncoding] = {
    **FLOAT_ENCODINGS,
    **INTEGER_ENCODINGS,
    **{kind: block_encoding(kind) for kind in BLOCK_FORMATS},
}  # Q8_1 and Q8_K are formats of activations, which no file has
KIND_NAMES = {kind.value: kind.name for kind in GGMLQuantizationType}


def read_header(
    path: Path, open_file: Callable[[Path], BinaryIO] = open_regular
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """The metadata by key, and the tensors by name."""
    try:
        with open_file(path) as file:
            return _HeaderReader(path, file).parse()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None


class _HeaderReader:
    """Reads the header of one open file in one pass. The lengths in the header are not trusted.

    A text is decoded in one call, which keeps the interpreter, so a long one is refused, or not read where no model
    needs it. All texts that are kept have MAX_VOCABULARY_BYTES at most.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.source = path, file, SourceFile.of(path, file)
        self.length = self.source.size
        self.room, self.left = (
            min(self.length, MAX_GGUF_HEADER_BYTES),
            MAX_VALUES,
        )  # bytes and values that may still come
        self.text_room = MAX_VOCABULARY_BYTES  # bytes of texts that may still be kept

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        if self.read_bytes(4) != b"GGUF":
            raise CheckpointError("no GGUF file: it does not begin with the letters GGUF", file=str(self.path))
        version = self.read_number("<I")
        if version not in (2, 3):
            raise UnsupportedError(
                f"GGUF version {version} (or big-endian); only little-endian files of version 2 and 3 are read",
                file=str(self.path),
            )
        tensors, values = self.read_number("<Q"), self.read_number("<Q")
        metadata: dict[str, Any] = {}
        self.check_value_count(values)
        if values > MAX_FIELDS:
            message = f"it has {values} fields of metadata, and {MAX_FIELDS} are the most: is the file damaged?"
            raise CheckpointError(message, file=str(self.path))
        for _ in range(values):
            key = self.read_string("the name of a field")
            if key in metadata:
                raise CheckpointError(
                    f"it has the key {show_value(key)} twice: is the file damaged?", file=str(self.path)
                )
            metadata[key] = self.read_value(key, self.read_number("<I"))
        return metadata, self.read_entries(tensors, metadata.get("general.alignment", 32))

    def read_bytes(self, size: int) -> bytes:
        self.take_room(size)
        raw = self.file.read(size)
        if len(raw) != size:  # it is shorter than it was when it was opened
            self.raise_end()
        return raw

    def take_room(self, size: int) -> None:
        """Count bytes of the header. CheckpointError if the file, or a header of the longest kind, has fewer."""
        self.room -= size
        if self.room < 0:
            self.raise_end()

    def raise_end(self) -> NoReturn:
        raise CheckpointError("the file is truncated or damaged: its header does not fit", file=str(self.path))

    def check_value_count(self, count: int) -> None:
        """Count `count` more values. CheckpointError if they are more than any valid file has."""
        self.left -= count
        if self.left < 0:
            message = f"the file is truncated or damaged: it has more than {MAX_VALUES} values before its tensors"
            raise CheckpointError(message, file=str(self.path))

    def read_number(self, form: str) -> int:
        value: int = struct.unpack(form, self.read_bytes(struct.calcsize(form)))[0]
        return value

    def read_string(self, what: str, most: int = MAX_TEXT_BYTES) -> str:
        """A text; `what` it is, for the error."""
        size = self.read_number("<Q")
        self.text_room -= size
        if size > most:
            message = f"{what} has {size} bytes, and {most} are the most of such a text"
            raise CheckpointError(message, file=str(self.path))
        if self.text_room < 0:
            message = f"its vocabulary and other texts of its header have more than {MAX_VOCABULARY_BYTES >> 20} MiB"
            raise CheckpointError(message, file=str(self.path))
        return self.read_bytes(size).decode("utf-8", errors="replace")

    def read_value(self, key: str, kind: int) -> Any:
        """The value of a field; None for one that no model needs."""
        if key.startswith(UNREAD) and not key.startswith(READ):
            return self.skip_value(kind)
        if kind == STRING:
            return self.read_string(show_value(key), MAX_TEMPLATE_BYTES if key.startswith(TEMPLATE) else MAX_TEXT_BYTES)
        if kind == ARRAY:
            return self.read_array(key, self.read_number("<I"), self.read_number("<Q"))
        return self.read_array(key, kind, 1)[0]

    def read_array(self, key: str, kind: int, count: int) -> list[Any]:
        self.check_value_count(count)
        if kind == STRING:
            what = f"a value of {show_value(key)}"
            return [self.read_string(what) for _ in range(count)]
        form = self.number_form(kind, count)
        values: list[Any] = numpy.frombuffer(self.read_bytes(count * form.itemsize), dtype=form).tolist()
        return values

    def number_form(self, kind: int, count: int) -> numpy.dtype[Any]:
        if kind not in SCALARS:
            message = f"{count} metadata values of unknown kind {kind}: is it damaged?"
            raise CheckpointError(message, file=str(self.path))
        return numpy.dtype(SCALARS[kind])

    def skip_value(self, kind: int) -> None:
        """Leave a value out without reading it."""
        count = 1
        if kind == ARRAY:
            kind, count = self.read_number("<I"), self.read_number("<Q")
        self.check_value_count(count)
        if kind == STRING:
            for _ in range(count):
                self.skip_bytes(self.read_number("<Q"))
        else:
            self.skip_bytes(count * self.number_form(kind, count).itemsize)

    def skip_bytes(self, size: int) -> None:
        self.take_room(size)
        self.file.seek(size, os.SEEK_CUR)

    def read_entries(self, count: int, alignment: Any) -> dict[str, TensorEntry]:
        self.check_value_count(count)
        check_tensor_count(self.path, count)
        found = [self.read_entry() for _ in range(count)]
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(
                f"general.alignment is {show_value(alignment)}, not a positive number", file=str(self.path)
            )
        start = -(-self.file.tell() // alignment) * alignment
        placed = {name: finish(start) for name, finish in found}
        for entry in placed.values():
            if entry.start + entry.size > self.length:
                raise CheckpointError(
                    f"the file is truncated: it ends at byte {self.length}, this tensor at byte "
                    f"{entry.start + entry.size}; copy the file again",
                    file=str(self.path),
                    tensor=entry.name,
                )
        self.check_overlaps([name for name, _ in found], placed)
        return placed

    def check_overlaps(self, names: list[str], placed: Mapping[str, TensorEntry]) -> None:
        """CheckpointError for two tensors of the same name, or with the same bytes."""
        if len(placed) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise CheckpointError("it is there twice: is the file damaged?", file=str(self.path), tensor=twice)
        there = sorted((entry for entry in placed.values() if entry.size), key=lambda entry: entry.start)
        for one, other in pairwise(there):
            if one.start + one.size > other.start:
                message = f"it overlaps the tensor {show_value(one.name)}: is the file damaged?"
                raise CheckpointError(message, file=str(self.path), tensor=other.name)

    def read_entry(self) -> tuple[str, Callable[[int], TensorEntry]]:
        name = self.read_string("the name of a tensor")
        check_name_length(self.path, name)
        # GGML counts the fastest dimension first.
        dimensions = self.read_number("<I")
        if dimensions > MAX_GGUF_DIMENSIONS:
            message = (
                f"it has {dimensions} dimensions, more than the {MAX_GGUF_DIMENSIONS} there are: is the file damaged?"
            )
            raise CheckpointError(message, file=str(self.path), tensor=name)
        shape = tuple(reversed([self.read_number("<Q") for _ in range(dimensions)]))
        kind, offset = _kind_name(self.read_number("<I")), self.read_number("<Q")
        encoding = ENCODINGS.get(kind)
        if encoding is None:
            raise UnsupportedError(
                f"its numbers are {kind}, and only {', '.join(ENCODINGS)} are read; quantise the model to one of those",
                file=str(self.path),
                tensor=name,
            )
        if not shape or shape[-1] % encoding.items:
            raise CheckpointError(
                f"shape {list(shape)} does not divide into {kind} blocks of {encoding.items}",
                file=str(self.path),
                tensor=name,
            )
        return name, partial(_build_entry, self.source, name, kind, shape, offset)


def _build_entry(
    source: SourceFile, name: str, kind: str, shape: tuple[int, ...], offset: int, start: int
) -> TensorEntry:
    return TensorEntry(source, name, kind, shape, start + offset, ENCODINGS[kind])


def _kind_name(number: int) -> str:
    return KIND_NAMES.get(number, f"of unknown type {number}")

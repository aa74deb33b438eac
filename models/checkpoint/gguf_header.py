"""The header of a GGUF file: key-value metadata and where each tensor lies.

Knows nothing of what the keys mean.  The one idea: the package's own reader makes an object of every word in the
vocabulary, seconds and hundreds of megabytes for a large one, so the header is read here in one pass; decoding
quantised numbers stays with the package.  Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from ..core.errors import CheckpointError, UnsupportedError
from ..core.files import opened
from ..native.library import fastest
from .tensor_files import Encoding, Entry, plain, refuse_long_name, refuse_many

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
DIMENSIONS = 4  # at most, in GGML
LONGEST_HEADER = 128 << 20  # bytes
MOST_VALUES = 1 << 22  # fields, items of lists and tensors, in all; large vocabularies have a quarter of that
COMPILED = {"Q4_0": 0, "Q4_1": 1, "Q8_0": 2}  # as in src/pack.hpp: several times as fast, and the same to the bit


def quantised(kind: str) -> Encoding:
    """The encoding of one of GGML's block formats."""
    number = GGMLQuantizationType[kind]
    items, size = GGML_QUANT_SIZES[number]

    def decode(raw: bytearray, out: Tensor) -> None:
        library = fastest()
        if library and kind in COMPILED and out.dtype == torch.float32 and out.is_cpu:
            given = torch.frombuffer(raw, dtype=torch.uint8)
            library.polyhead_decode(COMPILED[kind], given.data_ptr(), len(raw) // size, out.data_ptr())
            return
        blocks = numpy.frombuffer(raw, dtype=numpy.uint8).reshape(1, -1)
        out.copy_(torch.from_numpy(dequantize(blocks, number)).view(-1))

    return Encoding(items, size, decode)


ENCODINGS: dict[str, Encoding] = {
    "F32": plain(torch.float32),
    "F16": plain(torch.float16),
    "BF16": plain(torch.bfloat16),
    "Q8_0": quantised("Q8_0"),
    "Q4_0": quantised("Q4_0"),
    "Q4_1": quantised("Q4_1"),
    "Q5_0": quantised("Q5_0"),
    "Q5_1": quantised("Q5_1"),
    "Q2_K": quantised("Q2_K"),
    "Q3_K": quantised("Q3_K"),
    "Q4_K": quantised("Q4_K"),
    "Q5_K": quantised("Q5_K"),
    "Q6_K": quantised("Q6_K"),
}


def header(path: Path) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The metadata by key, and the tensors by name."""
    try:
        with opened(path) as file:
            return _Header(path, file).parse()
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None


class _Header:
    """One pass over the header of one open file, which says itself how long everything is, so it is not believed."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file, self.length = path, file, path.stat().st_size
        self.room, self.left = min(self.length, LONGEST_HEADER), MOST_VALUES  # bytes and values that may still come

    def parse(self) -> tuple[dict[str, Any], dict[str, Entry]]:
        if self.bytes(4) != b"GGUF":
            raise CheckpointError("no GGUF file: it does not begin with the letters GGUF", file=str(self.path))
        version = self.number("<I")
        if version not in (2, 3):
            raise UnsupportedError(
                f"GGUF version {version} (or big-endian); only little-endian files of version 2 and 3 are read",
                file=str(self.path),
            )
        tensors, values = self.number("<Q"), self.number("<Q")
        metadata: dict[str, Any] = {}
        self.expect(values)
        for _ in range(values):
            key = self.string()
            if key in metadata:
                raise CheckpointError(f"it says {key!r} twice: is the file damaged?", file=str(self.path))
            metadata[key] = self.value(self.number("<I"))
        return metadata, self.entries(tensors, metadata.get("general.alignment", 32))

    def bytes(self, size: int) -> bytes:
        self.room -= size
        raw = self.file.read(size) if self.room >= 0 else b""
        if len(raw) != size:
            raise CheckpointError("the file is truncated or damaged: its header does not fit", file=str(self.path))
        return raw

    def expect(self, count: int) -> None:
        """So many values come; CheckpointError if they are more than any file has."""
        self.left -= count
        if self.left < 0:
            message = f"the file is truncated or damaged: it has more than {MOST_VALUES} values before its tensors"
            raise CheckpointError(message, file=str(self.path))

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.bytes(struct.calcsize(form)))[0]
        return value

    def string(self) -> str:
        return self.bytes(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array(self.number("<I"), self.number("<Q"))
        return self.array(kind, 1)[0]

    def array(self, kind: int, count: int) -> list[Any]:
        self.expect(count)
        if kind in SCALARS:
            form = numpy.dtype(SCALARS[kind])
            values: list[Any] = numpy.frombuffer(self.bytes(count * form.itemsize), dtype=form).tolist()
            return values
        if kind == STRING:
            return [self.string() for _ in range(count)]
        raise CheckpointError(f"{count} metadata values of unknown kind {kind}: is it damaged?", file=str(self.path))

    def entries(self, count: int, alignment: Any) -> dict[str, Entry]:
        self.expect(count)
        refuse_many(self.path, count)
        found = [self.entry() for _ in range(count)]
        if type(alignment) is not int or alignment < 1:
            raise CheckpointError(f"general.alignment is {alignment!r}, not a positive number", file=str(self.path))
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
        self.refuse_doubt([name for name, _ in found], placed)
        return placed

    def refuse_doubt(self, names: list[str], placed: Mapping[str, Entry]) -> None:
        """Two tensors of one name, or in the same bytes."""
        if len(placed) != len(names):
            twice = next(name for name, count in Counter(names).items() if count > 1)
            raise CheckpointError("it is there twice: is the file damaged?", file=str(self.path), tensor=twice)
        there = sorted((entry for entry in placed.values() if entry.size), key=lambda entry: entry.start)
        for one, other in pairwise(there):
            if one.start + one.size > other.start:
                message = f"it overlaps the tensor {one.name!r}: is the file damaged?"
                raise CheckpointError(message, file=str(self.path), tensor=other.name)

    def entry(self) -> tuple[str, Callable[[int], Entry]]:
        name = self.string()
        refuse_long_name(self.path, name)
        # GGML counts the fastest dimension first.
        dimensions = self.number("<I")
        if dimensions > DIMENSIONS:
            message = f"it has {dimensions} dimensions, more than the {DIMENSIONS} there are: is the file damaged?"
            raise CheckpointError(message, file=str(self.path), tensor=name)
        shape = tuple(reversed([self.number("<Q") for _ in range(dimensions)]))
        kind, offset = _kind(self.number("<I")), self.number("<Q")
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
        return name, partial(_place, self.path, name, kind, shape, offset)


def _place(path: Path, name: str, kind: str, shape: tuple[int, ...], offset: int, start: int) -> Entry:
    return Entry(path, name, kind, shape, start + offset, ENCODINGS[kind])


def _kind(number: int) -> str:
    known = {kind.value: kind.name for kind in GGMLQuantizationType}
    return known.get(number, f"of unknown type {number}")

"""Tensors in files: the place of each one, its encoding, and how it is read.

A file is read, not mapped. A mapped page counts as resident memory until the kernel takes it back, so a mapped file and
its copy take twice the memory of the weights. Reading piece by piece into the final tensor takes the weights and one
piece.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..core.errors import CheckpointError, UnsupportedError
from ..core.files import SourceFile, open_member
from ..core.json_files import HEADER_JSON, count_values, parse_json

PIECE_BYTES = 1 << 20  # bytes of a file in memory at a time
READ_BYTES = 8 << 20  # bytes that are read between two reports, where they are kept as they are
MAX_DIMENSIONS = 8  # of a tensor
MAX_TENSORS = 1 << 18  # of all files together; the largest mixtures of experts have a third of that
MAX_NAME_LENGTH = 512  # characters of a tensor's name; published ones have a hundred


def ignore_bytes(size: int) -> None:
    """The default progress callback: does nothing."""


@dataclass(frozen=True)
class NumberEncoding:
    """How numbers are stored as bytes: blocks of `items` numbers in `size` bytes each; `decode` writes them to a flat
    tensor."""

    items: int
    size: int
    decode: Callable[[bytearray, Tensor], None]


@dataclass(frozen=True)
class TensorEntry:
    """One tensor in one file. `encoding` is None if the encoding, named `kind`, is not supported."""

    source: SourceFile
    name: str
    kind: str
    shape: tuple[int, ...]
    start: int
    encoding: NumberEncoding | None

    @property
    def file(self) -> Path:
        return self.source.path

    @property
    def files(self) -> tuple[Path, ...]:
        """All files that its numbers come from."""
        return (self.file,)

    @property
    def is_optional(self) -> bool:
        """Whether a network that has no such tensor can do without it."""
        return False

    @property
    def transformation(self) -> tuple[object, ...]:
        """A key for what is done to the stored numbers while they are read, if the files alone do not determine it."""
        return ()

    @property
    def size(self) -> int:
        """Bytes in the file."""
        assert self.encoding is not None
        return prod(self.shape) // self.encoding.items * self.encoding.size

    @property
    def read_size(self) -> int:
        """Bytes that are read for it, from all its files."""
        return self.size

    def read(
        self, dtype: torch.dtype, device: torch.device, report_bytes: Callable[[int], None] = ignore_bytes
    ) -> Tensor:
        """The whole tensor in new memory. CheckpointError if the file ends early or cannot be read.

        `report_bytes` is called with the bytes of every piece, and with 0 after a piece of other work.
        """
        assert self.encoding is not None
        out = torch.empty(self.shape, dtype=dtype, device=device)
        flat, done = out.view(-1), 0
        with self.open_file() as file:
            while done < flat.numel():
                raw = self._read_piece(file.read, flat.numel() - done)
                filled = flat[done : done + len(raw) // self.encoding.size * self.encoding.items]
                self.encoding.decode(raw, filled)
                self._check_finite(filled)
                done += filled.numel()
                report_bytes(len(raw))
        return out

    def read_bytes(self, report_bytes: Callable[[int], None] = ignore_bytes) -> Tensor:
        """Its bytes as they are stored: uint8 [rows, bytes of a row]. Raises and reports as `read`; the numbers are not
        looked at."""
        out = torch.empty(prod(self.shape[:-1]), self.size // prod(self.shape[:-1]), dtype=torch.uint8)
        left = memoryview(out.numpy().data).cast("B")
        with self.open_file() as file:
            while left:
                if not (count := file.readinto(left[:READ_BYTES])):
                    raise CheckpointError("the file ends inside it", file=str(self.file), tensor=self.name)
                left = left[count:]
                report_bytes(count)
        return out

    @contextmanager
    def open_file(self) -> Iterator[FileIO]:
        """The file at the place of the tensor. CheckpointError if it cannot be read, or is not the one that was
        described."""
        try:
            with self.source.open() as file:
                file.seek(self.start)
                yield file
        except OSError as error:
            raise CheckpointError(f"cannot be read: {error}", file=str(self.file), tensor=self.name) from None

    def raise_nonfinite(self) -> NoReturn:
        message = "holds numbers that are infinite or NaN; copy the file again, or ask who made it"
        raise CheckpointError(message, file=str(self.file), tensor=self.name)

    def _check_finite(self, filled: Tensor) -> None:
        """CheckpointError for infinite numbers or NaN. The sum is checked first: it is finite only if all summands are,
        and the numbers are still in the processor's cache."""
        if filled.dtype.itemsize == 1 and filled.is_floating_point():
            filled = filled.float()  # torch adds no numbers of eight bits
        if not filled.sum().isfinite() and not filled.isfinite().all():
            self.raise_nonfinite()

    def _read_piece(self, read: Callable[[int], bytes | None], left: int) -> bytearray:
        assert self.encoding is not None
        blocks = min(PIECE_BYTES // self.encoding.size, left // self.encoding.items)
        raw = bytearray()
        while len(raw) < blocks * self.encoding.size:
            more = read(blocks * self.encoding.size - len(raw))
            if not more:
                raise CheckpointError("the file ends inside it", file=str(self.file), tensor=self.name)
            raw += more
        return raw


def file_size(path: Path) -> int:
    """Bytes of a file. Raises CheckpointError if it is gone."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None


def entry_rows(entry: TensorEntry, rows: range) -> TensorEntry:
    """These rows as an entry of their own."""
    start = entry.start + rows.start * (entry.size // entry.shape[0])
    return replace(entry, shape=(len(rows), *entry.shape[1:]), start=start)


def plain_encoding(dtype: torch.dtype) -> NumberEncoding:
    """The encoding of numbers that are stored as in memory."""

    def decode(raw: bytearray, out: Tensor) -> None:
        out.copy_(torch.frombuffer(raw, dtype=dtype))

    return NumberEncoding(1, dtype.itemsize, decode)


FLOAT_ENCODINGS: dict[str, NumberEncoding] = {
    "F64": plain_encoding(torch.float64),
    "F32": plain_encoding(torch.float32),
    "F16": plain_encoding(torch.float16),
    "BF16": plain_encoding(torch.bfloat16),
    "F8_E4M3": plain_encoding(torch.float8_e4m3fn),
    "F8_E5M2": plain_encoding(torch.float8_e5m2),
    "F8_E8M0": plain_encoding(torch.float8_e8m0fnu),
}
INTEGER_ENCODINGS: dict[str, NumberEncoding] = {
    "U8": plain_encoding(torch.uint8),
    "I8": plain_encoding(torch.int8),
    "I16": plain_encoding(torch.int16),
    "I32": plain_encoding(torch.int32),
    "I64": plain_encoding(torch.int64),
}
NUMBER_ENCODINGS = FLOAT_ENCODINGS | INTEGER_ENCODINGS


def read_safetensors(path: Path, most: float = math.inf) -> dict[str, TensorEntry]:
    """The entries of a safetensors file, from its header alone (https://huggingface.co/docs/safetensors).
    CheckpointError for more of them than `most`, before they are made."""
    header, start, source = _read_header(path, most)
    length = source.size
    header.pop("__metadata__", None)
    entries = {name: _parse_entry(source, name, fields, start) for name, fields in header.items()}
    for entry in entries.values():
        if (end := start + header[entry.name]["data_offsets"][1]) > length:
            raise CheckpointError(
                f"the file is truncated: it ends at byte {length}, this tensor at byte {end}; copy the file again",
                file=str(path),
                tensor=entry.name,
            )
    check_gaps(
        path,
        {
            name: (start + fields["data_offsets"][0], start + fields["data_offsets"][1])
            for name, fields in header.items()
        },
        start,
        length,
    )
    return entries


def read_metadata(path: Path) -> Mapping[str, Any]:
    """The metadata of a safetensors file, which should be strings by name."""
    metadata = _read_header(path)[0].get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


def check_tensor_count(path: Path, count: int, most: float = math.inf) -> None:
    """Raises CheckpointError for more than MAX_TENSORS tensors, or than `most`, those of a network of this size."""
    if count > MAX_TENSORS:
        raise CheckpointError(f"it has {count} tensors; {MAX_TENSORS} are the most that are read", file=str(path))
    if count > most:
        message = f"it has {count} tensors; a network with as many layers and experts as config.json says"
        raise CheckpointError(f"{message} has {most} at most", file=str(path))


def check_gaps(path: Path, spans: Mapping[str, tuple[int, int]], start: int, length: int) -> None:
    """CheckpointError unless the tensors of a safetensors file lie one after the other and fill it. So no two tensors
    share bytes."""
    last = start
    for name, (begin, end) in sorted(spans.items(), key=lambda item: item[1]):
        if begin != last:
            what = "it overlaps another tensor" if begin < last else f"no tensor has the {begin - last} bytes before it"
            raise CheckpointError(f"no safetensors file: {what}", file=str(path), tensor=name)
        last = end
    if last != length:
        raise CheckpointError(f"no safetensors file: no tensor has its last {length - last} bytes", file=str(path))


def _read_header(path: Path, most: float = math.inf) -> tuple[dict[str, Any], int, SourceFile]:
    """The JSON header of a file of `most` tensors at most, the offset of the data, and the file."""
    try:
        with open_member(path) as file:
            source, prefix = SourceFile.of(path, file), file.read(8)
            length = source.size
            size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else length
            if size > min(length - 8, HEADER_JSON.bytes):
                raise CheckpointError("truncated, or no safetensors file: its header does not fit", file=str(path))
            raw = file.read(size)
        check_tensor_count(path, count := raw.count(b'"data_offsets"'), most)
        if (values := count_values(raw)) > HEADER_JSON.values:
            message = f"its header has {values} values, and {HEADER_JSON.values} are the most"
            raise CheckpointError(f"{message}; shorten its metadata, or save it in several files", file=str(path))
        header = parse_json(raw)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"no safetensors file: its header is no JSON ({error})", file=str(path)) from None
    if not isinstance(header, dict):
        raise CheckpointError("no safetensors file: its header is no JSON object", file=str(path))
    if count != len(header.keys() - {"__metadata__"}):
        raise CheckpointError("no safetensors file: its header names a tensor twice, or one malformed", file=str(path))
    return header, 8 + size, source


def _parse_entry(source: SourceFile, name: str, fields: Any, start: int) -> TensorEntry:
    path = source.path
    check_name_length(path, name)
    match fields:
        case {"dtype": str(kind), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            len(shape) <= MAX_DIMENSIONS
            and all(type(side) is int and side >= 0 for side in shape)
            and 0 <= begin <= end
        ):
            entry = TensorEntry(source, name, kind, tuple(shape), start + begin, NUMBER_ENCODINGS.get(kind))
        case _:
            raise CheckpointError("its header entry is malformed", file=str(path), tensor=name)
    if entry.encoding and entry.size != end - begin:
        raise CheckpointError(
            f"its header gives it {end - begin} bytes, its shape {list(shape)} of {kind} needs {entry.size}",
            file=str(path),
            tensor=name,
        )
    return entry


def check_name_length(path: Path, name: str) -> None:
    """CheckpointError for a tensor's name of more than MAX_NAME_LENGTH characters; names are matched with patterns."""
    if len(name) > MAX_NAME_LENGTH:
        message = f"a tensor's name has {len(name)} characters; {MAX_NAME_LENGTH} are the most"
        raise CheckpointError(message, file=str(path), tensor=f"{name[:60]}...")


def check_readable(entry: TensorEntry) -> None:
    """UnsupportedError unless the encoding is one of floats."""
    if entry.encoding is None or entry.kind in INTEGER_ENCODINGS:
        message = (
            f"its numbers are {entry.kind}, and only {', '.join(FLOAT_ENCODINGS)} are read; save it as one of those"
        )
        raise UnsupportedError(message, file=str(entry.file), tensor=entry.name)


def has_same_bytes(one: TensorEntry, other: TensorEntry) -> bool:
    """Whether two tensors have the same bytes. UnsupportedError if their encoding is not supported, CheckpointError if
    a file cannot be read."""
    if (one.kind, one.shape, one.transformation) != (other.kind, other.shape, other.transformation):
        return False
    check_readable(one)
    with one.open_file() as first, other.open_file() as second:
        sizes = [min(PIECE_BYTES, one.size - done) for done in range(0, one.size, PIECE_BYTES)]
        return all(first.read(size) == second.read(size) for size in sizes)

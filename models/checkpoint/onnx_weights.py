"""The weights of an ONNX graph beside a config.json, as torch's exporter writes it: `read_onnx`.

Only the places of the tensors and the names of the nodes are read; the graph is never run. Tensors have the names of
torch's parameters, except for the matrices of linear layers: they are stored transposed, under the name of a product
(`onnx::MatMul_42`), and the name of the product's node has the module's (`/encoder/layer.0/output/dense/MatMul`). Equal
tensors are stored once, and Identity nodes give the others' names.

The file is a message of protocol buffers, whose fields are in onnx.proto of ONNX. It is a stranger's file: each length
is compared with the end of what it is in, and every number of parts has a limit.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import SourceFile, is_plain_name, open_member
from .tensor_files import (
    FLOAT_ENCODINGS,
    MAX_DIMENSIONS,
    MAX_NAME_LENGTH,
    NUMBER_ENCODINGS,
    NumberEncoding,
    TensorEntry,
    check_tensor_count,
    ignore_bytes,
)

MAX_NODES = 1 << 18  # of a graph; one of 48 layers has 10,000
MAX_INPUTS = 64  # inputs or outputs of a node; those of a product are two and one
MAX_FIELDS = 1 << 20  # fields of a file that are looked at; those of a graph of 48 layers are 200,000
MAX_TEXT = 1 << 25  # bytes of all names; those of a graph of 48 layers are 3 MB
MAX_PAIRS = 16  # of a tensor's place in another file; there are four kinds
MAX_COPIES = 2  # bytes of all named tensors, in bytes of the file that they are; tied embeddings are there once
COPIED_BYTES = 16 << 20  # bytes that any file may have more, as equal biases and norms of all layers
MAX_VARINT_BYTES = 10
PIECE_BYTES = 1 << 12  # bytes in which numbers are looked for at a time
VARINT, FIXED64, MESSAGE, FIXED32 = 0, 1, 2, 5  # how a field is stored
MODEL_GRAPH = 7
GRAPH_NODE, GRAPH_TENSOR = 1, 5
NODE_INPUT, NODE_OUTPUT, NODE_NAME, NODE_KIND = 1, 2, 3, 4
TENSOR_DIMENSION, TENSOR_KIND, TENSOR_FLOATS, TENSOR_NAME, TENSOR_RAW, TENSOR_OUTSIDE = 1, 2, 4, 8, 9, 13
ENTRY_KEY, ENTRY_VALUE = 1, 2
KINDS = {1: "F32", 2: "U8", 3: "I8", 5: "I16", 6: "I32", 7: "I64", 10: "F16", 11: "F64", 16: "BF16"}
QUANTISED = ("MatMulInteger", "QLinearMatMul", "MatMulNBits", "DequantizeLinear", "DynamicQuantizeMatMul")
FUSED = ("Attention", "EmbedLayerNormalization", "SkipLayerNormalization", "BiasGelu", "FusedMatMul", "FastGelu")


class Field(NamedTuple):
    """A field of a message: its number, and its value if it is stored as a number. Its bytes are [start, end) of the
    file."""

    number: int
    kind: int
    value: int
    start: int
    end: int


@dataclass(frozen=True)
class TransposedEntry(TensorEntry):
    """A matrix whose columns are stored as rows; `shape` is that of the matrix."""

    @property
    def transformation(self) -> tuple[object, ...]:
        return ("transposed",)

    def read(
        self, dtype: torch.dtype, device: torch.device, report_bytes: Callable[[int], None] = ignore_bytes
    ) -> Tensor:
        stored = TensorEntry(self.source, self.name, self.kind, self.shape[::-1], self.start, self.encoding)
        return stored.read(dtype, device, report_bytes).T.contiguous()


@dataclass
class Node:
    """What is read of a node."""

    kind: str = ""
    name: str = ""
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


def read_onnx(path: Path) -> dict[str, TensorEntry]:
    """The entries of a graph's weights by the names of torch's parameters. CheckpointError for a damaged file,
    UnsupportedError for a graph whose weights are quantised or whose layers are fused."""
    try:
        with open_member(path) as file:
            reader = MessageReader(path, file)
            nodes, tensors = read_graph(path, reader)
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(path)) from None
    kinds = {node.kind for node in nodes}
    for known, what in ((QUANTISED, "its weights are quantised"), (FUSED, "its layers are fused")):
        if found := sorted(kinds.intersection(known)):
            message = f"{what} ({found[0]}), which is not read; name the plain export, or a safetensors folder"
            raise UnsupportedError(message, file=str(path))
    return name_tensors(path, nodes, tensors)


def name_tensors(path: Path, nodes: list[Node], tensors: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The tensors under the names of parameters."""
    shared = {out: node.inputs[0] for node in nodes if node.kind == "Identity" and node.inputs for out in node.outputs}
    known = {**tensors, **{name: tensors[source] for name, source in shared.items() if source in tensors}}
    check_tensor_count(path, len(known))
    found = {name: entry for name, entry in known.items() if is_parameter(name) and entry.kind in FLOAT_ENCODINGS}
    for node in nodes:
        scope, _, last = node.name.rpartition("/")
        matrix = known.get(node.inputs[1]) if len(node.inputs) == 2 else None
        if node.kind == "MatMul" and matrix is not None and len(matrix.shape) == 2 and scope and last:
            name = f"{scope.strip('/').replace('/', '.')}.weight"
            if not is_parameter(node.inputs[1]):
                found.setdefault(name, transpose(matrix, name))
    check_copies(path, found.values())
    return found


def check_copies(path: Path, entries: Collection[TensorEntry]) -> None:
    """CheckpointError where few bytes of the files have many names. Each name is read into memory of its own, so that a
    small file could ask for any amount. Places of tensors may overlap in part."""
    read, stored, ends = 0, 0, dict[Path, int]()
    readable = (entry for entry in entries if entry.encoding is not None)
    for entry in sorted(readable, key=lambda entry: entry.start):
        end = ends.get(entry.file, 0)
        read += entry.size
        stored += max(entry.start + entry.size - max(entry.start, end), 0)
        ends[entry.file] = max(end, entry.start + entry.size)
    if read > MAX_COPIES * stored + COPIED_BYTES:
        message = f"its tensors are {stored} bytes, which have so many names that {read} would be read"
        most = f"{MAX_COPIES} times as many and {COPIED_BYTES >> 20} MiB are the most"
        raise CheckpointError(
            f"{message}; {most}: export the network again, with a tensor for each layer", file=str(path)
        )


def transpose(entry: TensorEntry, name: str) -> TransposedEntry:
    return TransposedEntry(entry.source, name, entry.kind, entry.shape[::-1], entry.start, entry.encoding)


def is_parameter(name: str) -> bool:
    """Whether a tensor has the name of a parameter, and not one that the exporter made."""
    return "/" not in name and "::" not in name and "." in name


def read_graph(path: Path, reader: "MessageReader") -> tuple[list[Node], dict[str, TensorEntry]]:
    """The nodes and the tensors of a model."""
    nodes, tensors = list[Node](), dict[str, TensorEntry]()
    graphs = [each for each in reader.fields(0, reader.size) if each.number == MODEL_GRAPH and each.kind == MESSAGE]
    if len(graphs) != 1:
        raise CheckpointError(f"has {len(graphs)} graphs, which should be one", file=str(path))
    for part in reader.fields(graphs[0].start, graphs[0].end):
        if part.kind != MESSAGE:
            continue
        if part.number == GRAPH_NODE:
            nodes.append(read_node(reader, part))
        elif part.number == GRAPH_TENSOR:
            entry = read_tensor(path, reader, part)
            tensors[entry.name] = entry
            check_tensor_count(path, len(tensors))
        if len(nodes) > MAX_NODES:
            raise CheckpointError(f"has more than {MAX_NODES} nodes, which no known graph has", file=str(path))
    return nodes, tensors


def read_node(reader: "MessageReader", part: Field) -> Node:
    node = Node()
    for each in reader.fields(part.start, part.end):
        match each.number:
            case 1 | 2:  # NODE_INPUT, NODE_OUTPUT
                names = node.inputs if each.number == NODE_INPUT else node.outputs
                if len(names) < MAX_INPUTS:
                    names.append(reader.text(each))
            case 3:  # NODE_NAME
                node.name = reader.text(each)
            case 4:  # NODE_KIND
                node.kind = reader.text(each)
    return node


def read_tensor(path: Path, reader: "MessageReader", part: Field) -> TensorEntry:
    """The entry of a tensor, whose numbers are in this file or in one beside it."""
    name, number, shape, place = "", 0, list[int](), (reader.source, part.start, part.start)
    outside = dict[str, str]()
    for each in reader.fields(part.start, part.end):
        match each.number:
            case 1:  # TENSOR_DIMENSION: one number a field, or all in one
                packed = each.kind == MESSAGE
                shape += reader.numbers(each, MAX_DIMENSIONS) if packed else [each.value]
            case 2:  # TENSOR_KIND
                number = each.value
            case 4 | 9:  # TENSOR_FLOATS, TENSOR_RAW
                if each.kind == MESSAGE:
                    place = reader.source, each.start, each.end
            case 8:  # TENSOR_NAME
                name = reader.text(each)
            case 13:  # TENSOR_OUTSIDE
                key, value = read_pair(reader, each)
                outside |= {key: value} if len(outside) < MAX_PAIRS else {}
        if len(shape) > MAX_DIMENSIONS or any(not 0 <= size < 1 << 31 for size in shape):
            raise CheckpointError(f"its shape {show_value(shape)} is none", file=str(path), tensor=name)
    kind = KINDS.get(number, f"type {number}")
    encoding = NUMBER_ENCODINGS.get(kind)
    if outside:
        place = read_place(path, outside, name)
    source, start, end = place
    if encoding is not None and end >= start and prod(shape) * encoding.size != end - start:
        encoding = refuse_size(path, name, kind, encoding, (shape, end - start))
    return TensorEntry(source, name, kind, tuple(shape), start, encoding)


def refuse_size(
    path: Path, name: str, kind: str, encoding: NumberEncoding, found: tuple[list[int], int]
) -> NumberEncoding | None:
    """None for a tensor of another encoding than as in memory, which may have any size. CheckpointError for floats."""
    shape, size = found
    if kind not in FLOAT_ENCODINGS or (kind != "F32" and not size):
        return None  # small integers and half floats may be stored as numbers of their own
    message = f"it has {size} bytes, its shape {show_value(shape)} of {kind} needs {prod(shape) * encoding.size}"
    raise CheckpointError(message, file=str(path), tensor=name)


def read_place(path: Path, outside: Mapping[str, str], name: str) -> tuple[SourceFile, int, int]:
    """The file, the start and the end of numbers that are stored beside the graph."""
    location, numbers = outside.get("location", ""), (outside.get("offset", "0"), outside.get("length", ""))
    file = path.parent / location if is_plain_name(location) else None
    if file is None or not file.is_file():
        message = f"its numbers are in {show_value(location)}, which is no file of this folder"
        raise CheckpointError(message, file=str(path), tensor=name)
    with open_member(file) as opened:
        source = SourceFile.of(file, opened)
    if not all(number.isascii() and number.isdigit() and len(number) < 20 for number in numbers):
        message = f"its place {show_value(numbers)} should be an offset and a length"
        raise CheckpointError(message, file=str(path), tensor=name)
    start, length = int(numbers[0]), int(numbers[1])
    if start + length > source.size:
        message = f"its numbers end at byte {start + length} of {location}, which has {source.size}"
        raise CheckpointError(message, file=str(path), tensor=name)
    return source, start, start + length


def read_pair(reader: "MessageReader", part: Field) -> tuple[str, str]:
    found = {each.number: reader.text(each) for each in reader.fields(part.start, part.end)}
    return found.get(ENTRY_KEY, ""), found.get(ENTRY_VALUE, "")


class MessageReader:
    """Reads the fields of messages from a file, piece by piece."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.source = SourceFile.of(path, file)
        self.size = self.source.size
        self._path, self._file, self._fields_left, self._text_left = path, file, MAX_FIELDS, MAX_TEXT
        self._piece, self._piece_start = b"", 0

    def fields(self, start: int, end: int) -> Iterator[Field]:
        """The fields of the message in [start, end). Fields inside of them may be read meanwhile."""
        place = start
        while place < end:
            self._fields_left -= 1
            if self._fields_left < 0:
                raise self._damaged(f"more than {MAX_FIELDS} fields")
            tag, place = self._varint(place, end)
            number, kind, value = tag >> 3, tag & 7, 0
            match kind:
                case 0:  # VARINT
                    value, after = self._varint(place, end)
                case 2:  # MESSAGE
                    length, place = self._varint(place, end)
                    after = place + length
                case 1 | 5:  # FIXED64, FIXED32
                    after = place + (8 if kind == FIXED64 else 4)
                case _:
                    raise self._damaged(f"a field of kind {kind} at byte {place}")
            if after > end:
                raise self._damaged(f"a field that ends at byte {after}, behind the end of its message, {end}")
            yield Field(number, kind, value, place, after)
            place = after

    def text(self, field: Field) -> str:
        """A name. CheckpointError if it is longer than MAX_NAME_LENGTH bytes, or all names are than MAX_TEXT."""
        if field.kind != MESSAGE or field.end - field.start > MAX_NAME_LENGTH:
            raise self._damaged(f"a name of {field.end - field.start} bytes; {MAX_NAME_LENGTH} are the most")
        self._text_left -= field.end - field.start
        if self._text_left < 0:
            raise self._damaged(f"names of more than {MAX_TEXT} bytes together")
        self._file.seek(field.start)
        return self._file.read(field.end - field.start).decode(errors="replace")

    def numbers(self, field: Field, most: int) -> list[int]:
        """The numbers of a packed field."""
        found, place = list[int](), field.start
        while place < field.end:
            value, place = self._varint(place, field.end)
            found.append(value)
            if len(found) > most:
                raise self._damaged(f"a list of more than {most} numbers")
        return found

    def _varint(self, place: int, end: int) -> tuple[int, int]:
        """The number of variable length at `place`, and the place behind it."""
        at, value = place - self._piece_start, 0
        if not 0 <= at <= len(self._piece) - MAX_VARINT_BYTES:
            self._file.seek(place)
            self._piece, self._piece_start, at = self._file.read(PIECE_BYTES), place, 0
        for count, byte in enumerate(self._piece[at : at + min(MAX_VARINT_BYTES, end - place)]):
            value |= (byte & 0x7F) << 7 * count
            if byte < 0x80:
                return value, place + count + 1
        raise self._damaged(f"a number that does not end, at byte {place}")

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"has {what}; it is no ONNX file, or is damaged", file=str(self._path))

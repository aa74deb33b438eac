"""Tensors of the Open Inference Protocol, as JSON and as binary data.

Shape, datatype and size of a tensor are checked against each other before its data is used, and every error message
names the tensor.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ....core.errors import BadRequest
from ...shared.dialect import quote_json
from ...shared.streaming import dump_chunks, gather_parts

LENGTH_HEADER = "Inference-Header-Content-Length"  # bytes of JSON in a body; the rest are tensors
BYTE_COUNT = re.compile("[0-9]{1,12}")  # a number of bytes
RAW_NUMBERS = 1 << 16  # of a tensor that are copied as binary data at a time
LENGTH_BYTES = 4  # bytes of the length before each string, little-endian

Datatype = Literal["BYTES", "FP32"]


@dataclass(frozen=True, slots=True)
class InputTensor:
    """An input tensor: `data` in JSON, or `raw` bytes."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Any
    raw: bytes | None


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """An output tensor, in row-major order."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    values: Sequence[float] | Sequence[str] | NDArray[np.float64]

    @property
    def raw(self) -> list[bytes]:
        """The binary data in chunks."""
        if self.datatype == "FP32":
            numbers = np.asarray(self.values, "<f4")
            return [numbers[start : start + RAW_NUMBERS].tobytes() for start in range(0, len(numbers), RAW_NUMBERS)]
        return list(gather_parts(prefix_length(str(value).encode()) for value in self.values))


def prefix_length(value: bytes) -> bytes:
    return len(value).to_bytes(LENGTH_BYTES, "little") + value


# Inputs


def split_body(body: bytes | bytearray, header: str) -> tuple[bytes | bytearray, bytes]:
    """The JSON of a body, and the bytes after it."""
    if not header:
        return body, b""
    if not BYTE_COUNT.fullmatch(header) or int(header) > len(body):
        message = f"{LENGTH_HEADER}: must be at most the {len(body)} bytes of the body, got {header[:60]!r}"
        raise BadRequest(message, param=LENGTH_HEADER)
    return body[: int(header)], bytes(memoryview(body)[int(header) :])


def split_tensors(rest: bytes, sizes: Sequence[tuple[str, int]]) -> dict[str, bytes]:
    """Split `rest` into the named tensors."""
    announced = sum(size for _, size in sizes)
    if announced != len(rest):
        message = f"inputs: their binary_data_size come to {announced} bytes, {len(rest)} follow the JSON"
        raise BadRequest(message, param="inputs")
    found, start = {}, 0
    for name, size in sizes:
        found[name] = rest[start : start + size]
        start += size
    return found


def read_texts(tensor: InputTensor, max_texts: int) -> list[str]:
    """The strings of a tensor [N] or [N, 1], at most `max_texts`."""
    count = count_texts(tensor, max_texts)
    if tensor.raw is None:
        return read_json_texts(tensor, count)
    return [decode_text(tensor, index, value) for index, value in enumerate(split_strings(tensor, tensor.raw, count))]


def count_texts(tensor: InputTensor, max_texts: int) -> int:
    if tensor.datatype != "BYTES":
        raise tensor_error(tensor, f"datatype must be BYTES, got {quote_json(tensor.datatype)}")
    if len(tensor.shape) not in (1, 2) or tensor.shape[1:] not in ((), (1,)):
        raise tensor_error(tensor, f"shape must be [N] or [N, 1], got {quote_json(list(tensor.shape))}")
    if not 1 <= tensor.shape[0] <= max_texts:
        raise tensor_error(tensor, f"must be 1 to {max_texts} texts, its shape says {tensor.shape[0]}")
    return tensor.shape[0]


def read_json_texts(tensor: InputTensor, count: int) -> list[str]:
    """The strings of JSON data, a flat list or rows of one."""
    data = tensor.data
    if not isinstance(data, list):
        raise tensor_error(tensor, "data must be a list, or follow the JSON with a binary_data_size")
    if len(data) != count:
        raise tensor_error(tensor, f"shape says {count} texts, data has {len(data)}")
    found = [item[0] if isinstance(item, list) and len(item) == 1 else item for item in data]
    for index, item in enumerate(found):
        if not isinstance(item, str):
            raise tensor_error(tensor, f"must be a string, got {quote_json(item)}", index)
    return found


def split_strings(tensor: InputTensor, raw: bytes, count: int) -> Iterator[bytes]:
    """The binary strings, each of which follows its length."""
    start = 0
    for index in range(count):
        end = start + LENGTH_BYTES + int.from_bytes(raw[start : start + LENGTH_BYTES], "little")
        if start + LENGTH_BYTES > len(raw) or end > len(raw):
            raise tensor_error(tensor, f"its binary data of {len(raw)} bytes end inside this text", index)
        yield raw[start + LENGTH_BYTES : end]
        start = end
    if start != len(raw):
        raise tensor_error(tensor, f"shape says {count} texts, {len(raw) - start} bytes are left after them")


def decode_text(tensor: InputTensor, index: int, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise tensor_error(tensor, "is not UTF-8", index) from None


def tensor_error(tensor: InputTensor, message: str, index: int = -1) -> BadRequest:
    where = tensor.name if index < 0 else f"{tensor.name}[{index}]"
    return BadRequest(f"{where}: {message}", param=where)


# Outputs


@dataclass(frozen=True, slots=True)
class TensorBody:
    """The parts of the response body: JSON, and the `binary` tensors after it."""

    parts: list[bytes]
    json_bytes: int
    binary: bool


def write_tensors(envelope: dict[str, Any], tensors: Sequence[OutputTensor], binary: frozenset[str]) -> TensorBody:
    """The body with `tensors`; those in `binary` follow the JSON."""
    raws = {tensor.name: tensor.raw for tensor in tensors if tensor.name in binary}
    text = dump_chunks(envelope | {"outputs": [write_output(tensor, raws) for tensor in tensors]})
    return TensorBody([*text, *chain(*raws.values())], sum(map(len, text)), bool(raws))


def write_output(tensor: OutputTensor, raws: Mapping[str, Sequence[bytes]]) -> dict[str, Any]:
    assert math.prod(tensor.shape) == len(tensor.values), "a tensor is as large as its shape"
    described = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
    if tensor.name in raws:
        return described | {"parameters": {"binary_data_size": sum(map(len, raws[tensor.name]))}}
    return described | {"data": tensor.values}

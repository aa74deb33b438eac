"""Parses JSON of strangers so that it takes a bounded memory and other threads compute meanwhile.

A parser in C keeps the interpreter until it has read all: a second for a few million values. So every kind of file has
a limit of bytes and of values. Up to PIECE_VALUES are parsed in one piece, for 0.03 s at most; more by a parser in
Python, which takes ten times as long and lets other threads compute.
"""

import json
import math
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, NoReturn

import orjson

from .errors import CheckpointError
from .files import MAX_VOCABULARY_BYTES, read_content

PIECE_VALUES = 1 << 17  # values that are parsed in one piece
PIECE_BYTES = 4 << 20
MARKS = (b",", b"[", b"{")  # each value is the first of the text or follows one of them


@dataclass(frozen=True)
class JsonLimit:
    """The most bytes and values of a kind of file. A field of an object is one value."""

    bytes: int
    values: int


# Published files: 51,000 values in a tokenizer_config.json of 6,415 added tokens.
SMALL_JSON = JsonLimit(PIECE_BYTES, PIECE_VALUES)
# Lists of added tokens (65,792 in 12 MB, 460,000 values), of labels (two values each, and their commas), of tensors
# (92,000 in 9 MB), of words with weights.
LARGE_JSON = JsonLimit(16 << 20, 5 << 17)
# Published indexes of quantized experts have 20 to 27 MB and 280,000 values.
INDEX_JSON = JsonLimit(32 << 20, LARGE_JSON.values)
# A safetensors header of 131,072 tensors of three dimensions, nine values each, and metadata.
HEADER_JSON = JsonLimit(32 << 20, 10 << 17)
# A tokenizer.json, which only its library parses: 900,000 pieces with weights, or 515,000 merges as pairs.
VOCABULARY_JSON = JsonLimit(MAX_VOCABULARY_BYTES, 1 << 22)


def read_json_bytes(path: Path, limit: JsonLimit = SMALL_JSON) -> bytes:
    """The bytes of a JSON file. Raises CheckpointError as `read_content` does, and for more values than the limit has;
    FileNotFoundError."""
    raw = read_content(path, limit.bytes)
    if (count := count_values(raw)) > limit.values:
        message = f"has {count} values, and {limit.values} are the most of such a file; remove what no model needs"
        raise CheckpointError(message, file=str(path))
    return raw


def count_values(raw: bytes | bytearray) -> int:
    """The most values that a JSON text can have. Marks inside of strings count, too."""
    return 1 + sum(map(raw.count, MARKS))


def parse_json(raw: bytes | bytearray, *, lenient: bool = False) -> Any:
    """The value of a JSON text of limited size. Raises ValueError for one that is none, RecursionError for one that is
    nested too deep. `lenient`: also NaN, infinities, halves of characters and UTF-16, as `json` reads them."""
    if len(raw) <= PIECE_BYTES and count_values(raw) <= PIECE_VALUES:
        try:
            return orjson.loads(raw)
        except orjson.JSONDecodeError:
            if not lenient:
                raise
    text = raw.decode(json.detect_encoding(raw), "surrogatepass") if lenient else raw.decode()
    return _TurnsDecoder(lenient=lenient).decode(text)


class _TurnsDecoder(json.JSONDecoder):
    """The decoder of `json` with its scanner in Python: others may compute between two values."""

    def __init__(self, *, lenient: bool) -> None:
        hooks: dict[str, Any] = {} if lenient else {"parse_constant": _refuse_constant, "parse_float": _parse_finite}
        super().__init__(object_pairs_hook=_make_object if lenient else _make_strict_object, **hooks)
        if not lenient:
            self.parse_string = _parse_text
        self.scan_once = py_make_scanner(self)


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) <= PIECE_VALUES:
        return dict(pairs)
    return {name: value for name, value in pairs}  # noqa: C416 - dict() would keep the interpreter


def _make_strict_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, _ in pairs:
        _check_characters(name)
    return _make_object(pairs)


def _parse_text(text: str, begin: int, strict: bool = True) -> tuple[str, int]:
    value, end = scanstring(text, begin, strict)
    _check_characters(value)
    return value, end


def _check_characters(text: str) -> None:
    """ValueError for halves of characters (lone surrogates): no answer and no log can hold them."""
    if not text.isascii():
        text.encode()


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _parse_finite(digits: str) -> float:
    if math.isinf(value := float(digits)):
        raise ValueError(f"the number {digits[:40]} is infinite")
    return value

"""Reads files of labelled texts: JSON lines, CSV, TSV or plain lines.

Errors name the file, the line and the field.
"""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, Any, AnyStr, Literal

from polyhead.models.core.errors import ModelError

JSON_SUFFIXES, DELIMITERS = (".jsonl", ".ndjson"), {".csv": ",", ".tsv": "\t"}
MAX_DIGITS = 20  # of the number of a label; Python reads no number of thousands
MAX_LINE = 16 << 20  # characters, or bytes where these are read
MAX_LISTED = 8  # labels, or other choices, that a message lists


@dataclass(frozen=True)
class LabelledRow:
    """One row of a file."""

    file: str
    line: int
    values: Mapping[str, Any]

    def field_error(self, field: str, problem: str) -> ModelError:
        return ModelError(f"{self.file}, line {self.line}: {field}: {problem}")

    def has_field(self, field: str) -> bool:
        return self.values.get(field) not in (None, "")

    def text(self, field: str) -> str:
        """Return a non-empty text.  This and the methods below raise ModelError if the field is missing or wrong."""
        value = self._value(field)
        if not isinstance(value, str) or not value.strip():
            raise self.field_error(field, f"some text is expected, not {shorten_repr(value)}")
        return value

    def texts(self, field: str) -> list[str]:
        """Return a list of words; a string is split at blanks."""
        value = self._value(field)
        words = value.split() if isinstance(value, str) else value
        if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
            raise self.field_error(
                field, f"a list of words is expected, or words with blanks between, not {shorten_repr(value)}"
            )
        return words

    def number(self, field: str) -> float:
        value = self._value(field)
        try:
            if isinstance(value, bool):
                raise ValueError
            return float(value)
        except (TypeError, ValueError, OverflowError):
            raise self.field_error(field, f"a number is expected, not {shorten_repr(value)}") from None

    def choices(self, field: str, names: tuple[str, ...]) -> list[int]:
        """Return the indexes of one choice or of a list, each given by name or by index."""
        value = self._value(field)
        return [self._choice(field, each, names) for each in (value if isinstance(value, list) else [value])]

    def choice(self, field: str, names: tuple[str, ...]) -> int:
        return self._choice(field, self._value(field), names)

    def _value(self, field: str) -> Any:
        if field not in self.values or self.values[field] is None:
            present = ", ".join(map(str, self.values)) or "none"
            raise self.field_error(field, f"is missing; there are: {present}")
        return self.values[field]

    def _choice(self, field: str, value: object, names: tuple[str, ...]) -> int:
        if value in names:
            return names.index(str(value))
        spelled = str(value) if isinstance(value, str | int) else ""
        if spelled.isdecimal() and len(spelled) <= MAX_DIGITS and int(spelled) < len(names):
            return int(spelled)
        known = ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
        raise self.field_error(
            field, f"{shorten_repr(value)} is none of the model's labels: {known}; or 0 to {len(names) - 1}"
        )


def shorten_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def read_rows(path: Path, limit: int = 0) -> list[LabelledRow]:
    """Read all rows, or `limit` of them evenly over the file.  Raises ModelError if the file cannot be read."""
    if path.suffix.lower() not in (*JSON_SUFFIXES, *DELIMITERS, ".txt"):
        raise ModelError(f"{path}: must be JSON lines (.jsonl), a table (.csv, .tsv) or lines of text (.txt)")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            every = list(parse_rows(path, read_lines(path, file)))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not every:
        raise ModelError(f"{path} holds no rows")
    if not 0 < limit < len(every):
        return every
    return [every[number * len(every) // limit] for number in range(limit)]


def read_lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of a file.  Raises ModelError for one that is longer than MAX_LINE, before the rest is read: a
    file without lines may have gigabytes, also if it takes nothing of the disk.
    """
    for number in count(1):
        if not (line := file.readline(MAX_LINE + 1)):
            return
        if len(line) > MAX_LINE:
            raise ModelError(f"{path}, line {number}: is longer than {MAX_LINE >> 20} MiB, which no row is")
        yield line


def parse_rows(path: Path, read: Iterable[str]) -> Iterator[LabelledRow]:
    suffix, name = path.suffix.lower(), str(path)
    if suffix in DELIMITERS:
        return parse_table(name, read, DELIMITERS[suffix])
    lines = ((number, line.rstrip("\r\n")) for number, line in enumerate(read, 1) if line.strip())
    if suffix in JSON_SUFFIXES:
        return (LabelledRow(name, number, parse_object(name, number, line)) for number, line in lines)
    return (LabelledRow(name, number, {"text": line}) for number, line in lines)


def parse_object(name: str, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name}, line {number}: is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ModelError(f"{name}, line {number}: an object with fields is expected, not {shorten_repr(found)}")
    return found


def parse_table(name: str, file: Iterable[str], delimiter: str) -> Iterator[LabelledRow]:
    """Parse a table whose first line has the fields' names.  In a TSV, quotes have no meaning."""
    quoted = delimiter != "\t"
    quoting: Literal[0, 3] = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE
    reader = csv.DictReader(file, restkey="", delimiter=delimiter, quoting=quoting, strict=quoted)
    number = 1
    try:
        for found in reader:
            number = reader.line_num
            if "" in found:
                raise ModelError(f"{name}, line {number}: has more fields than the first line names")
            yield LabelledRow(name, number, found)
    except csv.Error as error:
        raise ModelError(f"{name}, line {reader.line_num}: is no row of a table: {error}") from None

"""Files of `polyhead decide`: questions, rows with a state each, and the answers that were written."""

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from polyhead.models.core.errors import ModelError

from ..api.shared.json_body import parse_json
from ..config.yaml_file import YamlFileError, read_yaml
from ..core.errors import BadRequest
from .labelled_files import DELIMITERS, JSON_SUFFIXES, MAX_LINE, parse_table, read_lines, shorten_repr

STANDARD_INPUT = Path("-")


@dataclass(frozen=True)
class DecisionRow:
    """The `index`-th row, from 0: its state, or the `problem` with it. `id` is None if the row has none."""

    index: int
    state: Any
    id: Any = None
    problem: str = ""


@dataclass
class ReadPosition:
    """How far a file is read, in bytes; `total` is 0 if that is not known."""

    total: int = 0
    done: int = 0
    skipped: int = 0  # bytes of rows that a run before has answered

    @property
    def part(self) -> float:
        """The part of this run's rows that is read; 0 if it is not known."""
        left = self.total - self.skipped
        return min((self.done - self.skipped) / left, 1.0) if left > 0 else 0.0


def read_questions_file(path: Path) -> dict[str, Any]:
    """The fields of the request that all rows share, from YAML or JSON. Raises ModelError."""
    try:
        found = read_json_file(path) if path.suffix == ".json" else read_yaml(str(path)).values
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from None
    except (YamlFileError, BadRequest) as error:
        raise ModelError(str(error)) from None
    if not isinstance(found, dict) or not isinstance(found.get("questions"), dict) or not found["questions"]:
        example = '{"questions": {"urgent": {"type": "noul", "instructions": "Is it urgent?"}}}'
        raise ModelError(f"{path}: must be an object with the questions by their names, as in {example}")
    if "state" in found:
        raise ModelError(f"{path}: state: belongs in the rows")
    return found


def read_json_file(path: Path) -> Any:
    """The value of a JSON file. Raises ModelError for one that is longer than MAX_LINE, OSError and BadRequest."""
    with path.open("rb") as file:
        raw = file.read(MAX_LINE + 1)
    if len(raw) > MAX_LINE:
        raise ModelError(f"{path}: is longer than {MAX_LINE >> 20} MiB, which no questions are")
    return parse_json(raw, str(path))


def read_decision_rows(path: Path, file: BinaryIO, field: str, position: ReadPosition) -> Iterator[DecisionRow]:
    """The rows of `file`, read as they are needed: of JSON lines, of a table, or of lines of text.

    The state is the value of `field`, or without one the field `state`, or the whole row. `position` advances. Raises
    ModelError for a table that cannot be read.
    """
    lines = decode_lines(path, file, position)
    if (suffix := path.suffix.lower()) in DELIMITERS:
        values: Iterable[Any] = (row.values for row in parse_table(str(path), lines, DELIMITERS[suffix]))
    else:
        must_be_json = bool(suffix in JSON_SUFFIXES or (path == STANDARD_INPUT and field))
        filled = (line for line in map(str.strip, lines) if line)
        values = (parse_line(line, is_text=suffix == ".txt", must_be_json=must_be_json) for line in filled)
    for index, value in enumerate(values):
        yield read_row(index, value, field)


def decode_lines(path: Path, file: BinaryIO, position: ReadPosition) -> Iterator[str]:
    try:
        for line in read_lines(path, file):
            text = line.decode("utf-8-sig" if not position.done else "utf-8")
            position.done += len(line)
            yield text
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read after {position.done} bytes: {error}") from None


def parse_line(line: str, *, is_text: bool, must_be_json: bool) -> Any:
    """The value of a line. What is no JSON is text, unless it must be JSON; then the error is returned."""
    if is_text:
        return line
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        return ModelError(f"is not JSON: {error}") if must_be_json else line
    return found if must_be_json or isinstance(found, dict | list | str) else line


def read_row(index: int, value: Any, field: str) -> DecisionRow:
    if isinstance(value, ModelError):
        return DecisionRow(index, None, problem=str(value))
    if not isinstance(value, Mapping):
        if field:
            return DecisionRow(
                index, None, problem=f"an object with the field {field} is expected, not {shorten_repr(value)}"
            )
        return DecisionRow(index, value)
    id = value.get("id")
    if not field and "state" not in value:
        return DecisionRow(index, dict(value), id)
    name = field or "state"
    if value.get(name) is None:
        return DecisionRow(index, None, id, f"{name}: is missing; there are: {', '.join(map(str, value)) or 'none'}")
    return DecisionRow(index, value[name], id)


def repair_answers(file: BinaryIO) -> None:
    """Cut off a last line that is not complete, and move to the end."""
    end = file.seek(0, io.SEEK_END)
    while end:
        start = max(end - (1 << 16), 0)
        file.seek(start)
        if (found := file.read(end - start).rfind(b"\n")) >= 0:
            end = start + found + 1
            break
        end = start
    file.truncate(end)
    file.seek(end)


def read_answers(path: Path, file: BinaryIO) -> Iterator[Mapping[str, Any]]:
    """The answers that a run before has written. Raises ModelError if they are not the first ones, in order."""
    for index, line in enumerate(read_lines(path, file)):
        found: Any = None
        with suppress(orjson.JSONDecodeError):
            found = orjson.loads(line)
        is_answer = isinstance(found, dict) and isinstance(found.get("answers", {}), dict)
        if not is_answer or found.get("index") != index:
            raise ModelError(f"{path}, line {index + 1}: is not an answer of polyhead decide to row {index}")
        yield found

"""Reads TOML files strictly: an unknown field or a wrong value is an error that names it.

A file may name a `base` file relative to it, whose values it overrides.  A recipe is trusted as a command line is, so
a base may lie anywhere; but only regular files are read, and each is small.
"""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from polyhead.models.core.errors import CheckpointError, show_value
from polyhead.models.core.files import open_regular

from .errors import RecipeError

MAX_BYTES = 1 << 14  # bytes of a file; recipes have 800, and long keys take the square of their length
MAX_FILES = 16  # a file, its base, the base of that, and so on
MAX_FAULTS = 16  # wrong fields that a message names
MAX_DEPTH = 16  # tables and lists inside each other
Value = TypeVar("Value")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the file's values, merged with those of its base files.  Raises RecipeError if one cannot be read."""
    values, files = read_table(path), [path]
    while base := values.pop("base", None):
        if not isinstance(base, str) or "\0" in base:
            raise RecipeError(f"{path}: base: {show_value(base)} should be the path of a file")
        path = path.parent / base
        if path in files:
            raise RecipeError(f"{path}: base: it is based on itself")
        files.append(path)
        if len(files) > MAX_FILES:
            raise RecipeError(f"{path}: base: more than {MAX_FILES} files are based on each other")
        values = merge_tables(read_table(path), values)
    return values


def read_table(path: Path) -> dict[str, Any]:
    """Return the values of one file.  Raises RecipeError."""
    try:
        with open_regular(path) as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise RecipeError(f"{path}: is longer than {MAX_BYTES >> 10} KiB, which no recipe is")
        values = tomllib.loads(raw.decode())
        check_depth(values)
        return values
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except CheckpointError as error:
        raise RecipeError(str(error)) from None
    except RecursionError:
        raise RecipeError(f"{path}: has more than {MAX_DEPTH} tables and lists inside each other") from None
    except ValueError as error:  # bytes that are no UTF-8, a number of thousands of digits, and what is no TOML
        raise RecipeError(f"{path}: is not TOML: {error}") from None


def check_depth(values: dict[str, Any]) -> None:
    """Raise RecursionError for more than MAX_DEPTH tables and lists inside each other; a dotted key makes many."""
    inner: list[Any] = [values]
    for _ in range(MAX_DEPTH):
        inner = [
            item
            for each in inner
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]
    if inner:
        raise RecursionError


def merge_tables(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables; values of `then` win, and tables are merged in turn."""
    tables = [name for name, value in then.items() if isinstance(value, dict) and isinstance(first.get(name), dict)]
    return {**first, **then, **{name: merge_tables(first[name], then[name]) for name in tables}}


def validate(kind: type[Value], values: Any, path: Path, *within: str) -> Value:
    """Validate values as a `kind`.  Raises RecipeError that names the wrong fields, under the tables `within`."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)[:MAX_FAULTS]
        faults = [f"{'.'.join(map(str, (*within, *fault['loc'])))}: {fault['msg']}" for fault in found]
        raise RecipeError(f"{path}: {'; '.join(faults)}") from None

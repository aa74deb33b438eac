"""Reads TOML files strictly: an unknown field or a wrong value is an error that names it.

A file may name a `base` file relative to it, whose values it overrides.
"""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from .errors import RecipeError

Value = TypeVar("Value")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the file's values, merged with those of its base files.  Raises RecipeError if one cannot be read."""
    values, files = read_table(path), [path]
    while base := values.pop("base", None):
        path = path.parent / str(base)
        if path in files:
            raise RecipeError(f"{path}: base: it is based on itself")
        files.append(path)
        values = merge_tables(read_table(path), values)
    return values


def read_table(path: Path) -> dict[str, Any]:
    """Return the values of one file."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: is not TOML: {error}") from None


def merge_tables(first: dict[str, Any], then: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables; values of `then` win, and tables are merged in turn."""
    tables = [name for name, value in then.items() if isinstance(value, dict) and isinstance(first.get(name), dict)]
    return {**first, **then, **{name: merge_tables(first[name], then[name]) for name in tables}}


def validate(kind: type[Value], values: Any, path: Path, *within: str) -> Value:
    """Validate values as a `kind`.  Raises RecipeError that names the wrong fields, under the tables `within`."""
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, (*within, *fault['loc'])))}: {fault['msg']}" for fault in error.errors()]
        raise RecipeError(f"{path}: {'; '.join(faults)}") from None

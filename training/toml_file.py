"""A TOML file read strictly: a field that is not known, or no value of its kind, is an error that names it."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from training.errors import RecipeError

Read = TypeVar("Read")


def content(path: Path) -> dict[str, Any]:
    """What stands in the file, as it stands there."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise RecipeError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path}: no TOML: {error}") from None


def checked(kind: type[Read], given: Any, path: Path, *within: str) -> Read:
    """The same as a `kind`, where it stood `within` the tables of the file; RecipeError names the fields at fault."""
    try:
        return TypeAdapter(kind).validate_python(given)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, (*within, *fault['loc'])))}: {fault['msg']}" for fault in error.errors()]
        raise RecipeError(f"{path}: {'; '.join(faults)}") from None

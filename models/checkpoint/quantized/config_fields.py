"""Fields of a quantization_config: their values are compared with those that are supported."""

from pathlib import Path
from typing import Any

from ...core.errors import UnsupportedError, show_value

Json = dict[str, Any]
CONFIG = "quantization_config"
REMEDY = "use the unquantised checkpoint or a GGUF file"


def dict_or_empty(value: Any) -> Json:
    return value if isinstance(value, dict) else {}


def check_field(file: Path, field: str, value: Any, known: tuple[Any, ...]) -> None:
    """UnsupportedError unless the field has one of the known values, of the same type: true is not 1."""
    if not any(type(value) is type(each) and value == each for each in known):
        message = f"{CONFIG}.{field} is {show_value(value)}, and only {' or '.join(map(repr, known))} is read; {REMEDY}"
        raise UnsupportedError(message, file=str(file))


def read_name(file: Path, field: str, value: Any, known: tuple[str, ...]) -> str:
    """One of the known values. UnsupportedError for anything else."""
    check_field(file, field, value, known)
    return str(value)


def read_count(file: Path, field: str, value: Any) -> int:
    """A positive whole number. UnsupportedError for anything else."""
    if type(value) is not int or not 0 < value < 2**31:
        message = f"{CONFIG}.{field} is {show_value(value)}, which should be a whole number from 1 on; {REMEDY}"
        raise UnsupportedError(message, file=str(file))
    return value

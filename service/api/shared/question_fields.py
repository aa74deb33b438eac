"""Fields that both dialects of decisions have, and JSON values as text."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import orjson
from pydantic import Field

from ...decisions.question import MAX_PERMUTATIONS
from .dialect import between, max_chars

MAX_NAME_CHARS = 256  # characters of a question's name
Permutations = Annotated[int, between(1, MAX_PERMUTATIONS)]
QuestionName = Annotated[str, max_chars(MAX_NAME_CHARS)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=1024)]


def json_text(value: str | Mapping[str, Any] | Sequence[Any] | None) -> str:
    """A text as it is, nothing as an empty text, any other value as JSON."""
    if isinstance(value, str):
        return value
    return "" if value is None else orjson.dumps(value).decode()

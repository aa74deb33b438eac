"""Bounds of numbers: the OpenAPI description has those that the server checks."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

import polyhead.service.api.app  # noqa: F401  all dialects
from polyhead.service.api.shared.dialect import Wire, inline_schema
from polyhead.service.core.errors import BadRequest

# Accepted as any number: they have no effect, or only the model knows their limit (`label`).
UNBOUNDED = {"index", "keep_alive", "label"}


def subclasses(kind: type[Wire]) -> Iterator[type[Wire]]:
    for each in kind.__subclasses__():
        yield each
        yield from subclasses(each)


KINDS = sorted(
    {kind for kind in subclasses(Wire) if kind.__module__.startswith("polyhead.")},
    key=lambda kind: (kind.__module__, kind.__name__),
)


def numbers(schema: Any, name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of numbers inside a schema, each with the name of the property that has it."""
    if isinstance(schema, dict):
        if schema.get("type") in ("integer", "number"):
            yield name, schema
        for key, value in schema.items():
            if key == "properties":
                for inner, described in value.items():
                    yield from numbers(described, inner)
            else:
                yield from numbers(value, name)
    elif isinstance(schema, list):
        for each in schema:
            yield from numbers(each, name)


def errors_of(kind: type[Wire], name: str, value: Any) -> list[str]:
    """The types of the errors of the field `name` of a body that has only this field."""
    try:
        kind.model_validate({name: value})
    except ValidationError as error:
        return [each["type"] for each in error.errors() if each["loc"][0] == name]
    return []


def bounded(kind: type[Wire]) -> list[tuple[str, dict[str, Any]]]:
    """The fields of `kind` that are numbers with bounds, with their schemas."""
    fields = inline_schema(kind).get("properties", {}).items()
    return [
        (name, found) for name, found in fields if found.get("type") in ("integer", "number") and "maximum" in found
    ]


def test_every_number_is_described_with_its_bounds() -> None:
    bare = {
        f"{kind.__name__}: {name}"
        for kind in KINDS
        for name, schema in numbers(inline_schema(kind))
        if not {"minimum", "maximum"} <= schema.keys() and not {"const", "enum"} & schema.keys()
        if name not in UNBOUNDED
    }
    assert not bare


@pytest.mark.parametrize("kind", [kind for kind in KINDS if bounded(kind)], ids=lambda kind: kind.__name__)
def test_a_number_is_refused_outside_the_bounds_of_its_schema_and_taken_inside(kind: type[Wire]) -> None:
    for name, schema in bounded(kind):
        low, high = schema["minimum"], schema["maximum"]
        assert schema.get("default", low) <= high
        assert schema.get("default", low) >= low
        for outside in (low - 1, high + 1):
            assert errors_of(kind, name, outside) == ["bounds"], (name, outside)
        for inside in (low, high):
            assert not errors_of(kind, name, inside), (name, inside)


def test_a_number_out_of_bounds_is_named_in_a_bad_request() -> None:
    kind = next(kind for kind in KINDS if kind.__name__ == "CompletionRequest")
    with pytest.raises(BadRequest, match=r"^top_p: must be between 0 and 1, got 1\.5$"):
        kind.read({"model": "m", "prompt": "a", "top_p": 1.5})

"""Bounds of numbers: the OpenAPI description has those that the server checks.  Refusals hold little of long values."""

import tracemalloc
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

import polyhead.service.api.app  # noqa: F401  all dialects
from polyhead.service.api.dialects.batches.wire import BatchRequest
from polyhead.service.api.dialects.responses.wire import ResponseRequest
from polyhead.service.api.shared.dialect import MAX_QUOTED_CHARS, Wire, field_path, inline_schema, quote_json
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


LONG = "y" * 4_000_000 + "\U0001f600"  # four bytes a character


@pytest.mark.parametrize("kind", [BatchRequest, ResponseRequest])
@pytest.mark.parametrize("place", [("metadata", LONG), ("metadata", "a"), (LONG,)])
def test_a_refusal_holds_no_copy_of_a_long_key_or_value(kind: type[Wire], place: tuple[str, ...]) -> None:
    """It lives until the client has read the answer; the memory of its body alone is claimed."""
    value: Any = LONG
    for key in reversed(place):
        value = {key: value}
    required = {"input_file_id": "f", "endpoint": "/v1/embeddings", "completion_window": "24h"}
    body = value | (required if kind is BatchRequest else {"model": "m", "input": "a"})
    tracemalloc.start()
    with pytest.raises(BadRequest) as caught:
        kind.read(body)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 2 * len(LONG)  # Python keeps the bytes of a string that a library has read in them
    assert caught.value.__context__ is None, "pydantic's error holds copies, which are not traced"
    assert place[0][:MAX_QUOTED_CHARS] in caught.value.message
    assert len(caught.value.message) < 500
    assert len(caught.value.param) < 200


@pytest.mark.parametrize("value", [LONG, [LONG], {LONG: LONG}, {"a": [{LONG: 1}, LONG]}, [0] * 1_000_000])
def test_only_what_is_shown_of_a_long_value_becomes_text(value: Any) -> None:
    tracemalloc.start()
    shown = quote_json(value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(shown) == MAX_QUOTED_CHARS + len("...")
    assert peak < 1 << 16


def test_a_value_is_shown_up_to_its_sixtieth_character() -> None:
    smile = "\U0001f600"
    values: tuple[Any, ...] = (
        *("é" * 29 + smile * 29, smile * 60, "", [], {}, None, True, 1.5, 1 << 60, "\n" * 40),
        *([[]] * 40, [[[]], {"a": {}}] * 9, {"a": [1, {"b": "c" * 60}]}, {str(key): key for key in range(90)}),
        *(list(range(31)), [{"a" * 61 + "b": 1, "a" * 61 + "c": 2}]),
    )
    for value in values:
        whole = orjson.dumps(value).decode()
        assert quote_json(value) == (whole if len(whole) <= MAX_QUOTED_CHARS else f"{whole[:MAX_QUOTED_CHARS]}...")
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    assert quote_json(deep) == "[" * MAX_QUOTED_CHARS + "..."
    assert quote_json({5: 1}) == '{"5":1}'
    assert quote_json([1 << 70, "\ud800"]) == f"[{1 << 70}, '\\ud800']"


def test_each_key_of_a_path_is_cut() -> None:
    assert field_path(("a", 0, "b")) == "a[0].b"
    cut = f"{LONG[:MAX_QUOTED_CHARS]}..."
    assert field_path((LONG, 3, LONG)) == f"{cut}[3].{cut}"

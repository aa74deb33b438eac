"""What the child that checks grammars shares with the server: walks over schemas."""

import json
import tracemalloc

import pytest

from polyhead.service.structured.grammar_child import MAX_PLACE_CHARS, find_inexact_number, find_long_pattern

BIG = (1 << 53) + 1  # the first whole number that no float of 64 bits is


def test_a_long_key_is_kept_once_for_all_parts_below_it() -> None:
    """Where each part has a text with its whole place, this takes 40 MB."""
    source = json.dumps({"x" * 20_000: [[]] * 2000})
    tracemalloc.start()
    try:
        assert find_long_pattern(source, 100) == ""
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most < 3_000_000


def test_the_place_of_a_long_pattern() -> None:
    def find(value: object) -> str:
        return find_long_pattern(json.dumps(value), 9)

    long = "a" * 10
    assert find({"properties": {"b": {"anyOf": [{}, {"pattern": long}]}}}) == ".properties.b.anyOf[1].pattern"
    assert find({"patternProperties": {long: {}}}) == ".patternProperties"
    assert find(long) == ""
    place = find({"properties": {"k" * 1000: {"pattern": long}}})
    assert place == ("." + "properties." + "k" * 1000)[:MAX_PLACE_CHARS]


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"enum": [1, BIG]}, ".enum[1]"),
        ({"const": {"a": [-BIG]}}, ".const.a[0]"),
        ({"const": -1e19}, ".const"),
        ({"properties": {"enum": {"anyOf": [{"minimum": BIG}]}}}, ".properties.enum.anyOf[0].minimum"),
        ({"items": [{"exclusiveMaximum": BIG}]}, ".items[0].exclusiveMaximum"),
        ({"minimum": 1e19, "maximum": 1e19}, ".minimum"),
        ({"maximum": -(1 << 63)}, ".maximum"),
        ({"maximum": 1 << 62}, ".maximum"),  # floats are written with the fewest digits, 4611686018427388000
        ({"exclusiveMinimum": BIG - 1}, ".exclusiveMinimum"),
        ({"exclusiveMaximum": 10**18}, ".exclusiveMaximum"),  # one less is no float
        ({"exclusiveMaximum": (1 << 63) - 1}, ".exclusiveMaximum"),
    ],
)
def test_a_number_that_would_be_another_one_is_found(schema: object, place: str) -> None:
    found = find_inexact_number(json.dumps(schema))
    assert found is not None
    assert found.place == place


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": [BIG - 1, 1 << 62, (1 << 63) - 1, 0.1, True, str(BIG)]},
        {"minimum": -(10**18), "maximum": 1e17, "exclusiveMinimum": 1 - BIG, "exclusiveMaximum": 1 << 63},
        {"minimum": -(1 << 63), "maximum": (1 << 64) - 1},  # limits of 64 bits are none
        {"exclusiveMinimum": True, "minimum": 1},
        {"default": BIG, "example": {"minimum": BIG}, "examples": [BIG], "title": "a"},
        {"properties": {"const": {"default": BIG}}},
        BIG,
    ],
)
def test_numbers_that_stay_as_they_are(schema: object) -> None:
    assert find_inexact_number(json.dumps(schema)) is None

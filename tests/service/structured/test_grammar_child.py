"""What the child that checks grammars shares with the server: walks over schemas."""

import json
import tracemalloc

from polyhead.service.structured.grammar_child import MAX_PLACE_CHARS, find_long_pattern


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

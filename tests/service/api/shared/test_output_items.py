"""Answers as lists of items: the arguments of tool calls."""

import sys

import orjson
import pytest

from polyhead.service.api.shared.output_items import parse_arguments

LARGEST = sys.float_info.max


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"n": 18446744073709551615, "m": -9223372036854775808}', {"n": (1 << 64) - 1, "m": -(1 << 63)}),
        ('{"n": 99999999999999999999999}', {"n": 1e23}),
        ('{"n": [{"m": -1' + "0" * 400 + "}]}", {"n": [{"m": -LARGEST}]}),
        ('{"n": 1e999, "b": true}', {"n": LARGEST, "b": True}),
        ('{"n": 1, "m": "a', {"n": 1}),
        ("[1]", {}),
    ],
)
def test_arguments_can_be_written_as_json(text: str, read: dict[str, object]) -> None:
    """Numbers that a model wrote too large for 64 bits become the nearest float."""
    assert orjson.loads(orjson.dumps(parse_arguments(text))) == read

"""Bodies of lines: how they are split."""

import pytest

from polyhead.service.api.shared.bulk_calls import split_lines


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        (b"", []),
        (b"\n \r\n", []),
        (b"a", [(1, b"a")]),
        (b"a\n", [(1, b"a")]),
        (b'{"a": 1}\r\n\n "b" \nc', [(1, b'{"a": 1}'), (3, b'"b"'), (4, b"c")]),
    ],
    ids=["empty", "blank", "one", "with its end", "several"],
)
def test_empty_lines_are_counted_and_left_out(body: bytes, lines: list[tuple[int, bytes]]) -> None:
    assert list(split_lines(bytearray(body))) == lines

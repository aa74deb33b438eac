"""JSON that is written in parts."""

from typing import Any

import numpy as np
import orjson
from hypothesis import given
from hypothesis import strategies as st

from polyhead.service.api.shared.streaming import NUMPY_OPTION, dumps_sliced

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=40) | st.dictionaries(st.text(), inner, max_size=5),
    max_leaves=60,
)


@given(JSON)
def test_json_in_parts_is_the_same_json(value: Any) -> None:
    assert dumps_sliced(value) == orjson.dumps(value)


def test_arrays_and_long_lists_in_parts_are_the_same_json() -> None:
    rows = np.arange(30_000, dtype=np.float32).reshape(100, 300) / 7
    for value in (
        rows,
        list(rows),
        [rows, rows[:2]],
        list(range(20_000)),
        {"data": [{"index": index, "embedding": row} for index, row in enumerate(rows)], "model": 'a"b'},
        [],
        {},
    ):
        assert dumps_sliced(value) == orjson.dumps(value, option=NUMPY_OPTION)

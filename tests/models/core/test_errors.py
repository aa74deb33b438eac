"""Values out of a file are written into messages within bounds."""

import ast
from pathlib import Path
from typing import Any

import pytest

from polyhead import models
from polyhead.models.core.errors import MAX_SHOWN_ITEMS, show_value

# What is written whole: constants of the program, names that the program chose, and texts that were cut or bounded.
WHOLE = {
    "models/checkpoint/recurrent_folder.py": {"KIND", "ARCHITECTURE"},
    "models/checkpoint/source_policy.py": {"truncate(source, 200)"},
    "models/chat/template_functions.py": {"name"},  # a name in a template, whose length is bounded
    "models/core/errors.py": {"x[:self.maxstring]"},
    "models/recurrent/recurrent_config.py": {"only"},
    "models/tokenizer/patterns.py": {"text", "key"},
}
ROOT = Path(str(models.__file__)).parent.resolve().parent


class Counted:
    """Counts how many of it are written."""

    written = 0

    def __repr__(self) -> str:
        type(self).written += 1
        return "x"


@pytest.mark.parametrize("make", [list, tuple, lambda items: dict(enumerate(items))])
def test_of_a_long_value_only_the_beginning_is_written(make: Any) -> None:
    Counted.written = 0
    shown = show_value(make([Counted() for _ in range(100_000)]))
    assert 0 < Counted.written <= MAX_SHOWN_ITEMS
    assert len(shown) < 210
    assert "..." in shown


def test_a_value_inside_a_value_is_not_written() -> None:
    Counted.written = 0
    inside = [[Counted()] * 100] * 100
    assert show_value([inside, {"a": inside}]).startswith("[[[...], [...], [...],")
    assert show_value({"a": [1, [inside], {"b": inside}]}) == "{'a': [1, [...], {...}]}"
    assert not Counted.written


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("it's", '"it\'s"'),
        ("x" * 300, f"'{'x' * 200}'..."),
        (1.5, "1.5"),
        (None, "None"),
        (True, "True"),
        (-(2**40), "-1099511627776"),
        ({}, "{}"),
        ({"b": [1, "two"], "a": {}}, "{'b': [1, 'two'], 'a': {}}"),
        ([], "[]"),
    ],
)
def test_a_short_value_is_written_as_it_is(value: Any, shown: str) -> None:
    assert show_value(value) == shown


def test_no_message_of_a_checkpoint_writes_a_value_whole() -> None:
    """`{value!r}` of a list with millions of numbers holds every thread for seconds."""
    for file in sorted((ROOT / "models").rglob("*.py")):
        name = str(file.relative_to(ROOT))
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.FormattedValue) and node.conversion == ord("r"):
                cut = isinstance(node.value, ast.Subscript) and isinstance(node.value.slice, ast.Slice)
                assert cut or ast.unparse(node.value) in WHOLE.get(name, ()), f"{name}:{node.lineno}"

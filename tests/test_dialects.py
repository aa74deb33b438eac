"""docs/dialects.md says of every field of every dialect what becomes of it; here each of its rows is tried.

Which fields there are is known from the wire objects, and from the types of the official clients.
"""

import copy
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from service.api.dialect import Wire
from service.errors import BadRequest

PAGE = Path(__file__).parent.parent / "docs" / "dialects.md"
ROW = re.compile(r"^\|(?P<cells>.*[^\\])\|$")
EXAMPLE = re.compile(r"^`(?P<value>.*?)`(?: with `(?P<beside>\{.*\})`)?$")
STATES = ("done", "harmless", "refused", "not applicable")


@dataclass(frozen=True)
class Section:
    """A table's wire object, a body that is just enough, and who reads it.  `official` are fields of others' types."""

    wire: type[Wire]
    body: Mapping[str, Any]
    read: Callable[[Any], object] = lambda wire: wire
    official: Collection[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class Row:
    section: str
    field: str
    value: Any
    beside: Mapping[str, Any]
    state: str
    words: str

    def __str__(self) -> str:
        return f"{self.section}: {self.field}"


def rows() -> Iterator[Row]:
    section = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ")
        elif section and (found := ROW.match(line)) and "---" not in line and "| state |" not in line:
            yield row(section, [cell.strip() for cell in re.split(r"(?<!\\)\|", found["cells"])])


def row(section: str, cells: list[str]) -> Row:
    name, example, state, words = (cell.replace(r"\|", "|") for cell in cells)
    found = EXAMPLE.match(example)
    assert found, f"{section}: {name}: {example}"
    return Row(
        section,
        name.strip("`"),
        json.loads(found["value"]),
        json.loads(found["beside"] or "{}"),
        state,
        words.strip("`"),
    )


SECTIONS: Mapping[str, Section] = {}

"""No release with a hole that we stand on is let in, by what this project asks for or by what is installed here."""

import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.support.places import ROOT

# The first release without it, and what it is.
FLOORS = {
    "jinja2": ("3.1.6", "CVE-2025-27516: templates leave the sandbox by the filter attr"),
    "starlette": ("0.49.1", "CVE-2025-62727: a header Range takes quadratic time; CVE-2025-54121: blocking on forms"),
    "h11": ("0.16.0", "CVE-2025-43859: bodies in malformed chunks are taken, which smuggles requests"),
    "orjson": ("3.11.6", "CVE-2025-67221: values nested deeply overflow the stack when they are written"),
    "torch": ("2.6.0", "CVE-2025-32434: weights_only ran code; nothing here unpickles, but those beside us may"),
}


def asked() -> dict[str, SpecifierSet]:
    """What the project depends on, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return {each.name.lower(): each.specifier for each in map(Requirement, project["dependencies"])}


def least(specifier: SpecifierSet) -> Version:
    return max(Version(each.version) for each in specifier if each.operator == ">=")


@pytest.mark.parametrize("name", FLOORS)
def test_what_is_asked_for_and_what_is_here_have_no_known_hole(name: str) -> None:
    floor, why = FLOORS[name]
    assert least(asked()[name]) >= Version(floor), why
    assert Version(version(name)) >= Version(floor), why

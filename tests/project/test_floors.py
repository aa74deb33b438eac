"""No dependency may be a release with a known vulnerability, neither by the requirements nor as installed here."""

import tomllib
from importlib.metadata import version
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests.support.places import ROOT

# The first release without the vulnerability, and its description.
FLOORS = {
    "jinja2": ("3.1.6", "CVE-2025-27516: templates leave the sandbox by the filter attr"),
    "starlette": ("0.49.1", "CVE-2025-62727: a header Range takes quadratic time; CVE-2025-54121: blocking on forms"),
    "h11": ("0.16.0", "CVE-2025-43859: bodies in malformed chunks are taken, which smuggles requests"),
    "orjson": ("3.11.6", "CVE-2025-67221: values nested deeply overflow the stack when they are written"),
    "opentelemetry-sdk": ("1.45.0", "a header tracestate of 32,000 spaces takes quadratic time: a second of the loop"),
    "python-multipart": ("0.0.34", "headers of a part without a limit of number and length"),
    "torch": ("2.6.0", "CVE-2025-32434: weights_only ran code; nothing here unpickles, but other packages may"),
}


def requirements() -> dict[str, SpecifierSet]:
    """The version specifiers of the project's dependencies by name, those of extras too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = chain(*project["optional-dependencies"].values(), project["dependencies"])
    return {each.name.lower(): each.specifier for each in map(Requirement, lines)}


def minimum(specifier: SpecifierSet) -> Version:
    return max(Version(each.version) for each in specifier if each.operator == ">=")


@pytest.mark.parametrize("name", FLOORS)
def test_required_and_installed_releases_have_no_known_vulnerability(name: str) -> None:
    floor, why = FLOORS[name]
    assert minimum(requirements()[name]) >= Version(floor), why
    assert Version(version(name)) >= Version(floor), why

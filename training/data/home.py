"""English and German sentences of Home Assistant's user interface, by its translators (Apache-2.0).

The package is read, never installed or run.  A sentence in several places is one example for each of its translations.
Sentences that are equal in both languages are left out.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.checkpoint.package_files import Package, fetch_matching

from .examples import WORD, Corpus, Example

PACKAGE = Package(
    name="homeassistant",
    version="2026.11.0",
    sha256="7ca5fbde9dea879ac7723949fc84347aac5182e6309c357b2e4973fd391b00f7",
    kind="wheel",
    python="3.14.2",
)
FOLDER = "homeassistant/components"
FILE = "translations/{}.json"


def corpus(downloads: Path) -> Corpus[str]:
    """Download the package once, check it, and read every sentence and its translation."""
    folder = downloads / "homeassistant"
    fetch_matching(PACKAGE, folder, *(f"{FOLDER}/*/{FILE.format(language)}" for language in ("en", "de")))
    return read_pairs(folder / FOLDER)


def read_pairs(folder: Path) -> Corpus[str]:
    """Read a folder of components with a file per language.  All examples of one source, without case and punctuation,
    are one group.
    """
    pairs: dict[tuple[str, str], None] = {}
    for english in sorted(folder.glob(f"*/{FILE.format('en')}")):
        german = english.with_name("de.json")
        if german.exists():
            english_strings, german_strings = (
                dict(flatten_strings(read_json(english))),
                dict(flatten_strings(read_json(german))),
            )
            pairs |= {
                (english_strings[key], german_strings[key]): None for key in english_strings if key in german_strings
            }
    examples = [
        Example(source, target, "en-de", " ".join(WORD.findall(source.lower())) or source)
        for source, target in pairs
        if source != target
    ]
    return Corpus(examples, (), group_similar=False)


def flatten_strings(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Yield the strings of nested objects, with their paths."""
    for key, value in tree.items():
        if isinstance(value, str):
            yield f"{path}.{key}", value
        else:
            yield from flatten_strings(value, f"{path}.{key}")

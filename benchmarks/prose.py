"""Real sentences and documents for measurements, from the human-rated corpora in the vaderSentiment source package."""

import tarfile
from itertools import groupby
from pathlib import Path
from random import Random

from polyhead.training.data import vader

FILES = ("movieReviewSnippets", "amazonReviewSnippets", "nytEditorialSnippets", "tweets")


def sentences(folder: Path, count: int, *files: str) -> list[str]:
    """`count` sentences drawn evenly over `files` (all four corpora by default), mixed, the same every time."""
    files = files or FILES
    with tarfile.open(vader.fetch_archive(folder)) as archive:
        columns = [_column(archive, name)[: -(-count // len(files))] for name in files]
    return [text for row in zip(*columns, strict=True) for text in row][:count]


def documents(folder: Path) -> list[str]:
    """Every text of the corpora as it was written, mixed, the same every time: tweets and remarks on films are a
    sentence or two, product reviews and editorials are whole again."""
    with tarfile.open(vader.fetch_archive(folder)) as archive:
        rows = [(name, *row) for name in FILES for row in _rows(archive, name)]
    whole = groupby(rows, key=lambda row: (row[0], row[1].split("_")[0]))  # ids read document_sentence, or document
    texts = [" ".join(text for *_, text in sentences) for _, sentences in whole]
    Random(0).shuffle(texts)
    return texts


def rated(folder: Path, name: str) -> list[tuple[float, str]]:
    """The mean rating, from -4 to 4, and the text of each line of one file."""
    with tarfile.open(vader.fetch_archive(folder)) as archive:
        return [(float(mean), vader.clean_text(text)) for _, mean, text in _lines(archive, name)]


def _column(archive: tarfile.TarFile, name: str) -> list[str]:
    return [text for _, text in _rows(archive, name)]


def _rows(archive: tarfile.TarFile, name: str) -> list[tuple[str, str]]:
    """The id and the text of each line."""
    return [(number, vader.clean_text(text)) for number, _, text in _lines(archive, name)]


def _lines(archive: tarfile.TarFile, name: str) -> list[list[str]]:
    """The id, the mean rating and the text of each line, as they are written."""
    content = archive.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
    assert content is not None
    return [line.split("\t") for line in content.read().decode("utf-8", "replace").splitlines()]

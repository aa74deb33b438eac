"""Real sentences for measurements, from the human-rated corpora in the vaderSentiment source package."""

import tarfile
from pathlib import Path

from training import vader

FILES = ("movieReviewSnippets", "amazonReviewSnippets", "nytEditorialSnippets", "tweets")


def sentences(folder: Path, count: int, *files: str) -> list[str]:
    """`count` sentences drawn evenly over `files` (all four corpora by default), mixed, the same every time."""
    files = files or FILES
    with tarfile.open(vader.fetch_archive(folder)) as archive:
        columns = [_column(archive, name)[: -(-count // len(files))] for name in files]
    return [text for row in zip(*columns, strict=True) for text in row][:count]


def _column(archive: tarfile.TarFile, name: str) -> list[str]:
    content = archive.extractfile(f"hutto_ICWSM_2014/{name}_GroundTruth.txt")
    assert content is not None
    lines = content.read().decode("utf-8", "replace").splitlines()
    return [vader.clean(line.split("\t")[2]) for line in lines]

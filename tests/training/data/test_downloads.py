"""What was downloaded lies beside a run, which may be a stranger's: no file of it is read beyond its limit."""

from pathlib import Path

import pytest

from polyhead.models.core.errors import CheckpointError
from polyhead.training.data import brown, spam


def test_a_document_of_gigabytes_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "brown"
    folder.mkdir()
    for letter, (_, number) in brown.GENRES.items():
        for document in range(1, number + 1):
            (folder / f"c{letter}{document:02}").write_text("jury/nn\n")
    assert len(brown.corpus(tmp_path).examples) == 500
    with (folder / "ca01").open("ab") as file:
        file.truncate(8 << 30)
    with pytest.raises(CheckpointError, match="ca01: is longer than 16 MiB"):
        brown.corpus(tmp_path)


def test_a_mail_of_gigabytes_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "1.txt").open("wb") as file:
        file.truncate(8 << 30)
    with pytest.raises(CheckpointError, match=r"1\.txt: is longer than 16 MiB"):
        spam.read_group(tmp_path)

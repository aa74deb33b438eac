"""Files of rows are read line by line: one without lines, perhaps of gigabytes, is refused at its first line."""

import io
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.core.errors import ModelError
from polyhead.service.cli import decision_rows, labelled_files
from polyhead.service.cli.decision_rows import ReadPosition

GIBIBYTES = 8 << 30


class CountedBytes(io.BytesIO):
    """Counts the bytes that are read."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.read_count = 0

    def readline(self, *given: Any) -> bytes:
        line = super().readline(*given)
        self.read_count += len(line)
        return line

    def __next__(self) -> bytes:
        return self.readline()


@pytest.fixture
def sparse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of gigabytes that takes nothing of the disk."""
    monkeypatch.setattr(labelled_files, "MAX_LINE", 1 << 20)
    monkeypatch.setattr(decision_rows, "MAX_LINE", 1 << 20)
    path = tmp_path / "rows.jsonl"
    with path.open("wb") as file:
        file.write(b'{"text": "a"}\n')
        file.truncate(GIBIBYTES)
    return path


def test_rows_of_a_line_without_end_are_refused(sparse: Path) -> None:
    with pytest.raises(ModelError, match=r"rows\.jsonl, line 2: is longer than 1 MiB, which no row is"):
        labelled_files.read_rows(sparse)
    with sparse.open("rb") as file, pytest.raises(ModelError, match="line 2: is longer than 1 MiB"):
        list(decision_rows.read_decision_rows(sparse, file, "text", ReadPosition()))


def test_no_more_of_a_long_line_is_read_than_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled_files, "MAX_LINE", 100)
    file = CountedBytes(b'{"index": 0}\n' + b" " * 10_000)
    with pytest.raises(ModelError, match="line 2: is longer"):
        list(decision_rows.read_answers(Path("answers"), file))
    assert file.read_count <= 13 + 101


def test_answers_that_are_no_object_are_refused() -> None:
    with pytest.raises(ModelError, match="line 1: is not an answer of polyhead decide to row 0"):
        list(decision_rows.read_answers(Path("answers"), io.BytesIO(b'{"index": 0, "answers": []}')))


def test_a_file_of_questions_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_rows, "MAX_LINE", 1 << 20)
    path = tmp_path / "questions.json"
    path.write_bytes(b'{"questions": {"a": {}}}')
    assert decision_rows.read_questions_file(path) == {"questions": {"a": {}}}
    with path.open("ab") as file:
        file.truncate(GIBIBYTES)
    with pytest.raises(ModelError, match=r"questions\.json: is longer than 1 MiB, which no questions are"):
        decision_rows.read_questions_file(path)

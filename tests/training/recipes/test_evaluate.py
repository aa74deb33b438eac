"""Texts that a checkpoint is measured on."""

from pathlib import Path

import pytest

from polyhead.training.loop.errors import RecipeError
from polyhead.training.recipes import evaluate


def test_a_text_has_a_limit_and_lines_end_as_one_newline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, pairs = tmp_path / "text.txt", tmp_path / "pairs.tsv"
    text.write_bytes(b"one\r\ntwo\rthree\n")
    assert [example.text for example in evaluate.read_examples(text)] == ["one\ntwo\nthree\n"]
    pairs.write_bytes(b"one\teins\r\n\r\ntwo\tzwei")
    assert [(each.text, each.label) for each in evaluate.read_examples(pairs)] == [("one", "eins"), ("two", "zwei")]
    monkeypatch.setattr(evaluate, "MAX_TEXT_BYTES", 1 << 20)
    with text.open("ab") as file:
        file.truncate(8 << 30)
    with pytest.raises(RecipeError, match=r"text\.txt: is longer than 1 MiB, the most that is measured; cut it"):
        evaluate.read_examples(text)

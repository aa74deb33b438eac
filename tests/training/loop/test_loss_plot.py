"""The picture of a run's loss: a journal that cannot be drawn, also a stranger's, is reported and fails no run."""

import json
import os
from pathlib import Path

import pytest

from polyhead.training.loop import loss_plot

STEP = json.dumps({"step": 20, "loss": 2.5, "rate": 0.1, "tokens": 9, "seconds": 0.1})
EVALUATION = json.dumps({"epoch": 1, "step": 20, "loss": 2.25})


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_a_missing_package_is_named(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_plot, "HAS_MATPLOTLIB", False)
    assert "pip install 'polyhead[explain]'" in loss_plot.draw_loss(journal, journal.with_name("loss.png"))


def test_steps_and_evaluations_are_drawn(journal: Path) -> None:
    pytest.importorskip("matplotlib")
    journal.write_text(f"{STEP}\n{EVALUATION}\n")
    assert loss_plot.read_points(journal) == {"rate": [(20, 2.5)], "epoch": [(20, 2.25)]}
    picture = journal.with_name("loss.png")
    assert loss_plot.draw_loss(journal, picture) == "loss.png: the loss over the steps"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("[" * 50_000, "metrics.jsonl, line 2: b'[[["),
        ('{"a":' * 10_000, "metrics.jsonl, line 2: "),
        ("[]", "metrics.jsonl, line 2: b'[]\\n' is no object of JSON"),
        ("no JSON", "metrics.jsonl, line 2: b'no JSON\\n' is no object of JSON"),
        (f'{{"step": {"9" * 6000}}}', "metrics.jsonl, line 2: "),
        (json.dumps({"text": "x" * (1 << 16)}), "metrics.jsonl, line 2: is longer than 64 KiB"),
    ],
)
def test_a_line_that_is_none_of_a_journal_is_named_and_nothing_is_drawn(
    line: str, complaint: str, journal: Path
) -> None:
    pytest.importorskip("matplotlib")
    journal.write_text(f"{STEP}\n{line}\n")
    said = loss_plot.draw_loss(journal, journal.with_name("loss.png"))
    assert said.startswith(f"no loss.png: {complaint}")
    assert len(said) < 400


def test_lines_without_numbers_are_left_out(journal: Path) -> None:
    wrong = [
        {"loss": 1.0, "rate": 1},
        {"step": [], "loss": 1.0, "rate": 1},
        {"step": 1, "loss": "1.0", "epoch": 1},
        {"step": 1, "loss": float("nan"), "epoch": 1},
        {"step": 1, "loss": float("inf"), "epoch": 1},
        {"step": 1, "loss": 1e300, "epoch": 1},
        {"step": True, "loss": 1.0, "epoch": 1},
    ]
    journal.write_text("".join(json.dumps(record) + "\n" for record in wrong) + STEP)
    assert loss_plot.read_points(journal) == {"rate": [(20, 2.5)], "epoch": []}


def test_a_journal_of_gigabytes_is_read_to_the_limit(journal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with journal.open("w") as file:
        file.write(f"{STEP}\n")
        file.truncate(8 << 30)
    pytest.importorskip("matplotlib")
    said = loss_plot.draw_loss(journal, journal.with_name("loss.png"))
    assert said == "no loss.png: metrics.jsonl, line 2: is longer than 64 KiB"
    os.truncate(journal, 0)
    journal.write_text(f"{STEP}\n" * 100)
    monkeypatch.setattr(loss_plot, "MAX_BYTES", 10 * len(STEP) + 10)
    assert len(loss_plot.read_points(journal)["rate"]) == 10


def test_files_that_cannot_be_read_or_written_fail_no_run(journal: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = journal.with_name("loss.png")
    assert loss_plot.draw_loss(journal, picture).startswith("no loss.png: ")
    os.mkfifo(journal)
    assert "is no regular file" in loss_plot.draw_loss(journal, picture)
    journal.unlink()
    journal.write_text(f"{STEP}\n")
    picture.mkdir()
    assert loss_plot.draw_loss(journal, picture).startswith("no loss.png: ")

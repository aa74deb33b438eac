"""`polyhead export` copies the files of a run's result, and nothing else that a run's folder leads to."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from polyhead.service.cli.main import app
from polyhead.training.export import result_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder with an adapter."""
    adapter = tmp_path / "run" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"a": torch.arange(4.0)}, adapter / "adapter_model.safetensors")
    return adapter.parent


def export(run: Path, out: Path) -> str:
    """The sentence that an export ends with; empty if it succeeds."""
    result = CliRunner().invoke(app, ["export", str(run), str(out)])
    assert result.exit_code == (1 if result.stderr else 0), result.exception
    return result.stderr


def test_a_result_is_copied(run: Path, tmp_path: Path) -> None:
    (run / "adapter" / "same.json").symlink_to("adapter_config.json")
    assert not export(run, tmp_path / "out")
    assert sorted(os.listdir(tmp_path / "out")) == ["adapter_config.json", "adapter_model.safetensors", "same.json"]
    assert not (tmp_path / "out" / "same.json").is_symlink()
    assert load_file(tmp_path / "out" / "adapter_model.safetensors")["a"].tolist() == [0, 1, 2, 3]


def move_out(run: Path) -> None:
    """Replace the result by a link to it."""
    shutil.move(run / "adapter", run.parent / "elsewhere")
    (run / "adapter").symlink_to(run.parent / "elsewhere")


def link_weights(run: Path) -> None:
    shutil.move(run / "adapter" / "adapter_model.safetensors", run.parent / "elsewhere")
    (run / "adapter" / "adapter_model.safetensors").symlink_to(run.parent / "elsewhere")


def lengthen(file: str, size: int) -> Callable[[Path], None]:
    """Make a file longer, without blocks on the disk."""
    return lambda run: os.truncate(run / "adapter" / file, size)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (move_out, "'adapter' is no folder inside this one"),
        (link_weights, "adapter_model.safetensors: is a link that leads out of its folder"),
        (lambda run: os.symlink("/etc/hostname", run / "adapter" / "notes"), "notes: is a link that leads out"),
        (lambda run: os.mkfifo(run / "adapter" / "pipe"), "pipe: is no regular file"),
        (lambda run: os.mkfifo(run / "adapter" / "pipe.safetensors"), "pipe.safetensors: is no regular file"),
        (lambda run: (run / "adapter" / "inside").mkdir(), "inside: is no regular file"),
        (lengthen("adapter_config.json", 1 << 40), "adapter_config.json: is longer than 64 MiB"),
        (lengthen("adapter_model.safetensors", 1 << 40), "no tensor has its last"),
        (lambda run: [(run / "adapter" / str(each)).touch() for each in range(99)], "it has more than 100 files"),
    ],
)
def test_what_is_no_result_is_not_copied(
    run: Path, tmp_path: Path, change: Callable[[Path], None], complaint: str
) -> None:
    change(run)
    assert complaint in export(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_copy_leaves_room_on_the_disk(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_folder.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 40, 1 << 40, 0))
    assert "0 MiB of weights are to be copied, and 0 MiB of the disk are free" in export(run, tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def test_small_files_are_bounded_together(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_folder, "MAX_SMALL_BYTES", 1)
    assert "adapter_config.json: files without weights have" in export(run, tmp_path / "out")


@pytest.mark.parametrize("kind", ["file", "link"])
def test_an_export_needs_a_folder(run: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    out.touch() if kind == "file" else out.symlink_to(tmp_path / "none")
    assert "name a new or an empty folder" in export(run, out)

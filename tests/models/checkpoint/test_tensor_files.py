"""A tensor is read from the file that was described, or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from polyhead.models.checkpoint.gguf_header import read_header
from polyhead.models.checkpoint.tensor_files import TensorEntry, has_same_bytes, read_safetensors
from polyhead.models.core import files
from polyhead.models.core.errors import CheckpointError
from tests.support import gguf_files


def swap(path: Path) -> None:
    """Put an equal file in its place."""
    shutil.copy2(path, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def touch(path: Path) -> None:
    os.utime(path, ns=(1, 1))


def put(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace_file(path: Path) -> None:
        path.unlink()
        make(path)

    return replace_file


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another file": (swap, "was changed or replaced after the model was described"),
    "a longer file": (lengthen, "was changed or replaced after the model was described"),
    "a file of another time": (touch, "was changed or replaced after the model was described"),
    "a pipe": (put(os.mkfifo), "is no regular file"),
    "a folder": (put(Path.mkdir), "is no regular file"),
    "a link to a device": (put(lambda path: path.symlink_to("/dev/zero")), "is no regular file"),
    "nothing": (Path.unlink, "cannot be read: .*No such file"),
}


def describe(path: Path) -> TensorEntry:
    if path.suffix == ".gguf":
        gguf_files.write(path, "llama", {}, {"a": torch.ones(2, 32)})
        return read_header(path)[1]["a"]
    save_file({"a": torch.ones(2, 32)}, path)
    return read_safetensors(path)["a"]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["a.safetensors", "a.gguf"])
def test_a_file_that_took_the_place_of_the_described_one_is_refused(tmp_path: Path, name: str, change: str) -> None:
    path, (alter, message) = tmp_path / name, CHANGES[change]
    entry = describe(path)
    assert bool((entry.read(torch.float32, torch.device("cpu")) == 1).all())
    alter(path)
    for read in (
        lambda: entry.read(torch.float32, torch.device("cpu")),
        entry.read_bytes,
        lambda: has_same_bytes(entry, entry),
    ):
        with pytest.raises(CheckpointError, match=message) as raised:
            read()
        assert raised.value.file == str(path)


def test_a_pipe_that_appears_between_the_check_and_the_opening_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_bytes(b"x")
    seen = (tmp_path / "file").stat()
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(files.os, "stat", lambda path, **_: seen)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match="is no regular file"):
        files.open_regular(tmp_path / "pipe")
    assert len(os.listdir("/proc/self/fd")) == before

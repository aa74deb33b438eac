"""Copies the files of a run's result, adapter/, model/ or vocabulary/, into another folder.

A run's folder may come from somebody else, in an archive, which keeps links.  So its files go through the checks of
loading: a link that leads out of the folder, a pipe or a device is refused, and sizes are bounded.
"""

import os
import shutil
from itertools import islice
from pathlib import Path

from polyhead.models.checkpoint.tensor_files import read_safetensors
from polyhead.models.core.files import copy_file, open_member, read_copyable, subfolder

from ..loop.errors import RecipeError

WEIGHTS_SUFFIX = ".safetensors"
MAX_FILES = 100  # files of a result; training writes ten
MAX_SMALL_BYTES = 256 << 20  # bytes of all files without weights; each has 64 MiB at most, as `copy_file` has it
RESERVED_BYTES = 256 << 20  # bytes of the disk that a copy leaves free
PIECE_BYTES = 1 << 20  # bytes of weights in memory at a time


def copy_result(run: Path, name: str, out: Path) -> None:
    """Copy the files of the folder `name` of a run into `out`, which may exist.

    Raises CheckpointError for a file or folder that is not read, or weights that are no safetensors file; RecipeError
    if there are too many bytes, or if `out` cannot be written.
    """
    files = list_result(subfolder(run, name))
    try:
        out.mkdir(parents=True, exist_ok=True)
        weights = sum(file.stat().st_size for file in files if file.suffix == WEIGHTS_SUFFIX)
        if weights + MAX_SMALL_BYTES + RESERVED_BYTES > (free := shutil.disk_usage(out).free):
            message = f"{weights >> 20} MiB of weights are to be copied, and {free >> 20} MiB of the disk are free"
            raise RecipeError(f"{out}: {message}; {RESERVED_BYTES + MAX_SMALL_BYTES >> 20} MiB stay free")
        for file in files:
            copy = copy_weights if file.suffix == WEIGHTS_SUFFIX else copy_file
            copy(file, out / file.name)
    except OSError as error:
        raise RecipeError(f"{out}: it cannot be written: {error.strerror or error}") from None


def list_result(folder: Path) -> list[Path]:
    """Return the files of a result, each checked.  Raises as `copy_result` does."""
    try:
        with os.scandir(folder) as found:
            names = sorted(entry.name for entry in islice(found, MAX_FILES + 1))
    except OSError as error:
        raise RecipeError(f"{folder}: it cannot be read: {error.strerror}") from None
    if len(names) > MAX_FILES:
        raise RecipeError(f"{folder}: it has more than {MAX_FILES} files, and training writes ten; remove the others")
    files, size = [folder / name for name in names], 0
    for file in files:
        if file.suffix == WEIGHTS_SUFFIX:
            read_safetensors(file)  # its header, and whether the tensors fill the file
        else:
            size += len(read_copyable(file))
        if size > MAX_SMALL_BYTES:
            most = f"files without weights have {MAX_SMALL_BYTES >> 20} MiB at most"
            raise RecipeError(f"{file}: {most}; remove what a model does not need")
    return files


def copy_weights(source: Path, target: Path) -> None:
    """Copy a safetensors file that `list_result` has checked.  Raises CheckpointError as `open_member`, and OSError."""
    with open_member(source) as file, target.open("wb") as out:
        shutil.copyfileobj(file, out, PIECE_BYTES)

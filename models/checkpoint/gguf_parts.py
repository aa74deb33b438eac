"""GGUF files in several parts, as llama.cpp's split tool writes them: NAME-00001-of-00003.gguf and so on.

The first part has all metadata; the header of each part has the places of its tensors. All parts lie in one folder.
"""

import os
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.files import MAX_LISTED_FILES, open_member, open_regular
from .gguf_header import read_header
from .tensor_files import TensorEntry, check_tensor_count

PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
MAX_PARTS = 1024  # of a file; published ones have a few dozen
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def read_parts(
    path: Path, open_file: Callable[[Path], BinaryIO] = open_regular
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """The metadata by key, and the tensors of all parts by name. `path` is the whole file, or its first part, which
    `open_file` opens; further parts are opened as members of their folder.

    CheckpointError names the part that is missing, or that belongs elsewhere.
    """
    metadata, entries = read_header(path, open_file)
    count = metadata.get(COUNT, 1)
    if count in (0, 1):
        return metadata, entries
    if type(count) is not int or not 1 < count <= MAX_PARTS:
        message = f"{COUNT} is {show_value(count)}; files of up to {MAX_PARTS} parts are read"
        raise UnsupportedError(message, file=str(path))
    parts = locate_parts(path, count)
    check_part(path, metadata, 1, count)
    for number, part in enumerate(parts[1:], 2):
        if not part.exists():
            message = f"part {number} of {count} is missing; all parts belong into one folder"
            raise CheckpointError(message, file=str(part))
        more_metadata, more = read_header(part, open_member)
        check_part(part, more_metadata, number, count)
        if twice := next((name for name in more if name in entries), None):
            message = f"{entries[twice].file.name} has it too: are these parts of one file?"
            raise CheckpointError(message, file=str(part), tensor=twice)
        entries |= more
        check_tensor_count(path, len(entries))
    if (expected := metadata.get(TENSORS, len(entries))) != len(entries):
        message = f"{TENSORS} is {show_value(expected)}, but its {count} parts have {len(entries)} tensors"
        raise CheckpointError(f"{message}: is one of them of another file?", file=str(path))
    return metadata, entries


def locate_parts(first: Path, count: int) -> list[Path]:
    """The paths of all parts. CheckpointError if the name of `first` is not that of the first of `count` parts."""
    found = PART_NAME.fullmatch(first.name)
    if not found or int(found["count"]) != count:
        form = f"NAME-00001-of-{count:05}.gguf"
        message = f"it is one of {count} parts, which are found by their names; name the first one {form}"
        raise CheckpointError(message, file=str(first))
    paths = [first.with_name(f"{found['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    if int(found["number"]) != 1:
        message = f"it is part {int(found['number'])} of {count}; name the first part, {paths[0].name}"
        raise UnsupportedError(message, file=str(first))
    return paths


def check_part(path: Path, metadata: dict[str, Any], number: int, count: int) -> None:
    """CheckpointError unless the metadata is that of part `number`, counted from 1, of `count`."""
    found = metadata.get(NUMBER), metadata.get(COUNT)
    if found != (number - 1, count):
        message = f"its name is that of part {number} of {count}, which has {NUMBER} {number - 1} and {COUNT} {count}"
        raise CheckpointError(f"{message}; it has {show_value(found[0])} and {show_value(found[1])}", file=str(path))


def find_split_file(folder: Path) -> Path | None:
    """The first part in a folder without config.json whose GGUF files are the parts of one file; None for other
    folders. Only names are compared. CheckpointError if the folder cannot be read.
    """
    if (folder / "config.json").exists():
        return None
    try:
        with os.scandir(folder) as listed:
            names = [each.name for each in islice(listed, MAX_LISTED_FILES) if each.name.endswith(".gguf")]
    except OSError as error:
        raise CheckpointError(f"cannot be read: {error.strerror}", file=str(folder)) from None
    found = [PART_NAME.fullmatch(name) for name in names]
    stems = {(part["stem"], part["count"]) for part in found if part}
    if len(stems) != 1 or not all(found):
        return None
    [(stem, count)] = stems
    return folder / f"{stem}-00001-of-{count}.gguf"

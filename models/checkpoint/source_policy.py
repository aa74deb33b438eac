"""Where sources may lie: what a name that somebody gives may reach on this machine.

Knows nothing of what is there.  The one idea: a path is where it really leads, links followed, and that is decided
before anything there is looked at; so who may not reach a folder doesn't learn whether it exists.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from ..core.errors import CheckpointError, truncate
from . import hub


@dataclass(frozen=True)
class SourcePolicy:
    """Folders and files under `root`, to which paths are relative; a source that is one of `known`, letter for letter,
    may lie anywhere, and is relative to where the process works."""

    root: Path
    known: frozenset[str] = frozenset()

    def for_source(self, source: str) -> "SourcePolicy":
        """What a source may reach in turn, that names another."""
        return ANYWHERE if source in self.known else self

    def locate(self, source: str) -> Path:
        """Where it lies, fetched if it is an id on the hub.  CheckpointError if it is nowhere, or out of reach."""
        path = self.for_source(source)._path(source)
        if source and os.path.exists(path):
            return path
        if hub.is_id(source):
            return hub.download(source)
        if "://" in source:
            raise CheckpointError("a URL is not read; give a folder, a file or an id on the hub, ORGANIZATION/NAME")
        form = "ORGANIZATION/NAME, or ORGANIZATION/NAME@REVISION"
        if "@" in source and not source.startswith(("/", ".", "~")):  # meant as an id: there is no folder to hide
            raise CheckpointError(f"{truncate(source, 200)!r} is no id on the hub; its form is {form}")
        raise CheckpointError(f"there is no such folder or file, and it is no id on the hub ({form})", file=source)

    def exists(self, source: str) -> bool:
        """Whether a folder or file is called so."""
        try:
            return os.path.exists(self.for_source(source)._path(source))
        except CheckpointError:
            return False

    def _path(self, source: str) -> Path:
        if self.root == ANYWHERE.root:
            return Path(os.path.expanduser(source))
        root = os.path.realpath(self.root)
        real = Path(os.path.realpath(os.path.join(root, source.replace("\0", "?"))))  # no file has that in its name
        if not real.is_relative_to(root):
            message = "lies outside of the folder in which models named over HTTP must lie; see the setting model_root"
            raise CheckpointError(message, file=source)
        return real


ANYWHERE = SourcePolicy(Path("/"))

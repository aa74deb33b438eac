"""Which files and folders a source may be, on this machine. Links are followed and the real path is checked before the
file system is accessed in any other way, so a client cannot learn whether a forbidden folder exists."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from ..core.errors import CheckpointError, truncate
from . import hub


@dataclass(frozen=True)
class SourcePolicy:
    """Files and folders under `root`, to which paths are relative. A source that equals one of `known` may be anywhere,
    and is relative to the working directory."""

    root: Path
    known: frozenset[str] = frozenset()
    downloads: hub.DownloadOptions = hub.ANY_DOWNLOAD

    def for_source(self, source: str) -> "SourcePolicy":
        """The policy for sources that are named by `source`, as the base of an adapter."""
        return replace(ANY_SOURCE, downloads=self.downloads) if source in self.known else self

    def locate(self, source: str) -> Path:
        """The path of a source, downloaded if it is an id on the hub. CheckpointError if it does not exist or is not
        allowed."""
        path = self.for_source(source)._path(source)
        if source and os.path.exists(path):
            return path
        if hub.is_id(source):
            return hub.download(source, self.downloads)
        if "://" in source:
            raise CheckpointError("a URL is not read; give a folder, a file or an id on the hub, ORGANIZATION/NAME")
        # An id on the hub, so there is no folder whose existence must be hidden.
        if "@" in source and not source.startswith(("/", ".", "~")):
            raise CheckpointError(f"{truncate(source, 200)!r} is no id on the hub; its form is {hub.FORMS}")
        raise CheckpointError(f"there is no such folder or file, and it is no id on the hub ({hub.FORMS})", file=source)

    def exists(self, source: str) -> bool:
        """Whether an allowed folder or file has this name."""
        try:
            return os.path.exists(self.for_source(source)._path(source))
        except CheckpointError:
            return False

    def _path(self, source: str) -> Path:
        if self.root == ANY_SOURCE.root:
            return Path(os.path.expanduser(source))
        root = os.path.realpath(self.root)
        # A null byte, which no file name contains.
        real = Path(os.path.realpath(os.path.join(root, source.replace("\0", "?"))))
        if not real.is_relative_to(root):
            message = "lies outside of the folder in which models named over HTTP must lie; see the setting model_root"
            raise CheckpointError(message, file=source)
        return real


ANY_SOURCE = SourcePolicy(Path("/"))

"""Loads checkpoints by their name on the Hugging Face hub. The extra `hub` installs huggingface_hub; it imports its
parts (and an HTTP client) only when something is downloaded.

| source | what is loaded |
|---|---|
| `org/name` | the folder with safetensors, or the only GGUF model, or its Q4_K_M |
| `org/name@revision` | the same at a branch, a tag or a commit |
| `org/name:Q8_0` | the GGUF model of that quantisation, split sets too |
| `org/name/folder/file.gguf` | that file |

The library reads HF_ENDPOINT (a mirror), HF_TOKEN, HF_HOME (the cache) and HF_HUB_OFFLINE. Without the hub, what is in
the cache is loaded.
"""

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from logging import getLogger
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..core.errors import CheckpointError, UnsupportedError, show_value
from ..core.json_files import INDEX_JSON
from ..core.turns import iterate_by_parts
from .folder_files import read_json
from .hub_files import (
    HubFile,
    choose_gguf,
    choose_onnx,
    choose_small_files,
    choose_weights,
    has_safetensors,
    index_shards,
    is_usable_name,
    list_gguf_sets,
    unread_weights_error,
)
from .hub_requests import OTHER_ERRORS, library_part, read_description
from .hub_transfer import Progress, Repository, download_files, remember_revision
from .hub_watch import CheckWanted, TooSlowError, always_wanted
from .unread_formats import INDEX

# No part begins with a dot and none is empty: names and revisions are looked up as paths in the cache.
SOURCE = re.compile(
    r"(?!.*\.\.)(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)"
    r"(/(?P<file>(\w[\w.-]*/)*\w[\w.-]*\.gguf))?"
    r"(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?"
    r"(:(?P<quantisation>[A-Za-z0-9][\w.-]*))?",
    re.ASCII,
)
FORMS = "ORGANIZATION/NAME, or with @REVISION, :QUANTISATION or the name of a GGUF file after it"
COMMIT = re.compile(r"[0-9a-f]{40}([0-9a-f]{24})?")
DEFAULT_REVISION = "main"
MAX_LISTED = 20_000  # files of a repository
log = getLogger(__name__)

HAS_HUB_LIBRARY = find_spec("huggingface_hub") is not None


def ignore_progress(done: int, total: int) -> None:
    """The default progress callback: does nothing."""


@dataclass(frozen=True)
class DownloadOptions:
    """`progress` is called with the bytes downloaded so far and in all, on several threads; what it raises ends the
    download. `max_bytes` limits the size of a checkpoint; 0: only by what is free on the disk. `check_wanted` is called
    every second on several threads, also while nothing comes; what it raises ends the download, too.
    """

    progress: Progress = ignore_progress
    max_bytes: int = 0
    check_wanted: CheckWanted = always_wanted


ANY_DOWNLOAD = DownloadOptions()


@dataclass(frozen=True)
class HubSource:
    """A model on the hub; `file`, `revision` and `quantisation` are empty where the source does not name them."""

    name: str
    file: str
    revision: str
    quantisation: str

    @classmethod
    def parse(cls, source: str) -> "HubSource | None":
        """None if the source has no form of a name on the hub."""
        found = SOURCE.fullmatch(source)
        if found is None or (found["file"] and found["quantisation"]):
            return None
        return cls(found["name"], *(found[part] or "" for part in ("file", "revision", "quantisation")))

    @property
    def is_gguf(self) -> bool:
        return bool(self.file or self.quantisation)


def is_id(source: str) -> bool:
    """Whether a source has the form of a name on the hub."""
    return HubSource.parse(source) is not None


def download(source: str, options: DownloadOptions = ANY_DOWNLOAD) -> Path:
    """The folder or GGUF file of a checkpoint, downloaded or from the cache. CheckpointError if that fails."""
    if not HAS_HUB_LIBRARY:
        raise UnsupportedError(
            f"{show_value(source, 1000)} is no folder or file here, and to fetch it from the hub an extra is needed: "
            "pip install 'polyhead[hub]'"
        )
    wanted = HubSource.parse(source)
    assert wanted is not None
    try:
        return download_parsed(source, wanted, options)
    except CheckpointError as error:
        if error.file:
            raise
        raise type(error)(f"{show_value(source, 1000)}, on the hub: {error}") from None
    except library_errors() as error:
        raise CheckpointError(
            f"{show_value(source, 1000)} is no folder or file here, and the hub did not send it: {explain(error)}"
        ) from None


def download_parsed(source: str, wanted: HubSource, options: DownloadOptions) -> Path:
    """As `download`, with the errors of the library as they are."""
    no_answer: tuple[type[Exception], ...] = (*library_errors(), TooSlowError)
    try:
        repository, files = ask_hub(source, wanted, options.check_wanted)
    except no_answer as error:
        options.check_wanted()
        if isinstance(error, library_part("errors").RevisionNotFoundError):
            raise
        cached = find_cached(source, wanted)
        if cached is None and isinstance(error, library_part("errors").OfflineModeIsEnabled):
            raise CheckpointError("HF_HUB_OFFLINE is set, and the cache does not have it") from None
        if cached is None:
            raise
        log.warning("%s: %s; its files in the cache are used, revision %s", source, explain(error), cached[0].commit)
        return choose_path(*cached, wanted, options)
    path = choose_path(repository, files, wanted, options)
    remember_revision(repository, wanted.revision or DEFAULT_REVISION)
    log.info("%s is revision %s, in %s", source, repository.commit, path)
    return path


def library_errors() -> tuple[type[Exception], ...]:
    """What the library raises: errors of its HTTP client, of the file system, of values, and of its own protocol."""
    return library_part("errors").HTTPError, *OTHER_ERRORS


def explain(error: Exception) -> str:
    """A sentence on why the hub did not send something."""
    kinds = library_part("errors")
    if isinstance(error, kinds.GatedRepoError):
        return "its terms must be accepted on its page first; HF_TOKEN then has a token of that account"
    if isinstance(error, kinds.RepositoryNotFoundError):
        return "there is no such repository, or it is private; HF_TOKEN then has a token that may read it"
    if isinstance(error, kinds.RevisionNotFoundError):
        return "the repository has no such revision"
    if isinstance(error, kinds.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def ask_hub(source: str, wanted: HubSource, check_wanted: CheckWanted) -> tuple[Repository, list[HubFile]]:
    """The repository at the wanted revision, and its files. Raises the library's errors, and CheckpointError for a
    description that is none."""
    revision = f"/revision/{quote(wanted.revision, safe='')}" if wanted.revision else ""
    url = f"{library_part('constants').ENDPOINT}/api/models/{wanted.name}{revision}?blobs=true"
    answer = read_description(url, check_wanted)
    commit, siblings = answer.get("sha"), answer.get("siblings") or []
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise CheckpointError(f"the hub names the commit {show_value(commit)}, which is none")
    if isinstance(siblings, list) and len(siblings) > MAX_LISTED:
        raise CheckpointError(f"the repository has {len(siblings)} files; {MAX_LISTED} are the most")
    if not isinstance(siblings, list) or not all(map(is_file_entry, siblings)):
        raise CheckpointError("the hub's description should have a list of files with names")
    listed = iterate_by_parts(siblings, check_wanted)
    files = [read_file_entry(sibling) for sibling in listed if is_usable_name(sibling["rfilename"])]
    return Repository(wanted.name, commit, storage_of(wanted.name), source), files


def is_file_entry(sibling: Any) -> bool:
    return isinstance(sibling, dict) and isinstance(sibling.get("rfilename"), str)


def read_file_entry(sibling: Mapping[str, Any]) -> HubFile:
    """A file as the hub lists it. What is no digest is left out. A size that is none is -1."""
    large, size = sibling.get("lfs"), sibling.get("size")
    digest = large.get("sha256") if isinstance(large, dict) else sibling.get("blobId")
    known = isinstance(digest, str) and COMMIT.fullmatch(digest)
    return HubFile(sibling["rfilename"], size if type(size) is int and size >= 0 else -1, str(digest) if known else "")


def storage_of(name: str) -> Path:
    """The folder of a repository in the cache."""
    return Path(library_part("constants").HF_HUB_CACHE).expanduser() / f"models--{name.replace('/', '--')}"


def find_cached(source: str, wanted: HubSource) -> tuple[Repository, list[HubFile]] | None:
    """The repository and those of its files that are in the cache; None if there are none."""
    storage, revision = storage_of(wanted.name), wanted.revision or DEFAULT_REVISION
    commit = revision
    try:
        if not COMMIT.fullmatch(revision):
            commit = (storage / "refs" / revision).read_text().strip()
    except (OSError, ValueError):
        return None
    repository = Repository(wanted.name, commit, storage, source)
    if not COMMIT.fullmatch(commit) or not repository.snapshot.is_dir():
        return None
    files = []
    for folder, _, names in os.walk(repository.snapshot):
        paths = [Path(folder) / name for name in names]
        files += [
            HubFile(str(path.relative_to(repository.snapshot)), path.stat().st_size) for path in paths if path.exists()
        ]
    return repository, files


def choose_path(
    repository: Repository, files: Collection[HubFile], wanted: HubSource, options: DownloadOptions
) -> Path:
    """The folder or GGUF file of a repository's model, with all of its files in the cache."""
    if wanted.is_gguf or (not has_safetensors(files) and list_gguf_sets(files)):
        parts = choose_gguf(files, wanted.quantisation, wanted.file).parts
        download_files(repository, parts, options.progress, options.max_bytes, options.check_wanted)
        return repository.snapshot / parts[0].name
    graph = [] if has_safetensors(files) else choose_onnx(files)
    if not has_safetensors(files) and not graph:
        raise unread_weights_error([file.name for file in files])
    small = choose_small_files(files)
    download_files(repository, small, options.progress, options.max_bytes, options.check_wanted)
    index = repository.snapshot / INDEX
    weights = graph or choose_weights(files, index_shards(read_json(index, limit=INDEX_JSON)) if index.exists() else ())
    rest = replace(options, max_bytes=options.max_bytes and max(options.max_bytes - sum(f.size for f in small), 1))
    download_files(repository, weights, rest.progress, rest.max_bytes, rest.check_wanted)
    return repository.snapshot

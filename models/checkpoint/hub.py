"""Downloads checkpoints by their id on the Hugging Face hub. The extra `hub` installs huggingface_hub; it imports its
parts (and an HTTP client) only when something is downloaded."""

import re
from importlib.util import find_spec
from pathlib import Path

from ..core.errors import CheckpointError, UnsupportedError, show_value

# No part begins with a dot and none is empty: a revision is looked up as a path in the cache.
ID = re.compile(
    r"(?!.*\.\.)(?P<name>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>\w[\w.-]*(/\w[\w.-]*)*))?", re.ASCII
)
PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.jinja")  # no pickles, no code, no second formats

HAS_HUB_LIBRARY = find_spec("huggingface_hub") is not None
if HAS_HUB_LIBRARY:
    import huggingface_hub


def is_id(source: str) -> bool:
    """Whether a source has the form "org/name" or "org/name@revision"."""
    return ID.fullmatch(source) is not None


def download(source: str) -> Path:
    """The folder of a checkpoint's files, downloaded or from the cache. CheckpointError if that fails."""
    if not HAS_HUB_LIBRARY:
        raise UnsupportedError(
            f"{show_value(source, 1000)} is no folder or file here, and to fetch it from the hub an extra is needed: "
            "pip install 'polyhead[hub]'"
        )
    found = ID.fullmatch(source)
    assert found is not None
    try:
        return Path(
            huggingface_hub.snapshot_download(found["name"], revision=found["revision"], allow_patterns=list(PATTERNS))
        )
    except (OSError, ValueError) as error:  # the library's own errors are subclasses
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise CheckpointError(
            f"{show_value(source, 1000)} is no folder or file here, and the hub did not send it: {reason}"
        ) from None

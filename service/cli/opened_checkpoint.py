"""A checkpoint in this process, for commands that look into one: `opened(source)`.

Knows no requests and no engine.  Torch computes, in float32, on the threads of this machine: who explains a network
wants its numbers, not its fastest ones.
"""

from pathlib import Path

import torch

from polyhead.models.checkpoint import Checkpoint, load

from ..config.settings import read
from ..runtime import quickstart
from ..runtime.placement import placed

HOW = {"executor": "torch", "precision": "float32"}  # settings of those commands


def opened(source: str) -> Checkpoint:
    """Of a source as for serve, or the name of a quick-start model, which is fetched if it has to be.

    ModelError where it cannot be read, SettingsError where this process is not set to compute so.
    """
    settings = read(HOW)
    place = placed(settings)
    torch.set_num_threads(place.torch_threads)
    return load(found(source, settings.model_dir), dtype=place.dtype, device=place.device)


def found(source: str, folder: Path) -> str:
    """A folder of that name comes first."""
    known = quickstart.sources(folder)
    if source not in known or Path(source).exists():
        return source
    quickstart.fetch_all(folder)
    return known[source]

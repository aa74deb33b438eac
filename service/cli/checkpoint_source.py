"""Loads a checkpoint for commands that inspect one.

Torch computes in float32: explanations need exact numbers more than speed.
"""

from pathlib import Path

import torch

from polyhead.models.checkpoint import Checkpoint, load

from ..config.settings import read_settings
from ..runtime import quickstart
from ..runtime.placement import choose_placement

REFERENCE_SETTINGS = {"executor": "torch", "precision": "float32"}  # settings of these commands


def open_checkpoint(source: str) -> Checkpoint:
    """Load a source as for serve, or a quick-start model by its name, which is fetched if needed.

    Raises ModelError if it cannot be read, SettingsError if the settings do not allow it.
    """
    settings = read_settings(REFERENCE_SETTINGS)
    placement = choose_placement(settings)
    torch.set_num_threads(placement.torch_threads)
    return load(resolve_source(source, settings.model_dir), dtype=placement.dtype, device=placement.device)


def resolve_source(source: str, folder: Path) -> str:
    """Return the source of a quick-start model by its name, else `source` itself.  An existing path comes first."""
    quickstart_sources = quickstart.sources(folder)
    if source not in quickstart_sources or Path(source).exists():
        return source
    quickstart.fetch_all(folder)
    return quickstart_sources[source]

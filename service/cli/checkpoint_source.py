"""Loads a checkpoint for commands that inspect one.

Torch computes in float32: explanations need exact numbers more than speed.
"""

from pathlib import Path

import torch

from polyhead.models.checkpoint import Checkpoint, describe_source, ignore_progress, load_described
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.folder_files import JsonObject

from ..config.settings import read_settings
from ..runtime import quickstart
from ..runtime.placement import choose_placement
from ..runtime.tokenizer_check import TokenizerCheck

REFERENCE_SETTINGS = {"executor": "torch", "precision": "float32"}  # settings of these commands


def open_checkpoint(source: str) -> Checkpoint:
    """Load a source as for serve, or a quick-start model by its name, which is fetched if needed.

    Raises ModelError if it cannot be read, SettingsError if the settings do not allow it.
    """
    settings = read_settings(REFERENCE_SETTINGS)
    placement = choose_placement(settings)
    torch.set_num_threads(placement.torch_threads)
    source = quickstart.resolve_source(source, settings.model_dir)
    described = describe_checked(source)
    return load_described(source, described, dtype=placement.dtype, device=placement.device, progress=ignore_progress)


def describe_checked(source: str) -> Description:
    """Describe a source whose tokenizer is tried in a child process first, as serve does.  Raises ModelError."""
    return describe_source(source, folder_check=try_tokenizer_apart)


def try_tokenizer_apart(source: Path, fields: JsonObject) -> int:
    """Have a child process, which ends then, try the tokenizer of a folder or of a GGUF file's metadata `fields`.
    Return the bytes that it takes in memory.

    Raises CheckpointError as TokenizerCheck does.
    """
    check = TokenizerCheck()
    try:
        return check.check_folder(source, fields)
    finally:
        check.close()

"""Copies of checkpoints with changes."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support import checkpoints


def edited(folder: Path, target: Path, file: str = "config.json", **changes: Any) -> Path:
    """A copy of a checkpoint with changed values in a JSON file; None removes a value."""
    if folder != target:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    path = target / file
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    checkpoints.write_json(path, {key: value for key, value in values.items() if value is not None})
    return target


def with_tensors(folder: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """A copy of a checkpoint with its tensors changed."""
    if folder != target:
        shutil.copytree(folder, target, dirs_exist_ok=True)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return target

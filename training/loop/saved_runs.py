"""Saves and restores a training run: weights, optimizer state, random states and progress.

All of it is one safetensors file, with the rest as JSON in its metadata.  It replaces the previous file atomically, so
a run that is killed at any time can be resumed.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from .errors import RecipeError

RANDOM_STATE = "chance"  # prefix of torch's random states, by device


def named_tensors(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return trained parameters and buffers by name, each once, in a stable order."""
    found: dict[int, tuple[str, Tensor]] = {}
    for number, module in enumerate(modules):
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        for name, tensor in [*trained, *module.named_buffers()]:
            found.setdefault(id(tensor), (f"{number}.{name}", tensor))
    return dict(found.values())


def write_run(
    path: Path, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer, progress: Mapping[str, Any]
) -> None:
    """Save a run; `progress` is its progress, as JSON values."""
    tensors = {f"weight.{name}": tensor.detach() for name, tensor in named_tensors(modules).items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{kind}": torch.as_tensor(value) for kind, value in state.items()}
    tensors |= {f"{RANDOM_STATE}.{device}": state for device, state in random_states().items()}
    replace_file(path, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, progress)


def write_weights(path: Path, modules: Sequence[nn.Module]) -> None:
    """Save the weights only."""
    replace_file(
        path, {f"weight.{name}": each.detach().cpu().contiguous() for name, each in named_tensors(modules).items()}, {}
    )


def replace_file(path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Replace a file atomically, also if the machine crashes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".part")
    with scratch.open("wb") as file:
        file.write(save(dict(tensors), metadata={"place": json.dumps(progress)}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)


def read_run(path: Path, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore a run, and return its progress.  Raises RecipeError if the file is of another network."""
    tensors, progress = read_tensors(path)
    copy_weights(path, tensors, modules)
    states: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, _, rest = name.partition(".")
        if kind == "optimizer":
            number, _, kind_name = rest.partition(".")
            states.setdefault(int(number), {})[kind_name] = tensor
        elif kind == RANDOM_STATE:
            torch.set_rng_state(tensor) if rest == "cpu" else torch.cuda.set_rng_state(tensor, rest)
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return progress


def read_weights(path: Path, modules: Sequence[nn.Module]) -> None:
    """Load the weights only, of a run or of its best evaluation."""
    copy_weights(path, read_tensors(path)[0], modules)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["place"])  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{path}: no run can be resumed from it: {error}") from None


@torch.no_grad()
def copy_weights(path: Path, tensors: Mapping[str, Tensor], modules: Sequence[nn.Module]) -> None:
    tensors_here, saved_names = (
        named_tensors(modules),
        {name.removeprefix("weight.") for name in tensors if name.startswith("weight.")},
    )
    if differing := saved_names ^ tensors_here.keys():
        raise RecipeError(f"{path}: it is of another network: {min(differing)} is only in one of both")
    for name, tensor in tensors_here.items():
        saved = tensors[f"weight.{name}"]
        if saved.shape != tensor.shape:
            raise RecipeError(f"{path}: it is of another network: {name} is {list(saved.shape)} there")
        tensor.copy_(saved)


def random_states() -> dict[str, Tensor]:
    """Return the states of torch's random number generators."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {"cpu": torch.get_rng_state(), **{f"cuda:{number}": torch.cuda.get_rng_state(number) for number in gpus}}

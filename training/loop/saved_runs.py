"""Saves and restores a training run: weights, optimizer state, random states and progress.

All of it is one safetensors file, with the rest as JSON in its metadata.  It replaces the previous file atomically, so
a run that is killed at any time can be resumed.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from polyhead.models.checkpoint.tensor_files import TensorEntry, read_metadata, read_safetensors
from polyhead.models.core.errors import CheckpointError, show_value

from .errors import RecipeError

RANDOM_STATE = "chance"  # prefix of torch's random states, by device
WEIGHT = "weight."  # before the names of trained parameters and buffers
MAX_DIGITS = 10  # of the number of a parameter
STEP, MOMENTS = "step", ("exp_avg", "exp_avg_sq")  # AdamW's states of a parameter: a number, and two of its shape


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
    tensors = {f"{WEIGHT}{name}": tensor.detach() for name, tensor in named_tensors(modules).items()}
    for number, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{number}.{kind}": torch.as_tensor(value) for kind, value in state.items()}
    tensors |= {f"{RANDOM_STATE}.{device}": state for device, state in random_states().items()}
    replace_file(path, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, progress)


def write_weights(path: Path, modules: Sequence[nn.Module]) -> None:
    """Save the weights only."""
    replace_file(
        path, {f"{WEIGHT}{name}": each.detach().cpu().contiguous() for name, each in named_tensors(modules).items()}, {}
    )


def replace_file(path: Path, tensors: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    """Replace a file atomically, also if the machine crashes.  Raises RecipeError if that fails, as on a full disk;
    then what was saved before is as it was.
    """
    scratch = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("wb") as file:
            file.write(save(dict(tensors), metadata={"place": json.dumps(progress)}))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):  # its folder, or the whole disk, cannot be used
            scratch.unlink()
        raise RecipeError(f"{path}: the run cannot be saved: {error.strerror}; resume it when it can") from None


def read_run(path: Path, modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Restore a run, and return its progress.  Raises RecipeError if the file is damaged or of another network."""
    entries = read_entries(path)
    progress = read_progress(path)
    check_weights(path, entries, modules)
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states: dict[int, dict[str, Tensor]] = {}
    with open_tensors(path) as file:
        copy_weights(file, modules)
        for name in entries:
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                number, state = check_state(path, entries[name], trained)
                states.setdefault(number, {})[state] = file.get_tensor(name)
            elif kind == RANDOM_STATE:
                restore_random_state(path, rest, file.get_tensor(name))
    for number, found in states.items():
        if missing := next((name for name in (STEP, *MOMENTS) if name not in found), None):
            raise RecipeError(f"{path}: no run can be resumed from it: optimizer.{number}.{missing} is missing")
    optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
    return progress


def read_weights(path: Path, modules: Sequence[nn.Module]) -> None:
    """Load the weights only, of a run or of its best evaluation.  Raises as `read_run` does."""
    check_weights(path, read_entries(path), modules)
    with open_tensors(path) as file:
        copy_weights(file, modules)


def read_entries(path: Path) -> dict[str, TensorEntry]:
    """Return the tensors of a saved run, from its header alone.  Raises RecipeError."""
    try:
        entries = read_safetensors(path)
    except CheckpointError as error:
        raise RecipeError(f"{path}: no run can be resumed from it: {str(error).removeprefix(f'{path}: ')}") from None
    if unknown := next((entry for entry in entries.values() if entry.encoding is None), None):
        raise RecipeError(f"{path}: no run can be resumed from it: {show_value(unknown.name)} is {unknown.kind}")
    return entries


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Open a saved run whose header was read.  Raises RecipeError."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{path}: no run can be resumed from it: {error}") from None


def read_progress(path: Path) -> dict[str, Any]:
    """Return the progress in the metadata of a saved run.  Raises RecipeError."""
    try:
        progress = json.loads(read_metadata(path).get("place", ""))
    except (TypeError, ValueError, RecursionError):
        progress = None
    if not isinstance(progress, dict):
        raise RecipeError(f"{path}: no run can be resumed from it: its metadata has no object of JSON named place")
    return progress


def check_weights(path: Path, entries: Mapping[str, TensorEntry], modules: Sequence[nn.Module]) -> None:
    """Raise RecipeError unless a saved run has the weights of these modules, which may be on the meta device."""
    here = named_tensors(modules)
    saved = {name.removeprefix(WEIGHT): entry.shape for name, entry in entries.items() if name.startswith(WEIGHT)}
    if differing := saved.keys() ^ here.keys():
        raise RecipeError(f"{path}: it is of another network: {show_value(min(differing))} is only in one of both")
    for name, tensor in here.items():
        if saved[name] != tensor.shape:
            raise RecipeError(f"{path}: it is of another network: {name} is {show_value(list(saved[name]))} there")


@torch.no_grad()
def copy_weights(file: Any, modules: Sequence[nn.Module]) -> None:
    """Copy weights that `check_weights` has compared, one tensor after the other."""
    for name, tensor in named_tensors(modules).items():
        tensor.copy_(file.get_tensor(f"{WEIGHT}{name}"))


def check_state(path: Path, entry: TensorEntry, trained: Sequence[Tensor]) -> tuple[int, str]:
    """Return the number of the parameter that a state of the optimizer belongs to, and the state's name.  Raises
    RecipeError unless it has the shape of this state: torch writes to it without a check.
    """
    _, number, state = (*entry.name.split(".", 2), "", "")[:3]
    parameter = int(number) if number.isascii() and number.isdigit() and len(number) < MAX_DIGITS else len(trained)
    if parameter >= len(trained) or state not in (STEP, *MOMENTS):
        raise RecipeError(f"{path}: {show_value(entry.name)} is no state of one of the {len(trained)} parameters")
    shape = () if state == STEP else tuple(trained[parameter].shape)
    if entry.shape != shape:
        named = f"{path}: {show_value(entry.name)} has the shape {show_value(list(entry.shape))}"
        raise RecipeError(f"{named}, that of the parameter's state is {list(shape)}")
    return parameter, state


def check_optimizer(path: Path, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Raise RecipeError for restored states that AdamW cannot have after `step` steps: it divides by what it computes
    from them, and the weights would become NaN.
    """
    for number, state in optimizer.state_dict()["state"].items():
        mean, square = (state[name] for name in MOMENTS)
        if not 1 <= float(state[STEP]) <= step:
            shown = f"optimizer.{number}.{STEP}: {float(state[STEP]):g}"
            raise RecipeError(f"{path}: {shown} should be 1 to {step}, the steps of the run")
        if not mean.isfinite().all() or not square.isfinite().all() or (square < 0).any():
            wrong = "its moments should be finite, and the squares not negative"
            raise RecipeError(f"{path}: optimizer.{number}: {wrong}")


def restore_random_state(path: Path, device: str, state: Tensor) -> None:
    try:
        torch.set_rng_state(state) if device == "cpu" else torch.cuda.set_rng_state(state, device)
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        shown = show_value(f"{RANDOM_STATE}.{device}")
        raise RecipeError(f"{path}: {shown} is no state of a random number generator here: {error}") from None


def random_states() -> dict[str, Tensor]:
    """Return the states of torch's random number generators."""
    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return {"cpu": torch.get_rng_state(), **{f"cuda:{number}": torch.cuda.get_rng_state(number) for number in gpus}}

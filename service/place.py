"""Where networks run and in what format: what the settings ask for, as far as there is such a device.

Knows nothing of models.
"""

from dataclasses import dataclass

import torch

from service.settings import Settings, SettingsError


@dataclass(frozen=True)
class Place:
    """A device and the format of weights and arithmetic on it."""

    device: torch.device
    dtype: torch.dtype


def placed(settings: Settings) -> Place:
    """Raises SettingsError if a GPU is asked for and there is none."""
    present = torch.cuda.is_available()
    if settings.device == "cuda" and not present:
        raise SettingsError("device: cuda is asked for and torch finds no GPU here; use auto or cpu")
    gpu = present and settings.device != "cpu"
    wanted = settings.precision if settings.precision != "auto" else ("bfloat16" if gpu else "float32")
    return Place(torch.device("cuda" if gpu else "cpu"), {"float32": torch.float32, "bfloat16": torch.bfloat16}[wanted])

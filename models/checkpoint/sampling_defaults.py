"""Reads the sampling options that a generator's checkpoint suggests: of a folder those in generation_config.json, of a
GGUF file those under `general.sampling`, and what these leave open from NAME.generation_config.json beside it.
Requests use them for options that they do not set, as vLLM does."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core.errors import CheckpointError, show_value

GGUF_PREFIX = "general.sampling."


@dataclass(frozen=True)
class OptionRange:
    """The range of an option, as requests have it, and its key in GGUF files."""

    least: float
    most: float
    gguf: str
    is_whole: bool = False


SAMPLING_OPTIONS: Mapping[str, OptionRange] = {
    "temperature": OptionRange(0, 100, "temp"),
    "top_k": OptionRange(0, 2**31 - 1, "top_k", is_whole=True),
    "top_p": OptionRange(0, 1, "top_p"),
    "min_p": OptionRange(0, 1, "min_p"),
    "repetition_penalty": OptionRange(0.01, 100, "penalty_repeat"),
}


def read_folder_sampling(file: str, fields: Mapping[str, Any]) -> dict[str, float]:
    """The options in the fields of a generation_config.json. CheckpointError names one that is out of its range."""
    return {
        name: read_option(file, name, fields[name], each)
        for name, each in SAMPLING_OPTIONS.items()
        if fields.get(name) is not None
    }


def read_gguf_sampling(file: str, metadata: Mapping[str, Any]) -> dict[str, float]:
    """The options in the metadata of a GGUF file. CheckpointError names one that is out of its range."""
    keys = {name: GGUF_PREFIX + each.gguf for name, each in SAMPLING_OPTIONS.items()}
    return {
        name: read_option(file, key, metadata[key], SAMPLING_OPTIONS[name])
        for name, key in keys.items()
        if metadata.get(key) is not None
    }


def read_option(file: str, key: str, value: Any, allowed: OptionRange) -> float:
    """The value of an option; -1 of a count means that it excludes nothing, as 0 does."""
    kinds = (int,) if allowed.is_whole else (int, float)
    if allowed.is_whole and value == -1:
        return 0
    if type(value) not in kinds or not allowed.least <= value <= allowed.most:
        kind = "a whole number" if allowed.is_whole else "a number"
        message = f"{key} is {show_value(value)}, which should be {kind} from {allowed.least} to {allowed.most}"
        raise CheckpointError(message, file=file)
    return int(value) if allowed.is_whole else float(value)

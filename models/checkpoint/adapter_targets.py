"""Which of a base's modules PEFT adapts, by the settings of an adapter. PEFT ignores the matrices of all others.

The names are those of the adapter's own tensors, as PEFT compares them (peft.tuners.tuners_utils).
"""

import re
from collections.abc import Callable
from logging import getLogger
from pathlib import Path
from typing import Any

from ..core.errors import UnsupportedError, show_value
from .folder_files import JsonObject
from .module_patterns import UnsupportedPattern, matches, parse_pattern

ALL_LINEAR = "all-linear"
MAX_NAMES = 1024  # of saved modules or of patterns of layers
LAYER_NUMBER = re.compile(r"\d{1,9}")
PLAIN_NAME = re.compile(r"[\w-]+")
log = getLogger(__name__)


def check_target_settings(file: Path, settings: JsonObject) -> None:
    """UnsupportedError for settings that PEFT does not have, or that are no plain names or numbers.

    An expression that is not evaluated here is logged: it leaves no matrix of the file out.
    """
    for key in ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern"):
        value = settings.get(key)
        names = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(name, str) for name in names) or (key == "modules_to_save" and isinstance(value, str)):
            raise _refusal(file, key, value, "a list of names")
        if key in ("modules_to_save", "layers_pattern") and len(names) > MAX_NAMES:
            raise UnsupportedError(f"{key} has {len(names)} names; {MAX_NAMES} are the most", file=str(file))
    layers, targets = settings.get("layers_to_transform"), settings.get("target_modules")
    if layers is not None and not all(type(each) is int for each in _listed(layers)):
        raise _refusal(file, "layers_to_transform", layers, "a number of a layer, or a list of them")
    if isinstance(targets, str) and layers is not None:
        message = "layers_to_transform needs target_modules to be a list of names; merge the adapter with peft"
        raise UnsupportedError(message, file=str(file))
    patterns = _listed(settings.get("layers_pattern") or [])
    if layers is not None and not all(PLAIN_NAME.fullmatch(name) for name in patterns):
        raise _refusal(file, "layers_pattern", settings["layers_pattern"], "plain names; merge the adapter with peft")
    for key in ("target_modules", "exclude_modules"):
        value = settings.get(key)
        if isinstance(value, str) and value.lower() != ALL_LINEAR and not _is_known(value):
            log.warning("%s: %s is an expression that is not evaluated; all matrices of the file are used", file, key)


class AdaptedModules:
    """The modules that an adapter with these settings adapts. `spend` is as for `matches`."""

    def __init__(self, settings: JsonObject, spend: Callable[[int], None]) -> None:
        self._targets, self._excluded = (_names(settings.get(key)) for key in ("target_modules", "exclude_modules"))
        self._saved: list[str] = settings.get("modules_to_save") or []
        layers = settings.get("layers_to_transform")
        self._layers = frozenset(() if layers is None else _listed(layers))
        self._layer_patterns = _listed(settings.get("layers_pattern") or [])
        self._spend = spend

    def find_exclusion(self, module: str) -> str:
        """The setting for which PEFT ignores the matrices of a module; "" if it adapts the module."""
        if self._excluded and self._is_named(self._excluded, module):
            return "exclude_modules"
        self._spend(len(self._saved))
        if any(f".{name}." in f".{module}." for name in self._saved):
            return "modules_to_save"
        if self._targets is None:
            return ""
        if not self._is_named(self._targets, module):
            return "target_modules"
        if not self._layers or module in self._targets or self._find_layer(module) in self._layers:
            return ""
        return "layers_to_transform"

    def is_saved(self, module: str) -> bool:
        """Whether PEFT has a copy of this module, as `modules_to_save` says, and leaves the base's as it is."""
        self._spend(len(self._saved))
        return any(module.endswith(name) for name in self._saved)

    def _is_named(self, names: str | frozenset[str], module: str) -> bool:
        """Whether a pattern is that of the whole name, or names are those of the module or of its end."""
        if isinstance(names, str):
            return matches(names, module, self._spend, whole=True)
        places = [place for place, character in enumerate(module) if character == "."]
        self._spend(len(places))
        return module in names or any(module[place + 1 :] in names for place in places)

    def _find_layer(self, module: str) -> int | None:
        """The number in the module's name after one of the patterns; without these, the first one that is neither its
        first part, nor its second."""
        parts = module.split(".")
        numbered = [place for place, part in enumerate(parts[:-1]) if place and LAYER_NUMBER.fullmatch(part)]
        if not self._layer_patterns:
            return next((int(parts[place]) for place in numbered if place > 1), None)
        self._spend(len(numbered) * len(self._layer_patterns))
        for pattern in self._layer_patterns:
            for place in numbered:
                if parts[place - 1] == pattern:
                    return int(parts[place])
        return None


def _refusal(file: Path, key: str, value: object, wanted: str) -> UnsupportedError:
    return UnsupportedError(f"{key} is {show_value(value)}, which should be {wanted}", file=str(file))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _names(value: Any) -> str | frozenset[str] | None:
    """The names or the pattern of a setting; None for all linear modules, and for what is not evaluated here."""
    if isinstance(value, list):
        return frozenset(value)
    return value if isinstance(value, str) and value.lower() != ALL_LINEAR and _is_known(value) else None


def _is_known(pattern: str) -> bool:
    try:
        parse_pattern(pattern)
    except UnsupportedPattern:
        return False
    return True

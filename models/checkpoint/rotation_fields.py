"""Refuses fields of rotary positions that transformers reads in another way than the family's module does.

transformers has several forms of these fields, and each network follows some of them and ignores the others. What it
would ignore, or fail with, is refused here: the file says something that no answer follows.
"""

from collections.abc import Iterator
from typing import Any

from ..architectures import Family
from ..architectures.family import ORIGINAL, SCALED_CONTEXTS, Json, rope_type
from ..architectures.field_names import STACKS
from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig

OLD, NEW = "rope_scaling", "rope_parameters"
SHARE = "partial_rotary_factor"


def list_stacks(hf: Json) -> list[Json]:
    """The configurations of the stacks inside `hf`; itself if there are none."""
    return [hf[name] for name in STACKS if isinstance(hf.get(name), dict)] or [hf]


def check_rotation_fields(file: str, family: Family, hf: Json, config: ModelConfig) -> None:
    """UnsupportedError that names the field. `config` is what was read from `hf`, with rotary positions."""
    for problem in (problem for stack in list_stacks(hf) for problem in _problems(family, stack, config)):
        raise UnsupportedError(problem, file=file)


def _problems(family: Family, hf: Json, config: ModelConfig) -> Iterator[str]:
    given = [fields for fields in (hf.get(OLD), hf.get(NEW)) if isinstance(fields, dict) and fields]
    if len(given) == 2 and given[0] != given[1]:
        yield f"{OLD} and {NEW} are both there, with other values; only one of them is followed"
    for fields in given:
        has_layers = any(isinstance(each, dict) for each in fields.values())
        if has_layers and not (family.rope_by_layer and fields is hf.get(NEW)):
            yield f"{_name(hf, fields)} has an object for a type of layers; {family.name} networks have one rotation"
        if family.rope_by_layer and fields is hf.get(NEW) and not has_layers and any(_is_set(fields)):
            yield f"{NEW} has no object for each type of layers, full_attention and sliding_attention"
        is_flat = not has_layers and rope_type(fields) in SCALED_CONTEXTS
        if family.rope_by_layer and is_flat and hf.get(ORIGINAL) not in (None, fields.get(ORIGINAL)):
            yield f"{ORIGINAL} is beside {_name(hf, fields)}; {family.name} networks read it only inside of that"
    named = [each[SHARE] for each in _objects(given) if each.get(SHARE) is not None and not _is_proportional(each)]
    top = hf.get(SHARE)
    shares = named if top is None or any(each.get(SHARE) is not None for each in _objects(given)) else [top]
    wrong = [share for share in shares if share != 1 and not _is_latent_share(share, config)]
    if wrong and not family.rotates_share:
        yield f"{SHARE} is {show_value(wrong[0])}: {family.name} networks rotate all features of a head"


def _name(hf: Json, fields: Json) -> str:
    return OLD if fields is hf.get(OLD) else NEW


def _is_set(fields: Json) -> Iterator[bool]:
    return (each is not None for each in fields.values())


def _objects(given: list[Any]) -> list[Json]:
    """The fields of each rotation."""
    return [each for fields in given for each in (fields, *fields.values()) if isinstance(each, dict)]


def _is_proportional(fields: Json) -> bool:
    """Whether the share belongs to the frequencies: all features are rotated, some of them by nothing."""
    return bool(rope_type(fields) == "proportional")


def _is_latent_share(share: Any, config: ModelConfig) -> bool:
    """Whether it is the share that latent attention rotates, whose width has a field of its own."""
    is_number = isinstance(share, int | float)
    return is_number and config.latent is not None and round(config.head_width * share) == config.rotary_width

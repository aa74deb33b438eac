"""Names of models, adapters and keys."""

import re
from collections.abc import Sequence

NAME_PATTERN = re.compile(r"(?=.{1,128}$)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME_CHARS = 128
MAX_LISTED_NAMES = 20  # names in an error
ADAPTER_SEPARATOR = ":"  # between the name of a served model and that of its adapter


def base_model_name(name: str) -> str:
    """The served model that the adapter of that name is applied to; empty: it is not the name of an adapter."""
    base, _, own = name.partition(ADAPTER_SEPARATOR)
    return base if own else ""


def is_name(name: str) -> bool:
    """Whether it is a valid name of a model, or of an adapter with its base model."""
    base, colon, own = name.partition(ADAPTER_SEPARATOR)
    parts = (base, own) if colon else (base,)
    return len(name) <= MAX_NAME_CHARS and all(NAME_PATTERN.fullmatch(part) for part in parts)


def join_names(names: Sequence[str]) -> str:
    """The first MAX_LISTED_NAMES of `names` for a message, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return (", ".join(names[:MAX_LISTED_NAMES]) or "none") + more

"""What may be the name of a model, of an adapter laid over one, and of a key."""

import re
from collections.abc import Sequence

NAME_PATTERN = re.compile(r"(?=.{1,128}$)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
MAX_NAME_CHARS = 128
MAX_LISTED_NAMES = 20  # names in an error
ADAPTER_SEPARATOR = ":"  # between the name of a served model and that of an adapter laid over it


def base_model_name(name: str) -> str:
    """Over which served model the adapter of that name is laid; empty: it is no adapter's."""
    base, _, own = name.partition(ADAPTER_SEPARATOR)
    return base if own else ""


def is_name(name: str) -> bool:
    """Of a model, or of an adapter and its trunk."""
    base, colon, own = name.partition(ADAPTER_SEPARATOR)
    parts = (base, own) if colon else (base,)
    return len(name) <= MAX_NAME_CHARS and all(NAME_PATTERN.fullmatch(part) for part in parts)


def join_names(names: Sequence[str]) -> str:
    """For people: the first LISTED of `names`, and how many more there are."""
    more = f" and {len(names) - MAX_LISTED_NAMES} more" if len(names) > MAX_LISTED_NAMES else ""
    return (", ".join(names[:MAX_LISTED_NAMES]) or "none") + more

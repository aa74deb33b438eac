"""What may be the name of a model, of an adapter laid over one, and of a key."""

import re
from collections.abc import Sequence

NAME = re.compile(r"(?=.{1,128}$)[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
LONGEST_NAME = 128
LISTED = 20  # names in an error
ADAPTER = ":"  # between the name of a served model and that of an adapter laid over it


def trunk_of(name: str) -> str:
    """Over which served model the adapter of that name is laid; empty: it is no adapter's."""
    base, _, own = name.partition(ADAPTER)
    return base if own else ""


def is_name(name: str) -> bool:
    """Of a model, or of an adapter and its trunk."""
    base, colon, own = name.partition(ADAPTER)
    parts = (base, own) if colon else (base,)
    return len(name) <= LONGEST_NAME and all(NAME.fullmatch(part) for part in parts)


def listed(names: Sequence[str]) -> str:
    """For people: the first LISTED of `names`, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return (", ".join(names[:LISTED]) or "none") + more

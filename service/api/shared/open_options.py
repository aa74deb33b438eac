"""Which sampling options a request leaves open, so that the checkpoint's suggestions are used."""

from .dialect import Wire

SUGGESTED_OPTIONS = frozenset(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"))


def open_options(wire: Wire) -> frozenset[str]:
    """The options that a request does not set. A dialect without a field for an option leaves it open, too."""
    return SUGGESTED_OPTIONS - wire.model_fields_set

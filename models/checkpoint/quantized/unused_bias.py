"""Biases of quantised modules that are all zero. Some tools write one for each module, even if the network has none."""

from dataclasses import fields

import torch

from ..tensor_files import FLOAT_ENCODINGS, TensorEntry
from .quantized_entry import CPU

MAX_BIAS = 1 << 20  # numbers of a bias; the largest vocabularies have a quarter of it


class ZeroBias(TensorEntry):
    """A bias of zeros, which is read if the network has such a bias, and ignored otherwise."""

    @property
    def is_optional(self) -> bool:
        return True


def mark_biases(entry: TensorEntry) -> TensorEntry:
    """The entry, as a ZeroBias if all its numbers are zero. The numbers are read."""
    if entry.kind not in FLOAT_ENCODINGS or len(entry.shape) != 1 or entry.shape[0] > MAX_BIAS:
        return entry
    if bool(entry.read(torch.float32, CPU).any()):
        return entry
    return ZeroBias(*(getattr(entry, field.name) for field in fields(TensorEntry)))

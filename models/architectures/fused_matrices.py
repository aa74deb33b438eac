"""Matrices in which the projections of queries, keys and values are stored as one."""

from torch import Tensor

from .family import NamedTensors


def split_groups(tensor: Tensor, groups: int, queries: int) -> list[Tensor]:
    """Queries, keys and values out of a matrix [groups * (queries + 2) * D, ...], where each group of heads has the
    rows of its query heads, then those of its one key head, then those of its value head."""
    rows = tensor.reshape(groups, queries + 2, -1, *tensor.shape[1:])
    return [rows[:, :-2].flatten(0, 2), rows[:, -2].flatten(0, 1), rows[:, -1].flatten(0, 1)]


def split_fused(module: str, groups: int, queries: int, name: str, tensor: Tensor) -> NamedTensors:
    """Split the weight or bias of the fused `module` as `split_groups` does; other tensors are kept."""
    before, found, leaf = name.rpartition(f".{module}.")
    if not found:
        return [(name, tensor)]
    parts = zip(("query", "key", "value"), split_groups(tensor, groups, queries), strict=True)
    return [(f"{before}.{part}.{leaf}", piece) for part, piece in parts]

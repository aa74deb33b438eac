"""The order in which recurrent layers read packed rows: token by token, all sequences at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .ragged import RaggedBatch


@dataclass(frozen=True)
class ScanOrder:
    """Where the rows of N sequences stand in the scan of a recurrent layer, the same for all layers.

    The scan takes the first row of every sequence, then the second of those that have one, and so on; longer sequences
    come first, so those still active are always the first ones. A convolution over K rows reads them from a list: for
    each sequence the K - 1 rows before its first one, then all packed rows.
    """

    counts: list[int]  # sequences with a row at each time
    borders: dict[int, list[tuple[int, int]]]  # after so many rows: which place among the sequences, and its slot
    sequences: Tensor  # [N] the longest first
    rows: Tensor  # [T] packed rows in the order of the scan
    places: Tensor  # [T] where each packed row stands in that order
    windows: Tensor  # [K, T] for each row the rows of its convolution, the oldest first, its own last
    tails: Tensor  # [N, K - 1] the rows that the next row's convolution needs
    border_tails: Tensor  # [M, K - 1] the same after the borders
    border_slots: Tensor  # [M]

    @classmethod
    def of(cls, batch: RaggedBatch, kernel: int) -> "ScanOrder":
        """The order for a convolution of `kernel` rows."""
        lengths, view, past = batch.lengths, batch.states, kernel - 1
        order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
        counts = count_active([lengths[n] for n in order])
        rows = torch.tensor([batch.starts[n] + time for time, count in enumerate(counts) for n in order[:count]])
        listed = len(lengths) * past  # rows in the list before the packed ones
        firsts = torch.tensor([[past * (n + 1), listed + start] for n, start in enumerate(batch.starts[:-1])])
        row_firsts = firsts.repeat_interleave(torch.tensor(lengths), dim=0)  # [T, 2]
        positions = torch.arange(listed, listed + len(rows)) - row_firsts[:, 1]
        ranks, borders = {n: rank for rank, n in enumerate(order)}, dict[int, list[tuple[int, int]]]()
        bordered = [] if view is None else [(n, count) for n, count in enumerate(view.border_rows) if count]
        for n, count in bordered:
            assert view is not None
            borders.setdefault(count, []).append((ranks[n], view.borders[n]))
        done = torch.tensor([count for _, count in bordered], dtype=torch.int64)
        tensors = (
            torch.tensor(order),
            rows,
            rows.argsort(),
            locate_rows(row_firsts, positions - past, kernel).T.contiguous(),
            locate_rows(firsts, torch.tensor(lengths) - past, past),
            locate_rows(firsts[[n for n, _ in bordered]], done - past, past),
            torch.tensor([view.borders[n] for n, _ in bordered] if view else [], dtype=torch.int64),
        )
        return cls(counts, borders, *(each.to(batch.tokens.device) for each in tensors))


def count_active(lengths: Sequence[int]) -> list[int]:
    """The number of sequences that have a row at each time; `lengths` descend."""
    ends = [0] * lengths[0]
    for length in lengths:
        ends[length - 1] += 1
    return list(accumulate(reversed(ends)))[::-1]


def locate_rows(firsts: Tensor, positions: Tensor, count: int) -> Tensor:
    """[M, count] where `count` consecutive rows from `positions` [M] on stand in the list. `firsts` [M, 2]: where the
    rows before the sequence end, and where its own begin; negative positions are of the former."""
    wanted = positions[:, None] + torch.arange(count)
    return torch.where(wanted < 0, firsts[:, :1], firsts[:, 1:]) + wanted

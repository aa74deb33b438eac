"""Where sequences lie among packed rows, for attention by one kernel."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from .scoring import Scoring

KeysAndValues = tuple[Tensor, Tensor]
Window = tuple[int, int]  # visible keys before and after a row's own; -1: all
# [T, H, D] queries, contiguous, over [T, KV, D] keys and values or blocks [P, size, KV, D], to [T, H, D].
Kernel = Callable[[Tensor, KeysAndValues, "SequenceSpans", Window, Scoring], Tensor]


@dataclass(frozen=True)
class SequenceSpans:
    """Where N sequences lie among packed rows, and their keys among packed keys or, with `block_table`, in cache
    blocks.

    All are int32. Entries of `block_table` beyond a sequence's `key_counts` are not read. The last row of a sequence
    sees its last key.
    """

    kernel: Kernel
    starts: Tensor  # [N + 1]
    key_starts: Tensor  # [N + 1]
    max_rows: int  # of a sequence
    max_keys: int  # of any sequence; constant over steps, so that the kernel's choices do not depend on the batch
    key_counts: Tensor | None = None  # [N]
    block_table: Tensor | None = None  # [N, B]

    def attend(self, query: Tensor, kept: KeysAndValues, window: Window, scoring: Scoring) -> Tensor:
        """[T, H, D] queries over keys and values, packed or in blocks, to [T, H * D]."""
        return self.kernel(query, kept, self, window, scoring).flatten(1)

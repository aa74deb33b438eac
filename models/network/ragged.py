"""Ragged: sequences of different lengths laid end to end, without padding.  The one batch layout, in training too.

Lengths are Python integers: asking a device for them would stall it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .cache import CacheView, MemoryView
from .lora import AdapterUpdates
from .varlen import SequenceSpans


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of N sequences: sequence n owns rows [starts[n], starts[n + 1]).

    `tokens[i]` stands at `positions[i]` of its sequence.  With a `cache`, the rows are only the newest tokens of
    their sequences, and the older ones are read from it.  `wanted` are the rows whose states are asked for; None
    asks for all.  With `spans` one kernel attends for all sequences, else they do in groups.  With a `memory` they are
    written from other texts, which were read before.  `embedded` stand in the place of what the network's table has for
    its tokens: who differentiates by them, or lies between two texts, gives them.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    starts: tuple[int, ...]  # [N + 1]
    segments: Tensor | None = None  # [T]
    cache: CacheView | None = None
    output_rows: Tensor | None = None  # [M]
    spans: SequenceSpans | None = None
    additions: AdapterUpdates | None = None  # of adapters, to the network's products
    memory: MemoryView | None = None
    embedded: Tensor | None = None  # [T, E]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        device: torch.device | str = "cpu",
    ) -> "RaggedBatch":
        """Whole sequences, from their first token, without a cache."""
        return cls(
            tokens=torch.tensor([token for sequence in sequences for token in sequence], device=device),
            positions=torch.tensor([p for sequence in sequences for p in range(len(sequence))], device=device),
            starts=tuple(accumulate(map(len, sequences), initial=0)),
            segments=None if segments is None else torch.tensor([s for row in segments for s in row], device=device),
        )

    @property
    def lengths(self) -> list[int]:
        """Rows of each sequence."""
        return [end - start for start, end in pairwise(self.starts)]

    @property
    def key_counts(self) -> list[int]:
        """Keys in sight of each sequence's last row: its rows, and what the cache holds of it."""
        return self.lengths if self.cache is None else list(self.cache.lengths)

"""The only batch layout, in training too: sequences of different lengths laid end to end, without padding. Lengths are
Python integers, because reading them from a device would stall it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .cache import CacheView, MemoryView
from .lora import AdapterUpdates
from .recurrent_state import StateView
from .sequence_spans import SequenceSpans


@dataclass(frozen=True)
class RaggedBatch:
    """T tokens of N sequences: sequence n owns rows [starts[n], starts[n + 1]).

    `tokens[i]` is at `positions[i]` of its sequence. With a `cache`, the rows are only the newest tokens of their
    sequences, and older ones are read from it; with `states`, so are the states of recurrent layers, which begin at
    zero otherwise. `output_rows` are the rows whose states are returned; None: all. With `spans` one kernel attends for
    all sequences, otherwise they attend in groups. With a `memory`, cross-attention reads source texts from it.
    `embedded` replaces the token embeddings, for gradients with respect to them and for points between two texts. No
    row attends to the last `hidden` rows of a sequence, which attend as others do.
    """

    tokens: Tensor  # [T]
    positions: Tensor  # [T]
    starts: tuple[int, ...]  # [N + 1]
    segments: Tensor | None = None  # [T]
    cache: CacheView | None = None
    output_rows: Tensor | None = None  # [M]
    spans: SequenceSpans | None = None
    additions: AdapterUpdates | None = None  # of adapters
    memory: MemoryView | None = None
    embedded: Tensor | None = None  # [T, E]
    hidden: tuple[int, ...] | None = None  # [N]
    states: StateView | None = None

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
        """Keys that each sequence's last row sees: its rows and those in the cache."""
        return self.lengths if self.cache is None else list(self.cache.lengths)

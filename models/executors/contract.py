"""The seam between those who decide what to compute and what computes it.

Above the seam everything is a plain integer: which tokens, at which positions, in which cache blocks.  Below it an
executor owns the network and the memory of the cache.  Whoever calls `step` learns logits or states, and never sees
a key or a value.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..network.lora import Lora


@dataclass(frozen=True)
class StepInput:
    """One step's work: sequences laid end to end, T tokens of N sequences.

    Sequence n owns rows [starts[n], starts[n + 1]).  `tables[n]` lists the cache blocks that hold its tokens in
    order, the new ones included: the token at position p lives in block `tables[n][p // block_size]`.  A network
    without a cache gets empty tables.  `wanted` are the rows whose output is asked for.
    """

    tokens: list[int]  # [T]
    positions: list[int]  # [T]
    starts: list[int]  # [N + 1]
    block_tables: list[list[int]]  # [N]
    output_rows: list[int]
    segments: list[int] | None = None  # [T], for encoders with segment embeddings
    adapters: list[int] | None = None  # [N] as `attach` numbered them, 0: the network alone; None: all of them 0
    sources: list[tuple[int, ...]] | None = None  # [N] what was read before, where that is another sequence


class Executor(Protocol):
    """Runs a network over rows.  One thread calls it, always the same."""

    @property
    def block_size(self) -> int:
        """Tokens a cache block; 0 for a network without a cache."""

    @property
    def block_count(self) -> int:
        """Blocks in the cache; 0 for a network without a cache."""

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        """Cache blocks that hold a key or a value that is no number (infinite or NaN), as of the last step.

        Whoever reads such a block gets nonsense from then on.  It stays named until a step starts it anew, that is
        writes its first slot: then it is cleared first.  Empty for a network without a cache.
        """

    @property
    def argmax(self) -> list[int] | None:
        """[len(wanted)] the first of the largest logits of each row of the last step; -1 where one is no number.

        None where the executor does not look: whoever wants to know does.
        """

    def step(self, rows: StepInput) -> Tensor:
        """Logits [len(wanted), V] of a generator, or states [len(wanted), W] of an encoder, as float32.

        Every row's keys and values are stored in the cache on the way.  An answer does not depend on what else is in
        the step (to its precision; to the bit where the network was made so, see models.invariant).
        """

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy whole cache blocks, one after the other: what the first of each pair holds, to the second."""

    def attach(self, adapter: Lora) -> int:
        """Keep an adapter beside the network; from now on sequences may have it, by this number, never given again.

        It costs its own size.  UnsupportedError where this executor cannot add to the network's products.
        """

    def detach(self, number: int) -> None:
        """Let go of it: no sequence has it any more."""

    def padding(self, rows: StepInput) -> int:
        """How many token slots `step` computes for `rows` that belong to no token (attention padding)."""

"""The interface between the scheduler and an executor.

The scheduler's side has plain integers only: tokens, positions, cache blocks. The executor owns the network and the
memory of the cache. The caller of `step` gets logits or states, never keys or values.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from ..core.turns import YieldTurn, keep_turn
from ..network.lora import Lora


class StateUse(NamedTuple):
    """The state slots of one sequence in a step. A slot holds the state of all recurrent layers after some token. It is
    never changed in place, so a step can be computed again, and sequences can share a slot."""

    read: int  # the slot of the state before the sequence's first row; -1: no token is before it
    write: int  # the slot for the state after its last row
    border_rows: int = 0  # rows of the sequence after which the state is also written to `border`; 0: none
    border: int = -1  # a slot; -1: none


@dataclass(frozen=True)
class StepInput:
    """The input of one step: N sequences laid end to end, T tokens in all.

    Sequence n owns rows [starts[n], starts[n + 1]). `block_tables[n]` lists the cache blocks of its tokens in order,
    including the new ones: the token at position p is in block `block_tables[n][p // block_size]`. Without a cache the
    tables are empty. `window_tables` belongs to caches with blocks of their own for windowed layers: it lists the
    blocks of the last tokens, in order, up to that of the last row. Blocks that lie before the window of the first row
    may be missing. `output_rows` are the rows whose output is returned. No row attends to the last `hidden` rows of a
    sequence. `states` belongs to recurrent networks with a cache; without a cache states begin at zero and are not
    kept.
    """

    tokens: list[int]  # [T]
    positions: list[int]  # [T]
    starts: list[int]  # [N + 1]
    block_tables: list[list[int]]  # [N]
    output_rows: list[int]
    segments: list[int] | None = None  # [T], for encoders with segment embeddings
    adapters: list[int] | None = None  # [N] numbers from `attach`, 0: no adapter; None: all are 0
    sources: list[tuple[int, ...]] | None = None  # [N] source tokens, for an encoder-decoder
    hidden: list[int] | None = None  # [N] of networks with `hides_rows` only
    states: list[StateUse] | None = None  # [N]
    window_tables: list[list[int]] | None = None  # [N]


class Executor(Protocol):
    """Runs a network on the input of steps. It is always called by the same thread."""

    @property
    def block_size(self) -> int:
        """Tokens in a cache block; 0 for a network without a cache."""

    @property
    def block_count(self) -> int:
        """Blocks in the cache; 0 for a network without a cache."""

    @property
    def window_blocks(self) -> int:
        """Blocks of windowed layers, numbered from `block_count` on, if they are not those of other layers; else 0."""

    @property
    def window(self) -> int:
        """Tokens that a windowed layer sees, the row's own included; 0: no layer is windowed."""

    @property
    def state_count(self) -> int:
        """Slots for states of recurrent layers; 0 for a network without recurrent layers or without a cache."""

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        """Cache blocks that hold an infinite or NaN key or value of the last layer, as of the last step; and those of
        the rows of a sequence whose state is not finite after them.

        Their sequence fails. A block stays in the set until a step writes its first slot again, or until `copy`
        overwrites it. No executor reads what is left in it then. Empty for a network without a cache.
        """

    @property
    def argmax(self) -> list[int] | None:
        """[len(output_rows)] the lowest token with the largest logit, for each row of the last step; -1 if a logit of
        the row is infinite or NaN.

        None if the executor does not compute it; the caller does then.
        """

    def step(self, rows: StepInput) -> Tensor:
        """Logits [len(output_rows), V] of a generator, or states [len(output_rows), W] of an encoder, as float32.

        The keys and values of every row are stored in the cache, and states in their slots. The result does not depend
        on the other sequences of the step (up to rounding; exactly where the network was made invariant, see
        models.invariant).
        """

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy whole cache blocks in order: of each pair, the first block to the second. Both are of windowed layers,
        or neither."""

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:
        """Attach an adapter and return its number, by which sequences use it; a number is never used twice.

        Its matrices are asked for once, those of one product of the network after the other, so that they may be read
        from a file then. `yield_turn` is called often meanwhile, and may compute steps, and attach or detach other
        adapters. It takes the memory of the adapter and of one product's matrices. UnsupportedError, before anything is
        asked for, if this executor cannot add to the network's products.
        """

    def detach(self, number: int) -> None:
        """Free an adapter that no sequence uses any more."""

    def padding(self, rows: StepInput) -> int:
        """How many token slots `step` computes for `rows` that belong to no token (attention padding)."""


@runtime_checkable
class TurnExecutor(Protocol):
    """An executor without a cache that can interrupt a step."""

    def step_in_turns(self, rows: StepInput, turn_s: float) -> Iterator[Tensor | None]:
        """The result of `Executor.step`, which belongs to the caller; before it None after each turn of about `turn_s`
        seconds that did not finish the step.

        Between turns other steps may be computed or begun, and the iterator may be dropped. Turns change no result.
        Raises what `step` does.
        """


@runtime_checkable
class JointExecutor(TurnExecutor, Protocol):
    """An executor that can compute steps of several networks at once, each on one thread."""

    @property
    def threads(self) -> int:
        """How many threads compute a step."""

    @property
    def product_bytes(self) -> int:
        """Bytes of the weights that each row is multiplied by."""

    def begin_together(self, steps: Sequence[Iterator[Tensor | None]]) -> None:
        """Compute the first turns of `steps` at once, the longest first, all of them within the turn of the first.
        `next` of each then returns what was computed, or raises what it would have raised alone.  Results are the same
        to the bit.  Where this raises, `next` computes.

        They are what `step_in_turns` of executors of this kind returned, all of different ones, and none was begun.
        """


@dataclass(frozen=True, slots=True)
class Preparation:
    """Sequences of the `rows` of `PreparingExecutor.prepare`, by number: those whose work is not finished, and those
    whose source has begun to be encoded. Of sequences with the same source it is the first."""

    unfinished: Sequence[int]
    begun: Sequence[int]


@runtime_checkable
class PreparingExecutor(Protocol):
    """An executor whose steps need work that takes much longer than a step, such as a source that is encoded, and that
    can do it before them."""

    def prepare(self, rows: StepInput, turn_s: float) -> Preparation:
        """Do some of the work that the sequences of `rows` need before their step, until `turn_s` seconds have passed,
        at least a piece of it.

        The next call goes on with the work for sequences that are still in its `rows`. A step does first what was not
        prepared. Raises StepInputError before anything is computed.
        """


def step_in_turns(executor: Executor, rows: StepInput, turn_s: float) -> Iterator[Tensor | None]:
    """As TurnExecutor.step_in_turns; an executor that cannot interrupt a step computes it in one turn."""
    if isinstance(executor, TurnExecutor):
        return executor.step_in_turns(rows, turn_s)
    return _step_in_one_turn(executor, rows)


def _step_in_one_turn(executor: Executor, rows: StepInput) -> Iterator[Tensor]:
    yield executor.step(rows).clone()


def copy_marks(marked: set[int], copies: Sequence[tuple[int, int]]) -> None:
    """Update the set of blocks that have some property after `copies`: a target has that of its source."""
    for source, target in copies:
        if source in marked:
            marked.add(target)
        else:
            marked.discard(target)

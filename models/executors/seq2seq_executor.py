"""The executor of encoder-decoders, recurrent networks and transformers alike.

A block of its cache holds tokens, and the network's state after the newest token is kept beside it. So sequences can be
forked, preempted and find shared prefixes as with a cache of keys and values. A state that is no longer kept is
computed again from the source and the generated tokens.
"""

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import UnsupportedError
from ..core.turns import YieldTurn, keep_turn
from ..network.lora import Lora
from ..network.ragged import RaggedBatch
from ..seq2seq.protocol import Seq2Seq, Seq2SeqState
from .bounds import Bounds
from .contract import StepInput, copy_marks

MAX_SOURCE_TOKENS = 1024  # tokens of sources encoded at once, unless a single source is longer
MAX_STATE_AGE = 4  # steps after which an unused state is freed
PLACEHOLDER_SOURCE = (0,)  # the source of a step without sources, as in a self-test


@dataclass(eq=False)
class BatchState:
    """The network's state of several sequences."""

    state: Seq2SeqState
    size: int


@dataclass(eq=False)
class StepSequence:
    """One sequence of a step. `pending` are the tokens it still has to read; the last `new_count` of them are rows of
    the step."""

    source: tuple[int, ...]
    slot: int  # of its newest token
    previous_slot: int  # of the token before the new ones; -1: none
    pending: list[int]
    new_count: int
    first_row: int  # row of its first new token
    batch_state: BatchState | None = None
    row: int = 0  # in `batch_state`
    finite: bool = True


class Seq2SeqExecutor:
    """See models.executors.contract.Executor."""

    def __init__(
        self, network: Seq2Seq, device: torch.device, *, vocabulary: int, block_count: int, block_size: int
    ) -> None:
        """`vocabulary`: the size of the vocabulary, which both sides share."""
        self.network, self.device = network, device
        self.block_count, self.block_size, self.state_count = block_count, block_size, 0
        self.window_blocks = self.window = 0  # it keeps tokens, not keys and values
        self._bounds = Bounds(vocabulary, 0, 0, block_count, block_size)
        self._slot_tokens = [0] * (block_count * block_size)  # tokens, by slot
        # By slot: the state, the row in it, and the step it is from.
        self._states: dict[int, tuple[BatchState, int, int]] = {}
        self._nonfinite_blocks: set[int] = set()
        self._steps = self._vocab_size = 0  # the size is known after the first logits

    @property
    def argmax(self) -> None:
        return None

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self._nonfinite_blocks

    @torch.inference_mode()
    def step(self, rows: StepInput) -> Tensor:
        """Raises StepInputError before anything is computed."""
        self._bounds.check(rows, ())
        members = [self._plan_sequence(rows, n) for n in range(len(rows.block_tables))]
        self._encode_sources([member for member in members if member.batch_state is None])
        logits: dict[int, Tensor] = {}
        while going := [member for member in members if member.pending]:
            self._advance(going, logits)
        self._store_states(rows, members)
        outputs = [logits[row] for row in rows.output_rows]
        return torch.stack(outputs).float() if outputs else torch.empty(0, self._vocab_size, device=self.device)

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._bounds.check_copies(blocks)
        copy_marks(self._nonfinite_blocks, blocks)
        size = self.block_size
        for one, other in blocks:
            self._slot_tokens[other * size : (other + 1) * size] = self._slot_tokens[one * size : (one + 1) * size]
            for offset in range(size):
                self._states.pop(other * size + offset, None)
                if known := self._states.get(one * size + offset):
                    self._states[other * size + offset] = known

    def attach(self, adapter: Lora, yield_turn: YieldTurn = keep_turn) -> int:  # noqa: ARG002
        raise UnsupportedError("adapters are supported for generators and encoders, not for encoder-decoders")

    def detach(self, number: int) -> None:  # noqa: ARG002
        raise AssertionError("nothing was attached")

    def padding(self, rows: StepInput) -> int:  # noqa: ARG002
        return 0

    def _plan_sequence(self, rows: StepInput, n: int) -> StepSequence:
        """A sequence of the step: continued from its kept state, or computed again from the start."""
        start, end = rows.starts[n], rows.starts[n + 1]
        first, new, size = rows.positions[start], rows.tokens[start:end], self.block_size
        slots = [
            rows.block_tables[n][place // size] * size + place % size for place in range(rows.positions[end - 1] + 1)
        ]
        member = StepSequence(
            source=rows.sources[n] if rows.sources is not None and rows.sources[n] else PLACEHOLDER_SOURCE,
            slot=slots[-1],
            previous_slot=slots[first - 1] if first else -1,
            pending=new,
            new_count=len(new),
            first_row=start,
        )
        if known := self._states.get(member.previous_slot):
            member.batch_state, member.row, _ = known
        elif first:
            member.pending = [self._slot_tokens[slot] for slot in slots[:first]] + new
        return member

    def _encode_sources(self, members: list[StepSequence]) -> None:
        """Encode the sources, each distinct one once, several together."""
        by: dict[tuple[int, ...], list[StepSequence]] = defaultdict(list)
        for member in members:
            by[member.source].append(member)
        left = sorted(by, key=len)
        while left:
            some = [left.pop()]
            while left and sum(map(len, some)) + len(left[-1]) <= MAX_SOURCE_TOKENS:
                some.append(left.pop())
            kept = BatchState(self.network.initial_state(RaggedBatch.of(some, device=self.device)), len(some))
            for row, source in enumerate(some):
                for member in by[source]:
                    member.batch_state, member.row = kept, row

    def _advance(self, members: list[StepSequence], logits: dict[int, Tensor]) -> None:
        """Run one token of each sequence."""
        members, state = self._join_states(members)
        tokens = torch.tensor([member.pending[0] for member in members], device=self.device)
        out, after = self.network.step(tokens, state)
        self._vocab_size = out.size(1)
        kept, whole = BatchState(after, len(members)), out.isfinite().all(dim=-1).tolist()
        for row, member in enumerate(members):
            del member.pending[0]
            member.batch_state, member.row = kept, row
            member.finite &= whole[row]
            if len(member.pending) < member.new_count:
                logits[member.first_row + member.new_count - 1 - len(member.pending)] = out[row]

    def _join_states(self, members: list[StepSequence]) -> tuple[list[StepSequence], Seq2SeqState]:
        """The sequences in the order of their joint state, and that state. Sequences of the same last step are already
        joint."""
        by: dict[BatchState, list[StepSequence]] = defaultdict(list)
        for member in members:
            assert member.batch_state is not None
            by[member.batch_state].append(member)
        ordered, states = list[StepSequence](), list[Seq2SeqState]()
        for kept, some in by.items():
            some.sort(key=lambda member: member.row)
            chosen = [member.row for member in some]
            whole = chosen == list(range(kept.size))
            states.append(kept.state if whole else self.network.select_rows(kept.state, self._tensor(chosen)))
            ordered += some
        return ordered, states[0] if len(states) == 1 else self.network.join_states(states)

    def _store_states(self, rows: StepInput, members: list[StepSequence]) -> None:
        """Store the new states, after all of the step was computed."""
        self._steps += 1
        for n, member in enumerate(members):
            self._states.pop(member.previous_slot, None)
            self._store_tokens(rows, n)
        for member in members:
            assert member.batch_state is not None
            self._states[member.slot] = member.batch_state, member.row, self._steps
            if not member.finite:
                self._nonfinite_blocks.add(member.slot // self.block_size)
        for slot, (_, _, since) in list(self._states.items()):
            if since <= self._steps - MAX_STATE_AGE:
                del self._states[slot]

    def _store_tokens(self, rows: StepInput, n: int) -> None:
        """Store the new tokens in their slots. A block whose first slot is written counts as empty before."""
        new, size = slice(rows.starts[n], rows.starts[n + 1]), self.block_size
        for position, token in zip(rows.positions[new], rows.tokens[new], strict=True):
            block, offset = rows.block_tables[n][position // size], position % size
            if not offset:
                self._nonfinite_blocks.discard(block)
            self._states.pop(block * size + offset, None)
            self._slot_tokens[block * size + offset] = token

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

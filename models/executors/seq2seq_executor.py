"""The executor of encoder-decoders, recurrent networks and transformers alike.

A block of its cache holds tokens, and the network's state after the newest token is kept beside it. So sequences can be
forked, preempted and find shared prefixes as with a cache of keys and values. A state that is no longer kept is
computed again from the source and the generated tokens.

Before its first step a sequence needs its source encoded, and one without a state also the steps of all its tokens.
Both may take seconds, so `prepare` does them in pieces: a layer of some sources, a step of a token of all sequences
whose states are computed again.
"""

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from math import inf
from time import perf_counter

import torch
from torch import Tensor

from ..core.errors import UnsupportedError
from ..core.turns import YieldTurn, keep_turn
from ..network.lora import Lora
from ..network.ragged import RaggedBatch
from ..network.work_pieces import Pieces
from ..seq2seq.protocol import Seq2Seq, Seq2SeqState
from .bounds import Bounds
from .contract import Preparation, StepInput, copy_marks

MAX_SOURCE_TOKENS = 512  # tokens of sources encoded at once, unless a single source is longer
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
    table: Sequence[int]  # its cache blocks,
    block_size: int  # of so many tokens
    length: int  # tokens in all
    pending: list[int]
    new_count: int
    first_row: int  # row of its first new token
    batch_state: BatchState | None = None
    row: int = 0  # in `batch_state`
    finite: bool = True

    @property
    def slot(self) -> int:
        """Of the last token that it has read; -1: none."""
        return self.slot_of(self.length - len(self.pending) - 1)

    def slot_of(self, place: int) -> int:
        """Of the token at a place, from 0; -1 before the first."""
        return -1 if place < 0 else self.table[place // self.block_size] * self.block_size + place % self.block_size

    @property
    def is_prepared(self) -> bool:
        """Whether it has the state before its new tokens."""
        return self.batch_state is not None and len(self.pending) == self.new_count


@dataclass(eq=False)
class OpenEncoding:
    """Sources that are encoded together."""

    sources: list[tuple[int, ...]]
    pieces: Pieces[Seq2SeqState]


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
        # The states of encoded sources, until a sequence has one: the state, and the row in it.
        self._encoded: dict[tuple[int, ...], tuple[BatchState, int]] = {}
        self._encoding: OpenEncoding | None = None
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
        self._prepare(members, inf)
        befores = [member.slot for member in members]
        logits: dict[int, Tensor] = {}
        while going := [member for member in members if member.pending]:
            self._advance(going, logits)
        self._store_states(rows, members, befores)
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

    @torch.inference_mode()
    def prepare(self, rows: StepInput, turn_s: float) -> Preparation:
        """See models.executors.contract.PreparingExecutor."""
        self._bounds.check(rows, ())
        members = [self._plan_sequence(rows, n) for n in range(len(rows.block_tables))]
        wanted = {member.source for member in members}
        self._encoded = {source: kept for source, kept in self._encoded.items() if source in wanted}
        if self._encoding is not None and wanted.isdisjoint(self._encoding.sources):
            self._encoding = None
        begun = [members.index(member) for member in self._prepare(members, turn_s)]
        return Preparation([n for n, member in enumerate(members) if not member.is_prepared], begun)

    def _prepare(self, members: list[StepSequence], turn_s: float) -> list[StepSequence]:
        """Compute the states before the new tokens of sequences that have none, for about `turn_s` seconds. States
        that sequences have reached are kept. Returns the sequences whose sources have begun to be encoded."""
        until, begun = perf_counter() + turn_s, list[StepSequence]()
        replayed = dict[StepSequence, int]()  # and the slot of the token after which their state was known
        while left := [member for member in members if not member.is_prepared]:
            if unread := [member for member in left if member.batch_state is None]:
                begun += self._encode_piece(unread)
            if going := [member for member in left if member.batch_state and not member.is_prepared]:
                replayed |= {member: member.slot for member in going if member not in replayed}
                self._advance(going, {})
            if perf_counter() >= until:
                break
        needed = {member.slot for member in members}
        for member, known_slot in replayed.items():
            if known_slot not in needed:
                self._states.pop(known_slot, None)
            self._keep_state(member)
        return begun

    def _plan_sequence(self, rows: StepInput, n: int) -> StepSequence:
        """A sequence of the step: continued from its newest kept state, or computed again from the start."""
        start, end = rows.starts[n], rows.starts[n + 1]
        first, length = rows.positions[start], rows.positions[end - 1] + 1
        source = rows.sources[n] if rows.sources is not None and rows.sources[n] else PLACEHOLDER_SOURCE
        table, new = rows.block_tables[n], rows.tokens[start:end]
        member = StepSequence(source, table, self.block_size, length, new, len(new), start)
        known = next((place for place in reversed(range(first)) if member.slot_of(place) in self._states), -1)
        if known >= 0:
            member.batch_state, member.row, _ = self._states[member.slot_of(known)]
        elif source in self._encoded:
            member.batch_state, member.row = self._encoded[source]
        member.pending = [self._slot_tokens[member.slot_of(place)] for place in range(known + 1, first)] + new
        return member

    def _encode_piece(self, members: list[StepSequence]) -> list[StepSequence]:
        """A piece of the encoding of sources, each distinct one once, several together: of those that are being
        encoded, or else of the first of `members` and what fits beside it. Returns the sequences whose sources begin
        with it, one for each source."""
        begun = list[StepSequence]()
        if self._encoding is None:
            unread = dict[tuple[int, ...], StepSequence]()
            for member in members:
                unread.setdefault(member.source, member)
            first, *others = unread.values()
            begun, left = [first], MAX_SOURCE_TOKENS - len(first.source)
            for member in others:
                if len(member.source) <= left:
                    begun.append(member)
                    left -= len(member.source)
            sources = [member.source for member in begun]
            batch = RaggedBatch.of(sources, device=self.device)
            self._encoding = OpenEncoding(sources, self.network.initial_state_in_pieces(batch))
        encoding, self._encoding = self._encoding, None  # for good, if it raises
        try:
            next(encoding.pieces)
        except StopIteration as over:
            kept = BatchState(over.value, len(encoding.sources))
            self._encoded |= {source: (kept, row) for row, source in enumerate(encoding.sources)}
        else:
            self._encoding = encoding
        for member in members:
            if member.source in self._encoded:
                member.batch_state, member.row = self._encoded[member.source]
        return begun

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

    def _store_states(self, rows: StepInput, members: list[StepSequence], befores: list[int]) -> None:
        """Store the new states, after all of the step was computed, in place of those after the slots `befores`."""
        self._steps += 1
        for n, (member, before) in enumerate(zip(members, befores, strict=True)):
            self._encoded.pop(member.source, None)
            self._states.pop(before, None)
            self._store_tokens(rows, n)
        for member in members:
            self._keep_state(member)
        for slot, (_, _, since) in list(self._states.items()):
            if since <= self._steps - MAX_STATE_AGE:
                del self._states[slot]

    def _keep_state(self, member: StepSequence) -> None:
        """Store the state after the last token that a sequence has read."""
        assert member.batch_state is not None
        self._states[member.slot] = member.batch_state, member.row, self._steps
        if not member.finite:
            self._nonfinite_blocks.add(member.slot // self.block_size)

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

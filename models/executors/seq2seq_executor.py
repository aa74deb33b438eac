"""The executor of what reads one sequence and writes another: recurrent networks and transformers alike.

It doesn't know requests, nor what is inside a network.  The one idea: a block of its cache holds tokens, and what the
network knows behind the newest of them is kept beside; so sequences fork, are preempted and find what others wrote, as
over keys and values.  A state that is not kept any more is made again: the source is read, and what was written fed.
"""

from collections import defaultdict
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.errors import UnsupportedError
from ..network.lora import Lora
from ..network.ragged import RaggedBatch
from ..seq2seq.protocol import Seq2Seq, Seq2SeqState
from .bounds import Bounds
from .contract import StepInput

MAX_SOURCE_TOKENS = 1024  # tokens of sources that are read at once, or one longer source
MAX_STATE_AGE = 4  # steps after which a state that nobody went on from is let go of
PLACEHOLDER_SOURCE = (0,)  # what is read where nobody says what: whoever asks wants to see that anything is computed


@dataclass(eq=False)
class BatchState:
    """What is known of several sequences at once."""

    state: Seq2SeqState
    size: int


@dataclass(eq=False)
class StepSequence:
    """One sequence of a step: `feed` is what it has yet to be fed, of which the last `new` are rows of the step."""

    source: tuple[int, ...]
    slot: int  # of its newest token, once it is fed
    previous_slot: int  # of the one before the first that is new; -1: there is none
    pending: list[int]
    new_count: int
    first_row: int  # row of the first new token
    batch_state: BatchState | None = None
    row: int = 0  # in `kept`
    finite: bool = True


class Seq2SeqExecutor:
    """See models.executors.contract.Executor."""

    def __init__(
        self, network: Seq2Seq, device: torch.device, *, vocabulary: int, block_count: int, block_size: int
    ) -> None:
        """`vocabulary`: how many tokens both sides know."""
        self.network, self.device = network, device
        self.block_count, self.block_size = block_count, block_size
        self._bounds = Bounds(vocabulary, 0, 0, block_count, block_size)
        self._slot_tokens = [0] * (block_count * block_size)  # tokens, by slot
        self._states: dict[int, tuple[BatchState, int, int]] = {}  # by slot: whose row it is, and since which step
        self._nonfinite_blocks: set[int] = set()
        self._steps = self._vocab_size = 0  # of the vocabulary, once logits were seen

    @property
    def argmax(self) -> None:
        return None

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self._nonfinite_blocks

    @torch.inference_mode()
    def step(self, rows: StepInput) -> Tensor:
        """Raises RowsError before anything is computed."""
        self._bounds.check(rows, ())
        members = [self._plan_sequence(rows, n) for n in range(len(rows.block_tables))]
        self._encode_sources([member for member in members if member.batch_state is None])
        logits: dict[int, Tensor] = {}
        while going := [member for member in members if member.pending]:
            self._advance(going, logits)
        self._store_states(rows, members)
        wanted = [logits[row] for row in rows.output_rows]
        return torch.stack(wanted).float() if wanted else torch.empty(0, self._vocab_size, device=self.device)

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._bounds.check_copies(blocks)
        size = self.block_size
        for one, other in blocks:
            self._slot_tokens[other * size : (other + 1) * size] = self._slot_tokens[one * size : (one + 1) * size]
            for offset in range(size):
                self._states.pop(other * size + offset, None)
                if known := self._states.get(one * size + offset):
                    self._states[other * size + offset] = known

    def attach(self, adapter: Lora) -> int:  # noqa: ARG002
        raise UnsupportedError("adapters are laid over generators and encoders, not over networks that read and write")

    def detach(self, number: int) -> None:  # noqa: ARG002
        raise AssertionError("nothing was attached")

    def padding(self, rows: StepInput) -> int:  # noqa: ARG002
        return 0

    def _plan_sequence(self, rows: StepInput, n: int) -> StepSequence:
        """Where it stands, and how it goes on from there, or from the beginning."""
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
        """Sources are read, each once, several together."""
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
        """All of them by one token."""
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
        """One state of all of them, and their order in it.  Those who went on together last time already are one."""
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
        """All was computed: it counts."""
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
        """The tokens that were new, each in its slot; a block that is begun anew holds nothing of before."""
        new, size = slice(rows.starts[n], rows.starts[n + 1]), self.block_size
        for position, token in zip(rows.positions[new], rows.tokens[new], strict=True):
            block, offset = rows.block_tables[n][position // size], position % size
            if not offset:
                self._nonfinite_blocks.discard(block)
            self._states.pop(block * size + offset, None)
            self._slot_tokens[block * size + offset] = token

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

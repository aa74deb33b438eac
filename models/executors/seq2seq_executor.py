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
from ..network.ragged import Ragged
from ..seq2seq.protocol import Seq2Seq, State
from .bounds import Bounds
from .contract import Rows

READ = 1024  # tokens of sources that are read at once, or one longer source
AGE = 4  # steps after which a state that nobody went on from is let go of
PROOF = (0,)  # what is read where nobody says what: whoever asks wants to see that anything is computed


@dataclass(eq=False)
class Kept:
    """What is known of several sequences at once."""

    state: State
    size: int


@dataclass(eq=False)
class Member:
    """One sequence of a step: `feed` is what it has yet to be fed, of which the last `new` are rows of the step."""

    source: tuple[int, ...]
    slot: int  # of its newest token, once it is fed
    before: int  # of the one before the first that is new; -1: there is none
    feed: list[int]
    new: int
    first: int  # row of the first new token
    kept: Kept | None = None
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
        self._written = [0] * (block_count * block_size)  # tokens, by slot
        self._states: dict[int, tuple[Kept, int, int]] = {}  # by slot: whose row it is, and since which step
        self._poisoned: set[int] = set()
        self._steps = self._words = 0  # of the vocabulary, once logits were seen

    @property
    def likeliest(self) -> None:
        return None

    @property
    def poisoned(self) -> AbstractSet[int]:
        return self._poisoned

    @torch.inference_mode()
    def step(self, rows: Rows) -> Tensor:
        """Raises RowsError before anything is computed."""
        self._bounds.check(rows, ())
        members = [self._member(rows, n) for n in range(len(rows.tables))]
        self._begin([member for member in members if member.kept is None])
        logits: dict[int, Tensor] = {}
        while going := [member for member in members if member.feed]:
            self._advance(going, logits)
        self._keep(rows, members)
        wanted = [logits[row] for row in rows.wanted]
        return torch.stack(wanted).float() if wanted else torch.empty(0, self._words, device=self.device)

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._bounds.check_copies(blocks)
        size = self.block_size
        for one, other in blocks:
            self._written[other * size : (other + 1) * size] = self._written[one * size : (one + 1) * size]
            for offset in range(size):
                self._states.pop(other * size + offset, None)
                if known := self._states.get(one * size + offset):
                    self._states[other * size + offset] = known

    def attach(self, adapter: Lora) -> int:  # noqa: ARG002
        raise UnsupportedError("adapters are laid over generators and encoders, not over networks that read and write")

    def detach(self, number: int) -> None:  # noqa: ARG002
        raise AssertionError("nothing was attached")

    def padding(self, rows: Rows) -> int:  # noqa: ARG002
        return 0

    def _member(self, rows: Rows, n: int) -> Member:
        """Where it stands, and how it goes on from there, or from the beginning."""
        start, end = rows.starts[n], rows.starts[n + 1]
        first, new, size = rows.positions[start], rows.tokens[start:end], self.block_size
        slots = [rows.tables[n][place // size] * size + place % size for place in range(rows.positions[end - 1] + 1)]
        member = Member(
            source=rows.sources[n] if rows.sources is not None and rows.sources[n] else PROOF,
            slot=slots[-1],
            before=slots[first - 1] if first else -1,
            feed=new,
            new=len(new),
            first=start,
        )
        if known := self._states.get(member.before):
            member.kept, member.row, _ = known
        elif first:
            member.feed = [self._written[slot] for slot in slots[:first]] + new
        return member

    def _begin(self, members: list[Member]) -> None:
        """Sources are read, each once, several together."""
        by: dict[tuple[int, ...], list[Member]] = defaultdict(list)
        for member in members:
            by[member.source].append(member)
        left = sorted(by, key=len)
        while left:
            some = [left.pop()]
            while left and sum(map(len, some)) + len(left[-1]) <= READ:
                some.append(left.pop())
            kept = Kept(self.network.begin(Ragged.of(some, device=self.device)), len(some))
            for row, source in enumerate(some):
                for member in by[source]:
                    member.kept, member.row = kept, row

    def _advance(self, members: list[Member], logits: dict[int, Tensor]) -> None:
        """All of them by one token."""
        members, state = self._together(members)
        tokens = torch.tensor([member.feed[0] for member in members], device=self.device)
        out, after = self.network.step(tokens, state)
        self._words = out.size(1)
        kept, whole = Kept(after, len(members)), out.isfinite().all(dim=-1).tolist()
        for row, member in enumerate(members):
            del member.feed[0]
            member.kept, member.row = kept, row
            member.finite &= whole[row]
            if len(member.feed) < member.new:
                logits[member.first + member.new - 1 - len(member.feed)] = out[row]

    def _together(self, members: list[Member]) -> tuple[list[Member], State]:
        """One state of all of them, and their order in it.  Those who went on together last time already are one."""
        by: dict[Kept, list[Member]] = defaultdict(list)
        for member in members:
            assert member.kept is not None
            by[member.kept].append(member)
        ordered, states = list[Member](), list[State]()
        for kept, some in by.items():
            some.sort(key=lambda member: member.row)
            chosen = [member.row for member in some]
            whole = chosen == list(range(kept.size))
            states.append(kept.state if whole else self.network.pick(kept.state, self._tensor(chosen)))
            ordered += some
        return ordered, states[0] if len(states) == 1 else self.network.join(states)

    def _keep(self, rows: Rows, members: list[Member]) -> None:
        """All was computed: it counts."""
        self._steps += 1
        for n, member in enumerate(members):
            self._states.pop(member.before, None)
            self._book(rows, n)
        for member in members:
            assert member.kept is not None
            self._states[member.slot] = member.kept, member.row, self._steps
            if not member.finite:
                self._poisoned.add(member.slot // self.block_size)
        for slot, (_, _, since) in list(self._states.items()):
            if since <= self._steps - AGE:
                del self._states[slot]

    def _book(self, rows: Rows, n: int) -> None:
        """The tokens that were new, each in its slot; a block that is begun anew holds nothing of before."""
        new, size = slice(rows.starts[n], rows.starts[n + 1]), self.block_size
        for position, token in zip(rows.positions[new], rows.tokens[new], strict=True):
            block, offset = rows.tables[n][position // size], position % size
            if not offset:
                self._poisoned.discard(block)
            self._states.pop(block * size + offset, None)
            self._written[block * size + offset] = token

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)

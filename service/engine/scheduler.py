"""Who computes how many tokens in the next step.

Plain integers: nothing here knows tensors, sampling or clients.  The one idea: there is no prefill phase and no decode
phase (vLLM v1's).  A sequence has `tokens`, of which `computed` are in the cache; every step lets sequences catch up
within one token budget.  A long prompt catches up in chunks, a talking sequence is one token behind, a preempted one
starts again at zero, a stored prefix starts ahead.

Who goes first in a step, by rank: higher priority, then earlier arrival.
  1. those that talk (one token behind), in order of rank;
  2. the first in rank that catches up: nobody waits forever;
  3. the others that catch up, nearest first: a short prompt overtakes a long one.
Nobody takes more than `chunk` tokens.

Who is let in is the queue's to say (priority, fair shares of owners, arrival).  A sequence is admitted when the cache
has room for all its tokens, so only a talking one ever needs another block; then the last in rank gives up its own, and
waits at the head of its line.  The first in rank can take everybody else's: it always finishes, hence everyone does.
To let somebody in, a running sequence gives up its place in two cases only: it has lower priority, or its owner runs
several while the other's owner runs none.

Sequences that have the same beginning can be forked: they share its blocks, the last and half full one too, until one
of them writes to it, which then gets a copy (copy on write).

A talking sequence may bring a draft: tokens that will perhaps be its next.  What is left of the budget, and of the
blocks, goes to computing some of them in the same step.

One whose reader has fallen behind is held: it has neither blocks nor a place in line until it is resumed, so it is in
nobody's way.
"""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from operator import attrgetter

from ..concurrency.fair_queue import Deadlines, Queue
from .block_allocator import Blocks, Copy, Key, chain, root


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens on their way through the cache.  The caller appends to `tokens` and never takes any away."""

    tokens: list[int]
    owner: str = ""
    priority: int = 0
    deadline: float = inf
    adapter: int = 0  # what is computed with another finds none of its blocks
    salt: str = ""  # the same
    source: tuple[int, ...] = ()  # what was read before; the salt stands for it
    scored: int = 0  # leading tokens whose own logits are wanted: they are computed, whatever is stored
    draft: list[int] = field(default_factory=list)  # what may come next
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # names of its full blocks, as far as anybody asked
    published: int = 0  # leading blocks that others can find, or that came from others
    cached: int = 0  # tokens of the prompt that were found stored
    preempted: int = 0
    rank: tuple[int, int] = (0, 0)  # smaller goes first

    def twin(self) -> "Sequence":
        """Another with the same tokens, of which nothing is computed."""
        terms = self.owner, self.priority, self.deadline, self.adapter
        return Sequence(list(self.tokens), *terms, self.salt, self.source)

    @property
    def room(self) -> int:
        """Tokens that it has blocks for; what was read has no slots in them, but its place is taken."""
        return len(self.tokens) + len(self.source)

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence; `last` when it has caught up after them, and the first `draft` of its."""

    sequence: Sequence
    count: int
    last: bool
    draft: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: blocks to copy before it, its chunks, and what making room and looking for stored prefixes came to."""

    chunks: list[Chunk]
    preemptions: int
    cached_tokens: int
    copies: list[Copy]


def rows_wanted(chunk: Chunk) -> int:
    """How many of its tokens' logits are wanted."""
    if chunk.sequence.computed < chunk.sequence.scored:
        return chunk.count + chunk.draft
    return 1 + chunk.draft if chunk.last else 0


class Scheduler:
    """Shares `token_budget` tokens a step among at most `sequence_budget` sequences, `chunk` at most for each."""

    def __init__(self, blocks: Blocks, *, token_budget: int, sequence_budget: int, chunk: int) -> None:
        assert min(token_budget, sequence_budget, chunk) > 0
        self.blocks = blocks
        self.token_budget, self.sequence_budget, self.chunk = token_budget, sequence_budget, chunk
        self.waiting: Queue[Sequence] = Queue()
        self.running: dict[Sequence, None] = {}  # in order of rank
        self.held: set[Sequence] = set()  # neither waiting nor running
        self._owners: Counter[str] = Counter()  # of those that run
        self._deadlines: Deadlines[Sequence] = Deadlines()
        self._arrivals = count()
        self._preemptions = self._cached = 0  # since the last plan
        self._copies: list[Copy] = []

    def add(self, sequence: Sequence) -> None:
        sequence.rank = -sequence.priority, next(self._arrivals)
        self.waiting.add(sequence, sequence.owner, sequence.priority)
        self._deadlines.add(sequence, sequence.deadline)

    def remove(self, sequence: Sequence) -> None:
        """Finished, aborted or expired, running or waiting: everything it held is free at once."""
        self.blocks.release(sequence.blocks)
        self._deadlines.remove(sequence)
        self._leave(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Compute no more of it for now."""
        self._leave(sequence)
        self._give_up(sequence)
        self.held.add(sequence)

    def resume(self, sequence: Sequence) -> None:
        """It takes its place at the end of its line."""
        self.held.remove(sequence)
        self.waiting.add(sequence, sequence.owner, sequence.priority)

    def expired(self, now: float) -> list[Sequence]:
        """Those whose deadline has passed, for the caller to remove."""
        return self._deadlines.passed(now)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let in a sequence that begins as another has: what that has computed is its own, too.

        Where there is no place for it now, it waits in line.
        """
        if parent not in self.running or len(self.running) >= self.sequence_budget:
            self.add(child)
            return
        child.rank = -child.priority, next(self._arrivals)
        self._deadlines.add(child, child.deadline)
        self._owners[child.owner] += 1
        self.running[child] = None
        self._sort()
        self.follow(child, parent)

    def follow(self, sequence: Sequence, other: Sequence) -> None:
        """Go on from where `other` is, instead of from where it is itself.  Who doesn't run has nothing to share."""
        sequence.keys = list(other.keys)
        if sequence not in self.running:
            return
        computed = other.computed
        kept = self.blocks.fork(other.blocks[: -(-computed // self.blocks.size)])
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = kept, computed
        sequence.published, sequence.cached = other.published, other.cached

    def schedule(self) -> Plan:
        """The next step.  Not empty while anybody waits or runs, save those that run and have caught up."""
        self._preemptions = self._cached = 0
        self._copies = []
        self._admit()
        chunks: list[Chunk] = []
        behind: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.behind or not self._make_room(sequence):
                continue  # one before it took its room in this loop; nobody in `chunks` or `behind` is after it
            if sequence.behind > 1:
                behind.append(sequence)
            elif len(chunks) < self.token_budget:
                chunks.append(Chunk(sequence, 1, last=True))
        left = self._catch_up(behind, self.token_budget - len(chunks), chunks)
        self._try_drafts(chunks, min(left, self.sequence_budget - sum(map(rows_wanted, chunks))))
        return Plan(chunks, self._preemptions, self._cached, self._copies)

    def commit(self, chunks: list[Chunk]) -> None:
        """Book what was computed, drafts apart, and let others find the blocks that are full now."""
        for chunk in chunks:
            self.waiting.charge(chunk.sequence.owner, chunk.count + chunk.draft)
            self.advance(chunk.sequence, chunk.count)

    def advance(self, sequence: Sequence, count: int) -> None:
        """So many more of its tokens are computed."""
        sequence.computed += count
        full = sequence.computed // self.blocks.size
        if full > sequence.published:
            self._name(sequence, full)
            for index in range(sequence.published, full):
                self.blocks.publish(sequence.blocks[index], sequence.keys[index])
            sequence.published = full

    def check(self) -> None:
        """Assert that no block is leaked, lost or held twice, and nobody is kept who has left."""
        self.blocks.check(sequence.blocks for sequence in self.running)
        assert not any(sequence.blocks for sequence in (*self.waiting, *self.held)), "who doesn't run holds blocks"
        assert self._owners == Counter(sequence.owner for sequence in self.running), "an owner runs what it doesn't"
        present = len(self.running) + len(self.waiting) + len(self.held)
        assert len(self._deadlines) <= present, "a deadline outlives its sequence"

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for what comes next, at the cost of the last in rank if need be; no, if that is the sequence itself."""
        while not (self.blocks.grow(sequence.blocks, sequence.room) and self._own(sequence)):
            last = next(reversed(self.running))
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _own(self, sequence: Sequence) -> bool:
        """Whether the block that is written next is nobody else's, by now."""
        index = sequence.computed // self.blocks.size
        if not self.blocks.is_shared(sequence.blocks, index):
            return True
        if not self.blocks.free:
            return False
        self._copies.append(self.blocks.own(sequence.blocks, index))
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._leave(sequence)
        self._give_up(sequence)
        self.waiting.put_back(sequence, sequence.owner, sequence.priority)
        self._preemptions += 1

    def _give_up(self, sequence: Sequence) -> None:
        """Its blocks, not its tokens; others may find what it stored, and so may it."""
        self.blocks.release(sequence.blocks)
        sequence.computed = sequence.published = 0
        sequence.preempted += 1

    def _leave(self, sequence: Sequence) -> None:
        """Where it stood, whichever of the three that is."""
        if sequence in self.held:
            self.held.remove(sequence)
        elif sequence not in self.running:
            self.waiting.remove(sequence)
        else:
            del self.running[sequence]
            self._owners[sequence.owner] -= 1
            if not self._owners[sequence.owner]:
                del self._owners[sequence.owner]

    def _admit(self) -> None:
        """Take in those waiting, the first of the queue each time, while they find a place."""
        before = len(self.running), self._preemptions
        while (sequence := self.waiting.first()) is not None and self._find_place(sequence):
            self.waiting.remove(sequence)
            self.running[sequence] = None
            self._owners[sequence.owner] += 1
        if (len(self.running), self._preemptions) != before:
            self._sort()

    def _sort(self) -> None:
        self.running = dict.fromkeys(sorted(self.running, key=attrgetter("rank")))

    def _find_place(self, sequence: Sequence) -> bool:
        """Room for all its tokens, and a block for everyone who runs to grow into."""
        while True:
            if len(self.running) < self.sequence_budget:
                shared = self._share(sequence)
                if self.blocks.grow(sequence.blocks, sequence.room, spare=len(self.running)):
                    self._count(sequence, shared)
                    return True
                self.blocks.release(sequence.blocks)
                sequence.computed = sequence.published = 0
            yielding = self._yielding(sequence)
            if yielding is None:
                return False
            self._preempt(yielding)

    def _yielding(self, sequence: Sequence) -> Sequence | None:
        """Who gives up its place to `sequence`, if anybody must: see above."""
        last = max(self.running, key=attrgetter("rank"), default=None)
        if last is None or last.priority < sequence.priority:
            return last
        if sequence.owner in self._owners:
            return None
        shares = Counter(runs.owner for runs in self.running if runs.priority == sequence.priority)
        owner, most = max(shares.items(), key=lambda share: share[1], default=("", 0))
        if most < 2:
            return None
        theirs = (runs for runs in self.running if runs.owner == owner and runs.priority == sequence.priority)
        return max(theirs, key=attrgetter("rank"))

    def _catch_up(self, behind: list[Sequence], budget: int, chunks: list[Chunk]) -> int:
        """Returns what is left of the budget.  Of prompts that are scored no more than there are logits for: as many as
        sequences could talk, but at least those of one token."""
        rows = max(self.sequence_budget - len(chunks) - len(behind), 1)
        oldest, others = behind[:1], behind[1:]
        others.sort(key=attrgetter("behind"))
        for sequence in (*oldest, *others):
            if not budget:
                break
            self._count(sequence, self._share(sequence))
            count = min(sequence.behind, self.chunk, budget)
            if sequence.computed < sequence.scored:
                count = min(count, rows)
                rows -= count
            if not count:
                continue
            chunks.append(Chunk(sequence, count, last=count == sequence.behind))
            budget -= count
        return budget

    def _try_drafts(self, chunks: list[Chunk], budget: int) -> None:
        """As many tokens of drafts as there is room for without taking any from others."""
        for place, chunk in enumerate(chunks):
            sequence = chunk.sequence
            count = min(len(sequence.draft), budget, self.chunk - chunk.count) if chunk.last else 0
            if count and self.blocks.grow(sequence.blocks, sequence.room + count, spare=len(self.running)):
                chunks[place] = replace(chunk, draft=count)
                budget -= count

    def _share(self, sequence: Sequence) -> int:
        """Skip the blocks ahead that somebody has computed; return how many tokens those are.

        The last token stays: its logits are still to be made.
        """
        size = self.blocks.size
        first, rest = divmod(sequence.computed, size)
        most = (len(sequence.tokens) - 1) // size
        if rest or first >= most or sequence.computed < sequence.scored:
            return 0
        self._name(sequence, most)
        shared = self.blocks.share(sequence.blocks, sequence.keys[first:most], first)
        sequence.computed += shared * size
        sequence.published += shared
        return shared * size

    def _count(self, sequence: Sequence, shared: int) -> None:
        if not sequence.preempted:  # else it finds what it has computed itself
            sequence.cached += shared
            self._cached += shared

    def _name(self, sequence: Sequence, full: int) -> None:
        """Extend the names of the sequence's blocks to the first `full`."""
        size, keys = self.blocks.size, sequence.keys
        for start in range(len(keys) * size, full * size, size):
            keys.append(
                chain(
                    keys[-1] if keys else root(sequence.adapter, sequence.salt), sequence.tokens[start : start + size]
                )
            )

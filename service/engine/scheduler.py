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

from ..concurrency.fair_queue import Deadlines, FairQueue
from .block_allocator import BlockAllocator, BlockCopy, BlockKey, child_key, root_key


@dataclass(eq=False, slots=True)
class TokenSequence:
    """Tokens on their way through the cache.  The caller appends to `tokens` and never takes any away."""

    tokens: list[int]
    owner: str = ""
    priority: int = 0
    deadline: float = inf
    adapter: int = 0  # what is computed with another finds none of its blocks
    salt: str = ""  # the same
    source: tuple[int, ...] = ()  # what was read before; the salt stands for it
    scored_prefix: int = 0  # leading tokens whose own logits are wanted: they are computed, whatever is stored
    draft: list[int] = field(default_factory=list)  # what may come next
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)  # names of its full blocks, as far as anybody asked
    published: int = 0  # leading blocks that others can find, or that came from others
    cached_tokens: int = 0  # tokens of the prompt that were found stored
    preempted: int = 0
    rank: tuple[int, int] = (0, 0)  # smaller goes first

    def copy_uncomputed(self) -> "TokenSequence":
        """Another with the same tokens, of which nothing is computed."""
        terms = self.owner, self.priority, self.deadline, self.adapter
        return TokenSequence(list(self.tokens), *terms, self.salt, self.source)

    @property
    def slot_count(self) -> int:
        """Tokens that it has blocks for; what was read has no slots in them, but its place is taken."""
        return len(self.tokens) + len(self.source)

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence; `last` when it has caught up after them, and the first `draft` of its."""

    sequence: TokenSequence
    count: int
    is_last: bool
    draft: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: blocks to copy before it, its chunks, and what making room and looking for stored prefixes came to."""

    chunks: list[Chunk]
    preemptions: int
    cached_tokens: int
    copies: list[BlockCopy]


def logits_row_count(chunk: Chunk) -> int:
    """How many of its tokens' logits are wanted."""
    if chunk.sequence.computed < chunk.sequence.scored_prefix:
        return chunk.count + chunk.draft
    return 1 + chunk.draft if chunk.is_last else 0


class Scheduler:
    """Shares `token_budget` tokens a step among at most `sequence_budget` sequences, `chunk` at most for each."""

    def __init__(self, blocks: BlockAllocator, *, token_budget: int, sequence_budget: int, chunk: int) -> None:
        assert min(token_budget, sequence_budget, chunk) > 0
        self.blocks = blocks
        self.token_budget, self.sequence_budget, self.chunk = token_budget, sequence_budget, chunk
        self.waiting: FairQueue[TokenSequence] = FairQueue()
        self.running: dict[TokenSequence, None] = {}  # in order of rank
        self.paused: set[TokenSequence] = set()  # neither waiting nor running
        self._running_by_owner: Counter[str] = Counter()  # of those that run
        self._deadlines: Deadlines[TokenSequence] = Deadlines()
        self._arrivals = count()
        self._preemptions = self._cached_tokens = 0  # since the last plan
        self._copies: list[BlockCopy] = []

    def add(self, sequence: TokenSequence) -> None:
        sequence.rank = -sequence.priority, next(self._arrivals)
        self.waiting.add(sequence, sequence.owner, sequence.priority)
        self._deadlines.add(sequence, sequence.deadline)

    def remove(self, sequence: TokenSequence) -> None:
        """Finished, aborted or expired, running or waiting: everything it held is free at once."""
        self.blocks.release(sequence.blocks)
        self._deadlines.remove(sequence)
        self._unlist(sequence)

    def pause(self, sequence: TokenSequence) -> None:
        """Compute no more of it for now."""
        self._unlist(sequence)
        self._release_blocks(sequence)
        self.paused.add(sequence)

    def resume(self, sequence: TokenSequence) -> None:
        """It takes its place at the end of its line."""
        self.paused.remove(sequence)
        self.waiting.add(sequence, sequence.owner, sequence.priority)

    def expired(self, now: float) -> list[TokenSequence]:
        """Those whose deadline has passed, for the caller to remove."""
        return self._deadlines.expired(now)

    def fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Let in a sequence that begins as another has: what that has computed is its own, too.

        Where there is no place for it now, it waits in line.
        """
        if parent not in self.running or len(self.running) >= self.sequence_budget:
            self.add(child)
            return
        child.rank = -child.priority, next(self._arrivals)
        self._deadlines.add(child, child.deadline)
        self._running_by_owner[child.owner] += 1
        self.running[child] = None
        self._sort_running()
        self.copy_progress(child, parent)

    def copy_progress(self, sequence: TokenSequence, other: TokenSequence) -> None:
        """Go on from where `other` is, instead of from where it is itself.  Who doesn't run has nothing to share."""
        sequence.block_keys = list(other.block_keys)
        if sequence not in self.running:
            return
        computed = other.computed
        kept = self.blocks.fork(other.blocks[: -(-computed // self.blocks.size)])
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = kept, computed
        sequence.published, sequence.cached_tokens = other.published, other.cached_tokens

    def schedule(self) -> StepPlan:
        """The next step.  Not empty while anybody waits or runs, save those that run and have caught up."""
        self._preemptions = self._cached_tokens = 0
        self._copies = []
        self._admit()
        chunks: list[Chunk] = []
        behind: list[TokenSequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.uncomputed or not self._make_room(sequence):
                continue  # one before it took its room in this loop; nobody in `chunks` or `behind` is after it
            if sequence.uncomputed > 1:
                behind.append(sequence)
            elif len(chunks) < self.token_budget:
                chunks.append(Chunk(sequence, 1, is_last=True))
        left = self._plan_prefills(behind, self.token_budget - len(chunks), chunks)
        self._plan_drafts(chunks, min(left, self.sequence_budget - sum(map(logits_row_count, chunks))))
        return StepPlan(chunks, self._preemptions, self._cached_tokens, self._copies)

    def commit(self, chunks: list[Chunk]) -> None:
        """Book what was computed, drafts apart, and let others find the blocks that are full now."""
        for chunk in chunks:
            self.waiting.charge(chunk.sequence.owner, chunk.count + chunk.draft)
            self.advance(chunk.sequence, chunk.count)

    def advance(self, sequence: TokenSequence, count: int) -> None:
        """So many more of its tokens are computed."""
        sequence.computed += count
        full = sequence.computed // self.blocks.size
        if full > sequence.published:
            self._extend_keys(sequence, full)
            for index in range(sequence.published, full):
                self.blocks.publish(sequence.blocks[index], sequence.block_keys[index])
            sequence.published = full

    def check(self) -> None:
        """Assert that no block is leaked, lost or held twice, and nobody is kept who has left."""
        self.blocks.check(sequence.blocks for sequence in self.running)
        assert not any(sequence.blocks for sequence in (*self.waiting, *self.paused)), "who doesn't run holds blocks"
        assert self._running_by_owner == Counter(sequence.owner for sequence in self.running), (
            "an owner runs what it doesn't"
        )
        present = len(self.running) + len(self.waiting) + len(self.paused)
        assert len(self._deadlines) <= present, "a deadline outlives its sequence"

    def _make_room(self, sequence: TokenSequence) -> bool:
        """Room for what comes next, at the cost of the last in rank if need be; no, if that is the sequence itself."""
        while not (self.blocks.allocate(sequence.blocks, sequence.slot_count) and self._make_writable(sequence)):
            last = next(reversed(self.running))
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _make_writable(self, sequence: TokenSequence) -> bool:
        """Whether the block that is written next is nobody else's, by now."""
        index = sequence.computed // self.blocks.size
        if not self.blocks.is_shared(sequence.blocks, index):
            return True
        if not self.blocks.free_blocks:
            return False
        self._copies.append(self.blocks.replace_shared(sequence.blocks, index))
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        self._unlist(sequence)
        self._release_blocks(sequence)
        self.waiting.put_back(sequence, sequence.owner, sequence.priority)
        self._preemptions += 1

    def _release_blocks(self, sequence: TokenSequence) -> None:
        """Its blocks, not its tokens; others may find what it stored, and so may it."""
        self.blocks.release(sequence.blocks)
        sequence.computed = sequence.published = 0
        sequence.preempted += 1

    def _unlist(self, sequence: TokenSequence) -> None:
        """Where it stood, whichever of the three that is."""
        if sequence in self.paused:
            self.paused.remove(sequence)
        elif sequence not in self.running:
            self.waiting.remove(sequence)
        else:
            del self.running[sequence]
            self._running_by_owner[sequence.owner] -= 1
            if not self._running_by_owner[sequence.owner]:
                del self._running_by_owner[sequence.owner]

    def _admit(self) -> None:
        """Take in those waiting, the first of the queue each time, while they find a place."""
        before = len(self.running), self._preemptions
        while (sequence := self.waiting.peek()) is not None and self._make_place(sequence):
            self.waiting.remove(sequence)
            self.running[sequence] = None
            self._running_by_owner[sequence.owner] += 1
        if (len(self.running), self._preemptions) != before:
            self._sort_running()

    def _sort_running(self) -> None:
        self.running = dict.fromkeys(sorted(self.running, key=attrgetter("rank")))

    def _make_place(self, sequence: TokenSequence) -> bool:
        """Room for all its tokens, and a block for everyone who runs to grow into."""
        while True:
            if len(self.running) < self.sequence_budget:
                shared = self._reuse_prefix(sequence)
                if self.blocks.allocate(sequence.blocks, sequence.slot_count, spare=len(self.running)):
                    self._count_cached(sequence, shared)
                    return True
                self.blocks.release(sequence.blocks)
                sequence.computed = sequence.published = 0
            yielding = self._find_victim(sequence)
            if yielding is None:
                return False
            self._preempt(yielding)

    def _find_victim(self, sequence: TokenSequence) -> TokenSequence | None:
        """Who gives up its place to `sequence`, if anybody must: see above."""
        last = max(self.running, key=attrgetter("rank"), default=None)
        if last is None or last.priority < sequence.priority:
            return last
        if sequence.owner in self._running_by_owner:
            return None
        shares = Counter(runs.owner for runs in self.running if runs.priority == sequence.priority)
        owner, most = max(shares.items(), key=lambda share: share[1], default=("", 0))
        if most < 2:
            return None
        theirs = (runs for runs in self.running if runs.owner == owner and runs.priority == sequence.priority)
        return max(theirs, key=attrgetter("rank"))

    def _plan_prefills(self, behind: list[TokenSequence], budget: int, chunks: list[Chunk]) -> int:
        """Returns what is left of the budget.  Of prompts that are scored no more than there are logits for: as many as
        sequences could talk, but at least those of one token."""
        rows = max(self.sequence_budget - len(chunks) - len(behind), 1)
        oldest, others = behind[:1], behind[1:]
        others.sort(key=attrgetter("uncomputed"))
        for sequence in (*oldest, *others):
            if not budget:
                break
            self._count_cached(sequence, self._reuse_prefix(sequence))
            count = min(sequence.uncomputed, self.chunk, budget)
            if sequence.computed < sequence.scored_prefix:
                count = min(count, rows)
                rows -= count
            if not count:
                continue
            chunks.append(Chunk(sequence, count, is_last=count == sequence.uncomputed))
            budget -= count
        return budget

    def _plan_drafts(self, chunks: list[Chunk], budget: int) -> None:
        """As many tokens of drafts as there is room for without taking any from others."""
        for place, chunk in enumerate(chunks):
            sequence = chunk.sequence
            count = min(len(sequence.draft), budget, self.chunk - chunk.count) if chunk.is_last else 0
            if count and self.blocks.allocate(sequence.blocks, sequence.slot_count + count, spare=len(self.running)):
                chunks[place] = replace(chunk, draft=count)
                budget -= count

    def _reuse_prefix(self, sequence: TokenSequence) -> int:
        """Skip the blocks ahead that somebody has computed; return how many tokens those are.

        The last token stays: its logits are still to be made.
        """
        size = self.blocks.size
        first, rest = divmod(sequence.computed, size)
        most = (len(sequence.tokens) - 1) // size
        if rest or first >= most or sequence.computed < sequence.scored_prefix:
            return 0
        self._extend_keys(sequence, most)
        shared = self.blocks.share_cached(sequence.blocks, sequence.block_keys[first:most], first)
        sequence.computed += shared * size
        sequence.published += shared
        return shared * size

    def _count_cached(self, sequence: TokenSequence, shared: int) -> None:
        if not sequence.preempted:  # else it finds what it has computed itself
            sequence.cached_tokens += shared
            self._cached_tokens += shared

    def _extend_keys(self, sequence: TokenSequence, full: int) -> None:
        """Extend the names of the sequence's blocks to the first `full`."""
        size, keys = self.blocks.size, sequence.block_keys
        for start in range(len(keys) * size, full * size, size):
            keys.append(
                child_key(
                    keys[-1] if keys else root_key(sequence.adapter, sequence.salt),
                    sequence.tokens[start : start + size],
                )
            )

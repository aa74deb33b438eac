"""Decides how many tokens of which sequences are computed in the next step.

There are no separate prefill and decode phases (as in vLLM v1).  A sequence has `tokens`, of which `computed` are in
the cache; each step computes some of the others within one token budget.  A long prompt is computed in chunks, a
decoding sequence has one uncomputed token, a preempted sequence starts again at zero, a cached prefix is skipped.

Order within a step, by rank: higher priority first, then earlier arrival.
  1. decoding sequences (one uncomputed token), in order of rank;
  2. the first prefilling sequence in rank, so that none waits forever;
  3. the other prefilling sequences: first those of the owner that has been served least, so that short prompts of one
     owner do not keep the prompt of another waiting; then fewest uncomputed tokens first, so that a short prompt
     overtakes a long one.
A prompt to be scored takes a row of logits for each token, so of a step's rows the first prefilling sequence has half
at most, too.
Sequences whose sources are not encoded yet count as prefilling.  Sources are encoded one after the other, so those of
the owner that has been served least go first, then the others, each by rank.
No sequence gets more than `chunk` tokens in a step.  Attention to a long context makes tokens slower: then a chunk has
fewer of them and each takes more of the budget, so that a step does not get longer with the context.  The budget of
prefilling sequences is also what the last steps would have computed in LONGEST_STEP_S.  A prefilling sequence whose
next block is computed in this step for another sequence waits for it, and finds it in the cache in the next step.

The queue decides which sequence is admitted next (priority, fair shares of owners, arrival).  A sequence is admitted
when the cache has room for all its tokens, so only a decoding one ever needs another block.  Then the last in rank is
preempted: it releases its blocks and goes back to the head of its line.  The first in rank can take the blocks of all
others, so it always finishes, and therefore all do.  For the admission of another sequence, a running one is preempted
in three cases only: it has lower priority, its owner runs several while the other's owner runs none, or it has
overtaken the other.

A sequence that does not fit yet may be overtaken by sequences of other owners with the same priority that do fit.  As
soon as it would fit without those that have overtaken it, they are preempted for it, so it waits no longer than without
them.

Sequences with the same beginning can be forked.  They share its blocks, including the last, partly filled one, until
one of them writes to it and gets a copy (copy on write).

The beams of a search have one rank, and the search advances when all of them are computed.  Of one owner and priority,
searches begin while their widths make at most `sequence_budget` together; the beams of a search that has begun are
admitted before other sequences.  A running beam whose tokens are all computed waits for the others of its search.  For
the admission of a sequence that does not rank after it, another beam of its search too, it may be preempted.  It is
then set aside: it is not computed again before its search advances.  So the first search in rank can always go on, and
no step is empty while there is work.

A decoding sequence may have a draft: tokens that may come next.  The budget and the blocks that are left are used to
compute some of them in the same step.

Of a network with recurrent layers, a sequence also holds a slot with its state after the computed tokens
(service.engine.state_slots), and its chunk a slot for the state after it.  A cached prefix ends where a state is
cached: after the last full block of a chunk, or where the tokens of two sequences branch.  Such sequences have no
drafts, since a state cannot go back to the token before it.

Windowed layers may have blocks of their own (service.engine.window_blocks).  A sequence holds those of its window and
of its next chunk.  It is admitted when these are free, and gets more as it gives back others; where it shared those,
none becomes free, and the last in rank may be preempted for it.

A sequence whose reader has fallen behind is paused: it has neither blocks nor a place in the queue until it is
resumed.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil, inf
from operator import attrgetter

from ..concurrency.fair_queue import Deadlines, FairQueue, LineKey
from .block_allocator import BlockAllocator, BlockCopy, BlockKey, child_key, root_key
from .state_slots import NO_SLOT, HeldSlots, StateSlots, smallest_slot_count
from .window_blocks import HeldWindow, WindowBlocks

Rank = tuple[int, int]  # smaller goes first
FULL_CHUNK_CONTEXT = 512  # tokens before a chunk that is as large as without any
SMALLEST_CHUNK = 64  # tokens of the first chunk of a step, after any context: reading the weights takes a time, too
SMALLEST_SHARE = 32  # tokens of the oldest prompt, beside others
LONGEST_STEP_S = 0.5  # of steps with chunks of prompts, as far as their time can be predicted
TIMED_STEPS = 3  # the fastest of which counts, because the machine may have had other work
MAX_PASSED_OWNERS = 16  # in one step: their next sequence does not fit, or may not begin


@dataclass(eq=False, slots=True)
class TokenSequence:
    """The tokens of one answer, and how far they are in the cache.  The caller only appends to `tokens`."""

    tokens: list[int]
    owner: str = ""
    priority: int = 0
    deadline: float = inf
    adapter: int = 0  # sequences of different adapters share no blocks
    salt: str = ""  # nor do those with different salts
    source: tuple[int, ...] = ()  # tokens that an encoder has read; they are part of the salt
    scored_prefix: int = 0  # leading tokens whose logits are needed: they are computed even if they are cached
    width: int = 1  # the most beams of its search; 1: no search
    draft: list[int] = field(default_factory=list)  # tokens that may come next
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)  # of its full blocks, as far as they were needed
    published: int = 0  # leading blocks that were published or are shared
    slots: HeldSlots = field(default_factory=HeldSlots)  # of recurrent states
    window: HeldWindow = field(default_factory=HeldWindow)  # blocks of windowed layers
    branch: int = 0  # leading tokens whose blocks were found in the cache, but not the state or the window after them
    cached_tokens: int = 0  # prompt tokens found in the cache
    preempted: int = 0
    rank: Rank = (0, 0)
    overtaken: "TokenSequence | None" = None  # that came before it and did not fit when it was admitted

    def copy_uncomputed(self) -> "TokenSequence":
        """Another sequence with the same tokens, none of them computed."""
        terms = self.owner, self.priority, self.deadline, self.adapter
        return TokenSequence(list(self.tokens), *terms, self.salt, self.source, width=self.width)

    @property
    def line(self) -> LineKey:
        return self.priority, self.owner

    @property
    def slot_count(self) -> int:
        """Tokens that it needs cache blocks for.  A source has no slots in them, but its size is counted."""
        return len(self.tokens) + len(self.source)

    @property
    def uncomputed(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def unread(self) -> int:
        """Tokens that are still to be computed, with those of its source before the first."""
        return self.uncomputed + (0 if self.computed else len(self.source))


@dataclass(eq=False, slots=True)
class Chunk:
    """What one step computes of a sequence: its next `count` tokens, and the first `draft` of its draft.

    `is_last`: all its tokens are computed after this chunk.  Its logits are `row_count` rows of the step's, from
    `first_row` on; both are set by `number_rows`.
    """

    sequence: TokenSequence
    count: int
    is_last: bool
    draft: int = 0
    first_row: int = 0
    row_count: int = 0

    @property
    def next_token_row(self) -> int:
        """The row after the last token that is not a draft: the next token is sampled from it."""
        return self.first_row + self.row_count - 1 - self.draft


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: the blocks to copy before it, its chunks, its preemptions, and the prompt tokens found in the cache."""

    chunks: list[Chunk]
    preemptions: int
    cached_tokens: int
    copies: list[BlockCopy]


def number_rows(chunks: Iterable[Chunk]) -> None:
    """Assign the rows of a step's logits to its chunks, in order."""
    first = 0
    for chunk in chunks:
        chunk.first_row, chunk.row_count = first, logits_row_count(chunk)
        first += chunk.row_count


def prefill_order(next_line: LineKey | None, sequence: TokenSequence) -> tuple[bool, int]:
    """The sort key of a prefilling sequence: those of the next line go first, then those with few uncomputed tokens."""
    return sequence.line != next_line, 0 if sequence.source else sequence.uncomputed


def logits_row_count(chunk: Chunk) -> int:
    """How many rows of logits the chunk needs."""
    if chunk.sequence.computed < chunk.sequence.scored_prefix:
        return chunk.count + chunk.draft
    return 1 + chunk.draft if chunk.is_last else 0


@dataclass(frozen=True, slots=True)
class LayerCaches:
    """What layers have that do not use the blocks of the others: slots for the states of recurrent layers, at least
    `smallest_slot_count`, and blocks of layers with a window of so many tokens; 0: there are no such layers.
    """

    state_count: int = 0
    window_blocks: int = 0
    window: int = 0


NO_LAYER_CACHES = LayerCaches()


class Scheduler:
    """Shares `token_budget` tokens a step among at most `sequence_budget` sequences, `chunk` at most for each."""

    def __init__(
        self,
        blocks: BlockAllocator,
        *,
        token_budget: int,
        sequence_budget: int,
        chunk: int,
        caches: LayerCaches = NO_LAYER_CACHES,
    ) -> None:
        assert min(token_budget, sequence_budget, chunk) > 0
        slots = caches.state_count
        assert not slots or slots >= smallest_slot_count(sequence_budget), "too few slots for states"
        self.blocks, self.states = blocks, StateSlots(slots, blocks.size)
        span = caches.window, min(chunk, token_budget)
        self.windows = WindowBlocks(caches.window_blocks, blocks.size, blocks.count, span)
        assert not self.windows.count or self.windows.count >= min(self.windows.limit, blocks.count), (
            "too few blocks for the window of one sequence"
        )
        self.token_budget, self.sequence_budget, self.chunk = token_budget, sequence_budget, chunk
        self._token_seconds: deque[float] = deque(maxlen=TIMED_STEPS)  # of a token of a prompt, without attention
        self.context_cost = 0.0  # the time of a token's attention to a token before it, in times of its other products
        self._least_served: LineKey | None = None  # of the lines with prompts, when the last step was planned
        self._tokens_per_row = max(token_budget / sequence_budget, 1.0)  # of a step, for each of its rows of logits
        self.waiting: FairQueue[TokenSequence] = FairQueue()
        self.running: dict[TokenSequence, None] = {}  # in order of rank
        self.paused: set[TokenSequence] = set()  # neither waiting nor running
        self.set_aside: set[TokenSequence] = set()  # computed beams that were preempted; neither waiting nor running
        self._searches: dict[Rank, dict[TokenSequence, None]] = {}  # the beams of searches that have begun
        self._widths: Counter[LineKey] = Counter()  # sum of the widths of these searches, by priority and owner
        self._running_by_owner: Counter[str] = Counter()  # number of running sequences
        self._deadlines: Deadlines[TokenSequence] = Deadlines()
        self._arrivals = count()
        self._preemptions = self._cached_tokens = 0  # since the last plan
        self._copies: list[BlockCopy] = []

    @property
    def free_places(self) -> int:
        return max(self.sequence_budget - len(self.running), 0)

    def add(self, sequence: TokenSequence) -> None:
        sequence.rank = -sequence.priority, next(self._arrivals)
        self.waiting.add(sequence, sequence.owner, sequence.priority)
        self._deadlines.add(sequence, sequence.deadline)

    def add_after(self, other: TokenSequence, sequence: TokenSequence) -> None:
        """Add a sequence with the rank of `other`, before those that came after `other`."""
        sequence.rank = other.rank
        self.waiting.put_back(sequence, sequence.owner, sequence.priority)
        self._deadlines.add(sequence, sequence.deadline)

    def remove(self, sequence: TokenSequence) -> None:
        """Remove a finished, aborted or expired sequence and release its blocks and its state."""
        self.blocks.release(sequence.blocks)
        self.windows.release(sequence.window)
        self.states.release(sequence.slots)
        self._deadlines.remove(sequence)
        self._unlist(sequence)
        beams = self._searches.get(sequence.rank, {})
        beams.pop(sequence, None)
        if not beams and self._searches.pop(sequence.rank, None) is not None:
            self._widths[sequence.line] -= sequence.width
            if not self._widths[sequence.line]:
                del self._widths[sequence.line]

    def pause(self, sequence: TokenSequence) -> None:
        """Compute no more of a sequence until it is resumed."""
        self._unlist(sequence)
        self._release_cache(sequence)
        self.paused.add(sequence)

    def resume(self, sequence: TokenSequence) -> None:
        """Put a paused sequence at the end of its line."""
        self.paused.remove(sequence)
        self.waiting.add(sequence, sequence.owner, sequence.priority)

    def expired(self, now: float) -> list[TokenSequence]:
        """Sequences whose deadline has passed, for the caller to remove."""
        return self._deadlines.expired(now)

    def fork(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Admit a sequence that begins as `parent` and shares its blocks; without a free place it waits."""
        if parent not in self.running or len(self.running) >= self.sequence_budget:
            self.add(child)
            return
        child.rank, child.overtaken = (-child.priority, next(self._arrivals)), parent.overtaken
        self._deadlines.add(child, child.deadline)
        self._run(child)
        self._sort_running()
        self.copy_progress(child, parent)

    def fork_beam(self, parent: TokenSequence, child: TokenSequence) -> None:
        """Add a beam to the search of `parent`, whose blocks it shares; without a free place it waits."""
        child.rank = parent.rank
        self._searches[child.rank][child] = None
        self._deadlines.add(child, child.deadline)
        if parent not in self.running or len(self.running) >= self.sequence_budget:
            self.waiting.put_back(child, child.owner, child.priority)
            return
        self._run(child)
        self._sort_running()
        self.copy_progress(child, parent)

    def requeue(self, sequence: TokenSequence) -> None:
        """Let a beam wait that was set aside, because its search has advanced; any other one stays where it is."""
        if sequence in self.set_aside:
            self.set_aside.remove(sequence)
            self.waiting.put_back(sequence, sequence.owner, sequence.priority)

    def copy_progress(self, sequence: TokenSequence, other: TokenSequence) -> None:
        """Make `sequence` share the blocks that `other` has computed, and its state, instead of its own.

        A sequence that is not running shares nothing.
        """
        sequence.block_keys = list(other.block_keys)
        if sequence not in self.running:
            return
        computed = other.computed
        kept = self.blocks.fork(other.blocks[: -(-computed // self.blocks.size)])
        self.blocks.release(sequence.blocks)
        sequence.blocks, sequence.computed = kept, computed
        sequence.published, sequence.cached_tokens = other.published, other.cached_tokens
        self.windows.share(sequence.window, other.window, computed)
        self.states.share(sequence.slots, other.slots)

    def schedule(self) -> StepPlan:
        """The next step.  Empty only if no sequence waits or runs."""
        self._preemptions = self._cached_tokens = 0
        self._copies = []
        for sequence in self.running:  # before others are admitted, who might take these blocks
            self.states.drop_planned(sequence.slots)  # a chunk that was not committed is planned again
            self._count_cached(sequence, self._reuse_prefix(sequence))
            self.windows.extend_partly(sequence.window, len(sequence.tokens))
        self._admit()
        chunks: list[Chunk] = []
        prefilling: list[TokenSequence] = []
        for sequence in list(self.running):
            if sequence not in self.running or not sequence.uncomputed or not self._make_room(sequence):
                continue  # preempted in this loop by one before it; none in `chunks` or `prefilling` ranks after it
            if sequence.unread > 1:
                prefilling.append(sequence)
            elif len(chunks) < self.token_budget:
                chunks.append(Chunk(sequence, 1, is_last=True))
        head = self._next_in_turn()
        self._least_served = self._next_line(prefilling if head is None else [*prefilling, head])
        left = self._plan_prefills(prefilling, self.token_budget - len(chunks), chunks)
        if self.states.count:
            self._plan_states(chunks)
        else:
            self._plan_drafts(chunks, min(left, self.sequence_budget - sum(map(logits_row_count, chunks))))
        return StepPlan(chunks, self._preemptions, self._cached_tokens, self._copies)

    def _next_in_turn(self) -> TokenSequence | None:
        """The next waiting sequence that no running one has overtaken.

        One that waits for blocks is served by the preemption of others.  As the least served of all it would hold the
        virtual time still until then, and an owner that was idle before would be owed all that others had meanwhile.
        """
        overtaken = {sequence.overtaken for sequence in self.running}
        owners = list[str]()
        while (head := self.waiting.peek(owners)) is not None and head in overtaken:
            owners.append(head.owner)
        return head

    def record_time(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Note how long a step took that computed these chunks, before they are committed."""
        costs = [(chunk.count, chunk.count * self._cost_after(chunk.sequence.computed)) for chunk in chunks]
        if sum(cost for count, cost in costs if count > 1) >= SMALLEST_SHARE:
            self._token_seconds.append(seconds / sum(cost for _, cost in costs))

    def charge_sources(self, sequences: Iterable[TokenSequence]) -> None:
        """Charge the owners of sequences whose sources begin to be encoded.  One that is aborted has cost as much."""
        for sequence in sequences:
            self._charge(sequence.owner, len(sequence.source))

    def charge(self, chunks: Iterable[Chunk]) -> None:
        """Charge the owners of chunks that were computed, before they are committed.

        A token to be scored costs as many tokens as a step has for each row of logits.  Otherwise an owner whose
        prompts wait for rows would have a claim to all of them, for the tokens that others computed meanwhile.
        """
        for chunk in chunks:
            sequence, cost = chunk.sequence, float(chunk.count + chunk.draft)
            if sequence.computed < sequence.scored_prefix:
                cost *= self._tokens_per_row
            self._charge(sequence.owner, cost)

    def _charge(self, owner: str, cost: float) -> None:
        least_served = self._least_served and self._least_served[1]
        self.waiting.charge(owner, cost, in_turn=least_served is None or owner == least_served)

    def commit(self, chunks: list[Chunk]) -> None:
        """Charge for the chunks, count them as computed, without their drafts, and publish full blocks and states."""
        self.charge(chunks)
        for chunk in chunks:
            sequence = chunk.sequence
            self.advance(sequence, chunk.count)
            self.states.commit(sequence.slots, sequence.block_keys, sequence.computed, chunk.count)

    def advance(self, sequence: TokenSequence, count: int) -> None:
        """Count `count` more tokens as computed."""
        sequence.computed += count
        full = sequence.computed // self.blocks.size
        if full > sequence.published:
            self._extend_keys(sequence, full)
            for index in range(sequence.published, full):
                self.blocks.publish(sequence.blocks[index], sequence.block_keys[index])
                self.windows.publish(sequence.window, index, sequence.block_keys[index])
            sequence.published = full
        self.windows.release_passed(sequence.window, sequence.computed)

    def unpublish(self, sequence: TokenSequence) -> None:
        """Remove what was computed of a sequence from the cached prefixes, because it is not valid."""
        self.blocks.unpublish(sequence.blocks)
        self.windows.unpublish(sequence.block_keys)
        self.states.unpublish(sequence.block_keys)

    def unpublish_all(self) -> None:
        self.blocks.unpublish(range(self.blocks.count))
        self.windows.unpublish_all()
        self.states.unpublish_all()

    def check(self) -> None:
        """Assert that no block or slot is leaked, lost or held twice, and that no removed sequence is kept."""
        self.blocks.check(sequence.blocks for sequence in self.running)
        self.states.check(sequence.slots for sequence in self.running)
        self.windows.check((sequence.window, sequence.computed) for sequence in self.running)
        assert not self.states.count or all(
            bool(sequence.computed) == (sequence.slots.current != NO_SLOT) for sequence in self.running
        ), "a running sequence lost its state, or has one before its first token"
        for sequence in (*self.waiting, *self.paused, *self.set_aside):
            assert not sequence.blocks, "a sequence not running holds blocks"
            assert not sequence.window.blocks, "a sequence not running holds blocks of windowed layers"
        assert self._running_by_owner == Counter(sequence.owner for sequence in self.running), (
            "the running sequences of an owner are miscounted"
        )
        present = len(self.running) + len(self.waiting) + len(self.paused) + len(self.set_aside)
        assert len(self._deadlines) <= present, "a deadline outlives its sequence"
        assert sum(map(len, self._searches.values())) <= present, "a search outlives its sequences"
        begun = [next(iter(beams)) for beams in self._searches.values()]
        assert self._widths == sum((Counter({beam.line: beam.width}) for beam in begun), Counter()), (
            "the widths of searches are miscounted"
        )

    def _make_room(self, sequence: TokenSequence) -> bool:
        """Allocate blocks for the next tokens, preempting the last in rank if need be.

        Returns False if the sequence itself was preempted.
        """
        while not (
            self.blocks.allocate(sequence.blocks, sequence.slot_count)
            and self.windows.extend(sequence.window, len(sequence.tokens))
            and self._make_writable(sequence)
        ):
            last = next(reversed(self.running))
            self._preempt(last)
            if last is sequence:
                return False
        return True

    def _make_writable(self, sequence: TokenSequence) -> bool:
        """Copy the blocks that are written next if they are shared; False if there is no free block for a copy."""
        index = sequence.computed // self.blocks.size
        if self.blocks.is_shared(sequence.blocks, index):
            if not self.blocks.free_blocks:
                return False
            self._copies.append(self.blocks.replace_shared(sequence.blocks, index))
        if self.windows.is_shared(sequence.window, index):
            copies = self.windows.replace_shared(sequence.window, index)
            self._copies += copies
            return bool(copies)
        return True

    def _preempt(self, sequence: TokenSequence) -> None:
        is_computed = not sequence.uncomputed
        sequence.overtaken = None
        self._unlist(sequence)
        self._release_cache(sequence)
        if is_computed:
            self.set_aside.add(sequence)
        else:
            self.waiting.put_back(sequence, sequence.owner, sequence.priority)
        self._preemptions += 1

    def _release_cache(self, sequence: TokenSequence) -> None:
        """Release the blocks and the state of a running sequence; it and others may find what is cached of it."""
        self._forget_progress(sequence)
        sequence.preempted += 1

    def _forget_progress(self, sequence: TokenSequence) -> None:
        self.blocks.release(sequence.blocks)
        self.windows.release(sequence.window)
        self.states.release(sequence.slots)
        sequence.computed = sequence.published = 0

    def _unlist(self, sequence: TokenSequence) -> None:
        """Remove a sequence from the paused, those set aside, the waiting or the running ones."""
        if sequence in self.paused:
            self.paused.remove(sequence)
        elif sequence in self.set_aside:
            self.set_aside.remove(sequence)
        elif sequence not in self.running:
            self.waiting.remove(sequence)
        else:
            del self.running[sequence]
            self._running_by_owner[sequence.owner] -= 1
            if not self._running_by_owner[sequence.owner]:
                del self._running_by_owner[sequence.owner]

    def _admit(self) -> None:
        """Admit waiting sequences while there is room: the beams of searches that have begun by rank, then all in the
        order of the queue.
        """
        before = len(self.running), self._preemptions
        self._admit_beams()
        passed: list[
            str
        ] = []  # owners whose next sequence does not fit, or whose next search is too wide beside others
        head: TokenSequence | None = None  # the first that does not fit
        while len(passed) < MAX_PASSED_OWNERS and (sequence := self.waiting.peek(passed)) is not None:
            if head is not None and sequence.priority < head.priority:
                break
            may_begin = self._may_begin(sequence)
            if may_begin and self._find_place(sequence, head):
                sequence.overtaken = head
                self._start(sequence)
                continue
            if may_begin and head is None:
                head = sequence
            passed.append(sequence.owner)
        if (len(self.running), self._preemptions) != before:
            self._sort_running()

    def _admit_beams(self) -> None:
        first = self.waiting.peek()
        if first is None:
            return
        for rank in sorted(self._searches):
            for beam in [beam for beam in self._searches[rank] if beam in self.waiting]:
                if first.priority > beam.priority or not self._make_place(beam):
                    return
                self._start(beam)

    def _may_begin(self, sequence: TokenSequence) -> bool:
        """Whether the search of a waiting sequence may begin beside others of its owner; true where there is none."""
        if sequence.width == 1 or sequence.rank in self._searches:
            return True
        begun = self._widths[sequence.line]
        return not begun or begun + sequence.width <= self.sequence_budget

    def _start(self, sequence: TokenSequence) -> None:
        """Let a waiting sequence run, for which there is a place."""
        self.waiting.remove(sequence)
        self._run(sequence)
        if sequence.width > 1 and sequence.rank not in self._searches:
            self._searches[sequence.rank] = {sequence: None}
            self._widths[sequence.line] += sequence.width

    def _run(self, sequence: TokenSequence) -> None:
        self.running[sequence] = None
        self._running_by_owner[sequence.owner] += 1

    def _sort_running(self) -> None:
        self.running = dict.fromkeys(sorted(self.running, key=attrgetter("rank")))

    def _find_place(self, sequence: TokenSequence, head: TokenSequence | None) -> bool:
        """As `_make_place`.  None is preempted for a sequence that would overtake `head`, and no search overtakes."""
        if head is None:
            return self._make_place(sequence)
        return sequence.width == 1 and self._take_place(sequence)

    def _make_place(self, sequence: TokenSequence) -> bool:
        """Take a place for `sequence`; others are preempted where that is allowed.  Returns whether there is one."""
        while not self._take_place(sequence):
            victim = self._find_victim(sequence)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _take_place(self, sequence: TokenSequence) -> bool:
        """Allocate blocks for all tokens of `sequence`, or for its window; return whether there is room.

        A free block is left for each running sequence.
        """
        if len(self.running) >= self.sequence_budget:
            return False
        shared = self._reuse_prefix(sequence)
        spare, length = len(self.running), len(sequence.tokens)
        if self.blocks.allocate(sequence.blocks, sequence.slot_count, spare) and self.windows.extend(
            sequence.window, length, spare
        ):
            self.windows.mark(sequence.window, length // self.blocks.size)
            self._count_cached(sequence, shared)
            return True
        self._forget_progress(sequence)
        return False

    def _fits_without(self, sequence: TokenSequence, others: Collection[TokenSequence]) -> bool:
        """Whether there would be a place for a waiting sequence if `others`, which run, were preempted."""
        spare = len(self.running) - len(others)
        self._reuse_prefix(sequence)
        fits = (
            spare < self.sequence_budget
            and self.blocks.has_room(sequence.blocks, sequence.slot_count, spare, [other.blocks for other in others])
            and self.windows.has_room(sequence.window, len(sequence.tokens), spare, [other.window for other in others])
        )
        self._forget_progress(sequence)
        return fits

    def _find_victim(self, sequence: TokenSequence) -> TokenSequence | None:
        """The sequence that is preempted to admit `sequence`, if any: see the module's docstring."""
        for runs in reversed(self.running):
            if not runs.uncomputed and runs.rank >= sequence.rank:
                return runs
        last = max(self.running, key=attrgetter("rank"), default=None)
        if last is None or last.priority < sequence.priority:
            return last
        behind = self._list_behind(sequence)
        if behind and self._fits_without(sequence, behind):
            return max(behind, key=attrgetter("rank"))
        if sequence.owner in self._running_by_owner:
            return None
        shares = Counter(runs.owner for runs in self.running if runs.priority == sequence.priority)
        owner, most = max(shares.items(), key=lambda share: share[1], default=("", 0))
        if most < 2:
            return None
        candidates = (runs for runs in self.running if runs.owner == owner and runs.priority == sequence.priority)
        return max(candidates, key=attrgetter("rank"))

    def _list_behind(self, sequence: TokenSequence) -> list[TokenSequence]:
        """The running sequences that have overtaken `sequence`, and those after them in their lines."""
        first: dict[LineKey, Rank] = {}
        for runs in self.running:
            if runs.overtaken is sequence:
                first[runs.line] = min(runs.rank, first.get(runs.line, runs.rank))
        return [runs for runs in self.running if runs.line in first and runs.rank >= first[runs.line]]

    def _plan_prefills(self, prefilling: list[TokenSequence], budget: int, chunks: list[Chunk]) -> int:
        """Add chunks of prefilling sequences; return what is left of the budget.

        The budget counts tokens; `room` is that of the step's time, in tokens without a context. `rows` are the rows of
        logits that are left: one for each sequence that could decode. A prompt to be scored takes one for each token.
        The first sequence leaves half of the room and of the rows to others. Any other prompt whose last token has no
        row leaves it to the next step, where it goes first.
        """
        rows = self.sequence_budget - len(chunks)
        begun: set[BlockKey] = set()  # blocks that are computed in this step
        first = 0 if any(sequence.source for sequence in prefilling) else 1
        oldest, others = prefilling[:first], prefilling[first:]
        others.sort(key=partial(prefill_order, self._next_line(prefilling)))
        room = min(budget, self._timed_budget())
        kept, kept_rows = (room // 2, rows // 2) if oldest and others else (0, 0)  # for others, whatever the oldest has
        room, rows, least = room - kept, rows - kept_rows, SMALLEST_SHARE if kept else SMALLEST_CHUNK
        for sequence in (*oldest, *others):
            if sequence not in oldest:
                room, rows, kept, kept_rows = max(room, 0) + kept, rows + kept_rows, 0, 0
            if not budget or room < 1:
                break
            self.windows.extend_partly(sequence.window, len(sequence.tokens))
            cost = self._cost_after(sequence.computed)
            most = max(int(min(self.chunk, room) / cost), min(least, self.chunk))
            count = min(sequence.uncomputed, most, budget)
            count = self.windows.room(sequence.window, sequence.computed, count)
            if sequence.computed < sequence.scored_prefix:
                count = min(count, rows)
            elif not rows and count == sequence.uncomputed:
                count -= 1
            if not count or self._next_key(sequence) in begun:
                continue
            chunk = Chunk(sequence, count, is_last=count == sequence.uncomputed)
            chunks.append(chunk)
            rows -= logits_row_count(chunk)
            begun.update(self._keys_within(sequence, count))
            budget, room, least = budget - count, room - ceil(count * cost), 1
        return budget

    def _timed_budget(self) -> int:
        """How many tokens of prompts a step computes in LONGEST_STEP_S, at least SMALLEST_CHUNK."""
        if len(self._token_seconds) < TIMED_STEPS:
            return self.token_budget
        return max(int(LONGEST_STEP_S / max(min(self._token_seconds), 1e-9)), SMALLEST_CHUNK)

    def _cost_after(self, context: int) -> float:
        """What a token takes of the budget after so many others: 1 up to FULL_CHUNK_CONTEXT."""
        more = max(context - FULL_CHUNK_CONTEXT, 0) * self.context_cost
        return 1 + more / (1 + FULL_CHUNK_CONTEXT * self.context_cost)

    def _next_line(self, sequences: Sequence[TokenSequence]) -> LineKey | None:
        """The line of the owner that has been served least, of the highest priority among `sequences`."""
        if not sequences:
            return None
        highest = max(sequence.priority for sequence in sequences)
        owners = (sequence.owner for sequence in sequences if sequence.priority == highest)
        return highest, self.waiting.next_owner(owners)

    def _next_key(self, sequence: TokenSequence) -> BlockKey | None:
        """The key of the block that a prefilling sequence computes next, if another sequence may compute it for it."""
        index, rest = divmod(sequence.computed, self.blocks.size)
        is_shared = not rest and sequence.computed >= sequence.scored_prefix and index < len(sequence.block_keys)
        return sequence.block_keys[index] if is_shared else None

    def _keys_within(self, sequence: TokenSequence, count: int) -> list[BlockKey]:
        """The keys of the blocks that are full after the next `count` tokens of a sequence."""
        first, last = sequence.computed // self.blocks.size, (sequence.computed + count) // self.blocks.size
        if first == last:
            return []
        self._extend_keys(sequence, last)
        return sequence.block_keys[first:last]

    def _plan_drafts(self, chunks: list[Chunk], budget: int) -> None:
        """Add drafts to the chunks, as many tokens as fit without taking room from others."""
        for chunk in chunks:
            sequence = chunk.sequence
            count = min(len(sequence.draft), budget, self.chunk - chunk.count) if chunk.is_last else 0
            if not count or not self.blocks.allocate(sequence.blocks, sequence.slot_count + count, len(self.running)):
                continue
            if self.windows.hold_draft(sequence.window, len(sequence.tokens) + count, len(self.running)):
                chunk.draft = count
                budget -= count

    def _plan_states(self, chunks: list[Chunk]) -> None:
        """Take a slot for the state after each chunk, then slots for states at borders, as far as there are any."""
        for chunk in chunks:
            self.states.take_write(chunk.sequence.slots)
        size = self.blocks.size
        for chunk in chunks:
            sequence, start = chunk.sequence, chunk.sequence.computed
            end = start + chunk.count
            border = sequence.branch if start < sequence.branch < end else (end - 1) // size * size
            if border > start:
                self._extend_keys(sequence, border // size)
                self.states.take_border(sequence.slots, border - start, sequence.block_keys[border // size - 1])

    def _reuse_prefix(self, sequence: TokenSequence) -> int:
        """Skip cached blocks, up to a cached state where there are states, and to a cached window where there are
        windows; return how many tokens they hold.

        The last token is always computed, for its logits.
        """
        size = self.blocks.size
        first, rest = divmod(sequence.computed, size)
        most = (len(sequence.tokens) - 1) // size
        if rest or first >= most or sequence.computed < sequence.scored_prefix:
            return 0
        self._extend_keys(sequence, most)
        keys = sequence.block_keys[first:most]
        keys, usable = keys[: self.blocks.count_cached(keys)], -1
        found = len(keys)
        while usable != len(keys):
            usable = len(keys)
            keys = keys[: self.windows.count_usable(keys, first)]
            keys = keys[: self.states.count_usable(keys)]
        self.windows.adopt_cached(sequence.window, keys, first)
        self.states.adopt_cached(sequence.slots, keys)
        sequence.branch = (first + found) * size if found > usable else 0
        if sequence.branch:
            self.windows.mark(sequence.window, first + found)
        shared = self.blocks.share_cached(sequence.blocks, keys, first)
        sequence.computed += shared * size
        sequence.published += shared
        return shared * size

    def _count_cached(self, sequence: TokenSequence, shared: int) -> None:
        if not sequence.preempted:  # otherwise it may find blocks that it computed itself
            sequence.cached_tokens += shared
            self._cached_tokens += shared

    def _extend_keys(self, sequence: TokenSequence, full: int) -> None:
        """Compute the keys of the sequence's first `full` blocks."""
        size, keys = self.blocks.size, sequence.block_keys
        for start in range(len(keys) * size, full * size, size):
            keys.append(
                child_key(
                    keys[-1] if keys else root_key(sequence.adapter, sequence.salt),
                    sequence.tokens[start : start + size],
                )
            )

"""Who computes how many tokens in the next step.

Plain integers: nothing here knows tensors, sampling or clients.  The one idea: there is no prefill phase and no decode
phase (vLLM v1's).  A sequence has `tokens`, of which `computed` are in the cache; every step lets sequences catch up
within one token budget.  A long prompt catches up in chunks, a talking sequence is one token behind, a preempted one
starts again at zero, a stored prefix starts ahead.

Who goes first in a step:
  1. those that talk (one token behind), oldest first;
  2. the oldest that catches up: nobody waits forever;
  3. the others that catch up, nearest first: a short prompt overtakes a long one.
Nobody takes more than `chunk` tokens.  `running` and then `waiting` are in the order of arrival at all times: admission
takes the first of those waiting, preemption the last of those running, to the head of the queue.  A sequence is
admitted when the cache has room for all its tokens, so only a talking one ever needs another block, and the oldest can
take everybody else's: it always finishes, hence everyone does.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from operator import attrgetter

from service.engine.blocks import ROOT, Blocks, Key, chain


@dataclass(eq=False, slots=True)
class Sequence:
    """Tokens on their way through the cache.  The caller appends to `tokens` and never takes any away."""

    tokens: list[int]
    computed: int = 0  # tokens whose keys and values are in the cache
    blocks: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)  # names of its full blocks, as far as anybody asked
    published: int = 0  # leading blocks that others can find, or that came from others
    cached: int = 0  # tokens of the prompt that were found stored
    preempted: int = 0

    @property
    def behind(self) -> int:
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `count` tokens of a sequence; `last` when it has caught up after them."""

    sequence: Sequence
    count: int
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: its chunks, and what making room and looking for stored prefixes came to."""

    chunks: list[Chunk]
    preemptions: int
    cached_tokens: int


class Scheduler:
    """Shares `token_budget` tokens a step among at most `sequence_budget` sequences, `chunk` at most for each."""

    def __init__(self, blocks: Blocks, *, token_budget: int, sequence_budget: int, chunk: int) -> None:
        assert min(token_budget, sequence_budget, chunk) > 0
        self.blocks = blocks
        self.token_budget, self.sequence_budget, self.chunk = token_budget, sequence_budget, chunk
        self.waiting: OrderedDict[Sequence, None] = OrderedDict()
        self.running: dict[Sequence, None] = {}
        self._preemptions = self._cached = 0  # since the last plan

    def add(self, sequence: Sequence) -> None:
        self.waiting[sequence] = None

    def remove(self, sequence: Sequence) -> None:
        """Finished or aborted, running or waiting: everything it held is free at once."""
        self.blocks.release(sequence.blocks)
        if sequence in self.running:
            del self.running[sequence]
        else:
            del self.waiting[sequence]

    def schedule(self) -> Plan:
        """The next step.  Not empty while anybody waits or runs."""
        self._preemptions = self._cached = 0
        chunks: list[Chunk] = []
        behind: list[Sequence] = []
        for sequence in list(self.running):
            if sequence not in self.running:
                continue  # an older one took its room in this loop; those in `chunks` and `behind` are older still
            if sequence.behind > 1:
                behind.append(sequence)
            elif len(chunks) < self.token_budget and self._make_room(sequence):
                chunks.append(Chunk(sequence, 1, last=True))
        behind += self._admit()
        self._catch_up(behind, self.token_budget - len(chunks), chunks)
        return Plan(chunks, self._preemptions, self._cached)

    def commit(self, chunks: list[Chunk]) -> None:
        """Book what was computed, and let others find the blocks that are full now."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.computed += chunk.count
            full = sequence.computed // self.blocks.size
            if full > sequence.published:
                self._name(sequence, full)
                for index in range(sequence.published, full):
                    self.blocks.publish(sequence.blocks[index], sequence.keys[index])
                sequence.published = full

    def check(self) -> None:
        """Assert that no block is leaked, lost or held twice."""
        self.blocks.check(sequence.blocks for sequence in self.running)
        assert not any(sequence.blocks for sequence in self.waiting), "a waiting sequence holds blocks"

    def _make_room(self, sequence: Sequence) -> bool:
        """Room for one more token, at the cost of the youngest if need be; no, if that is the sequence itself."""
        while not self.blocks.grow(sequence.blocks, len(sequence.tokens)):
            youngest, _ = self.running.popitem()
            self.blocks.release(youngest.blocks)
            youngest.computed = youngest.published = 0
            youngest.preempted += 1
            self.waiting[youngest] = None
            self.waiting.move_to_end(youngest, last=False)
            self._preemptions += 1
            if youngest is sequence:
                return False
        return True

    def _admit(self) -> list[Sequence]:
        """Take in those waiting, in order, while they fit and leave everyone who runs a block to grow into."""
        admitted = []
        while self.waiting and len(self.running) < self.sequence_budget:
            sequence = next(iter(self.waiting))
            shared = self._share(sequence)
            if not self.blocks.grow(sequence.blocks, len(sequence.tokens), spare=len(self.running)):
                self.blocks.release(sequence.blocks)
                sequence.computed = sequence.published = 0
                break
            del self.waiting[sequence]
            self.running[sequence] = None
            self._count(sequence, shared)
            admitted.append(sequence)
        return admitted

    def _catch_up(self, behind: list[Sequence], budget: int, chunks: list[Chunk]) -> None:
        if not behind:
            return
        oldest, *others = behind
        others.sort(key=attrgetter("behind"))
        for sequence in (oldest, *others):
            if not budget:
                return
            self._count(sequence, self._share(sequence))
            count = min(sequence.behind, self.chunk, budget)
            chunks.append(Chunk(sequence, count, last=count == sequence.behind))
            budget -= count

    def _share(self, sequence: Sequence) -> int:
        """Skip the blocks ahead that somebody has computed; return how many tokens those are.

        The last token stays: its logits are still to be made.
        """
        size = self.blocks.size
        first, rest = divmod(sequence.computed, size)
        most = (len(sequence.tokens) - 1) // size
        if rest or first >= most:
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
            keys.append(chain(keys[-1] if keys else ROOT, sequence.tokens[start : start + size]))

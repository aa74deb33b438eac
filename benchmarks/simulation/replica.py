"""A replica: the product's scheduler and blocks, and steps with measured durations.

Its only clock is the duration of steps, and it is independent of routing. Tokens are plain numbers, so blocks have
keys, are shared and are evicted as in a server.
"""

from dataclasses import dataclass
from typing import Any

from benchmarks.simulation.costs import StepCosts
from benchmarks.simulation.traffic import Turn
from polyhead.service.engine.block_allocator import BlockAllocator, BlockKey
from polyhead.service.engine.scheduler import Chunk, Scheduler, TokenSequence


@dataclass(frozen=True)
class Limits:
    """The settings of a replica that batches."""

    step_tokens: int = 512
    prefill_chunk: int = 256
    max_running: int = 64
    blocks: int = 1024
    block: int = 16


@dataclass(eq=False, slots=True)
class Visit:
    """A request on its way.  Times are simulated seconds; `ingress` and `candidate` are those of whoever routes."""

    turn: Turn
    turns: list[Turn]  # of the whole conversation
    came: float
    ingress: Any
    keys: tuple[BlockKey, ...]  # names of its prompt's blocks
    candidate: Any = None
    said: int = 0  # tokens
    first: float = 0.0  # seconds until its first token was heard
    last: float = 0.0  # when its last token was heard; 0: none yet
    cached: int = 0


class Replica:
    """One engine of one model."""

    def __init__(self, costs: StepCosts, limits: Limits) -> None:
        self._costs = costs
        self.scheduler = Scheduler(
            BlockAllocator(limits.blocks, limits.block),
            token_budget=limits.step_tokens,
            sequence_budget=limits.max_running,
            chunk=limits.prefill_chunk,
        )
        self.visits: dict[TokenSequence, Visit] = {}
        self._chunks: list[Chunk] = []
        self.stepping = False
        self.seconds = 0.0  # of all its steps
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.visits)

    @property
    def queued(self) -> int:
        """Tokens that are known and not computed."""
        return sum(sequence.uncomputed for sequence in self.visits)

    def submit(self, visit: Visit) -> None:
        blocks, turn = self.scheduler.blocks, visit.turn
        assert turn.prompt + turn.answer <= blocks.count * blocks.size, "it never fits: the engine refuses it"
        sequence = TokenSequence(turn.tokens(), block_keys=list(visit.keys))
        self.visits[sequence] = visit
        self.scheduler.add(sequence)

    def begin(self) -> float:
        """Plan a step; the seconds it will take."""
        plan = self.scheduler.schedule()
        self._chunks = plan.chunks
        rows = wanted = looked = 0
        for chunk in plan.chunks:
            count = chunk.count
            rows += count
            wanted += chunk.is_last
            looked += count * chunk.sequence.computed + count * (count + 1) // 2
        took = self._costs.of(rows, wanted, looked, len(plan.chunks))
        self.stepping = True
        self.seconds += took
        self.preemptions += plan.preemptions
        return took

    def finish(self) -> list[Visit]:
        """Book the step; who said a token.  Whose answer is whole has left."""
        self.stepping = False
        self.scheduler.commit(self._chunks)
        spoke: list[Visit] = []
        for chunk in self._chunks:
            if not chunk.is_last:
                continue
            sequence = chunk.sequence
            visit = self.visits[sequence]
            sequence.tokens.append(visit.turn.said(visit.said))
            visit.said += 1
            spoke.append(visit)
            if visit.said == visit.turn.answer:
                visit.cached = sequence.cached_tokens
                self.scheduler.remove(sequence)
                del self.visits[sequence]
        return spoke

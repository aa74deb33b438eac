"""Decode steps as CUDA graphs: a step of one row a sequence is recorded once and from then on replayed.

Knows neither network nor requests.  The one idea: a graph computes over fixed memory, so a step is padded up to the
next recorded number of sequences and its sheet copied to where the graph reads.  Padding rows are all the first token
of a sequence that lives in a spare block, which nobody else is given; what comes out of them is dropped.  No row's
arithmetic looks at another's, so they change nothing, not even a bit where the network was made so (models.invariant).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..network.cache import PagedCache
from ..network.ragged import RaggedBatch
from ..network.varlen import Kernel
from .contract import StepInput
from .step_buffer import StepBuffer

StepOutput = tuple[Tensor, Tensor | None]  # logits [M, V]; whether what each row stored is finite [T]
RunStep = Callable[[], StepOutput]
Capture = Callable[[RunStep], RunStep]


def graph_sizes(most: int) -> list[int]:
    """Numbers of sequences for which a graph is recorded: powers of two, and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


class GraphRecorder:
    """Makes graphs of what runs on the current device; they share the memory of what they compute on the way."""

    _pool: Any = None

    def __call__(self, run: RunStep) -> RunStep:
        """`run`, computed once beforehand, then recorded: what is returned replays it into the same tensors."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # libraries allocate and choose the first time, which must not be recorded
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Only this thread is kept from what would spoil the recording: another may ask how much memory is free.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            computed = run()

        def replay() -> StepOutput:
            graph.replay()
            return computed

        return replay


@dataclass(frozen=True)
class PagedAttention:
    """Attention by `kernel`, which reads blocks where they are (models.network.varlen), instead of in padded groups.

    Steps of up to `talking` sequences of one row each are recorded by `capture` and replayed; 0: none is.
    """

    kernel: Kernel
    decode_sequences: int = 0
    capture: Capture = field(default_factory=GraphRecorder)


@dataclass(frozen=True)
class RecordedGraph:
    """A graph and the memory it reads its sheet from."""

    buffer: Tensor
    replay: RunStep


class DecodeGraphs:
    """Steps of up to `how.talking` sequences over `cache`, whose last block is the spare one.

    `compute` is recorded when a number of sequences first comes up.  Sequences have up to `context` tokens.
    """

    def __init__(
        self, compute: Callable[[RaggedBatch], StepOutput], cache: PagedCache, how: PagedAttention, context: int
    ) -> None:
        self._compute, self._cache, self._attention, self._context = compute, cache, how, context
        self._sizes = graph_sizes(how.decode_sequences)
        self._width = -(-context // cache.size)
        self._recorded: dict[int, RecordedGraph] = {}

    def padding(self, rows: StepInput) -> int:
        """Rows that are computed for nobody; -1 if this is no step for a graph."""
        count = len(rows.block_tables)
        if rows.adapters is not None and any(rows.adapters):
            return -1  # what they add is not recorded
        if not len(rows.tokens) == len(rows.output_rows) == count <= self._sizes[-1]:
            return -1
        if max(map(len, rows.block_tables)) > self._width:
            return -1
        return next(size for size in self._sizes if size >= count) - count

    def step(self, rows: StepInput, slots: list[int]) -> StepOutput:
        """As `compute` does, good until the next step; for `rows` whose `padding` is not negative."""
        count, missing = len(rows.block_tables), self.padding(rows)
        spare = self._cache.count - 1
        padded = StepInput(
            tokens=rows.tokens + [0] * missing,
            positions=rows.positions + [0] * missing,
            starts=list(range(count + missing + 1)),
            block_tables=rows.block_tables + [[spare]] * missing,
            output_rows=list(range(count + missing)),
        )
        sheet = StepBuffer(padded, slots + [spare * self._cache.size] * missing, self._width)
        out, finite = self._replay(sheet, count + missing)
        return out[:count], None if finite is None else finite[:count]

    def _replay(self, sheet: StepBuffer, size: int) -> StepOutput:
        device = self._cache.keys[0].device
        recorded = self._recorded.get(size)
        if recorded is None:
            flat = sheet.copy_to(device)

            def run() -> StepOutput:
                return self._compute(sheet.view_batch(flat, self._attention.kernel, self._cache, self._context))

            recorded = self._recorded[size] = RecordedGraph(flat, self._attention.capture(run))
        else:
            recorded.buffer.copy_(sheet.stage_for(device), non_blocking=True)
        return recorded.replay()

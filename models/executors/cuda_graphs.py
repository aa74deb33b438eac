"""CUDA graphs of decode steps, in which every sequence has one row. A step is recorded once for each size and then
replayed.

A graph uses fixed memory, so a step is padded to the next recorded number of sequences, and its step buffer is copied
to where the graph reads it. Padding rows are the first token of a sequence in a spare block; their output is dropped.
No row depends on another one, so padding changes no result, not even the last bit where the network was made invariant
(models.invariant).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..network.cache import PagedCache
from ..network.ragged import RaggedBatch
from ..network.sequence_spans import Kernel
from .contract import StepInput
from .step_buffer import StepBuffer

StepOutput = tuple[Tensor, Tensor | None]  # logits [M, V]; whether the key and value of each row are finite [T]
RunStep = Callable[[], StepOutput]
Capture = Callable[[RunStep], RunStep]


def graph_sizes(most: int) -> list[int]:
    """The numbers of sequences for which a graph is recorded: powers of two, and `most`."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


class GraphRecorder:
    """Records graphs on the current device; they share the memory of their intermediate results."""

    _pool: Any = None

    def __call__(self, run: RunStep) -> RunStep:
        """Run `run` once, then record it. The result replays the graph and returns the same tensors each time."""
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()  # the first run allocates memory and chooses kernels, which must not be recorded
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Only this thread must avoid calls that break the recording; another may query free memory.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            computed = run()

        def replay() -> StepOutput:
            graph.replay()
            return computed

        return replay


@dataclass(frozen=True)
class PagedAttention:
    """Attention by `kernel`, which reads cache blocks in place (models.network.varlen) instead of gathering them into
    padded groups.

    Decode steps of up to `decode_sequences` sequences are recorded by `capture` and replayed; 0: none.
    """

    kernel: Kernel
    decode_sequences: int = 0
    capture: Capture = field(default_factory=GraphRecorder)


@dataclass(frozen=True)
class RecordedGraph:
    """A graph, and the memory it reads its step buffer from."""

    buffer: Tensor
    replay: RunStep


class DecodeGraphs:
    """Decode steps of up to `decode_sequences` sequences over `cache`, whose last block is the spare one.

    A graph of `compute` is recorded when its size is first needed. Sequences have up to `context` tokens.
    """

    def __init__(
        self, compute: Callable[[RaggedBatch], StepOutput], cache: PagedCache, attention: PagedAttention, context: int
    ) -> None:
        self._compute, self._cache, self._attention, self._context = compute, cache, attention, context
        self._sizes = graph_sizes(attention.decode_sequences)
        self._width = -(-context // cache.size)
        self._recorded: dict[int, RecordedGraph] = {}

    def padding(self, rows: StepInput) -> int:
        """The number of padding rows; -1 if the step cannot be replayed."""
        count = len(rows.block_tables)
        if rows.adapters is not None and any(rows.adapters):
            return -1  # adapter updates are not recorded
        if not len(rows.tokens) == len(rows.output_rows) == count <= self._sizes[-1]:
            return -1
        if max(map(len, rows.block_tables)) > self._width:
            return -1
        return next(size for size in self._sizes if size >= count) - count

    def step(self, rows: StepInput, slots: list[int]) -> StepOutput:
        """The result of `compute` for `rows` whose `padding` is not negative. It is valid until the next step."""
        count, missing = len(rows.block_tables), self.padding(rows)
        spare = self._cache.count - 1
        padded = StepInput(
            tokens=rows.tokens + [0] * missing,
            positions=rows.positions + [0] * missing,
            starts=list(range(count + missing + 1)),
            block_tables=rows.block_tables + [[spare]] * missing,
            output_rows=list(range(count + missing)),
        )
        step_buffer = StepBuffer(padded, slots + [spare * self._cache.size] * missing, self._width)
        out, finite = self._replay(step_buffer, count + missing)
        return out[:count], None if finite is None else finite[:count]

    def _replay(self, step_buffer: StepBuffer, size: int) -> StepOutput:
        device = self._cache.keys[0].device
        recorded = self._recorded.get(size)
        if recorded is None:
            flat = step_buffer.copy_to(device)

            def run() -> StepOutput:
                return self._compute(step_buffer.view_batch(flat, self._attention.kernel, self._cache, self._context))

            recorded = self._recorded[size] = RecordedGraph(flat, self._attention.capture(run))
        else:
            recorded.buffer.copy_(step_buffer.stage_for(device), non_blocking=True)
        return recorded.replay()

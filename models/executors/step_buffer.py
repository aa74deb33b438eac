"""All integers of a step in one buffer, so that one copy brings them to the device, where they are views of it.

It is for attention by one kernel (models.network.varlen), where shapes follow from the counts of rows, sequences and
blocks; steps with the same counts use the same memory.
"""

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..network.cache import CacheView, PagedCache
from ..network.ragged import RaggedBatch
from ..network.sequence_spans import Kernel, SequenceSpans
from .contract import StepInput


class StepBuffer:
    """The integers of the step `rows`, with keys and values stored at `slots`; block tables are padded to `width`
    blocks.

    Without a cache there are no slots, and `width` is 0.
    """

    def __init__(self, rows: StepInput, slots: list[int], width: int = 0) -> None:
        used = [rows.positions[end - 1] + 1 for end in rows.starts[1:]] if width else []
        table = np.zeros((len(used), width), np.int32)
        for blocks, row in zip(rows.block_tables, table, strict=bool(width)):
            row[: len(blocks)] = blocks
        self._all_output = len(rows.output_rows) == len(rows.tokens)
        outputs = [] if self._all_output else rows.output_rows
        lists = [rows.tokens, rows.positions, rows.segments or [], outputs, rows.starts]
        lists += [slots, list(accumulate(used, initial=0)), used]
        parts = [*(np.array(part, np.int32) for part in lists), table.ravel()]
        self.buffer = torch.from_numpy(np.concatenate(parts))
        self._sizes = [len(part) for part in parts]
        self._starts, self._longest = tuple(rows.starts), max(b - a for a, b in pairwise(rows.starts))

    def copy_to(self, device: torch.device) -> Tensor:
        """The buffer on the device; the host does not wait for the copy."""
        return self.stage_for(device).to(device, non_blocking=True)

    def stage_for(self, device: torch.device) -> Tensor:
        """The buffer in memory from which a copy to `device` does not block the host."""
        return self.buffer.pin_memory() if device.type == "cuda" else self.buffer

    def view_batch(self, flat: Tensor, kernel: Kernel, cache: PagedCache | None, context: int) -> RaggedBatch:
        """The batch whose tensors are views of `flat`, this buffer on a device; no sequence is longer than
        `context`."""
        tokens, positions, segments, outputs, starts, slots, key_starts, used, table = torch.split(flat, self._sizes)
        view = None if cache is None else CacheView(cache, cache.storage_rows(slots.long()))
        spans = SequenceSpans(kernel, starts, starts, self._longest, max(context, self._longest))
        if cache is not None:
            blocks = table.view(len(used), -1)
            most = max(context, blocks.size(1) * cache.size)
            spans = SequenceSpans(kernel, starts, key_starts, self._longest, most, used, blocks)
        return RaggedBatch(
            tokens=tokens,
            positions=positions,
            starts=self._starts,
            segments=segments if len(segments) else None,
            cache=view,
            output_rows=None if self._all_output else outputs,
            spans=spans,
        )

"""All integers of a step on one sheet: one copy to the device, then views of it.

Knows no networks and computes nothing.  For attention by one kernel (models.network.varlen), where a step's shapes
follow from how many rows, sequences and blocks there are; so sheets of the same counts can be copied into the same
memory."""

from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from ..network.cache import CacheView, PagedCache
from ..network.ragged import Ragged
from ..network.varlen import Kernel, Spans
from .contract import Rows


class Sheet:
    """What `rows` asks for, their keys and values stored at `slots`; tables are filled up to `width` blocks.

    Without a cache there are no slots, and `width` is 0.
    """

    def __init__(self, rows: Rows, slots: list[int], width: int = 0) -> None:
        used = [rows.positions[end - 1] + 1 for end in rows.starts[1:]] if width else []
        table = np.zeros((len(used), width), np.int32)
        for blocks, row in zip(rows.tables, table, strict=bool(width)):
            row[: len(blocks)] = blocks
        self._all_wanted = len(rows.wanted) == len(rows.tokens)
        wanted = [] if self._all_wanted else rows.wanted
        lists = [rows.tokens, rows.positions, rows.segments or [], wanted, rows.starts]
        lists += [slots, list(accumulate(used, initial=0)), used]
        parts = [*(np.array(part, np.int32) for part in lists), table.ravel()]
        self.flat = torch.from_numpy(np.concatenate(parts))
        self._sizes = [len(part) for part in parts]
        self._starts, self._longest = tuple(rows.starts), max(b - a for a, b in pairwise(rows.starts))

    def on(self, device: torch.device) -> Tensor:
        """The flat sheet there; the host does not wait for the copy."""
        return self.staged(device).to(device, non_blocking=True)

    def staged(self, device: torch.device) -> Tensor:
        """The flat sheet where a copy to `device` can start from without the host's waiting."""
        return self.flat.pin_memory() if device.type == "cuda" else self.flat

    def read(self, flat: Tensor, kernel: Kernel, cache: PagedCache | None, context: int) -> Ragged:
        """The batch whose tensors are views of `flat`, this sheet on a device; no sequence is longer than `context`."""
        tokens, positions, segments, wanted, starts, slots, key_starts, used, table = torch.split(flat, self._sizes)
        view = None if cache is None else CacheView(cache, cache.places(slots.long()))
        spans = Spans(kernel, starts, starts, self._longest, max(context, self._longest))
        if cache is not None:
            blocks = table.view(len(used), -1)
            most = max(context, blocks.size(1) * cache.size)
            spans = Spans(kernel, starts, key_starts, self._longest, most, used, blocks)
        return Ragged(
            tokens=tokens,
            positions=positions,
            starts=self._starts,
            segments=segments if len(segments) else None,
            cache=view,
            wanted=None if self._all_wanted else wanted,
            spans=spans,
        )

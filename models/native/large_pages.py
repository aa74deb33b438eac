"""Memory for what is read again in every step: large pages where the system has them, zeros until written.

Knows nothing of what is kept there.  Weights are read from end to end, a matrix at a time, faster than a processor
looks up small pages: so matrices lie side by side in large pieces, not each in an allocation of its own.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 2 << 20  # bytes of a large page
CHUNK_BYTES = 256 << 20  # of addresses: what is not used of the last large page is the only waste
CACHE_LINE = 64


class PageAllocator:
    """Arrays that live as long as anybody holds one of their piece."""

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        """[count] numbers, the first at the start of a cache line."""
        size = count * np.dtype(dtype).itemsize
        if self._used + size > len(self._piece):
            self._piece, self._used = map_pages(max(size, CHUNK_BYTES)), 0
        out = self._piece[self._used : self._used + size].view(dtype)
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return out

    def release_last(self, last: NDArray[np.generic]) -> None:
        """What `zeros` gave last and nobody keeps: there the next array will be, unless it is larger than what is left.

        It has no zeros then, so it must be written from end to end.
        """
        self._used -= -(-last.nbytes // CACHE_LINE) * CACHE_LINE


def map_pages(size: int) -> NDArray[np.uint8]:
    """At least `size` bytes that start at a large page; those that are never written take no memory."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # what is shared has small pages
    whole = mmap.mmap(-1, -(-size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        whole.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(whole, np.uint8)
    start = -array.ctypes.data % PAGE_BYTES
    return array[start : len(array) - PAGE_BYTES + start]

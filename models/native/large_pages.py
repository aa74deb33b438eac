"""Memory for what every step reads: in large pages if the system has them, zeros until written.

Weights are read sequentially, one matrix after the other, faster than a processor translates addresses of small pages.
So matrices are packed into large chunks instead of one allocation each.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 2 << 20  # bytes of a large page
CHUNK_BYTES = 256 << 20  # of address space; only the rest of the last large page is wasted
CACHE_LINE = 64


class PageAllocator:
    """Allocates arrays in large chunks. A chunk is freed when no array of it is used any more."""

    def __init__(self) -> None:
        self._piece = np.empty(0, np.uint8)
        self._used = 0

    def zeros(self, count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
        """[count] zeros, beginning at a cache line."""
        size = count * np.dtype(dtype).itemsize
        if self._used + size > len(self._piece):
            self._piece, self._used = map_pages(max(size, CHUNK_BYTES)), 0
        out = self._piece[self._used : self._used + size].view(dtype)
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return out

    def release_last(self, last: NDArray[np.generic]) -> None:
        """Release the last array of `zeros`, which must be unused: the next array takes its place if it fits the chunk.

        That memory is not zeroed again, so the next array must be written completely.
        """
        self._used -= -(-last.nbytes // CACHE_LINE) * CACHE_LINE


def map_pages(size: int) -> NDArray[np.uint8]:
    """At least `size` bytes that begin at a large page; pages that are never written take no memory."""
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared mappings get small pages
    whole = mmap.mmap(-1, -(-size // PAGE_BYTES) * PAGE_BYTES + PAGE_BYTES, flags=private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        whole.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(whole, np.uint8)
    start = -array.ctypes.data % PAGE_BYTES
    return array[start : len(array) - PAGE_BYTES + start]

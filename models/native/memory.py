"""Memory for what is read again in every step: large pages where the system has them, zeros until written."""

import mmap

import numpy as np
from numpy.typing import NDArray

LARGE = 2 << 20


def zeros(count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
    """[count] numbers, aligned to a large page where there are enough of them."""
    size = count * np.dtype(dtype).itemsize
    if size < LARGE:
        whole = np.zeros(size + 64, np.uint8)
        start = -whole.ctypes.data % 64
        return whole[start : start + size].view(dtype)
    mapped = mmap.mmap(-1, size + LARGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(mapped, np.uint8)
    start = -whole.ctypes.data % LARGE
    return whole[start : start + size].view(dtype)

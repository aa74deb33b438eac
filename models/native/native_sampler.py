"""Draws words from rows of logits by the compiled library, on threads of its own.

Knows no requests: what is wanted of each row, and what came of it, stands in the library's own structure.
"""

from ctypes import Array

from . import library as native
from .library import SampleStruct


class NativeSampler:
    """`instructions` names the library.  One thread calls it."""

    def __init__(self, instructions: str, threads: int) -> None:
        self._library = native.load_library(instructions)
        self._drawer = self._library.polyhead_open_drawer(threads)

    def __del__(self) -> None:
        if drawer := getattr(self, "_drawer", None):
            self._library.polyhead_close_drawer(drawer)

    def sample(self, draws: Array[SampleStruct]) -> None:
        """Fills in what they tell.  What they point to must live until then."""
        self._library.polyhead_draw(self._drawer, draws, len(draws))

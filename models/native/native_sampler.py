"""Samples tokens from rows of logits with the compiled library, on its own threads."""

from ctypes import Array

from . import library as native
from .library import SampleStruct


class NativeSampler:
    """`instructions` names the library. It is always called by the same thread."""

    def __init__(self, instructions: str, threads: int) -> None:
        self._library = native.load_library(instructions)
        self._drawer = self._library.polyhead_open_drawer(threads)

    def __del__(self) -> None:
        if drawer := getattr(self, "_drawer", None):
            self._library.polyhead_close_drawer(drawer)

    def sample(self, draws: Array[SampleStruct]) -> None:
        """Fill in the results of the structures. What they point to must exist until the call returns."""
        self._library.polyhead_draw(self._drawer, draws, len(draws))

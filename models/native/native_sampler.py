"""Samples tokens from rows of logits with the compiled library, on its own threads."""

from ctypes import Array

from . import library as native
from .library import SampleStruct


class NativeSampler:
    """`instructions` names the library. It is always called by the same thread."""

    def __init__(self, instructions: str, threads: int) -> None:
        self._library = native.load_library(instructions)
        self._sampler = self._library.polyhead_open_sampler(threads)

    def __del__(self) -> None:
        if sampler := getattr(self, "_sampler", None):
            self._library.polyhead_close_sampler(sampler)

    def sample(self, rows: Array[SampleStruct]) -> None:
        """Fill in the results of the structures. What they point to must exist until the call returns."""
        self._library.polyhead_sample(self._sampler, rows, len(rows))

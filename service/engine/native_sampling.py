"""The sampler of CPUs: tokens are drawn, and scored, by compiled code, on threads of its own.

Knows what is asked of a row, and writes it down as the library reads it.
"""

from collections.abc import Sequence
from ctypes import Array

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.native.library import Draw
from polyhead.models.native.native_sampler import Drawer

from .sampler import UNSCORED, Ask, Scored

FLOAT = 4  # bytes, and of a whole number here


class Compiled:
    """See Sampler.  `instructions` names the library."""

    def __init__(self, instructions: str, threads: int) -> None:
        self._drawer = Drawer(instructions, threads)

    def draw(self, logits: Tensor, asks: Sequence[Ask]) -> list[tuple[int, Scored]]:
        """As Sampler has it."""
        draws: Array[Draw] = (Draw * len(asks))()
        most = max(0, *(ask.logprobs for ask in asks))
        tops: NDArray[np.int32] = np.empty((len(asks), most), np.int32)
        values: NDArray[np.float32] = np.empty((len(asks), most), np.float32)
        address, places, theirs = logits.data_ptr(), tops.ctypes.data, values.ctypes.data
        width, stride = logits.size(1), logits.stride(0)
        for number, (draw, ask) in enumerate(zip(draws, asks, strict=True)):
            draw.logits, draw.words = address + FLOAT * stride * ask.row, width
            draw.tops, draw.top_values = places + FLOAT * most * number, theirs + FLOAT * most * number
            write(draw, ask, width)
        self._drawer.draw(draws)
        if all(ask.logprobs < 0 for ask in asks):
            return [(draw.word, UNSCORED) for draw in draws]
        listed = zip(draws, tops.tolist(), values.tolist(), strict=True)
        return [(draw.word, scored(draw, ids, theirs)) for draw, ids, theirs in listed]


def write(draw: Draw, ask: Ask, width: int) -> None:
    """Put down what is asked.  What is pointed to lives as long as `ask`."""
    sampling = ask.sampling
    draw.uniform, draw.temperature, draw.top_k = ask.uniform, sampling.temperature, min(sampling.top_k, width)
    draw.top_p, draw.min_p, draw.typical_p = sampling.top_p, sampling.min_p, sampling.typical_p
    draw.scored = min(ask.logprobs, width)
    if ask.shape is not None:
        tokens, values = ask.shape.changes
        draw.changed, draw.changes = tokens.ctypes.data, values.ctypes.data
        draw.changed_count, draw.stride = len(tokens), values.shape[1]
        if len(allowed := ask.shape.allowed(width)):
            draw.allowed = allowed.ctypes.data
    if ask.words is not None:
        draw.guided = ask.words.ctypes.data


def scored(draw: Draw, tops: list[int], values: list[float]) -> Scored:
    if draw.scored < 0 or draw.word < 0:
        return UNSCORED
    return draw.value, tuple(zip(tops[: draw.scored], values[: draw.scored], strict=True))

"""The sampler of CPUs: tokens are sampled and scored by compiled code, on threads of its own."""

from collections.abc import Sequence
from ctypes import Array

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.native.library import SampleStruct
from polyhead.models.native.native_sampler import NativeSampler

from .sampler import NO_SCORE, SampleRow, TokenScore

FLOAT_BYTES = 4  # bytes of a float, and of an integer here


class CompiledSampler:
    """See Sampler.  `instructions` names the instruction set of the library."""

    def __init__(self, instructions: str, threads: int) -> None:
        self._drawer = NativeSampler(instructions, threads)

    def sample(self, logits: Tensor, asks: Sequence[SampleRow]) -> list[tuple[int, TokenScore]]:
        """See Sampler."""
        draws: Array[SampleStruct] = (SampleStruct * len(asks))()
        most = max(0, *(ask.logprobs for ask in asks))
        tops: NDArray[np.int32] = np.empty((len(asks), most), np.int32)
        values: NDArray[np.float32] = np.empty((len(asks), most), np.float32)
        address, places, theirs = logits.data_ptr(), tops.ctypes.data, values.ctypes.data
        width, stride = logits.size(1), logits.stride(0)
        for number, (draw, ask) in enumerate(zip(draws, asks, strict=True)):
            draw.logits, draw.words = address + FLOAT_BYTES * stride * ask.row, width
            draw.tops, draw.top_values = places + FLOAT_BYTES * most * number, theirs + FLOAT_BYTES * most * number
            write_row(draw, ask, width)
        self._drawer.sample(draws)
        if all(ask.logprobs < 0 for ask in asks):
            return [(draw.word, NO_SCORE) for draw in draws]
        listed = zip(draws, tops.tolist(), values.tolist(), strict=True)
        return [(draw.word, read_score(draw, ids, theirs)) for draw, ids, theirs in listed]


def write_row(draw: SampleStruct, ask: SampleRow, width: int) -> None:
    """Write a row's options into the library's structure.  The arrays that it points to live as long as `ask`."""
    sampling = ask.sampling
    draw.uniform, draw.temperature, draw.top_k = ask.uniform, sampling.temperature, min(sampling.top_k, width)
    draw.top_p, draw.min_p, draw.typical_p = sampling.top_p, sampling.min_p, sampling.typical_p
    draw.scored = min(ask.logprobs, width)
    if ask.processor is not None:
        tokens, values = ask.processor.changes
        draw.changed, draw.changes = tokens.ctypes.data, values.ctypes.data
        draw.changed_count, draw.stride = len(tokens), values.shape[1]
        if len(allowed := ask.processor.allowed_words(width)):
            draw.allowed = allowed.ctypes.data
    if ask.mask is not None:
        draw.guided = ask.mask.ctypes.data


def read_score(draw: SampleStruct, tops: list[int], values: list[float]) -> TokenScore:
    if draw.scored < 0 or draw.word < 0:
        return NO_SCORE
    return draw.value, tuple(zip(tops[: draw.scored], values[: draw.scored], strict=True))

"""The sampler of CPUs: tokens are sampled and scored by compiled code, on threads of its own."""

from collections.abc import Sequence
from ctypes import Array

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.native.library import SampleStruct
from polyhead.models.native.native_sampler import NativeSampler

from .logits_processors import NO_CHANGES, Changes
from .sampler import NO_SCORE, SampleRow, TokenScore

FLOAT_BYTES = 4  # bytes of a float, and of an integer here


class CompiledSampler:
    """See Sampler.  `instructions` names the instruction set of the library."""

    def __init__(self, instructions: str, threads: int) -> None:
        self._native = NativeSampler(instructions, threads)

    def sample(self, logits: Tensor, samples: Sequence[SampleRow]) -> list[tuple[int, TokenScore]]:
        """See Sampler."""
        structs: Array[SampleStruct] = (SampleStruct * len(samples))()
        max_logprobs = max(0, *(each.logprobs for each in samples))
        tops: NDArray[np.int32] = np.empty((len(samples), max_logprobs), np.int32)
        values: NDArray[np.float32] = np.empty((len(samples), max_logprobs), np.float32)
        kept: list[Changes] = []  # arrays that the structures point to
        address, top_address, top_values = logits.data_ptr(), tops.ctypes.data, values.ctypes.data
        width, stride = logits.size(1), logits.stride(0)
        for number, (struct, each) in enumerate(zip(structs, samples, strict=True)):
            struct.logits, struct.words = address + FLOAT_BYTES * stride * each.row, width
            struct.tops, struct.top_values = (
                top_address + FLOAT_BYTES * max_logprobs * number,
                top_values + FLOAT_BYTES * max_logprobs * number,
            )
            kept.append(write_row(struct, each, width))
        self._native.sample(structs)
        if all(each.logprobs < 0 for each in samples):
            return [(struct.word, NO_SCORE) for struct in structs]
        listed = zip(structs, tops.tolist(), values.tolist(), strict=True)
        return [(struct.word, read_score(struct, ids, top_values)) for struct, ids, top_values in listed]


def write_row(struct: SampleStruct, sample: SampleRow, width: int) -> Changes:
    """Write a row's options into the library's structure.  The arrays that it points to live as long as `sample` and
    what is returned.
    """
    sampling = sample.sampling
    struct.uniform, struct.temperature, struct.top_k = sample.uniform, sampling.temperature, min(sampling.top_k, width)
    struct.top_p, struct.min_p, struct.typical_p = sampling.top_p, sampling.min_p, sampling.typical_p
    struct.scored = min(sample.logprobs, width)
    changes = NO_CHANGES if sample.processor is None else sample.processor.changes
    if sample.processor is not None:
        tokens, values = changes
        struct.changed, struct.changes = tokens.ctypes.data, values.ctypes.data
        struct.changed_count, struct.stride = len(tokens), values.shape[1]
        if len(allowed := sample.processor.allowed_words(width)):
            struct.allowed = allowed.ctypes.data
    if sample.mask is not None:
        struct.guided = sample.mask.ctypes.data
    return changes


def read_score(struct: SampleStruct, tops: list[int], values: list[float]) -> TokenScore:
    if struct.scored < 0 or struct.word < 0:
        return NO_SCORE
    return struct.value, tuple(zip(tops[: struct.scored], values[: struct.scored], strict=True))

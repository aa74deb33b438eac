"""The compiled library through ctypes: the choice for this processor, its structures and its functions.

The structures mirror those in src/. A library compiled from other sources is refused, and the sizes of the structures
are compared.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import build

LIBRARIES = Path(__file__).parent / "lib"
CPU_INFO = Path("/proc/cpuinfo")
# Fastest first: the name, and the CPU flags that Linux must report for it.
CPU_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c"),
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "i8mm": ("asimd", "asimddp", "i8mm"),
    "dotprod": ("asimd", "asimddp"),
    "portable": (),
}
UNFINISHED = -1  # the result of a step whose turn is over
# What is out of range, by the result of a step; 0: nothing.
STEP_ERRORS = (
    "",
    "counts",
    "starts",
    "tokens",
    "positions",
    "segments",
    "blocks",
    "output rows",
    "adapters",
    "the cache",
    "states",
)


class BlockKind(NamedTuple):
    """A format of blocks in GGUF files: its number in src/blocks.hpp, and the numbers and bytes of a block."""

    code: int
    numbers: int
    size: int


FLOATS = 0  # the number of rows that are float32
BLOCK_KINDS: dict[str, BlockKind] = {
    "Q4_0": BlockKind(1, 32, 18),
    "Q4_1": BlockKind(2, 32, 20),
    "Q5_0": BlockKind(3, 32, 22),
    "Q5_1": BlockKind(4, 32, 24),
    "Q8_0": BlockKind(5, 32, 34),
    "Q4_K": BlockKind(6, 256, 144),
    "Q5_K": BlockKind(7, 256, 176),
    "Q6_K": BlockKind(8, 256, 210),
}  # those that the library decodes; equal to the bit to the gguf package


class SourceStruct(Structure):
    _fields_ = (("rows", c_void_p), ("kinds", c_void_p))


class Norm(Structure):
    _fields_ = (("weight", c_void_p), ("bias", c_void_p))


class Linear(Structure):
    _fields_ = (
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("format", c_int32),
        ("unit", c_float),
    )


class LowRankStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("a", "b", "halves")),
        *((name, c_int32) for name in ("rank", "a_bytes", "b_bytes", "unused")),
    )


class RecurrentWeights(Structure):
    _fields_ = tuple((name, c_void_p) for name in ("taps", "taps_bias", "rates", "step_bias", "skip", "norm"))


class Layer(Structure):
    _fields_ = (
        ("attention_norm", Norm),
        ("mlp_norm", Norm),
        ("attention_post_norm", Norm),
        ("mlp_post_norm", Norm),
        ("query_norm", Norm),
        ("key_norm", Norm),
        ("value_norm", Norm),
        ("input_norm", Norm),
        ("frequencies", c_void_p),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("magnitude", c_float),
        *((name, c_int32) for name in ("mixer", "order", "gated")),
        *((name, c_int32) for name in ("kv_heads", "head_width", "rotary_width", "key_layer", "tied_values")),
        *((name, c_float) for name in ("score_scale", "output_scale")),
        ("unused", c_int32),
        *((name, Linear) for name in ("input", "output", "up", "down", "input_gate", "input_up")),
        ("mixture", c_void_p),
        ("recurrent", RecurrentWeights),
    )


class Recurrence(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("kernel", "heads", "head_width", "key_heads", "key_width")),
        *((name, c_int32) for name in ("norm_groups", "gate_first")),
        *((name, c_float) for name in ("norm_eps", "least_step", "most_step", "update_scale")),
        ("unused", c_int32),
    )


class Routing(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("count", "chosen", "groups", "chosen_groups")),
        *((name, c_int32) for name in ("logistic", "normalised", "shared", "shared_gate")),
        *((name, c_float) for name in ("normalised_eps", "scale", "clamp")),
        ("unused", c_int32),
    )


class Expert(Structure):
    _fields_ = (("up", Linear), ("down", Linear))


class Mixture(Structure):
    _fields_ = (
        ("router", Linear),
        *((name, c_void_p) for name in ("choice_bias", "output_scales", "chosen_input", "shared_input")),
        ("chosen_norm", Norm),
        ("shared_norm", Norm),
        ("experts", POINTER(Expert)),
    )


class Plan(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("width", "depth", "heads", "mlp_width")),
        *((name, c_int32) for name in ("causal", "norm", "activation", "gated", "generates")),
        *((name, c_int32) for name in ("block_count", "window_blocks", "state_count", "narrow")),
        *((name, c_int32) for name in ("position_offset", "vocab_size")),
        *((name, c_int32) for name in ("position_count", "segment_count")),
        *((name, c_int32) for name in ("embedding_width", "rotary_width", "head_norms", "layer_embedding")),
        *((name, c_int32) for name in ("global_tokens", "separator")),
        *((name, c_float) for name in ("eps", "embedding_scale")),
        *((name, c_float) for name in ("score_cap", "residual_scale", "logit_scale", "logit_cap")),
        *((name, c_void_p) for name in ("tokens", "positions", "segments", "rates")),
        ("embedding_norm", Norm),
        ("final_norm", Norm),
        ("projection", Linear),
        ("head", Linear),
        ("layer_tokens", c_void_p),
        ("layer_projection", Linear),
        ("layer_norm", Norm),
        ("routing", Routing),
        ("recurrence", Recurrence),
        ("layers", POINTER(Layer)),
    )


class StepStruct(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("count", "sequences", "output_count", "rank")),
        *(
            (name, c_void_p)
            for name in (
                "tokens",
                "positions",
                "segments",
                "starts",
                "block_tables",
                "table_starts",
                "window_tables",
                "window_starts",
                "output_rows",
                "adapters",
                "uses",
            )
        ),
        ("states", c_void_p),
    )


class StepCall(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("model", "rows", "out", "nonfinite", "argmax")),
        *((name, c_int32) for name in ("out_stride", "result")),
    )


class SampleStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "changed", "changes", "allowed", "guided", "tops", "top_values")),
        ("uniform", c_double),
        *((name, c_int32) for name in ("words", "changed_count", "stride", "top_k")),
        *((name, c_float) for name in ("temperature", "top_p", "min_p", "typical_p")),
        ("scored", c_int32),
        ("word", c_int32),
        ("value", c_float),
        ("unused", c_int32),
    )


def processor_flags() -> set[str]:
    """The features of this processor by Linux's names; empty where the system does not tell."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        lines = []
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def runnable_targets() -> list[str]:
    """The instruction sets that this processor has and that a library exists for, the fastest first."""
    flags = processor_flags()
    return [
        name for name, needs in CPU_FLAGS.items() if flags.issuperset(needs) and (LIBRARIES / f"{name}.so").exists()
    ]


@cache
def load_library(name: str) -> ctypes.CDLL:
    """The library for one instruction set. Raises OSError unless it was compiled from the present sources."""
    path = LIBRARIES / f"{name}.so"
    if build.SOURCES and build.is_stale(path):
        raise OSError(
            f"{path} was compiled from other sources; compile it again: python -m polyhead.models.native.build"
        )
    return open_library(path)


def library_hash(name: str) -> str:
    """The hash of the sources and flags that a library was compiled from."""
    made: bytes = load_library(name).polyhead_made_of()
    return made.decode()


@cache
def load_fastest() -> ctypes.CDLL | None:
    """The library for the best instruction set of this processor; None if there is none."""
    names = runnable_targets()
    return load_library(names[0]) if names else None


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library. Raises OSError if the file is missing, or its structures have other sizes."""
    loaded = ctypes.CDLL(str(path))
    mirrors = (
        *(Plan, Layer, Linear, StepStruct, LowRankStruct, SampleStruct),
        *(Routing, Expert, Mixture, SourceStruct, StepCall),
    )
    for which, mirror in enumerate(mirrors):
        if loaded.polyhead_sizes(which) != ctypes.sizeof(mirror):
            raise OSError(f"{path} does not fit: it was compiled from other sources")
    loaded.polyhead_made_of.restype = c_char_p
    loaded.polyhead_open.restype = c_void_p
    loaded.polyhead_open.argtypes = [POINTER(Plan), c_int]
    loaded.polyhead_close.argtypes = [c_void_p]
    loaded.polyhead_cache_bytes.restype = c_int64
    loaded.polyhead_cache_bytes.argtypes = [c_void_p, c_int]
    loaded.polyhead_layer_bytes.restype = c_int64
    loaded.polyhead_layer_bytes.argtypes = [c_void_p, c_int, c_int]
    loaded.polyhead_set_cache.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    loaded.polyhead_step.argtypes = [POINTER(StepCall), c_int, c_int64]
    loaded.polyhead_resume.restype = c_int
    loaded.polyhead_resume.argtypes = [c_void_p, c_int64]
    loaded.polyhead_multiply.argtypes = [POINTER(Linear), c_void_p, c_int, c_void_p]
    loaded.polyhead_pack.argtypes = [POINTER(SourceStruct), c_int, c_int, c_int, c_int, c_float, c_int, c_void_p]
    loaded.polyhead_decode.argtypes = [c_int, c_void_p, c_int64, c_void_p]
    loaded.polyhead_are_finite.argtypes = [c_int, c_void_p, c_int64]
    loaded.polyhead_largest.restype = c_float
    loaded.polyhead_largest.argtypes = [c_int, c_void_p, c_int64]
    loaded.polyhead_open_sampler.restype = c_void_p
    loaded.polyhead_open_sampler.argtypes = [c_int]
    loaded.polyhead_close_sampler.argtypes = [c_void_p]
    loaded.polyhead_sample.argtypes = [c_void_p, POINTER(SampleStruct), c_int]
    return loaded

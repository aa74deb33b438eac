"""The compiled library through ctypes: the choice for this processor, its structures and its functions.

The structures mirror those in src/. A library compiled from other sources is refused, and the sizes of the structures
are compared.
"""

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

from . import build

LIBRARIES = Path(__file__).parent / "lib"
# Fastest first: the name, and the CPU flags that Linux must report for it.
CPU_FLAGS: dict[str, tuple[str, ...]] = {
    "avx512vnni": ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx2", "fma", "f16c"),
    "avxvnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "portable": (),
}
# What is out of range, by the return value of polyhead_step; 0: nothing.
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
        ("frequencies", c_void_p),
        ("sinks", c_void_p),
        ("window", c_int64),
        ("magnitude", c_float),
        *((name, c_int32) for name in ("mixer", "order", "gated")),
        *((name, Linear) for name in ("input", "output", "up", "down")),
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
    _fields_ = (("router", Linear), ("choice_bias", c_void_p), ("experts", POINTER(Expert)))


class Plan(Structure):
    _fields_ = (
        *((name, c_int32) for name in ("width", "depth", "heads", "kv_heads", "head_width", "mlp_width")),
        *((name, c_int32) for name in ("causal", "norm", "activation", "gated", "generates")),
        *((name, c_int32) for name in ("block_count", "window_blocks", "state_count", "narrow")),
        *((name, c_int32) for name in ("position_offset", "vocab_size")),
        *((name, c_int32) for name in ("position_count", "segment_count")),
        *((name, c_int32) for name in ("embedding_width", "rotary_width", "head_norms", "unused")),
        *((name, c_float) for name in ("eps", "score_scale", "embedding_scale")),
        *((name, c_float) for name in ("score_cap", "residual_scale", "logit_scale", "logit_cap")),
        *((name, c_void_p) for name in ("tokens", "positions", "segments", "rates")),
        ("embedding_norm", Norm),
        ("final_norm", Norm),
        ("projection", Linear),
        ("head", Linear),
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


def runnable_targets() -> list[str]:
    """The instruction sets that this processor has and that a library exists for, the fastest first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = set(next((line for line in lines if line.startswith("flags")), "").split())
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
    mirrors = (Plan, Layer, Linear, StepStruct, LowRankStruct, SampleStruct, Routing, Expert, Mixture)
    for which, mirror in enumerate(mirrors):
        if loaded.polyhead_sizes(which) != ctypes.sizeof(mirror):
            raise OSError(f"{path} does not fit: it was compiled from other sources")
    loaded.polyhead_made_of.restype = c_char_p
    loaded.polyhead_open.restype = c_void_p
    loaded.polyhead_open.argtypes = [POINTER(Plan), c_int]
    loaded.polyhead_close.argtypes = [c_void_p]
    loaded.polyhead_cache_bytes.restype = c_int64
    loaded.polyhead_cache_bytes.argtypes = [c_void_p, c_int]
    loaded.polyhead_set_cache.argtypes = [c_void_p, c_void_p, c_void_p, c_void_p]
    loaded.polyhead_step.restype = c_int
    loaded.polyhead_step.argtypes = [c_void_p, POINTER(StepStruct), c_void_p, c_int, c_void_p, c_void_p]
    loaded.polyhead_multiply.argtypes = [POINTER(Linear), c_void_p, c_int, c_void_p]
    loaded.polyhead_pack.argtypes = [c_void_p, c_int, c_int, c_int, c_int, c_float, c_int, c_void_p]
    loaded.polyhead_decode.argtypes = [c_int, c_void_p, c_int64, c_void_p]
    loaded.polyhead_open_sampler.restype = c_void_p
    loaded.polyhead_open_sampler.argtypes = [c_int]
    loaded.polyhead_close_sampler.argtypes = [c_void_p]
    loaded.polyhead_sample.argtypes = [c_void_p, POINTER(SampleStruct), c_int]
    return loaded

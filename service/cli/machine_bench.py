"""`polyhead bench machine`: bytes and operations a second that this machine reaches.

Each figure is the best of a few tries, since it is used as a bound: a step of a network takes at least its bytes over
the one and its operations over the other.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from polyhead.models.native.large_pages import map_pages
from polyhead.models.native.library import load_library, runnable_targets
from polyhead.models.native.packed_network import PackedNetwork, Precision
from polyhead.models.network.model_config import ModelConfig

from ..resources import machine

CACHE_FOLDER = Path("/sys/devices/system/cpu/cpu0/cache")
CPUINFO = Path("/proc/cpuinfo")
SUFFIXES = {"K": 10, "M": 20, "G": 30}
MIN_SECONDS, MIN_TRIES = 0.4, 3  # of one figure: it is tried until both are reached
DEFAULT_CACHE = 32 << 20  # bytes, if the system doesn't say
MAX_CACHED_BYTES, MAX_MEMORY_BYTES = 64 << 20, 1 << 30  # bytes that are read, at most
MIN_SIDE, MAX_SECONDS = 256, 1.0  # side of a multiplied matrix, and seconds it may take
SIDE, ROWS = 2048, 512  # side of matrices; rows of the compiled step's product on each thread
GPU_SIDE = 8192  # side of matrices on a GPU
SQUARE_CONFIG = ModelConfig(
    vocab_size=1,
    width=SIDE,
    depth=1,
    heads=1,
    kv_heads=1,
    head_width=SIDE,
    mlp_width=SIDE,
    max_positions=1,
    causal=True,
)


@dataclass(frozen=True)
class BenchFigure:
    """One measured figure: what was done, by which function, on how many threads (0: on the GPU), and its rate."""

    what: str
    by: str
    threads: int
    value: float  # in `unit`
    unit: str


@dataclass(frozen=True)
class MachineReport:
    """The machine's parts, and their measured figures.  `kernels` are the compiled step's, the fastest first."""

    processor: str
    cores: int
    usable_cores: int
    memory_gib: float
    cache_mib: float
    kernels: list[str]
    torch_kernels: str
    gpu: str
    figures: list[BenchFigure]

    def best_value(self, what: str, threads: int) -> float:
        """Return the largest value of a figure.  Raises ValueError if it was not measured."""
        return max(one.value for one in self.figures if (one.what, one.threads) == (what, threads))

    def as_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def as_text(self) -> str:
        """Format the parts, then one line per figure."""
        names = f"{self.processor}, {self.cores} cores of which {self.usable_cores} may be used"
        parts = f"{self.memory_gib:.0f} GiB of memory, {self.cache_mib:.0f} MiB of last-level cache"
        kernels = f"compiled step: {', '.join(self.kernels) or 'none'}; torch: {self.torch_kernels}"
        rows = [("", "by", "threads", "")]
        rows += [(f.what, f.by, str(f.threads or "GPU"), f"{f.value:,.1f} {f.unit}") for f in self.figures]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join([names, parts, kernels, *([self.gpu] if self.gpu else []), "", *lines])


def measure_machine() -> MachineReport:
    """Measure the machine.  It takes some ten seconds, all usable cores and 1 GiB of memory."""
    before, cores = torch.get_num_threads(), min(machine.core_limits())
    try:
        figures = [*measure_processor(cores), *(measure_gpu() if torch.cuda.is_available() else [])]
    finally:
        torch.set_num_threads(before)
    return MachineReport(
        processor=processor_name(),
        cores=os.cpu_count() or cores,
        usable_cores=cores,
        memory_gib=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        cache_mib=last_cache_bytes() / 2**20,
        kernels=runnable_targets(),
        torch_kernels=torch.backends.cpu.get_cpu_capability(),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        figures=figures,
    )


def processor_name() -> str:
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def last_cache_bytes() -> int:
    """Return the bytes of the largest cache that a core has or shares."""
    sizes = [path.read_text().strip() for path in CACHE_FOLDER.glob("index*/size")]
    return max((int(size[:-1]) << SUFFIXES[size[-1]] for size in sizes if size), default=DEFAULT_CACHE)


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4 and so on, and the number of all cores."""
    return sorted({1 << n for n in range(cores.bit_length()) if 1 << n < cores} | {cores})


def best_seconds(function: Callable[[], object]) -> float:
    """Return the shortest time of several runs, after one to warm up."""
    function()
    tries: list[float] = []
    began = time.perf_counter()
    while len(tries) < MIN_TRIES or time.perf_counter() - began < MIN_SECONDS:
        tries.append(time_once(function))
    return min(tries)


def measure_processor(cores: int) -> Iterator[BenchFigure]:
    cache = last_cache_bytes()
    free = machine.spendable_memory(torch.device("cpu"))
    sizes = {
        "memory": min(4 * cache, MAX_MEMORY_BYTES, free // 4),
        "last-level cache": min(cache // 2, MAX_CACHED_BYTES, free // 4),
    }
    for what, size in sizes.items():
        numbers = torch.from_numpy(map_pages(size).view(np.float32))  # large pages, as weights have
        numbers.fill_(1.0)
        for threads in thread_counts(cores):
            torch.set_num_threads(threads)
            yield BenchFigure(what, "torch.sum", threads, numbers.nbytes / best_seconds(numbers.sum) / 1e9, "GB/s")
        del numbers
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        yield from measure_torch_products(threads)
        if runnable_targets():
            yield measure_compiled_product("float32", threads)
            yield measure_compiled_product("int8", threads)


def measure_torch_products(threads: int) -> Iterator[BenchFigure]:
    """Measure the product of a square matrix with itself."""
    for what, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        matrix = torch.randn(SIDE, SIDE).to(dtype)
        yield BenchFigure(what, "torch.mm", threads, measure_operations(matrix, torch.mm), "GFLOPS")
    codes = torch.randint(-128, 128, (SIDE, SIDE), dtype=torch.int8)
    yield BenchFigure("int8", "torch._int_mm", threads, measure_operations(codes, torch._int_mm), "GOPS")


def measure_operations(matrix: torch.Tensor, multiply: Callable[[torch.Tensor, torch.Tensor], object]) -> float:
    """Return 10^9 operations a second, for the largest corner of `matrix` that takes at most MAX_SECONDS.

    Without instructions for a type, torch computes one number at a time, and the whole matrix would take minutes.
    """
    side = MIN_SIDE
    while 8 * time_once(corner_product(matrix, side, multiply)) < MAX_SECONDS and side < len(matrix):
        side *= 2
    return 2 * side**3 / best_seconds(corner_product(matrix, side, multiply)) / 1e9


def corner_product(
    matrix: torch.Tensor, side: int, multiply: Callable[[torch.Tensor, torch.Tensor], object]
) -> Callable[[], object]:
    corner = matrix[:side, :side].contiguous()
    return lambda: multiply(corner, corner)


def time_once(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def measure_compiled_product(precision: Precision, threads: int) -> BenchFigure:
    """Measure [ROWS, SIDE] times [SIDE, SIDE] on each thread; rows are quantised on the way, as in a step."""
    pack = PackedNetwork(load_library(runnable_targets()[0]), SQUARE_CONFIG, precision)
    linear = pack.pack_linear([nn.Linear(SIDE, SIDE, bias=False)])
    buffers = [(torch.randn(ROWS, SIDE), torch.empty(ROWS, SIDE)) for _ in range(threads)]

    def multiply(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        pack.library.polyhead_multiply(linear, pair[0].data_ptr(), ROWS, pair[1].data_ptr())

    with ThreadPoolExecutor(threads) as pool:
        took = best_seconds(lambda: list(pool.map(multiply, buffers)))
    operations = threads * 2 * ROWS * SIDE * SIDE / 1e9
    return BenchFigure(
        precision, "compiled step", threads, operations / took, "GOPS" if precision == "int8" else "GFLOPS"
    )


def measure_gpu() -> Iterator[BenchFigure]:
    """Measure the first GPU.  Copied bytes count twice: read and written."""
    numbers = torch.ones(min(MAX_MEMORY_BYTES, torch.cuda.mem_get_info()[0] // 8) // 4, device="cuda")
    copied = torch.empty_like(numbers)
    size = 2 * numbers.numel() * 4
    yield BenchFigure("memory", "torch.copy_", 0, size / best_gpu_seconds(lambda: copied.copy_(numbers)) / 1e9, "GB/s")
    for what, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        a = torch.randn(GPU_SIDE, GPU_SIDE, device="cuda").to(dtype)
        took = best_gpu_seconds(lambda a=a: a @ a)  # type: ignore[misc]
        yield BenchFigure(what, "torch.mm", 0, 2 * GPU_SIDE**3 / took / 1e9, "GFLOPS")


def best_gpu_seconds(function: Callable[[], object]) -> float:
    def call_and_wait() -> None:
        function()
        torch.cuda.synchronize()

    return best_seconds(call_and_wait)

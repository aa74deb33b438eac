"""Measure how the time of a token grows with context, batch and model, and compute the minimum on this machine.

    python -m benchmarks.growth [--only NAME ...] [--rounds 5]     measures into .bench/growth.json
    python -m benchmarks.growth --draw                             writes docs/growth.md and docs/growth/*.svg

Networks have the shapes of real ones and random weights. Caches have random contents. A step generates the next token
of each of `batch` sequences of `context` tokens. A step must read its bytes and compute its operations, so it takes at
least the longer of these two times. The machine's rates are measured in the same run (service/cli/machine_bench.py).
"""

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, cast, get_args

import matplotlib as mpl
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from torch import nn

from polyhead.models.executors.contract import StepInput
from polyhead.models.native.native_executor import BLOCK_TOKENS, NativeExecutor
from polyhead.models.native.packed_network import Precision, free_weights
from polyhead.models.native.step_memory import native_block_bytes
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.service.cli import machine_bench as bench
from polyhead.service.cli.machine_bench import MachineReport

ROOT = Path(__file__).parent.parent
KEPT, DOCS = ROOT / ".bench" / "growth.json", ROOT / "docs"
LLAMA = ModelConfig(
    vocab_size=49_152,
    width=576,
    depth=30,
    heads=9,
    kv_heads=3,
    head_width=64,
    mlp_width=1536,
    max_positions=8192 + BLOCK_TOKENS,
    causal=True,
    position="rotary",
    norm="rms",
    activation="silu",
    gated_mlp=True,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
)
SHAPES = {
    "SmolLM2-135M": LLAMA,
    "SmolLM2-360M": replace(LLAMA, width=960, depth=32, heads=15, kv_heads=5, mlp_width=2560),
    "Qwen2.5-0.5B": replace(
        LLAMA, vocab_size=151_936, width=896, depth=24, heads=14, kv_heads=2, mlp_width=4864, qkv_bias=True
    ),
}
PLAINEST = "SmolLM2-135M"
CONTEXTS, BATCHES = (64, 256, 1024, 4096, 8192), (1, 2, 4, 8, 16, 32, 64, 128, 256)
USUAL, TOGETHER = 128, 32  # tokens of context; sequences
SMALL = 0x3C23  # about a hundredth twice over, as float32; a number of any format: what fills the cache
SECONDS = 0.3  # of one point in one round, at least


@dataclass(frozen=True)
class Point:
    """A step: a token for each of `batch` sequences that have `context` of them."""

    shape: str
    precision: Precision
    batch: int
    context: int


@dataclass(frozen=True)
class Measured:
    point: Point
    step_s: float
    floor_s: float

    @property
    def token_us(self) -> float:
        return self.step_s / self.point.batch * 1e6

    @property
    def floor_us(self) -> float:
        return self.floor_s / self.point.batch * 1e6


def points(shape: str, precision: Precision) -> list[Point]:
    wanted = [(1, USUAL), (TOGETHER, USUAL)]
    if shape == PLAINEST:
        wanted += [(1, context) for context in CONTEXTS] + [(batch, USUAL) for batch in BATCHES]
    return [Point(shape, precision, *pair) for pair in sorted(set(wanted))]


def made(config: ModelConfig) -> tuple[Transformer, LanguageHead]:
    """Random weights, small enough that numbers stay such; a head of its own reads as much as a tied one."""
    torch.manual_seed(0)
    with torch.device("meta"):
        net, head = Transformer(config), LanguageHead(config)
    net, head = net.to_empty(device="cpu"), head.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in (*net.parameters(), *head.parameters()):
            parameter.uniform_(-0.05, 0.05)
    turns = 10_000.0 ** (-torch.arange(0, config.head_width, 2) / config.head_width)
    for rotary in net.rotaries:
        cast(Any, rotary).frequency = turns
    return net, head


def executor(config: ModelConfig, precision: Precision, blocks: int, threads: int) -> NativeExecutor:
    net, head = made(config)
    run = NativeExecutor(net, head, precision=precision, block_count=blocks, threads=threads, load_part=held)
    for kept in run._cache:
        kept[: kept.size // 2 * 2].view(np.uint16)[:] = SMALL  # unwritten pages would all be one cached page
    return run


@contextmanager
def held(part: nn.Module) -> Iterator[None]:
    """Once packed, its own weights are not wanted any more."""
    yield
    free_weights(part)


def blocks(point: Point) -> int:
    return point.batch * -(-(point.context + 1) // BLOCK_TOKENS)


def rows(point: Point) -> StepInput:
    """The step, its sequences' blocks in no order."""
    choice, free = random.Random(0), list(range(blocks(point)))
    choice.shuffle(free)
    each = len(free) // point.batch
    return StepInput(
        tokens=[choice.randrange(1000) for _ in range(point.batch)],
        positions=[point.context] * point.batch,
        starts=list(range(point.batch + 1)),
        block_tables=[free[start : start + each] for start in accumulate([each] * (point.batch - 1), initial=0)],
        output_rows=list(range(point.batch)),
    )


def step_seconds(run: NativeExecutor, step: StepInput) -> float:
    """The median of as many steps as fit in SECONDS, one at least after one to warm up."""
    run.step(step)
    taken: list[float] = []
    began = time.perf_counter()
    while not taken or time.perf_counter() - began < SECONDS:
        before = time.perf_counter()
        run.step(step)
        taken.append(time.perf_counter() - before)
    return statistics.median(taken)


def measure(shape: str, precision: Precision, rounds: int, threads: int) -> dict[Point, float]:
    """Seconds of each point's step, the median of interleaved rounds."""
    wanted = points(shape, precision)
    steps = {point: rows(point) for point in wanted}
    run = executor(SHAPES[shape], precision, max(map(blocks, wanted)), threads)
    times: dict[Point, list[float]] = {point: [] for point in wanted}
    for _ in range(rounds):
        for point in wanted:
            times[point].append(step_seconds(run, steps[point]))
    return {point: statistics.median(taken) for point, taken in times.items()}


def floor(point: Point, machine: MachineReport) -> float:
    """Seconds that the step takes at least: to read its bytes, or to do its operations, whichever is longer.

    At best as many bytes as fit are still in the last-level cache from the step before.
    """
    config, bits = SHAPES[point.shape], 32 if point.precision == "float32" else 8
    inner, kept = config.heads * config.head_width, config.kv_heads * config.head_width
    layer = config.width * (2 * inner + 2 * kept + 3 * config.mlp_width)
    weights = config.depth * layer + config.width * config.vocab_size
    seen = point.batch * point.context
    read = weights * bits / 8 + seen * native_block_bytes(config, point.precision) / BLOCK_TOKENS
    threads = machine.usable_cores
    near = min(read, machine.cache_mib * 2**20)
    bytes_s = near / machine.best_value("last-level cache", threads) + (read - near) / machine.best_value(
        "memory", threads
    )
    products = 2 * weights * point.batch / machine.best_value("float32" if bits == 32 else "int8", threads)
    attention = 4 * seen * config.depth * inner / machine.best_value("float32" if bits == 32 else "int8", threads)
    return max(bytes_s, products + attention) / 1e9


def read() -> dict[str, Any]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def keep(name: str, value: object) -> None:
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps(read() | {name: value}))


def results(kept: dict[str, Any]) -> tuple[MachineReport, list[Measured]]:
    fields = dict(kept["machine"])
    machine = MachineReport(**fields | {"figures": [bench.BenchFigure(**figure) for figure in fields["figures"]]})
    found = [(Point(*where), step) for name, values in kept.items() if name != "machine" for where, step in values]
    return machine, [Measured(point, step, floor(point, machine)) for point, step in found]


def draw(axes: Axes, found: Sequence[Measured], along: str) -> None:
    """Cost a token of both precisions, measured and least, against `along`."""
    for precision, colour in zip(("int8", "float32"), ("tab:blue", "tab:orange"), strict=True):
        line = sorted((m for m in found if m.point.precision == precision), key=lambda m: getattr(m.point, along))
        across = [getattr(m.point, along) for m in line]
        axes.plot(across, [m.token_us for m in line], "o-", color=colour, label=precision)
        axes.plot(across, [m.floor_us for m in line], "--", color=colour, label=f"{precision}, floor")
    axes.set(xscale="log", yscale="log", xlabel=along, ylabel="microseconds a token")
    axes.set_xticks(across, [f"{value:,}" for value in across])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def draw_sizes(axes: Axes, found: Sequence[Measured]) -> None:
    """Bars beside each other, with their floors as lines across."""
    for offset, precision in ((-0.2, "int8"), (0.2, "float32")):
        line = [next(m for m in found if (m.point.shape, m.point.precision) == (s, precision)) for s in SHAPES]
        at = [offset + n for n in range(len(line))]
        axes.bar(at, [m.token_us for m in line], 0.38, label=precision)
        axes.hlines([m.floor_us for m in line], [x - 0.19 for x in at], [x + 0.19 for x in at], colors="black")
    axes.set(xlabel="shape (lines: the floor)", ylabel="microseconds a token")
    axes.set_xticks(range(len(SHAPES)), list(SHAPES))


def save(figure: Figure, axes: Axes, title: str, name: str) -> None:
    axes.set_title(title)
    axes.legend()
    axes.grid(alpha=0.3)
    (DOCS / "growth").mkdir(exist_ok=True)
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(DOCS / "growth" / f"{name}.svg", metadata=nothing)


def plots(found: Sequence[Measured]) -> None:
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "growth"})  # small files, the same each time
    series = {
        "context": [m for m in found if m.point.shape == PLAINEST and m.point.batch == 1],
        "batch": [m for m in found if m.point.shape == PLAINEST and m.point.context == USUAL],
    }
    for along, line in series.items():
        figure = Figure((6.4, 4.2), layout="constrained")
        axes = figure.subplots()
        draw(axes, line, along)
        save(figure, axes, f"{PLAINEST}, {'one sequence' if along == 'context' else f'{USUAL} tokens each'}", along)
    figure = Figure((6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    draw_sizes(axes, [m for m in found if (m.point.batch, m.point.context) == (1, USUAL)])
    save(figure, axes, f"one sequence, {USUAL} tokens", "size")


PAGE = """# Growth

The time of the compiled step for a token, against context, batch and model size, compared with the minimum (the
floor) on the same machine. A step must read its weights and the keys and values of its sequences once, and must compute
its products and its attention once. So the floor is the longer of two times: bytes over bandwidth, and operations over
peak rate. The bytes that fit in the last-level cache are counted at its bandwidth, as if the previous step had left
them there; the rest at the bandwidth of memory. Shapes are those of the named models, weights are random.
`python -m benchmarks.growth`, then `--draw`.

![cost of a token against context](growth/context.svg)
![cost of a token against batch](growth/batch.svg)
![cost of a token of three models](growth/size.svg)

## Measured

| shape | precision | batch | context | a step, ms | a token, us | floor, us | of the floor |
|---|---|---|---|---|---|---|---|
{rows}

## The machine

`polyhead bench machine`, run in the same hour:

```
{machine}
```
"""


def page(machine: MachineReport, found: Sequence[Measured]) -> str:
    lines = [
        f"| {m.point.shape} | {m.point.precision} | {m.point.batch} | {m.point.context:,} | {m.step_s * 1e3:,.2f} "
        f"| {m.token_us:,.0f} | {m.floor_us:,.0f} | {m.floor_us / m.token_us:.0%} |"
        for m in found
    ]
    return PAGE.format(rows="\n".join(lines), machine=machine.as_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=[""], help='parts of names: "machine", "SmolLM2-135M int8"')
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    if options.draw:
        machine, found = results(read())
        plots(found)
        (DOCS / "growth.md").write_text(page(machine, found))
        return
    chosen = {f"{s} {p}": (s, p) for s in SHAPES for p in get_args(Precision) if p != "int4"}
    if any(part in "machine" for part in options.only):
        keep("machine", asdict(bench.measure_machine()))
    torch.set_num_threads(1)  # beside the step's own
    for name, (shape, precision) in chosen.items():
        if any(part in name for part in options.only):
            times = measure(shape, precision, options.rounds, options.threads)
            keep(name, [[[*asdict(point).values()], seconds] for point, seconds in times.items()])
            print(name, {f"{p.batch} x {p.context}": round(s * 1e3, 2) for p, s in times.items()}, flush=True)


if __name__ == "__main__":
    main()

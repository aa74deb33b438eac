"""Compare the time of the engine's own decisions in a step with the time of the network.

    python -m benchmarks.scheduler [--steps 12]

Decoding sequences, one token each a step, without and with 1,000 waiting requests. `schedule` is the scheduler alone.
`own` is all of the worker's step except arithmetic: the scheduler, preparing rows, making events and the report. It is
measured once with an executor that does nothing, and once beside the network, whose weights evict the processor's
caches. The event loop's work on the events is not included. The network is SmolLM2-135M in float32 on the reference
executor.
"""

import argparse
import statistics
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from benchmarks.serving import machine
from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.network.heads import LanguageHead
from polyhead.service.config import settings
from polyhead.service.core.request import Generate, Sampling
from polyhead.service.engine.block_allocator import BlockAllocator
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.scheduler import Scheduler, TokenSequence
from polyhead.service.engine.worker import WarmupRequest
from polyhead.service.resources import machine as capacity
from polyhead.service.runtime import quickstart

WIDTHS = (1, 32, 256)  # sequences
WAITING = (0, 1000)
PROMPT = 32  # tokens
BLOCK = 16  # tokens
CHEAP_STEPS = 200  # of what takes microseconds
MOST = 480  # tokens that those go on for, after the prompt
PATIENCE_S = 12.0  # of a line
GREEDY = Sampling(temperature=0)
AIM = 0.03


class Nothing:
    """An executor with fixed results."""

    nonfinite_blocks: frozenset[int] = frozenset()
    state_count = window_blocks = window = 0
    argmax = None

    def __init__(self) -> None:
        self.block_size, self.block_count = BLOCK, max(WIDTHS) * (PROMPT + MOST + BLOCK) // BLOCK
        self.logits = torch.zeros(max(WIDTHS), 8)

    def step(self, rows: StepInput) -> Tensor:
        return self.logits[: len(rows.output_rows)]

    def padding(self, rows: StepInput) -> int:
        return 0


class Timed:
    """An executor that records the time of its last step."""

    def __init__(self, executor: Executor) -> None:
        self.executor, self.seconds = executor, 0.0
        self.block_size, self.block_count, self.state_count = (
            executor.block_size,
            executor.block_count,
            executor.state_count,
        )
        self.window_blocks, self.window = executor.window_blocks, executor.window
        self.padding = executor.padding

    @property
    def nonfinite_blocks(self) -> AbstractSet[int]:
        return self.executor.nonfinite_blocks

    @property
    def argmax(self) -> list[int] | None:
        return self.executor.argmax

    def step(self, rows: StepInput) -> Tensor:
        began = perf_counter()
        answer = self.executor.step(rows)
        self.seconds = perf_counter() - began
        return answer


@dataclass(frozen=True)
class Cost:
    """Medians over steps, in seconds."""

    own: float
    whole: float


def prompts(start: int, count: int) -> Iterator[list[int]]:
    """Distinct prompts, so that none finds a cached block of another."""
    return ([1000 + number, *range(1, PROMPT)] for number in range(start, start + count))


class Scheduling:
    """The scheduler alone, with `running` sequences that have caught up."""

    def __init__(self, running: int) -> None:
        blocks = BlockAllocator(Nothing().block_count, BLOCK)
        self.scheduler = Scheduler(blocks, token_budget=2 * max(WIDTHS), sequence_budget=running, chunk=256)
        self.wait(0, running)
        while any(sequence.uncomputed > 1 for sequence in (*self.scheduler.running, *self.scheduler.waiting)):
            self.step()

    def wait(self, start: int, count: int) -> None:
        for tokens in prompts(start, count):
            self.scheduler.add(TokenSequence(tokens))

    def step(self) -> float:
        began = perf_counter()
        plan = self.scheduler.schedule()
        self.scheduler.commit(plan.chunks)
        took = perf_counter() - began
        for chunk in plan.chunks:
            chunk.sequence.tokens.extend([7] * chunk.is_last)
        return took

    def cost(self) -> float:
        return statistics.median(self.step() for _ in range(CHEAP_STEPS))


class Stepping:
    """A generator's whole steps over `executor`, with `running` sequences that talk."""

    def __init__(self, executor: Executor, running: int) -> None:
        self.running, self.executor = running, Timed(executor)
        self.worker = GeneratorWorker(self.executor, model="m", token_budget=2 * max(WIDTHS), sequence_budget=running)
        self.wait(0, running)

    def wait(self, start: int, count: int) -> None:
        most = self.executor.block_count * BLOCK // self.running - PROMPT
        for tokens in prompts(start, count):
            self.worker.submit(WarmupRequest(Generate("r", tuple(tokens), max_tokens=most, sampling=GREEDY)))

    def cost(self, steps: int) -> Cost:
        """Of so many steps, or fewer where they take long."""
        own: list[float] = []
        whole: list[float] = []
        until = perf_counter() + PATIENCE_S
        while len(own) < steps and (len(own) < 3 or perf_counter() < until):
            began = perf_counter()
            self.worker.expire(began)  # as the engine does between two steps
            report = self.worker.step().report
            took = perf_counter() - began
            if report.sequences == report.tokens == self.running:
                checking = report.forward_s - self.executor.seconds  # of the logits, that all are numbers
                own.append(took - self.executor.seconds - checking - report.sample_s)
                whole.append(took)
        return Cost(statistics.median(own), statistics.median(whole))


def loaded() -> Checkpoint:
    """SmolLM2."""
    folder = settings.default_model_dir()
    quickstart.fetch_all(folder)
    return checkpoint.load(quickstart.sources(folder)["smollm2"], dtype=torch.float32)


def network(model: Checkpoint, tokens: int) -> TorchExecutor:
    """`model` with a cache for so many tokens."""
    assert isinstance(model.head, LanguageHead)
    return TorchExecutor(model.network, model.head, block_count=tokens // BLOCK, block_size=BLOCK)


def line(case: str, schedule: float, cheap: Cost, real: Cost) -> float:
    """Print one; return the larger share of a step."""
    shares = schedule / real.whole, real.own / real.whole
    print(
        f"{case} {schedule * 1e6:10.0f} {cheap.own * 1e6:10.0f} {real.own * 1e6:20.0f} "
        f"{real.whole * 1e3:10.1f} {shares[0]:11.2%} {shares[1]:11.2%}",
        flush=True,
    )
    return max(shares)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=12, help="of the network, for each line")
    steps = parser.parse_args().steps
    torch.set_num_threads(capacity.compute_threads())
    model = loaded()
    print(machine())
    print("sequences waiting   schedule        own   own beside network       step    schedule    own")
    print("                          us         us                   us         ms   of a step   of a step")
    worst = 0.0
    for running in WIDTHS:
        executor = network(model, running * (PROMPT + 2 * (steps + BLOCK)))
        alone, cheap, real = Scheduling(running), Stepping(Nothing(), running), Stepping(executor, running)
        for waiting in WAITING:
            for measured in (alone, cheap, real):
                measured.wait(running, waiting)
            worst = max(
                worst, line(f"{running:9d} {waiting:7d}", alone.cost(), cheap.cost(CHEAP_STEPS), real.cost(steps))
            )
    print(f"most: {worst:.2%} of a step; the aim is less than {AIM:.0%}")


if __name__ == "__main__":
    main()

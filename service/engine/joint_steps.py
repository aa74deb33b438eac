"""Short steps of several models, computed at the same time, each on one thread.

A step of few tokens is divided among threads at a loss, since they wait for each other several times a layer; and after
each step the engine's thread waits for the interpreter.  Where many models are in use, most steps are short.  So those
of several models are computed together.  Each result has the same bits as alone.
"""

import heapq
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Protocol, TypeVar, runtime_checkable

from torch import Tensor

from polyhead.models.executors.contract import JointExecutor

from ..concurrency.outcome import Failure, attempt
from .worker import StepResult, Worker

T = TypeVar("T")
log = logging.getLogger(__name__)
SHORT_TOKENS = 128  # of a short step: more are divided among threads without loss
STEPS_A_THREAD = 2  # at most: of several steps of unequal length, two threads have equal work more often
JOINT_LEAD_S = 0.01  # of an engine's time: how far a worker gets ahead of its share because it has steps beside others
EFFICIENCY = 0.85  # of a short step that is divided among threads, compared with one thread


@dataclass(eq=False)
class JointStep:
    """A step that was begun and not computed.  `states` is what its executor's `step_in_turns` returned, `cost` what it
    costs, above 0.
    """

    executor: JointExecutor
    states: Iterator[Tensor | None]
    cost: float
    forward_s: float = 0.0  # its share of the time of the first turns


@runtime_checkable
class JointWorker(Worker, Protocol):
    """A worker whose short steps can be computed beside those of others."""

    @property
    def step_threads(self) -> int:
        """How many threads compute its steps; 0: they are never computed beside others."""

    def short_step_cost(self) -> float:
        """What the next step costs at most, in a unit that all workers have; 0: it is not short."""

    def begin_short_step(self) -> JointStep:
        """Begin the next step, which is short.  `step` must be called next: it goes on with it."""


class JointSteps:
    """Decides which steps are computed together, and computes them.  Used on the engine thread only."""

    def __init__(self) -> None:
        self._workers: dict[Worker, JointWorker] = {}

    def add(self, worker: Worker) -> None:
        if isinstance(worker, JointWorker) and worker.step_threads:
            self._workers[worker] = worker

    def remove(self, worker: Worker) -> None:
        self._workers.pop(worker, None)

    def choose(self, workers: Sequence[Worker]) -> list[Worker]:
        """The first of `workers`, which are in the order of their turns, and those behind it whose steps are computed
        together with its step.
        """
        first = self._workers.get(workers[0])
        if first is None or not first.short_step_cost():
            return [workers[0]]
        costs = {each: self._workers[each].short_step_cost() for each in workers if each in self._workers}
        short = [worker for worker, cost in costs.items() if cost]
        return short[: choose_joint([costs[worker] for worker in short], first.step_threads)]

    def step(self, workers: Sequence[Worker]) -> list[tuple[StepResult | Failure, float]]:
        """A step of each of the workers: of one, or of those that `choose` returned; and the seconds that it took, of
        the time in which steps were computed together its share.
        """
        if len(workers) == 1:
            return [attempt_timed(workers[0].step)]
        begun = [attempt_timed(self._workers[worker].begin_short_step) for worker in workers]
        steps = [step for step, _ in begun if isinstance(step, JointStep)]
        together = attempt(partial(begin_together, steps)) if steps else None
        if isinstance(together, Failure):  # each step is computed alone
            log.error("steps of several models could not be computed together", exc_info=together.error)
        results = list[tuple[StepResult | Failure, float]]()
        for worker, (step, prepare_s) in zip(workers, begun, strict=True):
            if isinstance(step, Failure):
                results.append((step, prepare_s))
            else:
                result, seconds = attempt_timed(worker.step)
                results.append((result, prepare_s + step.forward_s + seconds))
        return results


def attempt_timed(function: Callable[[], T]) -> tuple[T | Failure, float]:
    """Call `function`; return its result, or a Failure if it raises, and the seconds that it took."""
    began = perf_counter()
    result = attempt(function)
    return result, perf_counter() - began


def choose_joint(costs: Sequence[float], threads: int) -> int:
    """How many steps to compute together, from the first on: the most that take less time so than one by one."""
    for count in range(min(len(costs), STEPS_A_THREAD * threads), 1, -1):
        if longest_share(costs[:count], threads) * threads * EFFICIENCY <= sum(costs[:count]):
            return count
    return 1


def longest_share(costs: Iterable[float], threads: int) -> float:
    """The sum of the costs of the thread that has most, where each takes the most costly one that is left."""
    shares = [0.0] * threads
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(shares, shares[0] + cost)
    return max(shares)


def begin_together(steps: Sequence[JointStep]) -> None:
    """Compute the first turn of each step."""
    steps = sorted(steps, key=lambda step: step.cost, reverse=True)
    began = perf_counter()
    steps[0].executor.begin_together([step.states for step in steps])
    took, whole = perf_counter() - began, sum(step.cost for step in steps)
    for step in steps:
        step.forward_s = took * step.cost / whole

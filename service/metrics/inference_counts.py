"""Counts and seconds of each model since the server started, as Triton's statistics extension reports them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ..engine.worker import RequestEnd, StepReport

MAX_BATCH_SIZE = 64  # of steps that are counted by size


@dataclass
class Duration:
    """How often something happened, and the seconds that it took together."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.count += 1
        self.seconds += seconds


@dataclass
class InferenceCounts:
    """Of one model.  `batches` are steps by the number of their sequences, up to MAX_BATCH_SIZE."""

    last_end: float = 0.0  # when a text or prompt has ended, in seconds since 1970; 0: none has
    done: Duration = field(default_factory=Duration)  # texts and prompts
    failed: Duration = field(default_factory=Duration)  # also those that were aborted, or took too long
    waiting: Duration = field(default_factory=Duration)  # from submission to the first step
    tokenising: Duration = field(default_factory=Duration)  # of requests
    steps: Duration = field(default_factory=Duration)
    batches: dict[int, Duration] = field(default_factory=dict)


class InferenceCounter:
    """Counts for each model name.  Lives on the thread of the metrics that own it."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._models: dict[str, InferenceCounts] = {}

    def find(self, model: str) -> InferenceCounts:
        """What was counted of a model; nothing, if it is not known."""
        return self._models.get(model) or InferenceCounts()

    def remove(self, model: str) -> None:
        self._models.pop(model, None)

    def count_end(self, model: str, ended: RequestEnd) -> None:
        counts = self._counts_of(model)
        counts.last_end = self._clock()
        (counts.done if ended.outcome == "done" else counts.failed).add(ended.seconds)

    def count_step(self, model: str, report: StepReport) -> None:
        counts = self._counts_of(model)
        counts.steps.add(report.forward_s)
        if report.sequences <= MAX_BATCH_SIZE:
            counts.batches.setdefault(report.sequences, Duration()).add(report.forward_s)
        for seconds in report.queue_s:
            counts.waiting.add(seconds)

    def count_tokenisation(self, model: str, seconds: float) -> None:
        self._counts_of(model).tokenising.add(seconds)

    def _counts_of(self, model: str) -> InferenceCounts:
        return self._models.setdefault(model, InferenceCounts())

"""A metrics page on which every event has happened once: a generator, its adapter, a classifier."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from polyhead.service.core.calibration import NO_CALIBRATION, Calibration
from polyhead.service.core.request import Task, Terms
from polyhead.service.engine.worker import RequestEnd, StepReport
from polyhead.service.metrics import Metrics

TRACE = "0af7651916cd43dd8448eb211c80319c"


@dataclass(frozen=True)
class Known:
    name: str = "chat"
    task: Task = "generate"
    family: str = "llama"
    dtype: str = "float32"
    executor: str = "torch"
    calibration: Calibration = NO_CALIBRATION


@dataclass(frozen=True)
class Few:
    waiting: int
    running: int


class Busy:
    """An engine with requests in flight."""

    tokens = 70

    def __init__(self) -> None:
        self.open: dict[tuple[str, Task], Few] = {("chat", "generate"): Few(5, 2)}

    def stalled_seconds(self) -> float:
        return 1.5

    def counts(self) -> dict[tuple[str, Task], Few]:
        return self.open


def report(**changes: Any) -> StepReport:
    known: dict[str, Any] = {
        "model": "chat",
        "task": "generate",
        "sequences": 3,
        "tokens": 40,
        "padding": 2,
        "forward_s": 0.25,
        "sample_s": 0.0625,
        "running": 3,
        "waiting": 1,
        "blocks_total": 64,
        "blocks_used": 16,
        "window_blocks_total": 48,
        "window_blocks_used": 12,
        "states_total": 34,
        "states_used": 8,
        "states_cached": 21,
        "preemptions": 1,
        "cached_tokens": 16,
        "drafted": 6,
        "accepted": 4,
        "queue_s": [0.5],
        "first_token_s": [(0.5, ""), (0.25, TRACE)],
        "inter_token_s": [0.125],
    }
    return StepReport(**(known | changes))


def ended(outcome: str, **changes: Any) -> RequestEnd:
    known: dict[str, Any] = {"model": "chat", "task": "generate", "seconds": 2.0, "prompt_tokens": 7}
    return RequestEnd(outcome=outcome, **({"completion_tokens": 5} | known | changes))  # type: ignore[arg-type]


class Scores(NamedTuple):
    """Of the answer to a question."""

    confidence: float
    label_mass: float


def busy_metrics(*, vllm: bool = False) -> Metrics:
    metrics = Metrics(["chat", "chat:dressed", "judge"], ["alice"], vllm=vllm)
    for model in (Known(), Known("chat:dressed"), Known("judge", "classify", "bert")):
        metrics.record_loaded(model)
    metrics.watch_engine(Busy())
    metrics.watch_in_flight(lambda: 3)
    metrics.watch_drain(lambda: 1.5, 30)
    metrics.record_submitted("chat", "generate", 4)
    metrics.record_tokenisation("chat", "generate", 0.001)
    metrics.record_step(report())
    metrics.record_step(report(model="judge", task="classify"))
    metrics.record_end(ended("done", finish="length", terms=Terms("alice", trace=TRACE)))
    metrics.record_end(ended("done", finish="stop", completion_tokens=3))
    metrics.record_end(ended("failed", reason="step_failed"))
    metrics.record_end(ended("expired", reason="expired", completion_tokens=0))
    metrics.record_end(ended("aborted", model="chat:dressed"))
    metrics.record_end(ended("done", model="judge", task="classify", finish="encoded", completion_tokens=0))
    metrics.record_early_end("rejected", "overloaded")
    metrics.record_early_end("expired", "expired", "chat", "generate")
    metrics.record_response("POST", "/v1/completions", 429, "alice")
    metrics.record_cut_connection()
    metrics.record_decision("chat", "choice", Scores(0.6, 0.9), refused=False)
    return metrics

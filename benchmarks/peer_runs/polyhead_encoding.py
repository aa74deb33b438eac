"""Polyhead's own encoder over its native step, in process, as the engine drives it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

import torch

from benchmarks.peer_runs.workload import Encode, asked, encoding, print_figures
from polyhead.models import checkpoint
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.service.core.request import Encode as Asked
from polyhead.service.core.request import Event, Failed, HeadOutput, Request, TokenCandidates
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.head_outputs import OutputHead
from polyhead.service.engine.worker import RequestTiming

STEP_TOKENS = 8192  # a whole batch of the longest texts


@dataclass(eq=False, slots=True)
class Question:
    """A ticket that keeps its vector, or its weights of words."""

    request: Request
    values: list[float] = field(default_factory=list)
    words: dict[int, float] = field(default_factory=dict)  # in place of a vector
    submitted: float = field(default_factory=perf_counter)
    timing: RequestTiming = field(default_factory=RequestTiming)

    def receive(self, event: Event) -> None:
        match event:
            case HeadOutput():
                self.values = event.values
            case TokenCandidates(candidates=[weights]):
                self.words = dict(weights)
            case Failed():
                raise SystemExit(event.error.message)


def encoder(worker: EncoderWorker) -> Encode:
    def encode(batch: list[list[int]]) -> list[list[float]]:
        questions = answered(worker, [Asked(str(number), tuple(text)) for number, text in enumerate(batch)])
        return [question.values for question in questions]

    return encode


def answered(worker: EncoderWorker, requests: Iterable[Asked]) -> list[Question]:
    questions = [Question(request) for request in requests]
    for question in questions:
        worker.submit(question)
    while worker.has_work:
        for ticket, event in worker.step().events:
            ticket.receive(event)
    return questions


def main() -> None:
    run = asked()
    torch.set_num_threads(1)  # what the head does is small, and a second pool of threads would stall the step's own
    began = perf_counter()
    loaded = checkpoint.load(str(run.model))
    executor = NativeExecutor(loaded.network, precision=cast(Precision, run.precision), threads=run.threads)
    seconds = perf_counter() - began
    worker = EncoderWorker(
        executor, cast(OutputHead, loaded.head), model="measured", task=loaded.task, token_budget=STEP_TOKENS
    )
    print_figures({"load": seconds, **encoding(encoder(worker))})


if __name__ == "__main__":
    main()

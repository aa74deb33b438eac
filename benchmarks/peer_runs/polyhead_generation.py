"""Polyhead's own generator over its native step, in process, as the engine drives it."""

from dataclasses import dataclass, field
from time import perf_counter
from typing import cast

import torch

from benchmarks.peer_runs.workload import (
    LONG_CONTEXT,
    LONG_NEW,
    LONG_WIDTH,
    Answer,
    Generate,
    asked,
    generation,
    print_figures,
)
from polyhead.models import checkpoint
from polyhead.models.native.native_executor import BLOCK_TOKENS, NativeExecutor
from polyhead.models.native.packed_network import Precision
from polyhead.models.network.heads import LanguageHead
from polyhead.service.core.request import Event, Failed, GeneratedToken, Request, Sampling
from polyhead.service.core.request import Generate as Asked
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.worker import RequestTiming

BLOCKS = LONG_WIDTH * -(-(LONG_CONTEXT + LONG_NEW) // BLOCK_TOKENS) + LONG_WIDTH


@dataclass(eq=False, slots=True)
class Question:
    """A ticket that notes when its tokens came."""

    request: Request
    answer: Answer = field(default_factory=Answer)
    submitted: float = field(default_factory=perf_counter)
    timing: RequestTiming = field(default_factory=RequestTiming)

    def receive(self, event: Event) -> None:
        match event:
            case GeneratedToken():
                self.answer.tokens.append(event.id)
                self.answer.times.append(perf_counter())
            case Failed():
                raise SystemExit(event.error.message)


def generator(worker: GeneratorWorker) -> Generate:
    def generate(prompts: list[list[int]], new: int) -> list[Answer]:
        began = perf_counter()
        questions = [
            Question(Asked(str(number), tuple(prompt), new, frozenset(), Sampling(temperature=0)))
            for number, prompt in enumerate(prompts)
        ]
        for question in questions:
            worker.validate(question.request)
            worker.submit(question)
        while worker.has_work:
            for ticket, event in worker.step().events:
                ticket.receive(event)
        for question in questions:
            question.answer.times = [time - began for time in question.answer.times]
        return [question.answer for question in questions]

    return generate


def main() -> None:
    run = asked()
    torch.set_num_threads(1)  # what is drawn is small, and a second pool of threads would stall the step's own
    began = perf_counter()
    loaded = checkpoint.load(str(run.model))
    assert isinstance(loaded.head, LanguageHead)
    executor = NativeExecutor(
        loaded.network,
        loaded.head,
        precision=cast(Precision, run.precision or "int8"),
        block_count=BLOCKS,
        threads=run.threads,
    )
    seconds = perf_counter() - began
    del loaded
    print_figures({"load": seconds, **generation(generator(GeneratorWorker(executor, model="measured")))})


if __name__ == "__main__":
    main()

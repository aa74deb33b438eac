"""Polyhead's own generator over its native step, in process, as the engine drives it."""

from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

from benchmarks.peer_runs.polyhead_loading import load_model
from benchmarks.peer_runs.text_workload import loading, memory
from benchmarks.peer_runs.workload import Answer, Generate, Run, asked, generation, print_figures
from polyhead.service.core.request import Event, Failed, GeneratedToken, Request, Sampling
from polyhead.service.core.request import Generate as Asked
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.worker import RequestTiming
from polyhead.service.runtime.placement import Placement


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


def blocks(run: Run, placement: Placement) -> int:
    """As many as the sequences of the work fill at once, and one more for each."""
    return run.work.together * (-(-run.work.longest // placement.block_size) + 1)


def main() -> None:
    run = asked()
    loaded, taken = loading(partial(load_model, run, partial(blocks, run)))
    worker = GeneratorWorker(loaded.executor, model="measured")
    figures = generation(generator(worker), run.work)
    print_figures({**taken, "precision": loaded.placement.precision, **figures, **memory("self")})


if __name__ == "__main__":
    main()

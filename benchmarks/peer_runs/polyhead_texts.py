"""Polyhead in process: the parts of the server, without HTTP and without its threads."""

from typing import cast

from benchmarks.peer_runs.polyhead_encoding import Question, answered
from benchmarks.peer_runs.polyhead_loading import load_model
from benchmarks.peer_runs.text_workload import Answer, reading
from benchmarks.peer_runs.workload import Run, asked, print_figures
from polyhead.service.core.model import Model
from polyhead.service.core.request import OutputForm, Terms
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.head_outputs import OutputHead
from polyhead.service.runtime.memory_budget import MemoryNeed
from polyhead.service.runtime.served_model import build_model
from polyhead.service.text.encoder_inputs import EncodedInput, EncodingRequest, read_inputs

NEED = MemoryNeed("measured", weights=0, cache=0, workspace=0, loading=0, blocks=0, block_size=0)


def served(run: Run) -> tuple[Model, EncoderWorker]:
    loaded = load_model(run)
    read, tokens = loaded.checkpoint, loaded.settings.encoder_step_tokens
    head = cast(OutputHead, read.head)
    worker = EncoderWorker(loaded.executor, head, model=NEED.name, task=read.task, token_budget=tokens)
    worker.warm_up()
    return build_model(NEED, read, loaded.placement, {}), worker


def reader(model: Model, worker: EncoderWorker) -> Answer:
    """Vectors, weights of words, or the likeliest label with its probability."""
    form: OutputForm = "words" if model.task == "fill" else ""

    def read(texts: list[str]) -> list[Question]:
        asked = EncodingRequest(field="texts", inputs=tuple(texts), unit=model.task == "embed", form=form)
        reads = read_inputs(model, asked, "call", Terms())
        return answered(worker, [request for one in reads if isinstance(one, EncodedInput) for request in one.requests])

    def embed(texts: list[str]) -> list[list[float]]:
        return [question.values for question in read(texts)]

    def weigh(texts: list[str]) -> list[dict[int, float]]:
        return [question.words for question in read(texts)]

    def label(texts: list[str]) -> list[tuple[str, float]]:
        pairs = (max(zip(question.values, model.labels, strict=True)) for question in read(texts))
        return [(name, score) for score, name in pairs]

    return {"embed": embed, "fill": weigh}.get(model.task, label)


def main() -> None:
    run = asked()
    print_figures(reading(reader(*served(run)), run.work))


if __name__ == "__main__":
    main()

"""Polyhead in process: the parts of the server, without HTTP and without its threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from benchmarks.peer_runs.polyhead_encoding import answered
from benchmarks.peer_runs.text_workload import Answer, reading
from benchmarks.peer_runs.workload import Run, asked, print_figures
from polyhead.models import checkpoint
from polyhead.models.native.packed_network import free_weights
from polyhead.service.config import settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import Terms
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.head_outputs import OutputHead
from polyhead.service.resources.process_info import trim_heap
from polyhead.service.runtime.executor_choice import build_executor, make_deterministic
from polyhead.service.runtime.memory_budget import MemoryNeed
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.served_model import build_model
from polyhead.service.text.encoder_inputs import EncodedInput, EncodingRequest, read_inputs

NEED = MemoryNeed("measured", weights=0, cache=0, workspace=0, loading=0, blocks=0, block_size=0)


def served(run: Run) -> tuple[Model, EncoderWorker]:
    chosen = settings.read_settings({"precision": run.precision, "threads": run.threads})
    source, dtype = str(run.model), torch.float32
    what = checkpoint.describe_source(source)
    loaded = checkpoint.prepare(source, what, dtype=dtype, device="cpu", progress=lambda done, total: None)

    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        loaded.load_weights(part)
        yield
        free_weights(part)

    placement = choose_placement(chosen, loaded.default_precision, loaded.config)
    make_deterministic(loaded, chosen, placement)
    executor = build_executor(loaded, chosen, placement, load_part=held)
    tokens, head = chosen.encoder_step_tokens, cast(OutputHead, loaded.head)
    worker = EncoderWorker(executor, head, model=NEED.name, task=loaded.task, token_budget=tokens)
    worker.warm_up()
    trim_heap()
    return build_model(NEED, loaded, placement), worker


def reader(model: Model, worker: EncoderWorker) -> Answer:
    """Vectors, or the likeliest label with its probability."""

    def read(texts: list[str]) -> list[list[float]]:
        asked = EncodingRequest(field="texts", inputs=tuple(texts), unit=model.task == "embed")
        reads = read_inputs(model, asked, "call", Terms())
        return answered(worker, [request for one in reads if isinstance(one, EncodedInput) for request in one.requests])

    def label(texts: list[str]) -> list[tuple[str, float]]:
        pairs = (max(zip(scores, model.labels, strict=True)) for scores in read(texts))
        return [(name, score) for score, name in pairs]

    return read if model.task == "embed" else label


def main() -> None:
    run = asked()
    torch.set_num_threads(1)  # what the head does is small, and a second pool of threads would stall the step's own
    print_figures(reading(reader(*served(run))))


if __name__ == "__main__":
    main()

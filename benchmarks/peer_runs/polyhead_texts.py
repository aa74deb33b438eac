"""Polyhead in process: what the server has, put together as it does, without HTTP and without its threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from benchmarks.peer_runs.polyhead_encoding import answered
from benchmarks.peer_runs.text_workload import Answer, reading
from benchmarks.peer_runs.workload import Run, asked, told
from polyhead.models import checkpoint
from polyhead.models.native.packed_network import hollow
from polyhead.service.config import settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import Terms
from polyhead.service.engine.encoder_worker import Encoder
from polyhead.service.engine.head_outputs import Head
from polyhead.service.resources.process_info import trim
from polyhead.service.runtime.executor_choice import executor_of, prepare
from polyhead.service.runtime.memory_budget import Need
from polyhead.service.runtime.model_card import model_of
from polyhead.service.runtime.placement import placed
from polyhead.service.text.inputs import Read, Reading, read_inputs

NEED = Need("measured", weights=0, cache=0, workspace=0, loading=0, blocks=0, block_size=0)


def served(run: Run) -> tuple[Model, Encoder]:
    chosen = settings.read({"precision": run.precision, "threads": run.threads})
    source, dtype = str(run.model), torch.float32
    what = checkpoint.describe(source)
    loaded = checkpoint.begin(source, what, dtype=dtype, device="cpu", progress=lambda done, total: None)

    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        loaded.fill(part)
        yield
        hollow(part)

    prepare(loaded, chosen)
    executor = executor_of(loaded, chosen, held=held)
    tokens, head = chosen.encoder_step_tokens, cast(Head, loaded.head)
    worker = Encoder(executor, head, model=NEED.name, task=loaded.task, token_budget=tokens)
    worker.warm_up()
    trim()
    return model_of(NEED, loaded, placed(chosen, loaded.suited, loaded.config)), worker


def reader(model: Model, worker: Encoder) -> Answer:
    """Vectors, or the likeliest label with its probability."""

    def read(texts: list[str]) -> list[list[float]]:
        asked = Reading(field="texts", inputs=tuple(texts), unit=model.task == "embed")
        reads = read_inputs(model, asked, "call", Terms())
        return answered(worker, [request for one in reads if isinstance(one, Read) for request in one.requests])

    def label(texts: list[str]) -> list[tuple[str, float]]:
        pairs = (max(zip(scores, model.labels, strict=True)) for scores in read(texts))
        return [(name, score) for score, name in pairs]

    return read if model.task == "embed" else label


def main() -> None:
    run = asked()
    torch.set_num_threads(1)  # what the head does is small, and a second pool of threads would stall the step's own
    told(reading(reader(*served(run))))


if __name__ == "__main__":
    main()

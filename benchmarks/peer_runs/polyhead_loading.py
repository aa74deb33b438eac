"""Loads a model as a server does, without a server around it: for the compiled step one part after the other."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from benchmarks.peer_runs.workload import Run
from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.executors.contract import Executor
from polyhead.models.native.packed_network import PackHooks, free_weights
from polyhead.service.config import settings
from polyhead.service.config.settings import Settings
from polyhead.service.engine.state_slots import smallest_slot_count
from polyhead.service.resources.process_info import trim_heap
from polyhead.service.runtime.executor_choice import CacheSize, build_executor, make_deterministic
from polyhead.service.runtime.placement import Placement, choose_placement

STATES = smallest_slot_count(64)  # for the states of recurrent layers, of as many sequences as a worker runs at once


@dataclass(frozen=True)
class LoadedModel:
    checkpoint: Checkpoint
    settings: Settings
    placement: Placement
    executor: Executor


def load_model(run: Run, blocks: Callable[[Placement], int] = lambda placement: 0) -> LoadedModel:
    """`blocks`: how many blocks the cache of a generator gets; "" and "auto" are the precision that suits the file."""
    chosen = settings.read_settings({"precision": run.precision or "auto", "threads": run.threads})
    source = str(run.model)
    what = checkpoint.describe_source(source)
    placement = choose_placement(chosen, what.default_precision, what.decoder_config)
    torch.set_num_threads(placement.torch_threads)
    begin = checkpoint.prepare if placement.instructions else checkpoint.load_built
    options = {"dtype": placement.dtype, "device": placement.device, "progress": checkpoint.ignore_progress}
    loaded = begin(source, WeightReader(what), **options)

    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        loaded.load_blocks(part)
        yield
        free_weights(part)
        trim_heap()  # as the server does: else the allocator keeps the memory of every part

    make_deterministic(loaded, chosen, placement)
    count = blocks(placement)
    cache = CacheSize(count, STATES if count and what.decoder_config.is_recurrent else 0)
    executor = build_executor(loaded, chosen, placement, cache, PackHooks(held))
    trim_heap()
    return LoadedModel(loaded, chosen, placement, executor)

"""The processes that compute networks together with this one, and the models they have.

Knows no requests.  The one idea: they are started at once and met when there is something to compute; from then on
this process tells them everything it does, in the order in which it does it.  Whoever ends, or is too late, is missed
by all: then nothing can be computed any more, and the engine is told so.
"""

import itertools
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import SourcePolicy
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.parallel import LeaderExecutor, ProcessGroup, ShareRequest, StepCommand

from ..config.settings import Settings, SettingsError
from . import follower
from .follower import TORCHRUN_RENDEZVOUS, RankConfig
from .memory_budget import MemoryNeed
from .placement import Placement

FILE_SCHEME = "file://"
EXIT_WAIT_S = 0.5  # from the last that is heard of a process to its end

log = logging.getLogger("polyhead.ranks")


class RankProcesses:
    """Begun on any thread; what they compute with this process is the engine's thread's alone."""

    def __init__(self, settings: Settings, place: Placement, lost: Callable[[str], None]) -> None:
        self._numbers = itertools.count(1)
        self._on_lost = lost
        launched = dist.is_torchelastic_launched()
        self.rank_config = leader_config(settings, place, TORCHRUN_RENDEZVOUS if launched else new_rendezvous_file())
        ranks = () if launched else range(1, self.rank_config.world)
        self.children = [start_process(replace(self.rank_config, rank=rank)) for rank in ranks]
        self._watch_threads = [
            threading.Thread(target=watch_process, args=(rank, child, lost), daemon=True)
            for rank, child in zip(ranks, self.children, strict=True)
        ]
        for thread in self._watch_threads:
            thread.start()
        self.close = weakref.finalize(self, close_inputs, self.children)

    @cached_property
    def group(self) -> ProcessGroup:
        """As soon as all are there."""
        log.info("%d processes compute together, %d threads each", self.rank_config.world, self.rank_config.threads)
        group = self.rank_config.join_group()
        if self.rank_config.at != TORCHRUN_RENDEZVOUS:
            rmtree(Path(self.rank_config.at.removeprefix(FILE_SCHEME)).parent, ignore_errors=True)
        return group

    def new_model(
        self, source: str, reach: SourcePolicy, need: MemoryNeed, place: Placement, *, in_place: bool
    ) -> "DistributedModel":
        """A model that is to be read by all, and what it needs of each."""
        dtype, size = str(place.dtype).removeprefix("torch."), need.block_size if need.blocks else 0
        asked = ShareRequest(source, str(reach.root), sorted(reach.known), dtype, need.blocks, size, in_place)
        return DistributedModel(self, next(self._numbers), asked)

    def report_lost_step(self) -> None:
        """A step ended in the middle: for want of one of them, as a rule, which is told by whoever watches it."""
        for thread in self._watch_threads:
            thread.join(EXIT_WAIT_S)
        self._on_lost(
            "a step that several processes compute together has failed in one of them, and cannot be repeated"
        )


class DistributedModel:
    """A model, as all of them know it: by its number."""

    def __init__(self, ranks: RankProcesses, number: int, asked: ShareRequest) -> None:
        self._processes, self._number, self._request = ranks, number, asked

    def read(self, what: Description, progress: Callable[[int, int], None]) -> Checkpoint:
        """This process's share; the others read theirs meanwhile."""
        group = self._processes.group
        group.broadcast_message([StepCommand.LOAD, self._number, *self._request.encode()])
        return follower.read_share(self._request, what, group, progress)

    def build_executor(self, loaded: Checkpoint) -> LeaderExecutor:
        """Once all have read theirs.  ModelError if one could not."""
        group = self._processes.group
        own = follower.build_share_executor(self._request, loaded, group)
        group.broadcast_message([StepCommand.READY, self._number])
        if not group.all_confirm(True):
            raise ModelError("another process could not read its share of it; the log says why")
        return LeaderExecutor(own, self._number, self._processes.report_lost_step)

    def drop(self) -> None:
        self._processes.group.broadcast_message([StepCommand.DROP, self._number])


def check_adapter_allowed(name: str, settings: Settings) -> None:
    """UnsupportedError where the network it would be laid over is computed by several processes."""
    if settings.tensor_parallel > 1:
        base, _, adapter = name.partition(":")
        raise UnsupportedError(
            f"an adapter is not laid over {base}, which {settings.tensor_parallel} processes compute together; merged "
            f"it is a model like others: {adapter}=BASE+ADAPTER, which are the two sources, or merge: true over HTTP"
        )


def leader_config(settings: Settings, place: Placement, at: str) -> RankConfig:
    """Of rank 0."""
    threads, patience = place.torch_threads, settings.hang_seconds
    logged = {"log_format": settings.log_format, "log_level": settings.log_level}
    return RankConfig(0, settings.tensor_parallel, at, place.device.type, threads, patience, **logged)


def torchrun_config(settings: Settings, place: Callable[[], Placement]) -> RankConfig | None:
    """What this process is to torchrun, if that has started it and it is to follow.

    Raises SettingsError if torchrun has started another number of processes than is asked for.
    """
    if settings.tensor_parallel == 1 or not dist.is_torchelastic_launched():
        return None
    _, rank, world = next(rendezvous(TORCHRUN_RENDEZVOUS))
    if world != settings.tensor_parallel:
        raise SettingsError(
            f"tensor_parallel: torchrun has started {world} processes, and it is {settings.tensor_parallel}; "
            "set it to as many, or leave torchrun out"
        )
    return replace(leader_config(settings, place(), TORCHRUN_RENDEZVOUS), rank=rank) if rank else None


def new_rendezvous_file() -> str:
    """A file in a folder that nobody else can look into."""
    return f"{FILE_SCHEME}{Path(mkdtemp(prefix='polyhead-'), 'met')}"


def start_process(joining: RankConfig) -> subprocess.Popen[bytes]:
    """It ends when its standard input does, which is when this process does."""
    command = [sys.executable, "-m", "polyhead.service.runtime.follower", joining.to_json()]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def watch_process(rank: int, child: subprocess.Popen[bytes], lost: Callable[[str], None]) -> None:
    """Until it ends; only one that was let go ends well."""
    code = child.wait()
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with status {code}"
        lost(f"rank {rank} of those that compute together {how}")


def close_inputs(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.close()

"""The rank processes that compute networks together with this process (tensor parallelism), and the models that they
have.

They are started at once, and join when there is something to compute. From then on this process, the leader, sends
every operation to all of them, in the order of execution. If one of them ends or is too late, nothing can be computed
any more, and the engine gets the error.
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
EXIT_WAIT_S = 0.5  # seconds from the failure of a step to the exit of the process that failed

log = logging.getLogger("polyhead.ranks")


class RankProcesses:
    """Built on any thread; `group` and its models are used on the engine's thread only. `lost` is called with a message
    when a process has ended.
    """

    def __init__(self, settings: Settings, placement: Placement, on_lost: Callable[[str], None]) -> None:
        self._numbers = itertools.count(1)
        self._on_lost = on_lost
        launched = dist.is_torchelastic_launched()
        self.rank_config = leader_config(
            settings, placement, TORCHRUN_RENDEZVOUS if launched else new_rendezvous_file()
        )
        ranks = () if launched else range(1, self.rank_config.world)
        self.children = [start_process(replace(self.rank_config, rank=rank)) for rank in ranks]
        self._watch_threads = [
            threading.Thread(target=watch_process, args=(rank, child, on_lost), daemon=True)
            for rank, child in zip(ranks, self.children, strict=True)
        ]
        for thread in self._watch_threads:
            thread.start()
        self.close = weakref.finalize(self, close_inputs, self.children)

    @cached_property
    def group(self) -> ProcessGroup:
        """The process group; the first access waits until all ranks have joined."""
        log.info("%d processes compute together, %d threads each", self.rank_config.world, self.rank_config.threads)
        group = self.rank_config.join_group()
        if self.rank_config.at != TORCHRUN_RENDEZVOUS:
            rmtree(Path(self.rank_config.at.removeprefix(FILE_SCHEME)).parent, ignore_errors=True)
        return group

    def new_model(
        self, source: str, policy: SourcePolicy, need: MemoryNeed, placement: Placement, *, in_place: bool
    ) -> "DistributedModel":
        """A model that all ranks are to read, and the cache that each of them needs."""
        dtype, size = str(placement.dtype).removeprefix("torch."), need.block_size if need.blocks else 0
        request = ShareRequest(source, str(policy.root), sorted(policy.known), dtype, need.blocks, size, in_place)
        return DistributedModel(self, next(self._numbers), request)

    def report_lost_step(self) -> None:
        """Report a step that failed in the middle. Usually a process has ended, which its watching thread reports
        first.
        """
        for thread in self._watch_threads:
            thread.join(EXIT_WAIT_S)
        self._on_lost(
            "a step that several processes compute together has failed in one of them, and cannot be repeated"
        )


class DistributedModel:
    """A model of which each rank computes a share. The ranks know it by its number."""

    def __init__(self, ranks: RankProcesses, number: int, request: ShareRequest) -> None:
        self._processes, self._number, self._request = ranks, number, request

    def read(self, description: Description, progress: Callable[[int, int], None]) -> Checkpoint:
        """Read this process's share, while the other ranks read theirs."""
        group = self._processes.group
        group.broadcast_message([StepCommand.LOAD, self._number, *self._request.encode()])
        return follower.read_share(self._request, description, group, progress)

    def build_executor(self, loaded: Checkpoint) -> LeaderExecutor:
        """Build the executor once all ranks have read their shares. Raises ModelError if one of them failed."""
        group = self._processes.group
        own = follower.build_share_executor(self._request, loaded, group)
        group.broadcast_message([StepCommand.READY, self._number])
        if not group.all_confirm(True):
            raise ModelError("another process could not read its share of it; the log says why")
        return LeaderExecutor(own, self._number, self._processes.report_lost_step)

    def drop(self) -> None:
        self._processes.group.broadcast_message([StepCommand.DROP, self._number])


def check_adapter_allowed(name: str, settings: Settings) -> None:
    """Raise UnsupportedError for an adapter of a base model that several processes compute."""
    if settings.tensor_parallel > 1:
        base, _, adapter = name.partition(":")
        raise UnsupportedError(
            f"{base} takes no adapter, since {settings.tensor_parallel} processes compute it together; merge the "
            f"adapter into a model of its own: {adapter}=BASE+ADAPTER, which are the two sources, or merge: true "
            "over HTTP"
        )


def leader_config(settings: Settings, placement: Placement, at: str) -> RankConfig:
    """Return the configuration of rank 0."""
    threads, patience = placement.torch_threads, settings.hang_seconds
    logged = {"log_format": settings.log_format, "log_level": settings.log_level}
    return RankConfig(0, settings.tensor_parallel, at, placement.device.type, threads, patience, **logged)


def torchrun_config(settings: Settings, placement: Callable[[], Placement]) -> RankConfig | None:
    """Return the configuration of this process if torchrun has started it and it is not rank 0; else None.

    Raises SettingsError if torchrun has started another number of processes than the setting `tensor_parallel`.
    """
    if settings.tensor_parallel == 1 or not dist.is_torchelastic_launched():
        return None
    _, rank, world = next(rendezvous(TORCHRUN_RENDEZVOUS))
    if world != settings.tensor_parallel:
        raise SettingsError(
            f"tensor_parallel: torchrun has started {world} processes, and it is {settings.tensor_parallel}; "
            "set it to as many, or leave torchrun out"
        )
    return replace(leader_config(settings, placement(), TORCHRUN_RENDEZVOUS), rank=rank) if rank else None


def new_rendezvous_file() -> str:
    """Return the address of a new file, in a folder that other users cannot read."""
    return f"{FILE_SCHEME}{Path(mkdtemp(prefix='polyhead-'), 'met')}"


def start_process(joining: RankConfig) -> subprocess.Popen[bytes]:
    """Start a rank process. It ends when its standard input closes, which happens when this process ends."""
    command = [sys.executable, "-m", "polyhead.service.runtime.follower", joining.to_json()]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def watch_process(rank: int, child: subprocess.Popen[bytes], on_lost: Callable[[str], None]) -> None:
    """Wait until a rank process ends, and report any exit status but 0. A process that was closed exits with 0."""
    code = child.wait()
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with status {code}"
        on_lost(f"rank {rank} of those that compute together {how}")


def close_inputs(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.close()

"""A rank process of tensor parallelism: it computes its share of every model, as the messages of the leader process
(rank 0) say.

It ends when the leader process ends, however that ends. `python -m polyhead.service.runtime.follower CONFIG` starts
one; torchrun starts others (`serve`).
"""

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.rendezvous import rendezvous

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.description import Description
from polyhead.models.checkpoint.source_policy import SourcePolicy
from polyhead.models.executors.cuda_graphs import PagedAttention
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.varlen import find_kernel
from polyhead.models.parallel import FollowerExecutor, ProcessGroup, Share, ShareRequest, StepCommand, shard_network
from polyhead.models.parallel.process_group import LOOPBACK
from polyhead.models.parallel.step_messages import decode_pairs, decode_step

from ..concurrency.outcome import Failure, attempt
from ..core import logs

TORCHRUN_RENDEZVOUS = "env://"

log = logging.getLogger("polyhead.follower")


@dataclass(frozen=True)
class RankConfig:
    """The rank of a process, the number of ranks, where they meet, and the device and threads to compute with.

    `at` is a torch.distributed rendezvous: a file that all can reach, or what torchrun has arranged. `patience`:
    seconds after which a step that does not go on counts as failed.
    """

    rank: int
    world: int
    at: str
    device: str
    threads: int
    patience: float
    log_format: Any = "console"
    log_level: str = "info"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def join_group(self) -> ProcessGroup:
        """Join the process group; returns when all ranks have joined."""
        store, _, _ = next(rendezvous(self.at, self.rank, self.world))
        host = "" if self.at == TORCHRUN_RENDEZVOUS else LOOPBACK  # torchrun's processes may be on several machines
        return ProcessGroup.connect(
            store, Share(self.rank, self.world), select_rank_device(self.device, self.rank), self.patience, host
        )


def select_rank_device(kind: str, rank: int) -> torch.device:
    """Return the device of a rank. Each rank of a machine has its own GPU, which becomes torch's current device."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def read_share(
    request: ShareRequest, description: Description, group: ProcessGroup, progress: Callable[[int, int], None]
) -> Checkpoint:
    """Read this rank's share of a checkpoint."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    shard = replace(description, cut_network=partial(shard_network, group=group))
    return checkpoint.load_described(request.source, shard, dtype=dtype, device=group.device, progress=progress)


def build_share_executor(request: ShareRequest, loaded: Checkpoint, group: ProcessGroup) -> FollowerExecutor:
    """Build the executor of a share. Its steps are not recorded as CUDA graphs: sums over several devices cannot be,
    yet.
    """
    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    weight = loaded.network.tokens.weight
    kernel = find_kernel(weight.device, weight.dtype) if request.in_place else None
    paged = PagedAttention(kernel) if kernel else None
    return FollowerExecutor(group, loaded.network, head, blocks=(request.blocks, request.block_size), in_place=paged)


def load_share(request: ShareRequest, group: ProcessGroup) -> FollowerExecutor:
    """Describe a checkpoint, read this rank's share and build its executor."""
    description = checkpoint.describe_source(request.source, SourcePolicy(Path(request.root), frozenset(request.known)))
    return build_share_executor(request, read_share(request, description, group, checkpoint.ignore_progress), group)


class FollowerLoop:
    """Executes the leader's messages. A model is read on a separate thread, so that steps of other models go on
    meanwhile.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._read_pool = ThreadPoolExecutor(1)
        self._pending: dict[int, Future[FollowerExecutor | Failure]] = {}
        self._followers: dict[int, FollowerExecutor] = {}

    def handle_message(self) -> None:
        """Wait for one message and execute it. Raises RuntimeError if the leader has ended or a step fails."""
        ask, number, *words = self._group.receive_message()
        match ask:
            case StepCommand.LOAD:
                self._pending[number] = self._read_pool.submit(
                    attempt, partial(load_share, ShareRequest.decode(words), self._group)
                )
            case StepCommand.READY:
                self._group.all_confirm(self._finish_load(number))
            case StepCommand.STEP:
                self._followers[number].step(decode_step(words))
            case StepCommand.COPY:
                self._followers[number].copy(decode_pairs(words))
            case StepCommand.DROP:
                self._pending.pop(number, None)
                self._followers.pop(number, None)

    def _finish_load(self, number: int) -> bool:
        """Wait until a model is read, and return whether that succeeded. If not, the leader reports it, and this
        process continues with its other models.
        """
        outcome = self._pending.pop(number).result()
        if isinstance(outcome, Failure):
            log.error("rank %d cannot read its share: %s", self._group.share.rank, outcome.error)
            return False
        self._followers[number] = outcome
        return True


def run_follower(config: RankConfig) -> int:
    """Execute messages until the leader ends; returns the exit status."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # the leader may still finish requests; this process ends with it
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    torch.set_num_threads(config.threads)
    loop = FollowerLoop(config.join_group())
    log.info("rank %d of %d follows", config.rank, config.world)
    while True:
        try:
            loop.handle_message()
        except RuntimeError as error:
            log.warning("rank %d ends: %s", config.rank, str(error).partition("\n")[0])
            return 1


def end_with_leader() -> None:
    """End this process when its standard input closes. The leader holds the other end and never writes to it."""

    def wait() -> None:
        sys.stdin.read()
        logs.exit_process(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    config = RankConfig(**json.loads(sys.argv[1]))
    end_with_leader()
    logs.configure_logging(config.log_format, config.log_level)
    logs.exit_process(run_follower(config))  # other threads may wait for ever in a collective operation


if __name__ == "__main__":
    main()

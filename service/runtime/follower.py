"""A process that computes its share of networks, and what it has in common with the one that leads.

Knows no requests and no models' names.  The one idea: it does what it is told, as long as somebody tells it.  The
first word comes from the leader's process and so does every other; when that process ends, however it ends, this one
does.  `python -m polyhead.service.runtime.follower JOINING` is such a process; torchrun starts others (`serve`).
"""

import json
import logging
import os
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
from polyhead.models.checkpoint.source_policy import Reach
from polyhead.models.executors.cuda_graphs import InPlace
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.varlen import found
from polyhead.models.parallel import Ask, Asked, Follower, Group, Share, shard
from polyhead.models.parallel.process_group import LOOPBACK
from polyhead.models.parallel.step_messages import pairs, unpacked

from ..concurrency.outcome import Failure, attempt
from ..core import logs

LAUNCHED = "env://"

log = logging.getLogger("polyhead.follower")


@dataclass(frozen=True)
class Joining:
    """Which of how many a process is, where they meet, and what it computes on.

    `at` is what torch calls a method of rendezvous: a file that all can reach, or what torchrun has arranged.
    `patience` are the seconds in which a step goes on or all is lost.
    """

    rank: int
    world: int
    at: str
    device: str
    threads: int
    patience: float
    log_format: Any = "console"
    log_level: str = "info"

    def words(self) -> str:
        return json.dumps(asdict(self))

    def group(self) -> Group:
        """As soon as all are there."""
        store, _, _ = next(rendezvous(self.at, self.rank, self.world))
        host = "" if self.at == LAUNCHED else LOOPBACK  # torchrun's processes may be on several machines
        return Group.met(store, Share(self.rank, self.world), device_of(self.device, self.rank), self.patience, host)


def device_of(kind: str, rank: int) -> torch.device:
    """Each rank of a machine has a GPU of its own."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def read(asked: Asked, what: Description, group: Group, progress: Callable[[int, int], None]) -> Checkpoint:
    """The share of a checkpoint."""
    dtype: torch.dtype = getattr(torch, asked.dtype)
    mine = replace(what, cutting=partial(shard, group=group))
    return checkpoint.read(asked.source, mine, dtype=dtype, device=group.device, progress=progress)


def executor(asked: Asked, loaded: Checkpoint, group: Group) -> Follower:
    """What computes it.  Steps are not recorded: sums over several devices are not, yet."""
    head = loaded.head if isinstance(loaded.head, LanguageHead) else None
    weight = loaded.network.tokens.weight
    kernel = found(weight.device, weight.dtype) if asked.in_place else None
    how = InPlace(kernel) if kernel else None
    return Follower(group, loaded.network, head, blocks=(asked.blocks, asked.block_size), in_place=how)


def joined(asked: Asked, group: Group) -> Follower:
    """The same from the beginning, for one that follows."""
    what = checkpoint.describe(asked.source, Reach(Path(asked.root), frozenset(asked.known)))
    return executor(asked, read(asked, what, group, checkpoint.ignore), group)


class Following:
    """Does what it is told.  A model is read on a thread of its own, so that steps of others go on meanwhile."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._reading = ThreadPoolExecutor(1)
        self._coming: dict[int, Future[Follower | Failure]] = {}
        self._there: dict[int, Follower] = {}

    def next(self) -> None:
        """One word, as soon as it comes.  RuntimeError when the leader is gone, or a step fails."""
        ask, number, *words = self._group.hear()
        match ask:
            case Ask.LOAD:
                self._coming[number] = self._reading.submit(attempt, partial(joined, Asked.of(words), self._group))
            case Ask.READY:
                self._group.confirm(self._ready(number))
            case Ask.STEP:
                self._there[number].step(unpacked(words))
            case Ask.COPY:
                self._there[number].copy(pairs(words))
            case Ask.DROP:
                self._coming.pop(number, None)
                self._there.pop(number, None)

    def _ready(self, number: int) -> bool:
        """Whether it was read: if not, the leader says so, and this process goes on with the others."""
        outcome = self._coming.pop(number).result()
        if isinstance(outcome, Failure):
            log.error("rank %d cannot read its share: %s", self._group.share.rank, outcome.error)
            return False
        self._there[number] = outcome
        return True


def follow(joining: Joining) -> int:
    """For as long as there is somebody to follow; the exit status."""
    for sig in (signal.SIGINT, signal.SIGTERM):  # the leader may have something to finish; its end is ours
        signal.signal(sig, signal.SIG_IGN)
    torch.set_num_threads(joining.threads)
    following = Following(joining.group())
    log.info("rank %d of %d follows", joining.rank, joining.world)
    while True:
        try:
            following.next()
        except RuntimeError as error:
            log.warning("rank %d ends: %s", joining.rank, str(error).partition("\n")[0])
            return 1


def end_with_leader() -> None:
    """It holds the other end of standard input, and never writes to it."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    joining = Joining(**json.loads(sys.argv[1]))
    end_with_leader()
    logs.configure(joining.log_format, joining.log_level)
    os._exit(follow(joining))  # other threads may hang: in a sum, for ever


if __name__ == "__main__":
    main()

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
from polyhead.models.checkpoint.source_policy import Reach
from polyhead.models.core.errors import ModelError, UnsupportedError
from polyhead.models.parallel import Ask, Asked, Group, Leader

from ..config.settings import Settings, SettingsError
from . import follower
from .follower import LAUNCHED, Joining
from .memory_budget import Need
from .placement import Place

FILE = "file://"
ENDING_S = 0.5  # from the last that is heard of a process to its end

log = logging.getLogger("polyhead.ranks")


class Ranks:
    """Begun on any thread; what they compute with this process is the engine's thread's alone."""

    def __init__(self, settings: Settings, place: Place, lost: Callable[[str], None]) -> None:
        self._numbers = itertools.count(1)
        self._told = lost
        launched = dist.is_torchelastic_launched()
        self.joining = joining_of(settings, place, LAUNCHED if launched else meeting_place())
        ranks = () if launched else range(1, self.joining.world)
        self.children = [start(replace(self.joining, rank=rank)) for rank in ranks]
        self._watching = [
            threading.Thread(target=watch, args=(rank, child, lost), daemon=True)
            for rank, child in zip(ranks, self.children, strict=True)
        ]
        for thread in self._watching:
            thread.start()
        self.close = weakref.finalize(self, close, self.children)

    @cached_property
    def group(self) -> Group:
        """As soon as all are there."""
        log.info("%d processes compute together, %d threads each", self.joining.world, self.joining.threads)
        group = self.joining.group()
        if self.joining.at != LAUNCHED:
            rmtree(Path(self.joining.at.removeprefix(FILE)).parent, ignore_errors=True)
        return group

    def part(self, source: str, reach: Reach, need: Need, place: Place, *, in_place: bool) -> "Part":
        """A model that is to be read by all, and what it needs of each."""
        dtype, size = str(place.dtype).removeprefix("torch."), need.block_size if need.blocks else 0
        asked = Asked(source, str(reach.root), sorted(reach.known), dtype, need.blocks, size, in_place)
        return Part(self, next(self._numbers), asked)

    def lost(self) -> None:
        """A step ended in the middle: for want of one of them, as a rule, which is told by whoever watches it."""
        for thread in self._watching:
            thread.join(ENDING_S)
        self._told("a step that several processes compute together has failed in one of them, and cannot be repeated")


class Part:
    """A model, as all of them know it: by its number."""

    def __init__(self, ranks: Ranks, number: int, asked: Asked) -> None:
        self._ranks, self._number, self._asked = ranks, number, asked

    def read(self, what: Description, progress: Callable[[int, int], None]) -> Checkpoint:
        """This process's share; the others read theirs meanwhile."""
        group = self._ranks.group
        group.tell([Ask.LOAD, self._number, *self._asked.words()])
        return follower.read(self._asked, what, group, progress)

    def executor(self, loaded: Checkpoint) -> Leader:
        """Once all have read theirs.  ModelError if one could not."""
        group = self._ranks.group
        own = follower.executor(self._asked, loaded, group)
        group.tell([Ask.READY, self._number])
        if not group.confirm(True):
            raise ModelError("another process could not read its share of it; the log says why")
        return Leader(own, self._number, self._ranks.lost)

    def drop(self) -> None:
        self._ranks.group.tell([Ask.DROP, self._number])


def refuse_adapter(name: str, settings: Settings) -> None:
    """UnsupportedError where the network it would be laid over is computed by several processes."""
    if settings.tensor_parallel > 1:
        base, _, adapter = name.partition(":")
        raise UnsupportedError(
            f"an adapter is not laid over {base}, which {settings.tensor_parallel} processes compute together; merged "
            f"it is a model like others: {adapter}=BASE+ADAPTER, which are the two sources, or merge: true over HTTP"
        )


def joining_of(settings: Settings, place: Place, at: str) -> Joining:
    """Of rank 0."""
    threads, patience = place.torch_threads, settings.hang_seconds
    logged = {"log_format": settings.log_format, "log_level": settings.log_level}
    return Joining(0, settings.tensor_parallel, at, place.device.type, threads, patience, **logged)


def launched(settings: Settings, place: Callable[[], Place]) -> Joining | None:
    """What this process is to torchrun, if that has started it and it is to follow.

    Raises SettingsError if torchrun has started another number of processes than is asked for.
    """
    if settings.tensor_parallel == 1 or not dist.is_torchelastic_launched():
        return None
    _, rank, world = next(rendezvous(LAUNCHED))
    if world != settings.tensor_parallel:
        raise SettingsError(
            f"tensor_parallel: torchrun has started {world} processes, and it is {settings.tensor_parallel}; "
            "set it to as many, or leave torchrun out"
        )
    return replace(joining_of(settings, place(), LAUNCHED), rank=rank) if rank else None


def meeting_place() -> str:
    """A file in a folder that nobody else can look into."""
    return f"{FILE}{Path(mkdtemp(prefix='polyhead-'), 'met')}"


def start(joining: Joining) -> subprocess.Popen[bytes]:
    """It ends when its standard input does, which is when this process does."""
    command = [sys.executable, "-m", "polyhead.service.runtime.follower", joining.words()]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def watch(rank: int, child: subprocess.Popen[bytes], lost: Callable[[str], None]) -> None:
    """Until it ends; only one that was let go ends well."""
    code = child.wait()
    if code:
        how = f"was ended by signal {-code}" if code < 0 else f"has ended with status {code}"
        lost(f"rank {rank} of those that compute together {how}")


def close(children: list[subprocess.Popen[bytes]]) -> None:
    for child in children:
        assert child.stdin is not None
        child.stdin.close()

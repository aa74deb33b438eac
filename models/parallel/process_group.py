"""Those who compute one network together, and what they say to each other (torch.distributed).

Knows no networks.  The one idea: there are two ways between them.  On one, sums and gathered numbers go, in the middle
of a step: whoever is late there is lost.  On the other the first says what is to be done next, and the others wait for
that as long as it takes; both end at once where a process ends.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.nn import functional as F

from .share import Share

PAGE = 1024  # numbers that are told at once; of more, how many come is told with the first
EVER = 365 * 86_400.0  # seconds
LOOPBACK = "127.0.0.1"
Words = list[int]


class Way(Protocol):
    """What is used of a process group of torch's."""

    def allreduce(self, tensors: list[Tensor], /) -> Any: ...

    def broadcast(self, tensors: list[Tensor], /) -> Any: ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any, /) -> Any: ...


@dataclass(frozen=True)
class Group:
    """`numbers` is the way of a step, `told` that of what comes next; `device` is this process's own."""

    share: Share
    device: torch.device
    numbers: Way
    told: Way

    @classmethod
    def met(cls, store: Any, share: Share, device: torch.device, patience: float, host: str = LOOPBACK) -> "Group":
        """As soon as all are there who have the same `store`.  A step waits `patience` seconds for whoever is late.

        `host` is an address of this machine for what goes between CPUs; empty: torch finds one.
        """
        told = over_sockets(PrefixStore("told", store), share, EVER, host)
        if device.type == "cuda":
            numbers = between_gpus(PrefixStore("numbers", store), share, patience, device)
        else:
            numbers = over_sockets(PrefixStore("numbers", store), share, patience, host)
        group = cls(share, device, numbers, told)
        group.confirm(True)  # nobody needs the store any more
        return group

    def sum(self, x: Tensor) -> Tensor:
        """Over all, in place: everybody has it then, to the same bit."""
        self.numbers.allreduce([x]).wait()
        return x

    def collect(self, x: Tensor, counts: list[int]) -> Tensor:
        """Everybody's [M, counts[rank]] beside each other, for the first; the others get their own back."""
        padded = F.pad(x, (0, max(counts) - x.size(1))).contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        first = self.share.rank == 0
        parts = [torch.empty_like(padded) for _ in counts] if first else []
        self.numbers.gather([parts] if first else [], [padded], options).wait()
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1) if first else x

    def agree(self, flags: Tensor) -> Tensor:
        """Where everybody says yes."""
        against = (~flags).to(torch.int32)
        self.numbers.allreduce([against]).wait()
        return against == 0

    def tell(self, words: Words) -> None:
        """Have the others hear it; for the first."""
        page = torch.zeros(PAGE, dtype=torch.int64)
        page[0], head = len(words), words[: PAGE - 1]
        page[1 : 1 + len(head)] = torch.tensor(head, dtype=torch.int64)
        self.told.broadcast([page]).wait()
        if len(words) >= PAGE:
            self.told.broadcast([torch.tensor(words[PAGE - 1 :], dtype=torch.int64)]).wait()

    def hear(self) -> Words:
        """What the first tells, whenever it does.  RuntimeError if it is gone."""
        page = torch.zeros(PAGE, dtype=torch.int64)
        self.told.broadcast([page]).wait()
        count = int(page[0])
        words: Words = page[1 : 1 + count].tolist()
        if count >= PAGE:
            rest = torch.zeros(count - len(words), dtype=torch.int64)
            self.told.broadcast([rest]).wait()
            words += rest.tolist()
        return words

    def confirm(self, good: bool) -> bool:
        """Whether everybody says so, on the way that has time."""
        against = torch.tensor([int(not good)])
        self.told.allreduce([against]).wait()
        return not against


def over_sockets(store: Any, share: Share, patience: float, host: str) -> Way:
    """A way between CPUs (gloo)."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
    options._timeout = timedelta(seconds=patience)
    way: Way = gloo(store, share.rank, share.world, options)
    return way


def between_gpus(store: Any, share: Share, patience: float, device: torch.device) -> Way:
    """A way between GPUs (NCCL)."""
    dist.init_process_group(
        "nccl",
        store=store,
        rank=share.rank,
        world_size=share.world,
        timeout=timedelta(seconds=patience),
        device_id=device,
    )
    return cast(Way, dist.group.WORLD)

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

MESSAGE_NUMBERS = 1024  # numbers that are told at once; of more, how many come is told with the first
NO_TIMEOUT_S = 365 * 86_400.0  # seconds
LOOPBACK = "127.0.0.1"
Message = list[int]


class Collectives(Protocol):
    """What is used of a process group of torch's."""

    def allreduce(self, tensors: list[Tensor], /) -> Any: ...

    def broadcast(self, tensors: list[Tensor], /) -> Any: ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any, /) -> Any: ...


@dataclass(frozen=True)
class ProcessGroup:
    """`numbers` is the way of a step, `told` that of what comes next; `device` is this process's own."""

    share: Share
    device: torch.device
    tensors: Collectives
    messages: Collectives

    @classmethod
    def connect(
        cls, store: Any, share: Share, device: torch.device, patience: float, host: str = LOOPBACK
    ) -> "ProcessGroup":
        """As soon as all are there who have the same `store`.  A step waits `patience` seconds for whoever is late.

        `host` is an address of this machine for what goes between CPUs; empty: torch finds one.
        """
        told = connect_cpus(PrefixStore("told", store), share, NO_TIMEOUT_S, host)
        if device.type == "cuda":
            numbers = connect_gpus(PrefixStore("numbers", store), share, patience, device)
        else:
            numbers = connect_cpus(PrefixStore("numbers", store), share, patience, host)
        group = cls(share, device, numbers, told)
        group.all_confirm(True)  # nobody needs the store any more
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Over all, in place: everybody has it then, to the same bit."""
        self.tensors.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, counts: list[int]) -> Tensor:
        """Everybody's [M, counts[rank]] beside each other, for the first; the others get their own back."""
        padded = F.pad(x, (0, max(counts) - x.size(1))).contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        first = self.share.rank == 0
        parts = [torch.empty_like(padded) for _ in counts] if first else []
        self.tensors.gather([parts] if first else [], [padded], options).wait()
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1) if first else x

    def all_true(self, flags: Tensor) -> Tensor:
        """Where everybody says yes."""
        against = (~flags).to(torch.int32)
        self.tensors.allreduce([against]).wait()
        return against == 0

    def broadcast_message(self, words: Message) -> None:
        """Have the others hear it; for the first."""
        page = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        page[0], head = len(words), words[: MESSAGE_NUMBERS - 1]
        page[1 : 1 + len(head)] = torch.tensor(head, dtype=torch.int64)
        self.messages.broadcast([page]).wait()
        if len(words) >= MESSAGE_NUMBERS:
            self.messages.broadcast([torch.tensor(words[MESSAGE_NUMBERS - 1 :], dtype=torch.int64)]).wait()

    def receive_message(self) -> Message:
        """What the first tells, whenever it does.  RuntimeError if it is gone."""
        page = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        self.messages.broadcast([page]).wait()
        count = int(page[0])
        words: Message = page[1 : 1 + count].tolist()
        if count >= MESSAGE_NUMBERS:
            rest = torch.zeros(count - len(words), dtype=torch.int64)
            self.messages.broadcast([rest]).wait()
            words += rest.tolist()
        return words

    def all_confirm(self, good: bool) -> bool:
        """Whether everybody says so, on the way that has time."""
        against = torch.tensor([int(not good)])
        self.messages.allreduce([against]).wait()
        return not against


def connect_cpus(store: Any, share: Share, patience: float, host: str) -> Collectives:
    """A way between CPUs (gloo)."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
    options._timeout = timedelta(seconds=patience)
    way: Collectives = gloo(store, share.rank, share.world, options)
    return way


def connect_gpus(store: Any, share: Share, patience: float, device: torch.device) -> Collectives:
    """A way between GPUs (NCCL)."""
    dist.init_process_group(
        "nccl",
        store=store,
        rank=share.rank,
        world_size=share.world,
        timeout=timedelta(seconds=patience),
        device_id=device,
    )
    return cast(Collectives, dist.group.WORLD)

"""Communication between the processes that compute one network (torch.distributed).

There are two channels. On the first, sums and gathered tensors are exchanged in the middle of a step; it has a timeout.
On the second the first process sends commands and the others wait for them without a timeout. Both fail at once if a
process ends.
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

MESSAGE_NUMBERS = 1024  # numbers sent at once; the first one is the length, and a longer message has a second part
NO_TIMEOUT_S = 365 * 86_400.0  # seconds
LOOPBACK = "127.0.0.1"
Message = list[int]


class Collectives(Protocol):
    """The methods of a torch process group that are used."""

    def allreduce(self, tensors: list[Tensor], /) -> Any: ...

    def broadcast(self, tensors: list[Tensor], /) -> Any: ...

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any, /) -> Any: ...


@dataclass(frozen=True)
class ProcessGroup:
    """`tensors` is the channel of steps, `messages` that of commands; `device` is this process's own."""

    share: Share
    device: torch.device
    tensors: Collectives
    messages: Collectives

    @classmethod
    def connect(
        cls, store: Any, share: Share, device: torch.device, patience: float, host: str = LOOPBACK
    ) -> "ProcessGroup":
        """Connect all processes with the same `store`; returns when all are there. A step waits `patience` seconds for
        each other process.

        `host` is an address of this machine for communication between CPUs; empty: torch chooses one.
        """
        message_group = connect_cpus(PrefixStore("messages", store), share, NO_TIMEOUT_S, host)
        if device.type == "cuda":
            numbers = connect_gpus(PrefixStore("tensors", store), share, patience, device)
        else:
            numbers = connect_cpus(PrefixStore("tensors", store), share, patience, host)
        group = cls(share, device, numbers, message_group)
        group.all_confirm(True)  # after this the store is not needed any more
        return group

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over all processes, in place; every process gets the same bits."""
        self.tensors.allreduce([x]).wait()
        return x

    def gather_columns(self, x: Tensor, counts: list[int]) -> Tensor:
        """The concatenated columns [M, counts[rank]] of all processes, on the first; the others get their own back."""
        padded = F.pad(x, (0, max(counts) - x.size(1))).contiguous()
        options = dist.GatherOptions()
        options.rootRank = 0
        first = self.share.rank == 0
        parts = [torch.empty_like(padded) for _ in counts] if first else []
        self.tensors.gather([parts] if first else [], [padded], options).wait()
        return torch.cat([part[:, :count] for part, count in zip(parts, counts, strict=True)], 1) if first else x

    def all_true(self, flags: Tensor) -> Tensor:
        """Where the flags of all processes are true."""
        against = (~flags).to(torch.int32)
        self.tensors.allreduce([against]).wait()
        return against == 0

    def broadcast_message(self, message: Message) -> None:
        """Send a message to the other processes; called by the first."""
        page = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        page[0], head = len(message), message[: MESSAGE_NUMBERS - 1]
        page[1 : 1 + len(head)] = torch.tensor(head, dtype=torch.int64)
        self.messages.broadcast([page]).wait()
        if len(message) >= MESSAGE_NUMBERS:
            self.messages.broadcast([torch.tensor(message[MESSAGE_NUMBERS - 1 :], dtype=torch.int64)]).wait()

    def receive_message(self) -> Message:
        """Receive the next message of the first process, without a timeout. RuntimeError if that process is gone."""
        page = torch.zeros(MESSAGE_NUMBERS, dtype=torch.int64)
        self.messages.broadcast([page]).wait()
        count = int(page[0])
        message: Message = page[1 : 1 + count].tolist()
        if count >= MESSAGE_NUMBERS:
            rest = torch.zeros(count - len(message), dtype=torch.int64)
            self.messages.broadcast([rest]).wait()
            message += rest.tolist()
        return message

    def all_confirm(self, good: bool) -> bool:
        """Whether all processes pass True, on the channel without a timeout."""
        against = torch.tensor([int(not good)])
        self.messages.allreduce([against]).wait()
        return not against


def connect_cpus(store: Any, share: Share, patience: float, host: str) -> Collectives:
    """A process group between CPUs (gloo)."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
    options._timeout = timedelta(seconds=patience)
    way: Collectives = gloo(store, share.rank, share.world, options)
    return way


def connect_gpus(store: Any, share: Share, patience: float, device: torch.device) -> Collectives:
    """A process group between GPUs (NCCL)."""
    dist.init_process_group(
        "nccl",
        store=store,
        rank=share.rank,
        world_size=share.world,
        timeout=timedelta(seconds=patience),
        device_id=device,
    )
    return cast(Collectives, dist.group.WORLD)

"""The event loop of the server: a turn handles few events of sockets, and those of preferred sockets first.

asyncio handles all events that are there in one turn. Thousands of clients that each send a byte at once would hold up
everything else: probes, timers, and the answers that threads hand over.
"""

import asyncio
import math
import os
import select
import selectors
import sys

MAX_EVENTS = 32  # of one turn, besides those of preferred sockets; one takes up to some tenths of a millisecond


class BoundedSelector(selectors.DefaultSelector):
    """Returns at most MAX_EVENTS events in a call, besides input of preferred files, which comes first. For Linux.

    The kernel queues the files that are ready, and those that it has returned go to the end of its queue: each has its
    turn.
    """

    def __init__(self) -> None:
        super().__init__()
        self._all = select.epoll.fromfd(os.dup(self.fileno()))  # the same files; it is closed by itself
        self._preferred = select.epoll()

    def prefer(self, fd: int) -> None:
        """Prefer the file from now on. The kernel forgets it when it is closed."""
        self._preferred.register(fd, select.EPOLLIN)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        keys = self.get_map()
        events = {
            fd: mask
            for fd, mask in self._preferred.poll(0)
            if (key := keys.get(fd)) is not None and key.events & selectors.EVENT_READ
        }
        events |= self._all.poll(0 if events else epoll_timeout(timeout), MAX_EVENTS)
        found = []
        for fd, mask in events.items():
            if (key := keys.get(fd)) is not None:
                writes = selectors.EVENT_WRITE if mask & ~select.EPOLLIN else 0
                reads = selectors.EVENT_READ if mask & ~select.EPOLLOUT else 0
                found.append((key, (reads | writes) & key.events))
        return found

    def close(self) -> None:
        self._all.close()
        self._preferred.close()
        super().close()


def epoll_timeout(seconds: float | None) -> float:
    """The timeout of `epoll.poll`, at least `seconds`: it counts whole milliseconds. None: without end."""
    return -1 if seconds is None else math.ceil(max(seconds, 0) * 1000) / 1000


class ServerLoop(asyncio.SelectorEventLoop):
    """asyncio's loop with a BoundedSelector."""

    def __init__(self) -> None:
        self.selector = BoundedSelector()
        super().__init__(self.selector)


def create_server_loop() -> asyncio.AbstractEventLoop:
    """A ServerLoop, or asyncio's own loop on systems without epoll."""
    return ServerLoop() if sys.platform == "linux" else asyncio.new_event_loop()


def prefer_socket(fd: int) -> None:
    """Handle input of this socket before that of others until it is closed, if the running loop can."""
    loop = asyncio.get_running_loop()
    if isinstance(loop, ServerLoop):
        loop.selector.prefer(fd)

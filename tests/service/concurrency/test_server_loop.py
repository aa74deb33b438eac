"""The event loop of the server: how many events a turn handles, and which first."""

import asyncio
import socket
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

from polyhead.service.concurrency.server_loop import MAX_EVENTS, ServerLoop, create_server_loop, prefer_socket

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the selector is of Linux")


def run(work: object) -> None:
    with asyncio.Runner(loop_factory=create_server_loop) as runner:
        assert isinstance(runner.get_loop(), ServerLoop)
        runner.run(work)  # type: ignore[arg-type]


def test_a_turn_handles_few_events_and_each_socket_has_its_turn() -> None:
    turns, found, turn = list[int](), Counter[int](), 0

    async def read_all(stack: ExitStack) -> None:
        nonlocal turn
        loop = asyncio.get_running_loop()
        for number in range(3 * MAX_EVENTS):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            theirs.send(b"x")  # it stays unread, so the socket stays ready

            def count(number: int = number) -> None:
                found[number] += 1
                turns.append(turn)

            loop.add_reader(ours, count)
        while len(found) < 3 * MAX_EVENTS:
            turn += 1
            await asyncio.sleep(0)
        assert max(Counter(turns).values()) == MAX_EVENTS
        assert max(found.values()) == 1, "none has a second turn before another one has its first"

    with ExitStack() as stack:
        run(read_all(stack))


def test_preferred_sockets_come_first() -> None:
    order = list[str]()

    async def read_all(stack: ExitStack) -> None:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        for _ in range(4 * MAX_EVENTS):
            ours, theirs = map(stack.enter_context, socket.socketpair())
            theirs.send(b"x")
            loop.add_reader(ours, order.append, "other")
        for _ in range(4):  # turns: the other sockets are before the next one in the kernel's queue
            await asyncio.sleep(0)
        ours, theirs = map(stack.enter_context, socket.socketpair())

        def read() -> None:
            order.append("preferred")
            ours.recv(9)
            arrived.set()

        loop.add_reader(ours, read)
        prefer_socket(ours.fileno())
        theirs.send(b"x")
        order.clear()
        await arrived.wait()
        assert order.index("preferred") <= MAX_EVENTS, "after those of the turn that had begun"

    with ExitStack() as stack:
        run(read_all(stack))


def test_a_preferred_socket_that_is_not_read_holds_up_nothing() -> None:
    """It is ready all the time, but nothing reads it: the loop sleeps until its next timer."""

    async def wait(stack: ExitStack) -> None:
        loop, polls = asyncio.get_running_loop(), 0
        assert isinstance(loop, ServerLoop)
        ours, theirs = map(stack.enter_context, socket.socketpair())
        prefer_socket(ours.fileno())
        theirs.close()
        real = loop.selector.select

        def select(timeout: float | None = None) -> object:
            nonlocal polls
            polls += 1
            return real(timeout)

        loop.selector.select = select  # type: ignore[method-assign, assignment]
        await asyncio.sleep(0.1)
        assert polls < 20
        ours.close()
        with socket.socketpair()[0] as again:  # may have its number
            prefer_socket(again.fileno())

    with ExitStack() as stack:
        run(wait(stack))

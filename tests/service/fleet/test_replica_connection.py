"""A replica that is silent is lost, a process that was paused has lost nothing."""

import asyncio
import socket
import time

import pytest

from polyhead.service.fleet import replica_connection
from polyhead.service.fleet.replica_connection import SILENT_WAITS, wait_unless_silent

WAIT_S = 0.05


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_connection, "WAIT_S", WAIT_S)


async def read_one(ours: socket.socket) -> tuple[asyncio.Task[bytes], asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(sock=ours)
    return asyncio.create_task(reader.readexactly(1)), writer


def test_what_arrived_in_a_pause_is_read_before_a_replica_is_lost() -> None:
    async def act() -> None:
        ours, peer = socket.socketpair()
        with peer:
            reading, writer = await read_one(ours)
            waiting = asyncio.create_task(wait_unless_silent(reading))
            await asyncio.sleep(0)
            peer.send(b"x")
            time.sleep(2 * SILENT_WAITS * WAIT_S)
            assert await waiting == b"x"
            writer.close()

    asyncio.run(act())


def test_a_silent_replica_is_lost() -> None:
    async def act() -> None:
        ours, peer = socket.socketpair()
        with peer:
            reading, writer = await read_one(ours)
            with pytest.raises(TimeoutError, match=r"no message for \d+ s"):
                await wait_unless_silent(reading)
            await asyncio.wait({reading})
            assert reading.cancelled()
            writer.close()

    asyncio.run(act())

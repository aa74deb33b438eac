"""Many clients in a process of their own, so that they take no time from the process that measures:
waiting_clients.py URL TALKING WAITING.

It opens TALKING streams and reads them, and sends WAITING requests that are queued behind them. It writes "sent"
when all have been sent, and stays until it is killed."""

import asyncio
import sys

from tests.support.crowd import COMPLETIONS, call, completion

ENDLESS = 90_000  # tokens


async def talk(url: str, stream: bool, begun: asyncio.Event) -> None:
    reader, _ = await call(url, COMPLETIONS, completion([40, 41, 42], ENDLESS, stream=stream), {})
    while await reader.read(1 << 16):
        begun.set()


async def main(url: str, talking: int, waiting: int) -> None:
    streams = [asyncio.Event() for _ in range(talking)]
    tasks = [asyncio.create_task(talk(url, stream=True, begun=begun)) for begun in streams]
    await asyncio.gather(*(begun.wait() for begun in streams))
    for _ in range(waiting):
        tasks.append(asyncio.create_task(talk(url, stream=False, begun=asyncio.Event())))
        await asyncio.sleep(0.001)
    sys.stdout.write("sent\n")
    sys.stdout.flush()
    await asyncio.gather(*tasks)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))

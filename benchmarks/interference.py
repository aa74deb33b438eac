"""Measure the latency of a classification over HTTP: while the server is idle, and while sixteen generations run.

    python -m benchmarks.interference [--calls 200] [--weights sentiment=4]

One short text at a time is sent to the quick-start classifier, one call after the other. SmolLM2-135M generates sixteen
answers at once in the same server; a new one starts when one ends. Float32, client and server on the same cores. With
--weights the server is started again with those shares of the engine.
"""

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import httpx

from benchmarks.prose import sentences
from benchmarks.serving import Running, machine, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

TEXT = "a good film, well acted and beautifully shot"
WIDTH, TOKENS = 16, 128
WARM_S = 3.0
PATIENCE_S = 30.0  # of a line


@dataclass
class Writing:
    """Tokens of the generations that have ended."""

    tokens: int = 0


async def write(http: httpx.AsyncClient, prompt: str, writing: Writing) -> None:
    """One generation after the other, until cancelled.  Streamed, so that tokens are counted as they come."""
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    while True:
        async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                writing.tokens += line.startswith("data: {")


@contextlib.asynccontextmanager
async def beside(http: httpx.AsyncClient, prompts: Sequence[str]) -> AsyncIterator[Writing]:
    """Generations run while the block does, one for each prompt."""
    writing = Writing()
    tasks = [asyncio.create_task(write(http, prompt, writing)) for prompt in prompts]
    await asyncio.sleep(WARM_S if tasks else 0)
    try:
        yield writing
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait([*tasks, asyncio.create_task(asyncio.sleep(0))])


async def classify(http: httpx.AsyncClient, calls: int) -> list[float]:
    """Milliseconds of each of so many calls, or of fewer where they take long."""
    took: list[float] = []
    until = time.perf_counter() + PATIENCE_S
    while len(took) < calls and time.perf_counter() < until:
        began = time.perf_counter()
        answer = await http.post("/models/sentiment/predict", json={"inputs": TEXT})
        answer.raise_for_status()
        took.append((time.perf_counter() - began) * 1000)
    return took


async def measure(server: Running, case: str, prompts: Sequence[str], calls: int) -> None:
    """One line: classifications while `prompts` are continued."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await classify(http, 5)
        async with beside(http, prompts) as writing:
            written, began = writing.tokens, time.perf_counter()
            took = sorted(await classify(http, calls))
            rate = (writing.tokens - written) / (time.perf_counter() - began)
    p99 = took[min(int(len(took) * 0.99), len(took) - 1)]
    print(
        f"{case:34s} {len(took):5d} {statistics.median(took):9.1f} {p99:9.1f} {took[-1]:9.1f} {rate:10.0f}", flush=True
    )


async def alone(server: Running, prompts: Sequence[str]) -> None:
    """One line: the generations without anybody beside them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http, beside(http, prompts) as writing:
        written, began = writing.tokens, time.perf_counter()
        await asyncio.sleep(2 * WARM_S)
        rate = (writing.tokens - written) / (time.perf_counter() - began)
    print(f"{f'{WIDTH} generations alone':34s} {'':35s} {rate:10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--calls", type=int, default=200)
    parser.add_argument("--weights", default="", help="shares of the engine, as `polyhead serve` takes them")
    options = parser.parse_args()
    folder = settings.default_model_dir()
    quickstart.fetch_all(folder)
    prompts = sentences(folder / "prose", WIDTH)
    models = [f"{name}={source}" for name, source in quickstart.sources(folder).items() if name != "minilm"]
    flags = ("--precision", "float32", "--log-level", "warning")
    print(machine())
    print("one classification                 calls    p50 ms    p99 ms    max ms   tokens/s beside")
    with serve(*models, *flags) as server:
        asyncio.run(measure(server, "idle", (), options.calls))
        asyncio.run(alone(server, prompts))
        asyncio.run(measure(server, f"{WIDTH} generations run", prompts, options.calls))
    if options.weights:
        with serve(*models, *flags, "--weights", options.weights) as server:
            asyncio.run(measure(server, f"{WIDTH} run, {options.weights}", prompts, options.calls))


if __name__ == "__main__":
    main()

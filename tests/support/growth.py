"""The memory that a served model takes, as a child of tests: it reads lines of JSON, [WARM, SOURCE, SETTINGS], and
answers each with one.

WARM is a small checkpoint of the same kind. It is loaded and used first, so that what libraries allocate once is not
counted. The C library is set to return free memory at once, so that only needed memory is measured. The load is the
largest possible: a full cache, every sequence sampled in the most costly way, and prompts as long as the context.
Each measurement has its own process, forked from one that has imported everything."""

import asyncio
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch

from polyhead.service.config.settings import Settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import Encode, Generate, Request, Sampling
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.resources import machine
from polyhead.service.runtime.registry import ModelRegistry

M_MMAP_THRESHOLD, SMALLEST = -3, 1 << 16
MIB = 1 << 20
STATUS, CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
dice = Random(0)


def resident(kind: str) -> float:
    """MiB now ("VmRSS"), or the maximum since `forget` ("VmHWM")."""
    lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(lines[kind].split()[0]) / 1024


def forget() -> None:
    CLEAR_REFS.write_text("5")


def text(model: Model, length: int) -> tuple[int, ...]:
    return tuple(dice.randrange(model.vocab_size) for _ in range(length))


def waves(model: Model, settings: Settings) -> list[list[Request]]:
    if model.task != "generate":
        full = settings.encoder_step_tokens // model.max_tokens + 1  # more texts than one step takes
        lengths = ([model.max_tokens] * full, [dice.randrange(1, model.max_tokens + 1) for _ in range(2 * full)])
        return [[Encode("e", text(model, length)) for length in wave] for wave in lengths]
    shaped = Sampling(temperature=50, top_p=0.9, typical_p=0.9, repetition_penalty=1.1, bias=((3, 1.0),))
    beginning, short = text(model, model.max_tokens - 8), settings.cache_tokens // settings.max_running - 4
    many = [Generate("m", text(model, short), 4, sampling=shaped, logprobs=5) for _ in range(settings.max_running)]
    alike = [Generate("a", (*beginning, *text(model, 2)), 4, sampling=shaped) for _ in range(settings.max_running)]
    long = [Generate("l", text(model, model.max_tokens - 4), 3) for _ in range(2)]
    scored = [Generate("s", text(model, model.max_tokens - 4), 3, prompt_logprobs=5) for _ in range(2)]
    return [many, alike, long, scored]


async def asked(registry: ModelRegistry, model: Model, requests: Sequence[Request]) -> None:
    for stream in registry.submit(model, requests):
        events = [event async for event in stream]
        assert "Failed" not in type(events[-1]).__name__, events[-1]


async def measured(warm: str, source: str, settings: Settings) -> dict[str, float]:
    engine, metrics = Engine(Metrics([]), threads=1), Metrics([])
    engine.start()
    registry = ModelRegistry(engine, settings, observer=metrics)
    await registry.load("warm", warm).wait_and_raise()
    small = registry.models()[0]
    for wave in waves(small, settings):
        await asked(registry, small, wave[:4])
    del small
    lives = 1 if settings.precision in ("auto", "float32") else 2
    for _ in range(lives):  # of the first load the libraries keep up to 45 MiB, for kernels and their buffers
        machine.return_free_memory()
        found = await one_life(registry, source, settings)
    await engine.close(0)
    return found


async def one_life(registry: ModelRegistry, source: str, settings: Settings) -> dict[str, float]:
    """MiB that were added: the maximum during the load, the maximum during requests, and after the unload."""
    forget()
    base = resident("VmRSS")
    await registry.load("model", source).wait_and_raise()
    loading = resident("VmHWM")
    forget()
    model = registry.models()[1]
    for wave in waves(model, settings):
        await asked(registry, model, wave)
    peak = resident("VmHWM")
    await registry.unload("model", 0).wait_and_raise()
    return {"loading": loading - base, "peak": peak - base, "gone": resident("VmRSS") - base}


def measure(warm: str, source: str, given: dict[str, Any]) -> None:
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, SMALLEST)
    torch.set_num_threads(1)
    nowhere = "/proc/nowhere"  # a folder that cannot store the costs of a precision: each load measures them
    settings = Settings(device="cpu", model_root="/", model_dir=nowhere, **given)
    say(asyncio.run(measured(warm, source, settings)))


def say(found: dict[str, float] | None) -> None:
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            measure(*json.loads(line))
            return
        if os.waitpid(child, 0)[1]:
            say(None)


if __name__ == "__main__":
    main()

"""Measure throughput and added latency of replicas on Ray, on this machine.

    python -m benchmarks.fleet throughput [--rounds 2]    # two replicas on two cores against one on one
    python -m benchmarks.fleet added [--calls 200]        # a classification and a token through Ray against direct
    python -m benchmarks.fleet scaleup                    # from the decision to the first answer, by stage
    python -m benchmarks.fleet routing [--rounds 2]       # policies, two replicas, conversations of several turns

Needs the extra ray. `throughput`: with one replica, everything (replica, ingress, Ray, clients) is pinned to one core;
with two, everything to two cores, and each replica to one of them. SmolLM2-135M has the quantisation of its file.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.prose import sentences
from benchmarks.serving import Running, answers, machine, report, serve
from benchmarks.simulation import processes
from benchmarks.simulation.figures import share
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

WIDTH, PROMPT, TOKENS = 32, 48, 64  # clients, words of their prompts, tokens of an answer
WARM_S, MEASURED_S = 15.0, 40.0
TURNS, SPEAKERS, TURN_WORDS, PAUSE_S, CACHE = 6, 8, 60, 1.0, 16_384
GENERATED = 'polyhead_tokens_total{kind="generated"'
STRAIGHT = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1"}  # HAProxy, to replicas' own ports
MEASURED = ("random", "round-robin", "two-choices", "affinity")
REPLICA = re.compile(r"^ray::ServeReplica:polyhead-chat")
STAGES = (
    ("Ray decides", re.compile(r"Upscaling|Adding 1 replica")),
    ("its process runs our code", re.compile(r"chat: int4|chat: int8")),
    ("the model is read and warm", re.compile(r"chat is ready")),
    ("it listens", re.compile(r"answers on")),
    ("requests can be sent there", re.compile(r"chat has a replica")),
)


def models() -> dict[str, str]:
    home = settings.default_model_dir()
    quickstart.fetch_all(home)
    return quickstart.sources(home)


@dataclass
class Count:
    tokens: int = 0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)


def asked(prompt: str, **named: Any) -> dict[str, Any]:
    body = {"model": "chat", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, **named}


async def streamed(http: httpx.AsyncClient, body: dict[str, Any], count: Count) -> None:
    began = last = time.perf_counter()
    first = True
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now = time.perf_counter()
            count.tokens += 1
            (count.firsts if first else count.gaps).append(now - (began if first else last))
            first, last = False, now


def prompts(count: int, words: int = PROMPT) -> list[str]:
    text = " ".join(sentences(settings.default_model_dir(), 4000)).split()
    return [" ".join(text[number * words : (number + 1) * words]) for number in range(count)]


# Throughput


@contextlib.contextmanager
def held(cores: set[int]) -> Iterator[None]:
    """This process, and what it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def replicas() -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and REPLICA.match((entry / "cmdline").read_text()):
                found.append(int(entry.name))
    return sorted(found)


def pin(process: int, core: int) -> None:
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), {core})


def rate(cores: set[int]) -> float:
    """Tokens a second of as many replicas as there are cores, and all that belongs to them on those."""
    flags = ("--ray", "--replicas", str(len(cores)), "--replica-cpus", "1", "--threads", "1")
    with held(cores), serve(f"chat={models()['smollm2']}", *flags, limit_s=240) as running:
        until(lambda: sample(running.url, 'polyhead_replicas{model="chat"}') == len(cores))
        for process, core in zip(replicas(), sorted(cores), strict=True):
            pin(process, core)
        return asyncio.run(throughput(running, WIDTH * len(cores)))


async def throughput(running: Running, width: int) -> float:
    """Tokens a second of answers that ended, of mixed lengths so that they don't end together.  Not streamed: clients
    that looked at each token would take a good part of the cores."""
    draw = random.Random(1)
    async with httpx.AsyncClient(base_url=running.url, timeout=300) as http:

        async def client(text: str) -> None:
            while True:
                tokens = draw.randint(TOKENS // 2, 3 * TOKENS // 2)
                answer = await http.post("/v1/completions", json=asked(text, stream=False, max_tokens=tokens))
                answer.raise_for_status()

        clients = [asyncio.create_task(client(text)) for text in prompts(width)]
        await asyncio.sleep(WARM_S)
        before, began = sample(running.url, GENERATED), time.perf_counter()
        await asyncio.sleep(MEASURED_S)
        tokens, seconds = sample(running.url, GENERATED) - before, time.perf_counter() - began
        for task in clients:
            task.cancel()
        await asyncio.wait(clients)
    return tokens / seconds


def sample(url: str, name: str) -> float:
    page = httpx.get(f"{url}/metrics", timeout=30).text
    return next((float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(name)), 0.0)


def until(condition: Callable[[], Any], timeout_s: float = 240.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("what was waited for does not come")
        time.sleep(0.2)


def measure_throughput(rounds: int) -> None:
    one, two = [], []
    for _ in range(rounds):
        one.append(rate({0}))
        two.append(rate({0, 1}))
        print(f"one {one[-1]:.1f}, two {two[-1]:.1f} tokens/s", flush=True)
    report("two replicas, tokens", two, one, "1/s", other="one replica")


# Added


@contextlib.contextmanager
def serve_behind_proxy(given: dict[str, str], proxy: Mapping[str, str]) -> Iterator[str]:
    """The application behind a proxy of Ray's, as a config file deploys it; the address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "polyhead",
                "import_path": "polyhead.service.fleet.ray_app:application",
                "route_prefix": "/",
                "args": {"models": given, "replica_cpus": 0.3, "threads": 1},
                "deployments": [{"name": "Ingress", "ray_actor_options": {"num_cpus": 0.2}}],
            }
        ],
    }
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(config, file)
        file.flush()
        command = [str(Path(sys.executable).with_name("serve")), "run", file.name]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, env={**os.environ, **proxy}, **quiet)
        try:
            until(lambda: answers(port, "/readyz"))
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def measure_added(calls: int) -> None:
    served = models()
    given = {"chat": served["smollm2"], "mood": served["sentiment"]}
    flags = [f"{name}={source}" for name, source in given.items()]
    print(f"{calls} calls of each, one after the other and in turns")
    with serve(*flags, "--threads", "1") as direct:
        with serve(*flags, "--ray", "--replica-cpus", "0.3", "--threads", "1", limit_s=240) as through:
            asyncio.run(compared({"direct": direct.url, "polyhead serve --ray": through.url}, calls))
        for name, proxy in (("behind Ray's proxy", {}), ("behind Ray's HAProxy", STRAIGHT)):
            with serve_behind_proxy(given, proxy) as url:
                asyncio.run(compared({"direct": direct.url, name: url}, calls))


async def compared(ways: dict[str, str], calls: int) -> None:
    async with contextlib.AsyncExitStack() as stack:
        https = {
            name: await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
            for name, url in ways.items()
        }
        classified: dict[str, list[float]] = {name: [] for name in ways}
        tokens = {name: Count() for name in ways}
        for turn in range(calls + 5):
            for name, http in https.items():
                began = time.perf_counter()
                answer = await http.post("/models/mood/predict", json={"inputs": "a good film, well acted"})
                answer.raise_for_status()
                if turn >= 5:
                    classified[name].append(time.perf_counter() - began)
        for _ in range(max(calls // 10, 1)):
            for name, http in https.items():
                await streamed(http, asked("The capital of France is", max_tokens=32), tokens[name])
    for name in ways:
        labels, firsts, gaps = (sorted(each) for each in (classified[name], tokens[name].firsts, tokens[name].gaps))
        print(
            f"{name:24s} classification p50 {1e3 * share(labels, 0.5):6.2f} ms, p95 {1e3 * share(labels, 0.95):6.2f}; "
            f"first token p50 {1e3 * share(firsts, 0.5):6.1f} ms; "
            f"a token p50 {1e3 * share(gaps, 0.5):6.2f} ms, p95 {1e3 * share(gaps, 0.95):6.2f}"
        )


# Routing


@dataclass
class Talk:
    """What the prompts of one policy's conversations found stored, and how long their first tokens took."""

    prompt: int = 0
    cached: int = 0
    firsts: list[float] = field(default_factory=list)


async def conversed(http: httpx.AsyncClient, texts: Sequence[str], talk: Talk) -> None:
    """Several turns: each prompt is all that was said before, and more."""
    said = " ".join(texts[:2])
    for text in texts[2:]:
        said += f" {text}"
        began, first = time.perf_counter(), True
        body = asked(said, max_tokens=16, stream_options={"include_usage": True})
        async with http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                if first:
                    talk.firsts.append(time.perf_counter() - began)
                    first = False
                event = json.loads(line.removeprefix("data: "))
                said += "".join(choice["text"] for choice in event["choices"])
                if usage := event.get("usage"):
                    talk.prompt += usage["prompt_tokens"]
                    talk.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        await asyncio.sleep(PAUSE_S)


def measure_routing(rounds: int) -> None:
    """Each policy in turn has replicas and conversations of its own; speakers come and go, so queues differ."""
    settings_of = {"models": {"chat": models()["smollm2"]}, "threads": 1, "cache_tokens": CACHE}
    talks: dict[str, Talk] = {name: Talk() for name in MEASURED}
    for turn in range(rounds):
        for name in MEASURED:
            with contextlib.ExitStack() as stack:
                started = [
                    stack.enter_context(processes.started("replica", core, settings_of, f"replica-{core}", os.devnull))
                    for core in (0, 1)
                ]
                ports = [process.port for process in started]
                ingress = stack.enter_context(processes.started("ingress", 0, settings_of, name, *ports))
                url = f"http://127.0.0.1:{ingress.port}"
                until(lambda url=url: ready(url))
                asyncio.run(conversations(url, talks[name], turn))
    for name, talk in talks.items():
        print(
            f"{name:14s} prefix hit rate {talk.cached / talk.prompt:6.1%}; first token p50 "
            f"{1e3 * statistics.median(talk.firsts):7.1f} ms, p95 {1e3 * share(sorted(talk.firsts), 0.95):7.1f} "
            f"({len(talk.firsts)} turns)"
        )


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        page = httpx.get(f"{url}/metrics", timeout=30).text
        return 'polyhead_replicas{model="chat"} 2.0' in page
    return False


async def conversations(url: str, talk: Talk, seed: int) -> None:
    texts = prompts(SPEAKERS * (TURNS + 2) * (seed + 1), TURN_WORDS)[-SPEAKERS * (TURNS + 2) :]
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        speakers = [texts[number::SPEAKERS] for number in range(SPEAKERS)]
        await asyncio.gather(*(conversed(http, speaker, talk) for speaker in speakers))


# Scale-up


def measure_scaleup() -> None:
    flags = ("--ray", "--replicas", "1-2", "--queued-tokens", "512", "--replica-cpus", "0.5", "--threads", "1")
    with serve(f"chat={models()['smollm2']}", *flags, limit_s=240) as running:
        asyncio.run(scaled(running))
        log = running.log()
    marks = []
    for name, pattern in STAGES:
        lines = [line for line in log.splitlines() if pattern.search(line)]
        marks.append((name, clock(lines[-1]) if lines else float("nan")))
    print(f"{machine()}")
    for (name, at), (_, before) in zip(marks[1:], marks, strict=False):
        print(f"{name:32s} {at - before:6.2f} s")
    print(f"{'in all':32s} {marks[-1][1] - marks[0][1]:6.2f} s")


def clock(line: str) -> float:
    """When a line of the log was written; Ray's own lines have a date before."""
    found = re.search(r"(\d\d):(\d\d):(\d\d)(?:,(\d{3}))?", line)
    assert found is not None, line
    hours, minutes, seconds, thousandths = (int(part or 0) for part in found.groups())
    return 3600 * hours + 60 * minutes + seconds + thousandths / 1000


async def scaled(running: Running) -> None:
    count = Count()
    async with httpx.AsyncClient(base_url=running.url, timeout=120) as http:

        async def client(text: str) -> None:
            while True:
                await streamed(http, asked(text), count)

        clients = [asyncio.create_task(client(text)) for text in prompts(WIDTH)]
        await asyncio.to_thread(until, lambda: sample(running.url, 'polyhead_replicas{model="chat"}') == 2)
        await asyncio.sleep(5)
        for task in clients:
            task.cancel()
        await asyncio.wait(clients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("throughput", "added", "scaleup", "routing"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args()
    print(machine(), file=sys.stderr)
    match given.what:
        case "throughput":
            measure_throughput(given.rounds)
        case "added":
            measure_added(given.calls)
        case "routing":
            measure_routing(given.rounds)
        case _:
            measure_scaleup()


if __name__ == "__main__":
    main()

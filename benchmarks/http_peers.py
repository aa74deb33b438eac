"""Compare servers: 32 streams over HTTP, with the client on the same cores.

    python -m benchmarks.http_peers [--install] [--share] [--rounds 3] [--threads 2] [--only NAME ...]

Environments and models are made by benchmarks/peers.py. `--install` adds what servers need, and compiles llama.cpp's
own server. Each run starts a server, sends requests from a separate process, and ends the server. A round goes through
all of them. `--share` also runs Polyhead in process, in the same round. OpenVINO Model Server is not included, because
package registries have no wheel of it.
"""

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.peer_runs.workload import NEW, PROMPT
from benchmarks.peers import BENCH, OURS, RUNS, called, command, measured, middle, python, running, table
from benchmarks.peers import Peer as InProcess
from benchmarks.serving import machine

STREAMS, READY_S, LIMIT_S = 32, 120.0, 400.0
SERVERS = {  # what is installed into an environment of benchmarks/peers.py
    "llamacpp": ("uvicorn", "fastapi", "pydantic-settings", "sse-starlette", "starlette-context"),
    "openvino": ("fastapi", "uvicorn"),
}
COLUMNS = {
    "tokens/s": ("tokens/s",),
    "first token p50 / last, ms": ("first p50", "first last"),
    "of the same in process": ("share",),
}
ALONE = "polyhead_generation"
MARGIN = 64  # tokens of room beside a prompt and what is made of it
BUILD_LIMIT_S = 4 * 3600.0
LLAMA_SERVER = BENCH / "llamacpp" / "server"  # folder


@dataclass(frozen=True)
class Server:
    """A row of the table: the command, the name of the model, the route of readiness and the time limit."""

    name: str
    environment: str
    words: str
    model: str
    ready: str = "/v1/models"
    precision: str = ""  # of the run in process that it is compared with; none: it is not
    ready_s: float = READY_S


PEERS = (
    Server(
        "Polyhead int8",
        OURS,
        "-m polyhead serve polyhead={generator} --precision int8 --port {port}",
        "polyhead",
        "/readyz",
        "int8",
    ),
    Server(
        "Polyhead float32",
        OURS,
        "-m polyhead serve polyhead={generator} --precision float32 --port {port}",
        "polyhead",
        "/readyz",
        "float32",
    ),
    Server(
        "vLLM's own server, bfloat16",
        "vllm",
        "-m vllm.entrypoints.openai.api_server --model {models}/smollm2 --served-model-name vllm --dtype bfloat16 "
        "--host 127.0.0.1 --port {port}",
        "vllm",
        ready_s=300.0,  # it compiles
    ),
    Server(
        "llama.cpp's own server, Q8_0",
        "llamacpp",
        "{bench}/llamacpp/server/llama-server --model {models}/smollm2-Q8_0.gguf --alias llama.cpp "
        "--parallel {streams} --ctx-size {room} --threads {threads} --host 127.0.0.1 --port {port}",
        "llama.cpp",
        "/health",
    ),
    Server(  # one request at a time, with any setting; threads its own default, half of the cores: faster than all
        "llama-cpp-python's server, Q8_0 (one at a time)",
        "llamacpp",
        "-m llama_cpp.server --model {models}/smollm2-Q8_0.gguf --model_alias llama --n_ctx 512 "
        "--interrupt_requests false --host 127.0.0.1 --port {port}",
        "llama",
    ),
    Server(
        "OpenVINO GenAI Q8_0 behind a thin HTTP of ours",
        "openvino",
        "-m benchmarks.peer_runs.openvino_server {models}/smollm2-Q8_0.gguf {port} --threads {threads}",
        "openvino",
    ),
)


@contextlib.contextmanager
def started(server: Server, threads: int) -> Iterator[str]:
    """Its address, once it is ready.  Raises SystemExit if it does not become so."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    room = STREAMS * (PROMPT + NEW + MARGIN)
    words = command(server.words, server.environment, port=port, threads=threads, streams=STREAMS, room=room)
    given = {**os.environ, **running(server.environment, threads)}
    errors = tempfile.TemporaryFile("a+")  # noqa: SIM115  # no pipe: it would be full one day, and the server wait
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors, env=given)
    url, end = f"http://127.0.0.1:{port}", time.monotonic() + server.ready_s
    try:
        while not ready(url + server.ready):
            if process.poll() is not None or time.monotonic() > end:
                errors.seek(0)
                said = errors.read().strip().splitlines() or ["nothing"]
                raise SystemExit(f"{server.name} did not become ready; its last line: {said[-1][:160]}")
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(15)
        process.kill()
        errors.close()


def ready(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def asked(server: Server, threads: int) -> tuple[dict[str, object], str]:
    """The figures of one run, or none and the reason."""
    client = [sys.executable, "-m", "benchmarks.peer_runs.http_client"]
    try:
        with started(server, threads) as url:
            printed, reason = called([*client, url, server.model, "--streams", str(STREAMS)], {}, LIMIT_S)
    except (SystemExit, OSError) as error:
        return {}, str(error)
    return ({}, reason) if reason else (json.loads(printed.strip().splitlines()[-1]), "")


def alone(server: Server, threads: int) -> float:
    """Tokens a second of the same in process, from arrival to the last token."""
    figures, reason = measured(InProcess(server.name, OURS, ALONE, "{generator}", server.precision), threads, ())
    return float(str(figures[f"whole {STREAMS}"])) if not reason else float("nan")


def install() -> None:
    for environment, packages in SERVERS.items():
        words = [python(environment), "-m", "pip", "install", "-q", *packages]
        print(f"{environment}: {called(words, {})[1] or 'installed'}", flush=True)
    build_llama_server()


def build_llama_server() -> None:
    """Compile llama.cpp's own server, unless it is there. It needs no environment but its folder."""
    if not LLAMA_SERVER.exists():
        LLAMA_SERVER.parent.mkdir(parents=True, exist_ok=True)
        its = python("llamacpp")
        words = [its if Path(its).exists() else sys.executable, "-m", f"{RUNS}.build_llama_server", str(LLAMA_SERVER)]
        print(f"llama.cpp's own server: {called(words, {}, BUILD_LIMIT_S)[1] or 'built'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--only", nargs="*", default=[""], help="parts of names, in any case")
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--share", action="store_true", help="run Polyhead in process too")
    options = parser.parse_args()
    if options.install:
        install()
    chosen = [server for server in PEERS if any(part.lower() in server.name.lower() for part in options.only)]
    figures: dict[Server, list[dict[str, object]]] = {server: [] for server in chosen}
    reasons: dict[Server, str] = {}
    for number in range(options.rounds):
        for server in (server for server in chosen if server not in reasons):
            once, reason = asked(server, options.threads)
            if reason:
                reasons[server] = reason
                continue
            if options.share and server.precision:
                once["alone"] = alone(server, options.threads)
            figures[server].append(once)
            print(f"round {number + 1}, {server.name}: {json.dumps(once)}", file=sys.stderr, flush=True)
    rows = {s.name: reasons.get(s) or shared(figures[s]) for s in chosen if reasons.get(s) or figures[s]}
    print(f"{machine()}, {options.threads} threads, medians of {options.rounds} rounds\n")
    print(table(f"{STREAMS} streams over HTTP", COLUMNS, rows))


def shared(rounds: list[dict[str, object]]) -> dict[str, object]:
    """Medians, and over HTTP as a share of in process, round by round."""
    found = middle(rounds)
    ratios = [float(str(once["tokens/s"])) / float(str(once["alone"])) for once in rounds if "alone" in once]
    return found | ({"share": statistics.median(ratios)} if ratios else {})


if __name__ == "__main__":
    main()

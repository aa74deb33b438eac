"""Measure many small models in one server: the same requests to one of them, and spread over all.

    python -m benchmarks.many_models [--models 20] [--clients 32] [--seconds 5] [--rounds 5]

Copies of the quick start's MiniLM are served under different names, each with weights of its own. Every client sends
one short sentence after the other to /v1/embeddings over a kept connection. Rounds alternate between both cases; the
client runs on the same cores.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from benchmarks.prose import sentences
from benchmarks.serving import Running, machine, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

SHORT = 80  # characters of the longest sentence
WARM_S = 1.0


@dataclass
class Answers:
    """Seconds of each request that was answered."""

    took: list[float] = field(default_factory=list)

    def rate(self, seconds: float) -> float:
        return len(self.took) / seconds

    def percentile(self, share: float) -> float:
        """Milliseconds."""
        return sorted(self.took)[int(len(self.took) * share)] * 1000


async def ask(port: int, requests: Sequence[bytes], until: float, answers: Answers) -> None:
    """One request after the other over one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    number = 0
    while time.perf_counter() < until:
        began = time.perf_counter()
        writer.write(requests[number % len(requests)])
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            raise SystemExit(f"the server answered {head.splitlines()[0]!r}")
        length = next(int(line[15:]) for line in head.lower().splitlines() if line.startswith(b"content-length:"))
        await reader.readexactly(length)
        answers.took.append(time.perf_counter() - began)
        number += 1
    writer.close()


def requests_of(names: Sequence[str], texts: Sequence[str], seed: int) -> list[bytes]:
    """Requests for one client, to random models."""
    choice = Random(seed)
    requests = []
    for text in choice.sample(texts, len(texts)):
        body = json.dumps({"model": choice.choice(names), "input": text, "encoding_format": "base64"}).encode()
        fields = ("Host: 127.0.0.1", "Content-Type: application/json", f"Content-Length: {len(body)}")
        head = "\r\n".join(("POST /v1/embeddings HTTP/1.1", *fields, "", ""))
        requests.append(head.encode() + body)
    return requests


async def load(server: Running, names: Sequence[str], texts: Sequence[str], clients: int, seconds: float) -> Answers:
    answers = Answers()
    port = int(server.url.rsplit(":", 1)[1])
    until = time.perf_counter() + seconds
    await asyncio.gather(*(ask(port, requests_of(names, texts, seed), until, answers) for seed in range(clients)))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = settings.default_model_dir()
    source = quickstart.sources(folder)["minilm"]
    texts = [text for text in sentences(folder / "prose", 4000) if len(text) < SHORT][:500]
    names = [f"minilm{number}" for number in range(options.models)]
    print(machine())
    with serve(*(f"{name}={source}" for name in names), "--log-level", "warning") as server:
        cases = {"one model": names[:1], f"{options.models} models": names}
        rounds: dict[str, list[Answers]] = {case: [] for case in cases}
        for case in cases:
            asyncio.run(load(server, cases[case], texts, options.clients, WARM_S))
        for _ in range(options.rounds):
            for case, among in cases.items():
                rounds[case].append(asyncio.run(load(server, among, texts, options.clients, options.seconds)))
        for case, answers in rounds.items():
            rates = [each.rate(options.seconds) for each in answers]
            p50, p99 = (statistics.median(each.percentile(share) for each in answers) for share in (0.5, 0.99))
            print(
                f"{case:12s} {statistics.median(rates):7.0f} requests/s ({min(rates):.0f} to {max(rates):.0f}), "
                f"p50 {p50:.1f} ms, p99 {p99:.1f} ms"
            )
        print(f"{server.resident_mb():.0f} MB resident")


if __name__ == "__main__":
    main()

"""Compare the speed of two checkouts of this project on the quick-start models.

    python -m benchmarks.checkouts FOLDER [--rounds 7] [a flag of `polyhead serve` ...]

FOLDER is another checkout with its compiled step built. Both servers are ready and idle. Each measurement is made of
one server and then of the other, in an order that changes with each round. Printed are medians, ranges, and the ratio.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from benchmarks.serving import Running, machine, serve

WIDTHS = (1, 8, 32)
TOKENS = 96  # of each answer
CALLS = 150  # requests whose median duration is measured
WORDS = "a quick brown fox jumps over the lazy dog near the river bank while it rains".split()  # noqa: SIM905
Measure = Callable[[httpx.Client], float]


def decode(width: int) -> Measure:
    """Tokens a second of so many streams at once."""

    def measure(client: httpx.Client) -> float:
        def one(number: int) -> int:
            prompt = f"{number} {' '.join(WORDS)}"
            body = {"model": "smollm2", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            return int(answer.raise_for_status().json()["usage"]["completion_tokens"])

        with ThreadPoolExecutor(width) as pool:
            began = time.perf_counter()
            tokens = sum(pool.map(one, range(width)))
        return tokens / (time.perf_counter() - began)

    return measure


def embed_batch(client: httpx.Client) -> float:
    """Texts a second, 8 calls of 32 texts."""
    texts = [" ".join(WORDS[: 4 + number % 12]) for number in range(32)]

    def one(_: int) -> None:
        client.post("/v1/embeddings", json={"model": "minilm", "input": texts}).raise_for_status()

    with ThreadPoolExecutor(4) as pool:
        began = time.perf_counter()
        list(pool.map(one, range(8)))
    return 8 * 32 / (time.perf_counter() - began)


def median_call(client: httpx.Client) -> float:
    """Milliseconds of one classification over HTTP, one after the other."""
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        client.post("/predict", json={"inputs": "I liked it very much"}).raise_for_status()
        seconds.append(time.perf_counter() - began)
    return 1000 * statistics.median(seconds)


MEASURES: dict[str, Measure] = {
    **{f"decode {width}, tokens/s": decode(width) for width in WIDTHS},
    "MiniLM, texts/s": embed_batch,
    "HTTP p50, ms": median_call,
}


@contextmanager
def start(checkout: Path, flags: Sequence[str]) -> Iterator[Running]:
    """Serve the quick-start models with the code of a checkout."""
    package = "polyhead" if (checkout / "polyhead" / "__main__.py").exists() else "service"
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(checkout)
    try:
        with serve(*flags, program=("-P", "-m", package)) as running:
            yield running
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    arguments, flags = parser.parse_known_args()
    checkouts = {"before": arguments.checkout, "now": Path(__file__).parents[1]}
    found: dict[tuple[str, str], list[float]] = {(name, who): [] for name in MEASURES for who in checkouts}
    with ExitStack() as stack:
        clients = {}
        for who, folder in checkouts.items():
            url = stack.enter_context(start(folder, flags)).url
            clients[who] = stack.enter_context(httpx.Client(base_url=url, timeout=300))
        for number in range(arguments.rounds + 1):
            for name, measure in MEASURES.items():
                for who in sorted(clients, reverse=bool(number % 2)):
                    value = measure(clients[who])
                    if number:  # the first round warms up
                        found[name, who].append(value)
    print(f"{machine()}; {arguments.rounds} rounds, medians (ranges)")
    for name in MEASURES:
        before, now = found[name, "before"], found[name, "now"]
        columns = [f"{statistics.median(each):.4g} ({min(each):.4g} to {max(each):.4g})" for each in (before, now)]
        print(f"| {name} | {' | '.join(columns)} | {statistics.median(now) / statistics.median(before):.3f} |")


if __name__ == "__main__":
    main()

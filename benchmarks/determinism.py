"""Measure the cost of answers that do not depend on the batch, to the bit: the deterministic mode beside the fast mode.

    python -m benchmarks.determinism [--rounds 7] [--precision float32] [--threads 0]

SmolLM2-135M and MiniLM run on the reference executor in this process, each loaded twice. Rounds alternate between the
modes; the figures are medians. Decoding is a step of several sequences with about CONTEXT tokens each. A prompt is
computed in chunks of CHUNK tokens. Texts are real sentences, in steps of BATCH texts, whose pooled vectors are read.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import torch

from benchmarks.prose import sentences
from benchmarks.serving import machine
from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.network.heads import LanguageHead
from polyhead.service.config import settings
from polyhead.service.resources import machine as capacity
from polyhead.service.runtime import quickstart

WIDTHS = (1, 8, 16, 32)  # sequences
CONTEXT, PROMPT, CHUNK, BLOCK = 128, 512, 256, 16  # tokens
STEPS = 4  # a round
TEXTS, BATCH = 256, 32
Work = Callable[[], float]  # does some work, and returns tokens or texts per second


def decoding(loaded: Checkpoint, width: int) -> Work:
    """Steps of `width` sequences, one token each, over a filled cache."""
    count = -(-(CONTEXT + STEPS) // BLOCK)
    assert isinstance(loaded.head, LanguageHead)
    executor = TorchExecutor(loaded.network, loaded.head, block_count=width * count, block_size=BLOCK)
    tables = [list(range(n * count, (n + 1) * count)) for n in range(width)]
    for table in tables:
        executor.step(StepInput(list(range(CONTEXT)), list(range(CONTEXT)), [0, CONTEXT], [table], []))

    def work() -> float:
        began = perf_counter()
        for step in range(STEPS):
            rows = list(range(width))
            used = [table[: (CONTEXT + step) // BLOCK + 1] for table in tables]
            executor.step(StepInput(rows, [CONTEXT + step] * width, list(range(width + 1)), used, rows))
        return width * STEPS / (perf_counter() - began)

    return work


def prefilling(loaded: Checkpoint) -> Work:
    """One prompt, in chunks, of which the last wants logits."""
    assert isinstance(loaded.head, LanguageHead)
    executor = TorchExecutor(loaded.network, loaded.head, block_count=PROMPT // BLOCK, block_size=BLOCK)

    def work() -> float:
        began = perf_counter()
        for start in range(0, PROMPT, CHUNK):
            end = start + CHUNK
            span = list(range(start, end))
            executor.step(
                StepInput(span, span, [0, CHUNK], [list(range(end // BLOCK))], [CHUNK - 1] if end == PROMPT else [])
            )
        return PROMPT / (perf_counter() - began)

    return work


def reading(loaded: Checkpoint, texts: list[str]) -> Work:
    """Texts in batches, the shortest first in each, as the worker lays them out."""
    executor = TorchExecutor(loaded.network)
    tokens = [each.ids for each in loaded.tokenizer.encode_batch(texts)]
    batches = [sorted(tokens[start : start + BATCH], key=len) for start in range(0, len(tokens), BATCH)]

    @torch.inference_mode()
    def work() -> float:
        began = perf_counter()
        for batch in batches:
            starts = [0]
            for text in batch:
                starts.append(starts[-1] + len(text))
            wanted, heads = loaded.head.wanted(starts)  # type: ignore[operator]
            flat = [token for text in batch for token in text]
            positions = [position for text in batch for position in range(len(text))]
            states = executor.step(StepInput(flat, positions, starts, [[]] * len(batch), wanted))
            loaded.head.close(loaded.head(states, heads))  # type: ignore[operator]
        return len(texts) / (perf_counter() - began)

    return work


def pair(source: str, dtype: torch.dtype) -> tuple[Checkpoint, Checkpoint]:
    """The same checkpoint in the fast and in the deterministic mode; prints the time of the self-test."""
    fast, exact = (checkpoint.load(source, dtype=dtype) for _ in range(2))
    began = perf_counter()
    make_invariant(exact.network, exact.head)
    print(f"{Path(source).name}: laid out and proven in {perf_counter() - began:.2f} s")
    return fast, exact


def compared(name: str, unit: str, works: tuple[Work, Work], rounds: int) -> None:
    for work in works:
        work()
    fast, exact = zip(*((works[0](), works[1]()) for _ in range(rounds)), strict=True)
    ratio = statistics.median(a / b for a, b in zip(fast, exact, strict=True))
    medians = [f"{statistics.median(speeds):8.1f} ({min(speeds):.1f} to {max(speeds):.1f})" for speeds in (fast, exact)]
    print(f"{name:24} fast {medians[0]}  deterministic {medians[1]} {unit}  cost {ratio:.2f} x", flush=True)


def cases(folder: Path, dtype: torch.dtype) -> Iterator[tuple[str, str, tuple[Work, Work]]]:
    sources = quickstart.sources(folder)
    fast, exact = pair(sources["smollm2"], dtype)
    for width in WIDTHS:
        yield f"decode, {width} sequences", "tokens/s", (decoding(fast, width), decoding(exact, width))
    yield f"prefill, {PROMPT} tokens", "tokens/s", (prefilling(fast), prefilling(exact))
    texts = sentences(folder / "prose", TEXTS)
    fast, exact = pair(sources["sentiment"].split("+")[0], dtype)
    yield f"encode, batches of {BATCH}", "texts/s", (reading(fast, texts), reading(exact, texts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(options.threads or capacity.compute_threads())
    print(f"{machine()}, {torch.get_num_threads()} threads, {options.precision}")
    for name, unit, works in cases(settings.default_model_dir(), getattr(torch, options.precision)):
        compared(name, unit, works, options.rounds)


if __name__ == "__main__":
    settings.set_library_defaults()
    main()

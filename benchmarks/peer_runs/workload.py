"""The work of every peer and its measurements: the same prompts and texts, the same clock.

Independent of peers: a run passes `generate` or `encode` and gets a dict of figures, printed as one line of JSON. Needs
only the standard library, because it runs inside every peer's own environment.
"""

import argparse
import gc
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter
from typing import TypeVar

WIDTHS = (1, 8, 16, 32)  # prompts that arrive together
PROMPT, NEW, LONG_PROMPT = 64, 128, 512  # tokens
LONG_CONTEXT, LONG_WIDTH, LONG_NEW = 1000, 16, 128
VOCABULARY = (1000, 20_000)  # token ids, words of either model
REPEATS = 3  # of what is asked of a generator: the first finds a processor that is not used to it
FIXED = (504, 3575, 282, 4649, 314)  # a prompt in the generator's own tokens: whether peers continue it alike
LENGTHS, BATCH = (32, 128), 32
SHORTEST, LONGEST, MIXED_BATCHES = 8, 256, 6
SPLITS = (32, 8, 4, 1)  # texts padded together, of a batch of mixed lengths sorted by length
CALLS, SECONDS = 200, 2.0  # of one figure of a single text, at most
Generate = Callable[[list[list[int]], int], "list[Answer]"]
Encode = Callable[[list[list[int]]], object]
T = TypeVar("T")


@dataclass
class Answer:
    """The tokens of one sequence, and when each came, in seconds since the prompts arrived."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """How much a peer is asked for. Of a generator: prompts at once, and tokens of each answer. `has_long`: long
    prompts or texts follow."""

    widths: tuple[int, ...]
    new: int
    has_long: bool

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return LONG_CONTEXT + LONG_NEW if self.has_long else PROMPT + self.new

    @property
    def together(self) -> int:
        """How many sequences are so long at once."""
        return LONG_WIDTH if self.has_long else max(self.widths)


WORK = {"full": Work(WIDTHS, NEW, has_long=True), "brief": Work((1, 8), 32, has_long=False)}


@dataclass(frozen=True)
class Run:
    """The inputs of a run: the model's file or folder, the threads it may use, the format, where it may be chosen, the
    folder of a tokenizer, where the model is a file, and how much is asked for."""

    model: Path
    threads: int
    precision: str
    tokenizer: Path
    work: Work


def asked() -> Run:
    """The command line of a run.  Keeps this process on as many cores as it has threads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="")
    parser.add_argument("--tokenizer", type=Path, default=Path())
    parser.add_argument("--work", default="full", choices=WORK)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: options.threads]
    os.sched_setaffinity(0, cores)
    return Run(options.model, options.threads, options.precision, options.tokenizer, WORK[options.work])


def print_figures(figures: dict[str, object]) -> None:
    """Print the figures as JSON, the last line of a run."""
    print(json.dumps(figures), flush=True)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Distinct random prompts, so that a prefix cache has none of them."""
    choice = Random(f"{count} {length} {seed}")
    return [[choice.randint(*VOCABULARY) for _ in range(length)] for _ in range(count)]


def generation(generate: Generate, work: Work) -> dict[str, object]:
    """Tokens a second together, times to first tokens; then prefill and long contexts, if the work has them."""
    figures: dict[str, object] = {"continuation": generate([list(FIXED)], 16)[0].tokens}
    generate(prompts(8, PROMPT, 0), 8)
    for width in work.widths:
        talks = [generate(prompts(width, PROMPT, 1 + n), work.new) for n in range(REPEATS)]
        figures[f"decode {width}"] = statistics.median(map(decoding, talks))
        figures[f"whole {width}"] = statistics.median(width * work.new / ended(answers) for answers in talks)
        repeats = [first_tokens(generate(prompts(width, PROMPT, 10 + n), 1)) for n in range(REPEATS)]
        figures[f"first p50 {width}"] = statistics.median(statistics.median(times) for times in repeats) * 1000
        figures[f"first last {width}"] = statistics.median(map(max, repeats)) * 1000
    if not work.has_long:
        return figures
    firsts = [first_tokens(generate(prompts(1, LONG_PROMPT, n), 1))[0] for n in range(5)]
    figures[f"prefill {LONG_PROMPT}"] = LONG_PROMPT / statistics.median(firsts)
    answers = generate(prompts(LONG_WIDTH, LONG_CONTEXT, 0), LONG_NEW)
    figures[f"context {LONG_CONTEXT}"] = decoding(answers)
    figures[f"context {LONG_CONTEXT} prefill"] = LONG_WIDTH * LONG_CONTEXT / max(first_tokens(answers))
    return figures


def ended(answers: Sequence[Answer]) -> float:
    return max(answer.times[-1] for answer in answers)


def first_tokens(answers: Sequence[Answer]) -> list[float]:
    return [answer.times[0] for answer in answers]


def decoding(answers: Sequence[Answer]) -> float:
    """Tokens a second while all of them talk: from the last one's first token until the first one ends."""
    begin, end = max(first_tokens(answers)), min(answer.times[-1] for answer in answers)
    if end <= begin:
        return float("nan")  # they never talked all at once
    return sum(begin < time <= end for answer in answers for time in answer.times) / (end - begin)


def encoding(encode: Encode) -> dict[str, object]:
    """Milliseconds of a single text, texts a second in batches: of one length, and of mixed lengths."""
    figures: dict[str, object] = {}
    for length in LENGTHS:
        texts = prompts(CALLS, length, 0)
        figures[f"alone {length}"] = statistics.median(times(encode, [[text] for text in texts])) * 1000
    for length in LENGTHS:
        batches = [prompts(BATCH, length, n) for n in range(12)]
        figures[f"batches {length}"] = BATCH / statistics.median(times(encode, batches))
    choice = Random(0)
    lengths = [[choice.randint(SHORTEST, LONGEST) for _ in range(BATCH)] for _ in range(MIXED_BATCHES)]
    mixed = [[prompts(1, n, b)[0] for n in row] for b, row in enumerate(lengths)]
    rates = {split: mixed_rate(parted(encode, split), mixed) for split in SPLITS}
    best = max(rates, key=rates.__getitem__)
    return {**figures, "batches mixed": rates[best], "padded together": best}


def mixed_rate(encode: Encode, batches: list[list[list[int]]]) -> float:
    """Texts a second, all shapes met once before."""
    for batch in batches:
        encode(batch)
    return BATCH / statistics.mean(times(encode, batches))


def times(encode: Callable[[T], object], batches: Sequence[T], seconds: float = SECONDS) -> list[float]:
    """Seconds of each batch after one to warm up, as many as fit in `seconds` but three at least."""
    encode(batches[0])
    gc.collect()
    taken: list[float] = []
    began = perf_counter()
    for batch in batches:
        if len(taken) >= 3 and perf_counter() - began > seconds:
            break
        before = perf_counter()
        encode(batch)
        taken.append(perf_counter() - before)
    return taken


def parted(encode: Encode, size: int) -> Encode:
    """A batch in parts of `size` texts of like length."""

    def run(batch: list[list[int]]) -> None:
        ordered = sorted(batch, key=len)
        for start in range(0, len(ordered), size):
            encode(ordered[start : start + size])

    return run

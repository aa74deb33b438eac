"""Compare the time of sampling tokens with the time of computing their logits: 32 sequences of SmolLM2-135M.

    python -m benchmarks.sampling [--precision auto] [--rounds 40]

A step of the server's own executor computes the logits for the next token of each of 32 sequences of prose. Right after
it the same thread samples with one of several sets of parameters, as the server does. The sets take turns.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import get_args

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.prose import documents
from benchmarks.serving import machine
from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.checkpoint.default_precision import choose_precision
from polyhead.models.checkpoint.weight_reader import WeightReader
from polyhead.models.executors.contract import Executor, StepInput
from polyhead.models.native.packed_network import PackHooks, free_weights
from polyhead.service.config import settings
from polyhead.service.config.settings import Settings
from polyhead.service.core.request import Generate, Sampling
from polyhead.service.engine.logits_processors import LogitsProcessor, needs_processing
from polyhead.service.engine.sampler import Sampler, SampleRow
from polyhead.service.runtime import quickstart
from polyhead.service.runtime.executor_choice import CacheSize, build_executor, build_sampler, make_deterministic
from polyhead.service.runtime.placement import Precision, choose_placement

SEQUENCES, CONTEXT, ANSWERED = 32, 128, 32
STOP = 2


@dataclass(frozen=True)
class Way:
    """How tokens are drawn; `masks`: how many words a grammar lets come, row by row."""

    name: str
    sampling: Sampling
    masks: Sequence[int] = ()
    logprobs: int = -1


def ways(words: int) -> list[Way]:
    choice = Random(0)
    penalties = Sampling(
        temperature=0.8,
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        bias=tuple((token, choice.uniform(-5, 5)) for token in choice.sample(range(words), 100)),
        banned=tuple(tuple(choice.choices(range(words), k=choice.randint(1, 3))) for _ in range(100)),
        min_tokens=100,
    )
    json = [choice.choice((2, 10, 40_000)) for _ in range(SEQUENCES)]
    return [
        Way("greedy, penalty of presence", Sampling(temperature=0, presence_penalty=0.5)),
        Way("temperature 1", Sampling()),
        Way("temperature 0.8", Sampling(temperature=0.8)),
        Way("top_p 0.9, temperature 0.8", Sampling(temperature=0.8, top_p=0.9)),
        Way("top_p 0.9, temperature 1", Sampling(top_p=0.9)),
        Way("top_k 50, top_p 0.9, temperature 0.8", Sampling(temperature=0.8, top_k=50, top_p=0.9)),
        Way("min_p 0.05, temperature 1", Sampling(min_p=0.05)),
        Way("typical_p 0.9, temperature 1", Sampling(typical_p=0.9)),
        Way("penalties, bias, bad words, min_tokens, temperature 0.8", penalties),
        Way("grammar, temperature 1", Sampling(), json),
        Way("4,096 biased, temperature 1", Sampling(bias=tuple((token, -1.0) for token in range(4096)))),
        Way("temperature 1, logprobs", Sampling(), logprobs=0),
        Way("temperature 1, 5 top_logprobs", Sampling(), logprobs=5),
        Way("half of all words allowed, temperature 1", Sampling(allowed=tuple(range(0, words, 2)))),
    ]


def opened(chosen: Settings) -> tuple[Checkpoint, Executor, Sampler]:
    """As the loader does it."""
    source = next(iter(chosen.models.values()))
    what = checkpoint.describe_source(source)
    place = choose_placement(chosen, choose_precision(what.entries.values()), what.config)
    torch.set_num_threads(place.torch_threads)
    loaded = checkpoint.prepare(
        source, WeightReader(what), dtype=place.dtype, device=place.device, progress=checkpoint.ignore_progress
    )

    @contextmanager
    def held(part: nn.Module) -> Iterator[None]:
        loaded.load_weights(part)
        yield
        free_weights(part)

    make_deterministic(loaded, chosen, place)
    blocks = SEQUENCES * -(-(CONTEXT + 1) // place.block_size)
    return loaded, build_executor(loaded, chosen, place, CacheSize(blocks), PackHooks(held)), build_sampler(place)


def caught_up(run: Executor, tokens: list[int]) -> StepInput:
    """The step in which each sequence gets its next token, all before it being in the cache."""
    each = -(-(CONTEXT + 1) // run.block_size)
    tables = [list(range(start, start + each)) for start in range(0, SEQUENCES * each, each)]
    last = []
    for number, table in enumerate(tables):
        start = number * (CONTEXT + 1)
        run.step(StepInput(tokens[start : start + CONTEXT], list(range(CONTEXT)), [0, CONTEXT], [table], [CONTEXT - 1]))
        last.append(tokens[start + CONTEXT])
    return StepInput(last, [CONTEXT] * SEQUENCES, list(range(SEQUENCES + 1)), tables, list(range(SEQUENCES)))


def drawing(way: Way, tokens: list[int], words: int, sampler: Sampler) -> Callable[[Tensor], object]:
    """What the engine does between a step's logits and its tokens."""
    choice = Random(1)
    request = Generate("", tuple(tokens[:CONTEXT]), 10**6, frozenset([STOP]), way.sampling, logprobs=way.logprobs)
    shapes = [LogitsProcessor(request) for _ in range(SEQUENCES)]
    for one in shapes:
        for token in tokens[CONTEXT : CONTEXT + ANSWERED]:
            one.push(token)
    bits = np.zeros((SEQUENCES, -(-words // 32) * 32), np.bool_)
    for row, count in zip(bits, way.masks, strict=False):
        row[choice.sample(range(words), count)] = True
    masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)

    def draw(logits: Tensor) -> object:
        asks = []
        for row, one in enumerate(shapes):
            shape, guide = (
                one.after_drafts(()) if needs_processing(way.sampling) else None,
                masks[row] if way.masks else None,
            )
            asks.append(SampleRow(row, way.sampling, choice.random(), shape, guide, way.logprobs))
        return sampler.sample(logits, asks)

    return draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--precision", default="auto", choices=["auto", *get_args(Precision)])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    folder = settings.default_model_dir()
    source = quickstart.sources(folder)["smollm2"]
    loaded, run, sampler = opened(Settings(models={"smollm2": source}, precision=options.precision))
    text = " ".join(documents(folder / "prose"))[: 8 * SEQUENCES * CONTEXT]
    tokens, words = list(loaded.tokenizer.encode(text).ids), loaded.config.vocab_size
    draws = {way.name: drawing(way, tokens, words, sampler) for way in ways(words)}
    draws = {"greedy": lambda _: run.argmax, **draws}  # found within the step
    times: dict[str, list[float]] = defaultdict(list)
    with torch.inference_mode():
        step = caught_up(run, tokens)
        for _ in range(options.rounds):
            for name, draw in draws.items():
                began = time.perf_counter()
                logits = run.step(step)
                computed = time.perf_counter()
                draw(logits)
                times[name].append(time.perf_counter() - computed)
                times[""].append(computed - began)
    report(times)


def report(times: dict[str, list[float]]) -> None:
    print(machine())
    medians = {name: statistics.median(taken) * 1000 for name, taken in times.items()}
    step = medians.pop("")
    print(f"a step of {SEQUENCES} sequences after {CONTEXT} tokens: {step:.2f} ms; drawing, of that:")
    for name, taken in medians.items():
        print(f"{name:60s} {taken:6.2f} ms {taken / step:6.1%}")


if __name__ == "__main__":
    main()

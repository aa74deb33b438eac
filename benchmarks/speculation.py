"""Measure the gain from draft tokens: the quick-start generator with and without them, on two kinds of prompts.

    python -m benchmarks.speculation [--rounds 5] [--precision int8] [--batches 1 4 16] [--tokens 128]

Prompts are those whose answers copy from them (a text corrected, changed in one place or quoted, code edited) and open
questions. Decoding is greedy, and at temperature 0.8 with seeds, with several prompts at a time. One engine in this
process has both workers with the same file. They take turns, prompt by prompt, and each begins in turn, after a round
that is not counted. After that round prompts are cached, so only decoding is measured. Answers must have the same
tokens with and without draft tokens.
"""

import argparse
import asyncio
import statistics
import time
from collections import Counter
from collections.abc import Sequence

from benchmarks.copying import COPYING, OPEN
from benchmarks.serving import machine
from polyhead.service.config import settings
from polyhead.service.config.settings import Settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import Generate, GeneratedToken, Sampling, Task
from polyhead.service.engine.engine import Engine
from polyhead.service.engine.worker import RequestEnd, StepReport
from polyhead.service.metrics import Metrics
from polyhead.service.runtime import quickstart
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry

WAYS = {"greedy": Sampling(temperature=0), "temperature 0.8": Sampling(temperature=0.8, seed=7)}
KINDS = {"copying": COPYING, "open": OPEN}
Said = list[list[int]]


class Counting:
    """Counts draft tokens."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def record_step(self, report: StepReport) -> None:
        self.counts.update(steps=1, drafted=report.drafted, accepted=report.accepted)

    def record_end(self, ended: RequestEnd) -> None:
        pass

    def record_idle(self, model: str, task: Task) -> None:
        pass


class Bench:
    """The same model twice, without and with drafts."""

    def __init__(self, source: str, options: argparse.Namespace) -> None:
        self.counting, self._tokens = Counting(), options.tokens
        self.models: dict[str, Model] = {}
        common = {"precision": options.precision}
        plain = Settings(models={"plain": source}, draft_tokens=0, **common)
        drafts = {"drafted": options.draft or source} if options.draft else {}
        drafted = Settings(models={"drafted": source}, draft_tokens=options.most, drafts=drafts, **common)
        self.engine = Engine(self.counting, threads=choose_placement(plain).torch_threads)
        metrics = Metrics([])
        self.registries = {
            "plain": ModelRegistry(self.engine, plain, metrics),
            "drafted": ModelRegistry(self.engine, drafted, metrics),
        }

    async def __aenter__(self) -> "Bench":
        self.engine.start()
        for name, registry in self.registries.items():
            await registry.load_all()
            [self.models[name]] = registry.models()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close(0)

    def prompt(self, text: str) -> tuple[int, ...]:
        model = self.models["plain"]
        assert model.chat is not None
        rendered = model.chat.render([{"role": "user", "content": text}])
        return tuple(model.tokenizer.encode(rendered, special=False).ids)

    async def ask(self, name: str, prompts: Sequence[tuple[int, ...]], sampling: Sampling) -> tuple[float, Said]:
        """Seconds until all have ended, and what was said."""
        model = self.models[name]
        requests = [
            Generate(str(number), prompt, self._tokens, model.stop_tokens, sampling)
            for number, prompt in enumerate(prompts)
        ]
        began = time.perf_counter()
        streams = self.registries[name].submit(model, requests)
        said = [[event.id async for event in stream if isinstance(event, GeneratedToken)] for stream in streams]
        return time.perf_counter() - began, said


async def measure(bench: Bench, batch: int, texts: Sequence[str], sampling: Sampling, rounds: int) -> str:
    """One line: how much faster, over all prompts in groups of `batch`, and how good the drafts were."""
    prompts = [bench.prompt(text) for text in texts]
    while len(prompts) % batch:
        prompts.append(prompts[len(prompts) % len(texts)])
    groups = [prompts[start : start + batch] for start in range(0, len(prompts), batch)]
    seconds: dict[str, list[list[float]]] = {name: [[] for _ in groups] for name in bench.models}
    count = 0
    for turn in range(rounds + 1):
        if turn == 1:
            bench.counting.counts.clear()
        for number, group in enumerate(groups):
            answers = {}
            for name in list(bench.models)[:: 1 if (turn + number) % 2 else -1]:
                taken, answers[name] = await bench.ask(name, group, sampling)
                if turn:
                    seconds[name][number].append(taken)
            if answers["plain"] != answers["drafted"]:
                raise SystemExit(f"the answers of group {number} differ")
            count += sum(map(len, answers["plain"])) if turn == 1 else 0
    plain, drafted = (sum(statistics.median(each) for each in seconds[name]) for name in ("plain", "drafted"))
    ratios = [
        statistics.median(a) / statistics.median(b)
        for a, b in zip(*(seconds[n] for n in ("plain", "drafted")), strict=True)
    ]
    counts = bench.counting.counts
    speeds = f"{count / plain:6.1f} -> {count / drafted:6.1f} tokens/s"
    came = f"{counts['accepted']} of {counts['drafted']} drafted came"
    return f"{plain / drafted:5.2f} x ({min(ratios):.2f} to {max(ratios):.2f})  {speeds}  {came}"


async def run(options: argparse.Namespace) -> None:
    source = quickstart.sources(settings.default_model_dir())["smollm2"]
    async with Bench(source, options) as bench:
        for batch in options.batches:
            for way in options.ways:
                for kind in options.kinds:
                    line = await measure(bench, batch, KINDS[kind], WAYS[way], options.rounds)
                    print(f"  {batch:2} at a time, {way:15} {kind:7} {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--most", type=int, default=8)
    parser.add_argument("--draft", default="")
    options = parser.parse_args()
    print(machine())
    print(f"{options.precision}, answers of at most {options.tokens} tokens, {options.rounds} rounds")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()

"""Compare fifty classifiers on one base model with one merged: throughput of mixed traffic, memory, load time.

    python -m benchmarks.adapters [--rounds 7] [--texts 1000] [--adapters 50] [--precision float32]

The model is the quick start's sentence encoder with random LoRA adapters of rank 8, each with a head, saved by peft.
Adapters cover queries and values, or all matrices of a layer. Sentences of mixed length go through the engine in this
process: once all to the merged classifier, once each to the next adapter. Rounds alternate. Memory is measured in a
separate process that has answered as many sentences.
"""

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import peft
import torch
import transformers

from benchmarks.prose import sentences
from benchmarks.serving import machine
from polyhead.service.config import settings
from polyhead.service.config.settings import Settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import Encode, HeadOutput
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.resources.process_info import resident_memory
from polyhead.service.runtime import quickstart
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry

RANK, MIB = 8, 1 << 20
ENCODER = r".*encoder\.layer.*\.({})"
TARGETS = {"queries and values": ENCODER.format("query|value"), "all matrices": ENCODER.format("query|key|value|dense")}


def write(base: Path, folder: Path, targets: str, count: int) -> list[Path]:
    """Folders of as many classifiers, no two alike."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(base, num_labels=2)
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=targets, task_type="SEQ_CLS")
    adapter = peft.get_peft_model(model, config)
    folders = [folder / f"{number:02}" for number in range(count)]
    for number, place in enumerate(folders):
        torch.manual_seed(number)
        with torch.no_grad():
            for parameter in adapter.parameters():
                if parameter.requires_grad:
                    parameter.normal_(std=0.02)
        adapter.save_pretrained(place)
    return folders


def merged_model(base: Path, folders: Sequence[Path]) -> dict[str, str]:
    return {"one": f"{base}+{folders[0]}"}


def adapter_models(base: Path, folders: Sequence[Path]) -> dict[str, str]:
    return {"base": str(base)} | {f"base:{folder.name}": str(folder) for folder in folders}


class Bench:
    """A registry whose models are loaded, and the sentences as tokens."""

    def __init__(self, models: Mapping[str, str], precision: str, count: int) -> None:
        self._count = count
        self.settings = Settings(models=models, precision=precision)
        metrics = Metrics(models)
        self.engine = Engine(metrics, threads=choose_placement(self.settings).torch_threads)
        self.registry = ModelRegistry(self.engine, self.settings, observer=metrics)
        self.texts: list[tuple[int, ...]] = []

    async def __aenter__(self) -> "Bench":
        self.engine.start()
        await self.registry.load_all()
        tokenizer = self.registry.models()[0].tokenizer
        lines = sentences(settings.default_model_dir() / "prose", self._count)
        self.texts = [tuple(encoding.ids) for encoding in tokenizer.encode_batch(lines)]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close(0)

    async def ask(self, models: Sequence[Model]) -> tuple[float, list[list[float]]]:
        """Texts a second, each asked of the next of the models, and what was answered."""
        began = time.perf_counter()
        streams = []
        for number, text in enumerate(self.texts):
            model = models[number % len(models)]
            streams += self.registry.submit(model, [Encode(str(number), text, adapter=model.adapter)])
        answers = [await anext(stream) for stream in streams]
        taken = time.perf_counter() - began
        return len(streams) / taken, [answer.values for answer in answers if isinstance(answer, HeadOutput)]

    def named(self, *beginnings: str) -> list[Model]:
        return [model for model in self.registry.models() if model.name.startswith(beginnings)]


async def throughput(base: Path, folders: Sequence[Path], options: argparse.Namespace) -> None:
    async with Bench(
        merged_model(base, folders) | adapter_models(base, folders), options.precision, options.texts
    ) as bench:
        traffic = {"one, merged": bench.named("one"), f"{len(folders)}, mixed": bench.named("base:")}
        traffic |= {"one of them": bench.named("base:00"), "the base model": bench.named("base")[:1]}
        taken: dict[str, list[float]] = {name: [] for name in traffic}
        answers: dict[str, list[list[float]]] = {}
        for number in range(options.rounds + 1):
            for name, models in traffic.items():
                speed, answers[name] = await bench.ask(models)
                if number:
                    taken[name].append(speed)
        one = statistics.median(taken["one, merged"])
        for name, speeds in taken.items():
            median = statistics.median(speeds)
            print(f"  {name:14} {median:7.0f} texts/s ({min(speeds):.0f} to {max(speeds):.0f}), {median / one:.0%}")
        pairs = zip(answers["one, merged"], answers["one of them"], strict=True)
        worst = max(abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))
        print(f"  largest difference of a probability, merged and beside: {worst:.1e}")
        await loading(bench, folders)


async def loading(bench: Bench, folders: Sequence[Path]) -> None:
    """Each adapter unloaded and loaded again."""
    loads, unloads = [], []
    for folder in folders:
        began = time.perf_counter()
        await bench.registry.unload(f"base:{folder.name}", 0).wait_and_raise()
        between = time.perf_counter()
        await bench.registry.load(f"base:{folder.name}", str(folder)).wait_and_raise()
        unloads.append(between - began)
        loads.append(time.perf_counter() - between)
    load, unload = (statistics.median(each) * 1e3 for each in (loads, unloads))
    known = {each.name: each.memory for each in bench.registry.model_statuses()}
    each = known[f"base:{folders[0].name}"] / MIB
    print(f"  loaded in {load:.1f} ms, unloaded in {unload:.1f} ms, {each:.2f} MiB each in the budget")


async def resident(models: Mapping[str, str], precision: str, texts: int) -> None:
    async with Bench(models, precision, texts) as bench:
        served = bench.registry.models()
        for _ in range(3):
            await bench.ask([model for model in served if model.task == "classify"])
        weights = sum(known.memory for known in bench.registry.model_statuses())
        print(resident_memory() / MIB, weights / MIB)


def memory(base: Path, folders: Sequence[Path], options: argparse.Namespace) -> None:
    """Of two processes."""
    found = {}
    for name, models in (("one", merged_model(base, folders)), ("many", adapter_models(base, folders))):
        pairs = [f"{key}={value}" for key, value in models.items()]
        flags = ["--precision", options.precision, "--texts", str(options.texts), "--resident", *pairs]
        command = [sys.executable, "-m", "benchmarks.adapters", *flags]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
        found[name] = [float(value) for value in said[-2:]]
    (one, planned_one), (many, planned_many) = found.values()
    print(f"  resident: one, merged {one:.0f} MiB; {len(folders)} {many:.0f} MiB, {many / one:.2f} times as much")
    print(f"  in the budget: {planned_one:.0f} MiB; {planned_many:.0f} MiB, {planned_many / planned_one:.2f} times")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--adapters", type=int, default=50)
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--resident", nargs="*", metavar="NAME=SOURCE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.resident:
        models = dict(pair.split("=", 1) for pair in options.resident)
        asyncio.run(resident(models, options.precision, options.texts))
        return
    base = settings.default_model_dir() / quickstart.ENCODER.member
    print(machine())
    for name, targets in TARGETS.items():
        with tempfile.TemporaryDirectory() as place:
            folders = write(base, Path(place), targets, options.adapters)
            print(f"rank {RANK} over {name}, {options.precision}")
            asyncio.run(throughput(base, folders, options))
            memory(base, folders, options)


if __name__ == "__main__":
    main()

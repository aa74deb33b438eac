"""The threads of the compiled step under the thread sanitizer, as a child of tests: `python tests/support/racing.py
FOLDER NAME`.

Loads FOLDER/NAME.so, which is compiled with it, and runs steps of networks on three threads. The sanitizer reports a
race with both of its places."""

import random
import sys
from dataclasses import replace
from pathlib import Path

from polyhead.models.network.model_config import ModelConfig
from tests.models.native.test_step import GENERATORS, LLAMA, rows_of
from tests.support.sanitized import Exact, adapters, chunks, draw, exactly, some_kinds


def generate(config: ModelConfig, instructions: str) -> int:
    choice, steps = random.Random(2), 0
    for net, last, precision in some_kinds(config):
        executor = Exact(net, last, precision=precision, block_count=24, threads=3, instructions=instructions)
        numbers = adapters(config, executor)
        for parts in chunks(config, random.Random(steps)):
            rows = rows_of(parts, last_only=steps % 2 == 0)
            executor.step(replace(rows, adapters=[choice.choice(numbers) for _ in parts]))
            steps += 1
    return steps


def main(folder: Path, instructions: str) -> None:
    exactly(folder)
    steps = draw(instructions)
    names = ("gemma", "gpt2", "qwen, experts", "all experts chosen, parallel parts")
    steps += sum(generate(config, instructions) for config in (LLAMA, *map(GENERATORS.__getitem__, names)))
    sys.stdout.write(f"{steps} steps\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""The threads of the compiled step under the thread sanitizer, as a child of tests: `python tests/support/racing.py
FOLDER NAME`.

Loads FOLDER/NAME.so, which is compiled with it, and runs steps of networks on three threads. The sanitizer reports a
race with both of its places."""

import random
import sys
from dataclasses import replace
from pathlib import Path

from polyhead.models.network.model_config import ModelConfig
from tests.models.native.test_recurrent_layers import RECURRENT
from tests.models.native.test_step import GENERATORS, LLAMA, rows_of
from tests.support.sanitized import LENGTHS, Exact, adapters, chunks, draw, exactly, some_kinds
from tests.support.state_slots import StateSlots


def generate(config: ModelConfig, instructions: str) -> int:
    choice, steps = random.Random(2), 0
    for net, last, precision in some_kinds(config):
        slots = StateSlots(4 * len(LENGTHS), choice) if config.is_recurrent else None
        options = {"precision": precision, "block_count": 24, "state_count": slots.count if slots else 0}
        executor = Exact(net, last, **options, threads=3, instructions=instructions)
        numbers = adapters(config, executor)
        for parts in chunks(config, random.Random(steps)):
            rows = rows_of(parts, last_only=steps % 2 == 0, states=slots.uses(parts) if slots else None)
            executor.step(replace(rows, adapters=[choice.choice(numbers) for _ in parts]))
            steps += 1
    return steps


def main(folder: Path, instructions: str) -> None:
    exactly(folder)
    steps = draw(instructions)
    names = ("gemma", "gpt2", "qwen, experts", "all experts chosen, parallel parts")
    configs = (LLAMA, *map(GENERATORS.__getitem__, names), RECURRENT["every mixer"])
    steps += sum(generate(config, instructions) for config in configs)
    sys.stdout.write(f"{steps} steps\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

"""The compiled step under sanitizers, as a child of tests: `python tests/support/sanitized.py FOLDER NAME`.

Loads FOLDER/NAME.so, which is compiled with sanitizers, and runs steps of tiny networks of every kind. A report ends
the process. Everything that the step reads or writes is in an allocation of exactly its size, so that an access to
the first byte behind it is found. Answers are compared in other tests."""

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count, product
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from polyhead.models.executors.contract import Executor
from polyhead.models.native import large_pages as memory
from polyhead.models.native import library
from polyhead.models.native import native_executor as native
from polyhead.models.native.packed_network import PackedNetwork, Precision
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.lora import LowRank, adaptable_shapes
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.service.core.request import Generate, Sampling
from polyhead.service.engine.logits_processors import LogitsProcessor, TokenRules
from polyhead.service.engine.native_sampling import CompiledSampler
from polyhead.service.engine.sampler import SampleRow
from tests.models.executors.test_bounds import LEARNED, disturbed, fits, fuzzed, good, passed, texts, unchecked
from tests.models.native.test_recurrent_layers import RECURRENT, ROUNDED
from tests.models.native.test_step import BERT, ENCODERS, GENERATORS, LLAMA, head, multiplied, network, pieces, rows_of
from tests.support.state_slots import StateSlots

LENGTHS = (1, 5, 16, 270)  # the last with two parts of attention
ODD = {
    "odd widths": replace(LLAMA, width=50, mlp_width=37, heads=3, kv_heads=1, head_width=10, vocab_size=33),
    "odd and plain": replace(LLAMA, width=70, mlp_width=65, gated_mlp=False, vocab_size=97, window=3, kv_heads=3),
}
FINE, BLOCKS, WIDE = 32, 24, 150  # WIDE: rows in panels for several threads
# Network, precision, least weight, steps (0: any floats), by format.
FORMATS: list[tuple[ModelConfig, Precision, float, int]] = [
    (LLAMA, "float32", 0.0, 0),
    (LLAMA, "int8", 0.0, 0),
    (LLAMA, "int4", 0.0, 16),
    (LLAMA, "int4", -3.5, 16),
    (LLAMA, "int8", -3.5, 32),
    (BERT, "int8", 0.0, 0),
]
TURN = count()
WAYS = [Sampling(), Sampling(temperature=0), Sampling(top_k=3, top_p=0.5), Sampling(typical_p=0.5, top_p=0.9)]


class Exact(native.NativeExecutor):
    """Allocations without spare bytes."""

    def _room(self, rows: int) -> Tensor:
        return torch.empty(rows, self._stride)


def exact_bytes(size: int) -> NDArray[np.uint8]:
    return np.zeros(size, np.uint8)


def exact(self: memory.PageAllocator, count: int, dtype: type[np.generic]) -> NDArray[np.generic]:
    return np.zeros(count, dtype)


def narrow(net: nn.Module, least: float, steps: int) -> None:
    """Round weights to `steps` of a power of two: of both signs, or above `least` where that is not zero."""
    for linear in (module for module in net.modules() if isinstance(module, nn.Linear)):
        codes = torch.randint(0, steps, linear.weight.shape).float()
        codes[:, :2] = torch.tensor([0.0, steps - 1.0])
        with torch.no_grad():
            linear.weight.copy_((codes + least) / 16 if least else (codes - steps // 2) / 16)


def narrowed(config: ModelConfig, least: float, steps: int = 16) -> tuple[Transformer, LanguageHead]:
    net, last = network(config), head(config)
    narrow(net, least, steps)
    narrow(last, least, steps)
    return net, last


def kinds(config: ModelConfig) -> list[Callable[[], tuple[Transformer, LanguageHead, Precision]]]:
    """The network with weights of every format."""
    return [
        lambda: (network(config), head(config), "float32"),
        lambda: (network(config), head(config), "int8"),
        lambda: (*narrowed(config, 0.0), "int4"),
        lambda: (*narrowed(config, -3.5), "int4"),
        lambda: (*narrowed(config, -3.5, 32), "int8"),
    ]


def some_kinds(config: ModelConfig) -> list[tuple[Transformer, LanguageHead, Precision]]:
    """All formats of the plainest network, and one of each other network."""
    made = kinds(config)
    return [make() for make in (made if config is LLAMA else [made[next(TURN) % len(made)]])]


def chunks(config: ModelConfig, choice: random.Random) -> Iterator[list[tuple[list[int], int, list[int]]]]:
    """Texts in random chunks beside others, then one token after the other, alone and all together."""
    free = list(range(BLOCKS))
    choice.shuffle(free)
    tables = [[free.pop() for _ in range(-(-(length + 2) // 16))] for length in LENGTHS]
    cuts, done = [[length] if length > WIDE else list(pieces(choice, length)) for length in LENGTHS], [0] * len(LENGTHS)
    for _ in range(2):
        for cut in cuts:
            cut.append(1)
    while any(cuts):
        parts = []
        for n in (n for n in range(len(LENGTHS)) if cuts[n] and choice.random() < 0.8):
            size = cuts[n].pop(0)
            tokens = [choice.randrange(config.vocab_size) for _ in range(size)]
            parts.append((tokens, done[n], tables[n][: -(-(done[n] + size) // 16)]))
            done[n] += size
        if parts:
            yield parts


def adapters(config: ModelConfig, executor: Executor) -> list[int]:
    """The numbers of two adapters, one on all matrices and one on some of a packed matrix; and the number of none."""

    def low(rank: int, inputs: int, outputs: int) -> LowRank:
        return LowRank(torch.randn(rank, inputs), torch.randn(outputs, rank) / 64)

    shapes = adaptable_shapes(config)
    everywhere = {name: low(5, *shape) for name, shape in shapes.items()}
    somewhere = {name: low(3, *shape) for name, shape in shapes.items() if "value" in name or "mlp.up" in name}
    return [0, executor.attach(everywhere), executor.attach(somewhere)]


def generate(config: ModelConfig, instructions: str) -> int:
    choice, steps = random.Random(2), 0
    for net, last, precision in some_kinds(config):
        threads = 1 + steps % 3
        slots = StateSlots(4 * len(LENGTHS), choice) if config.is_recurrent else None
        options = {"precision": precision, "block_count": BLOCKS, "state_count": slots.count if slots else 0}
        executor = Exact(net, last, **options, threads=threads, instructions=instructions)
        numbers = adapters(config, executor)
        for parts in chunks(config, random.Random(steps)):
            some = [choice.choice(numbers) for _ in parts] if steps % 3 else None
            rows = rows_of(parts, last_only=steps % 4 > 0, states=slots.uses(parts) if slots else None)
            rows = replace(rows, adapters=some)
            executor.step(rows) if steps % 4 else executor.step_with_states(rows)
            steps += 1
    return steps


def encode(config: ModelConfig, instructions: str) -> int:
    choice, steps = random.Random(1), 0
    for net, _, precision in some_kinds(config):
        executor = Exact(net, precision=precision, threads=2, instructions=instructions)
        numbers = adapters(config, executor)
        for lengths in ((1,), LENGTHS, (33, 2, 64)):
            texts = [[choice.randrange(config.vocab_size) for _ in range(length)] for length in lengths]
            rows = rows_of([(text, 0, []) for text in texts], last_only=len(lengths) == 3)
            rows = replace(rows, adapters=[choice.choice(numbers) for _ in texts])
            rows = replace(rows, segments=[1] * len(rows.tokens)) if config.segments else rows
            executor.step(rows)
            if len(rows.output_rows) == len(rows.tokens):
                executor.step_with_states(rows)
            steps += 1
    return steps


def multiply(instructions: str) -> int:
    """Products with all heights of a tile, in all formats."""
    for format, (config, precision, least, steps) in enumerate(FORMATS):
        pack = PackedNetwork(library.load_library(instructions), config, precision)
        for rows in range(1, 15):
            linear = nn.Linear(FINE + rows, 29 + rows, bias=rows % 2 > 0)
            if steps:
                narrow(linear, least, steps)
            assert pack.pack_linear([linear]).format == format
            multiplied(pack, linear, torch.randn(rows, FINE + rows))
    return 14 * len(FORMATS)


def check_nan(instructions: str) -> int:
    """Rows with NaN."""
    for precision in ("float32", "int8"):
        net = network(LLAMA)
        with torch.no_grad():
            net.tokens.weight[7] = torch.tensor([float("nan"), float("inf"), -3e38] * 16)
        executor = Exact(net, head(LLAMA), precision=precision, block_count=2, instructions=instructions)
        executor.step(rows_of([([1, 7, 2], 0, [1]), ([3], 0, [0])]))
    return 2


def fuzz(instructions: str) -> int:
    """Numbers out of range, with the check in Python and, for lists of the right lengths, without it."""
    for config, rows in ((LEARNED, good()), (replace(LEARNED, position="rotary"), good()), (BERT, texts())):
        blocks, last = (8, head(config)) if config.causal else (0, None)
        executor = Exact(network(config), last, block_count=blocks, threads=2, instructions=instructions)
        fuzzed(executor, rows, 150)
        choice = random.Random(5)
        unchecked(executor)
        for _ in range(300):
            if fits(bad := disturbed(rows, choice), rows):
                passed(executor, bad)
    return 3


def draw(instructions: str) -> int:
    """Rows of various lengths, sampled in all ways."""
    sampler, choice, steps = CompiledSampler(instructions, 2), random.Random(3), 0
    for words in (1, 31, 64, 257, 512):
        logits = torch.randn(9, words)
        bits = np.full(-(-words // 32), -2, np.int32)  # not the first
        shaped = Sampling(allowed=tuple(range(0, words + 3, 2)), bias=((0, 2.0), (words - 1, -1.0), (words, 1.0)))
        request = Generate("", (1, 2), 5, sampling=shaped)
        shape = LogitsProcessor(request, TokenRules(request))
        for way, logprobs, one, guide in product(WAYS, (-1, 0, 4, 1000), (None, shape), (None, bits)):
            uniforms = [0.0, 1 - 2**-53, *(choice.random() for _ in range(7))]
            sampler.sample(
                logits, [SampleRow(row, way, uniform, one, guide, logprobs) for row, uniform in enumerate(uniforms)]
            )
            steps += 1
    return steps


def exactly(folder: Path) -> None:
    """Load libraries from `folder`, and give them allocations of exactly the needed size."""
    torch.set_num_threads(1)
    memory.PageAllocator.zeros = exact  # type: ignore[method-assign]
    native.map_pages = exact_bytes
    library.LIBRARIES = folder


def main(folder: Path, instructions: str) -> None:
    exactly(folder)
    steps = multiply(instructions) + check_nan(instructions) + draw(instructions)
    recurrent = {name: RECURRENT[name] for name in ROUNDED}
    steps += sum(generate(config, instructions) for config in (GENERATORS | ODD | recurrent).values())
    steps += fuzz(instructions)
    steps += sum(encode(config, instructions) for config in ENCODERS.values())
    sys.stdout.write(f"{steps} steps\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

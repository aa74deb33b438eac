"""Measure what a sequence takes in the cache, and the time of its next token, with and without blocks for windows.

    python -m benchmarks.windows [--rounds 30]

The network has the shape of Gemma 3 270M (18 layers, every sixth without a window of 512 tokens) with random weights
and a smaller vocabulary, which changes no size of the cache. The sequences that fit are those of one context, in as
many bytes as eight of 32,768 tokens take in one table, with `max_running` 64. Both executors compute in turns.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import torch

from polyhead.models.executors.contract import StepInput
from polyhead.models.native.native_executor import BLOCK_TOKENS, NativeExecutor
from polyhead.models.native.step_memory import native_block_bytes
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.service.engine.window_blocks import held_limit

DEPTH, LONG, RUNNING, STEP_TOKENS = 18, 32_768, 64, 512
GEMMA = ModelConfig(
    vocab_size=16_384,
    width=640,
    depth=DEPTH,
    heads=4,
    kv_heads=1,
    head_width=256,
    mlp_width=2048,
    max_positions=LONG,
    causal=True,
    position="rotary",
    rope_base=1e6,
    window=512,
    windowed=tuple((layer + 1) % 6 > 0 for layer in range(DEPTH)),
    window_rope_base=1e4,
    norm="rms",
    norm_order="sandwich",
    query_key_norm="shared",
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    gated_mlp=True,
    activation="gelu_tanh",
)


@dataclass(frozen=True)
class Sizes:
    """Bytes of a block of all layers, and of the windowed ones only."""

    whole: int
    windowed: int

    def sequence_bytes(self, context: int, own: bool) -> int:
        """Bytes of the blocks that a decoding sequence of so many tokens holds."""
        blocks = -(-context // BLOCK_TOKENS)
        held = min(held_limit(GEMMA.window, 1, BLOCK_TOKENS), blocks) if own else blocks
        return blocks * (self.whole - self.windowed) + held * self.windowed

    def fitting(self, context: int, budget: int) -> int:
        """Sequences whose blocks fit beside the pool of windowed layers for RUNNING sequences."""
        pool = RUNNING * held_limit(GEMMA.window, 1, BLOCK_TOKENS) + STEP_TOKENS // BLOCK_TOKENS
        left = budget - pool * self.windowed
        return left // (-(-context // BLOCK_TOKENS) * (self.whole - self.windowed))


def next_token(executor: NativeExecutor, context: int, batch: int) -> StepInput:
    """The step after `context` - 1 tokens of each sequence. Caches are zeros, which takes no less time."""
    each, held = -(-context // BLOCK_TOKENS), held_limit(GEMMA.window, 1, BLOCK_TOKENS)
    tables = [list(range(n * each, (n + 1) * each)) for n in range(batch)]
    first = executor.block_count
    windows = [list(range(first + n * held, first + (n + 1) * held)) for n in range(batch)]
    last = context - 1
    seen = last // BLOCK_TOKENS - max(last - GEMMA.window + 1, 0) // BLOCK_TOKENS + 1
    return StepInput(
        [5] * batch,
        [last] * batch,
        list(range(batch + 1)),
        tables,
        list(range(batch)),
        window_tables=[table[:seen] for table in windows] if executor.window_blocks else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    rounds = parser.parse_args().rounds
    sizes = Sizes(*(native_block_bytes(GEMMA, "int8", windowed=windowed) for windowed in (False, True)))
    budget = 8 * sizes.sequence_bytes(LONG, own=False)
    for context in (8192, LONG):
        before, after = (sizes.sequence_bytes(context, own) / 2**20 for own in (False, True))
        fit = budget // sizes.sequence_bytes(context, own=False), sizes.fitting(context, budget)
        print(f"{context} tokens: {before:.1f} MiB, with own blocks {after:.1f}; in {budget >> 20} MiB {fit}")
    torch.manual_seed(0)
    net = Transformer(GEMMA)
    head = LanguageHead(GEMMA, net.tokens)
    for context, batch in ((8192, 1), (8192, 4), (LONG, 1)):
        count = batch * -(-context // BLOCK_TOKENS)
        own = batch * held_limit(GEMMA.window, 1, BLOCK_TOKENS)
        kinds = [NativeExecutor(net, head, block_count=count, window_blocks=some, threads=2) for some in (0, own)]
        steps = [(each, next_token(each, context, batch)) for each in kinds]
        seconds: list[list[float]] = [[], []]
        for _ in range(rounds + 3):
            for taken, (executor, rows) in zip(seconds, steps, strict=True):
                began = time.perf_counter()
                executor.step(rows)
                taken.append(time.perf_counter() - began)
        one, other = (1000 * statistics.median(taken[3:]) for taken in seconds)
        print(f"{batch} x {context} tokens: {one:.2f} ms, with own blocks {other:.2f} ms")


if __name__ == "__main__":
    main()

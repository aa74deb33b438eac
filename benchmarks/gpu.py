"""Check the torch executor on a GPU, and measure it: attention by groups, by the kernel in place, and with CUDA graphs.

    python -m benchmarks.gpu [--rounds 5]

The network has SmolLM2-135M's shape and random weights, in bfloat16. Checked are logits against float32 on the CPU,
recorded steps against others, and in deterministic mode sequences together against each alone, to the bit. Measured
are tokens a second.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from torch import Tensor

from polyhead.models.core.errors import InvarianceError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.cuda_graphs import PagedAttention
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant, self_test_kernel
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.network.varlen import PAGE_TOKENS, Kernel, find_kernel, kernel_problem, varlen_attn

SIZES = {"width": 576, "depth": 30, "heads": 9, "kv_heads": 3, "head_width": 64, "mlp_width": 1536}
ROTARY = {"vocab_size": 49_152, "position": "rotary", "rope_base": 1e5, "max_positions": 8192, "causal": True}
NO_BIASES = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
SMOLLM2 = ModelConfig(**SIZES, **ROTARY, **NO_BIASES, norm="rms", activation="silu", gated_mlp=True)
WIDTHS = (1, 8, 32, 128)  # sequences that talk
CONTEXT, PROMPT, CHUNK = 224, 2048, 512  # tokens
CHECKED, STEPS = 7, 32  # sequences, of which recorded steps make eight; steps a round
Built, Made = tuple[Transformer, LanguageHead], Callable[[int], TorchExecutor]  # with so many blocks


def build(config: ModelConfig) -> Built:
    torch.manual_seed(0)
    network = Transformer(config).eval()
    for parameter in (one for one in network.parameters() if one.dim() > 1):
        torch.nn.init.normal_(parameter, std=0.04)
    return network, LanguageHead(config, network.tokens)


def ways(built: Built, kernel: Kernel | None) -> dict[str, Made]:
    """How a step can be computed, by name."""
    made: dict[str, Made] = {"groups": lambda count: TorchExecutor(*built, block_count=count, block_size=PAGE_TOKENS)}
    for name, talking in (("in place", 0), ("in place, graphs", max(WIDTHS))) if kernel else ():
        how = PagedAttention(kernel, talking)
        made[name] = lambda count, how=how: TorchExecutor(
            *built, block_count=count, block_size=PAGE_TOKENS, in_place=how
        )
    return made


def prompted(executor: TorchExecutor, width: int) -> list[Tensor]:
    """Prompts of CONTEXT tokens, one after the other, the blocks of sequence n starting at n: logits after each."""
    span, out = list(range(CONTEXT)), []
    for n in range(width):
        tokens = [(31 * n + 7 * index) % 97 for index in span]
        out.append(executor.step(StepInput(tokens, span, [0, CONTEXT], [[n]], [CONTEXT - 1])).clone())
    return out


def talk(executor: TorchExecutor, members: list[int], position: int) -> Tensor:
    """A step of sequences with one token each."""
    rows, tables = list(range(len(members))), [[n] for n in members]
    return executor.step(StepInput([n + 3 for n in members], [position] * len(rows), [*rows, len(rows)], tables, rows))


def logits(make: Made, alone: bool = False) -> Tensor:
    """[CHECKED * 5, V] after prompts, and after four tokens more of each, together or each alone."""
    executor = make(CHECKED)
    out = prompted(executor, CHECKED)
    groups = [[n] for n in range(CHECKED)] if alone else [list(range(CHECKED))]
    for position in range(CONTEXT, CONTEXT + 4):
        out += [talk(executor, members, position).clone() for members in groups]
    return torch.cat(out).cpu()


def invariant(built: Built, kernel: Kernel | None, name: str) -> str:
    """Whether sequences together equal each alone once the network is made so."""
    network, head = copy.deepcopy(built)
    try:
        make_invariant(network, head)
        if kernel:
            self_test_kernel(kernel, network.config, network.tokens.weight)
    except InvarianceError as error:
        return f"no: {error}"
    make = ways((network, head), kernel)[name]
    return "yes" if torch.equal(logits(make), logits(make, alone=True)) else "NO"


def decoding(make: Made, width: int) -> float:
    executor, members = make(width), list(range(width))
    prompted(executor, width)
    talk(executor, members, CONTEXT)  # and record it, where that is done
    began = perf_counter()
    for step in range(STEPS):
        talk(executor, members, CONTEXT + step)
    torch.cuda.synchronize()
    return width * STEPS / (perf_counter() - began)


def prefilling(make: Made) -> float:
    executor = make(PROMPT // PAGE_TOKENS)
    for _ in range(2):  # the first is not counted
        began = perf_counter()
        for start in range(0, PROMPT, CHUNK):
            span = list(range(start, start + CHUNK))
            table = list(range((start + CHUNK) // PAGE_TOKENS))
            executor.step(StepInput([n % 97 for n in span], span, [0, CHUNK], [table], [CHUNK - 1]))
        torch.cuda.synchronize()
        took = perf_counter() - began
    return PROMPT / took


def main() -> None:
    (parser := argparse.ArgumentParser()).add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch finds no GPU here, and this measures nothing else")
    device, dtype = torch.device("cuda"), torch.bfloat16
    kernel = find_kernel(device, dtype)
    why = "no kernel in place: " + kernel_problem(varlen_attn, device, dtype) if kernel is None else ""
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", why)
    built = build(SMOLLM2)
    expected = logits(lambda count: TorchExecutor(*built, block_count=count, block_size=PAGE_TOKENS))
    for part in built:
        part.to(device, dtype)
    seen, columns = dict[str, Tensor](), "  ".join(f"decode {width:3d}" for width in WIDTHS)
    print(f"{'tokens/s':17s} {columns}  prefill {PROMPT}  off float32  off no graphs  together = alone")
    for name, make in ways(built, kernel).items():
        seen[name] = logits(make)
        off = distance(seen[name], expected)
        eager = distance(seen[name], seen[name.removesuffix(", graphs")])
        speeds = [statistics.median(decoding(make, width) for _ in range(rounds)) for width in WIDTHS]
        speeds.append(statistics.median(prefilling(make) for _ in range(rounds)))
        figures = "  ".join(f"{speed:10.0f}" for speed in speeds) + f"    {off:11.4f}  {eager:13.4f}"
        print(f"{name:17s} {figures}  {invariant(built, kernel, name)}")


def distance(some: Tensor, other: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    return float((some - other).abs().max() / other.abs().max())


if __name__ == "__main__":
    main()

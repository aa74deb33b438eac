"""Check the torch executor on a GPU, and measure it beside transformers in one run.

    python -m benchmarks.gpu [--rounds 5] [--shape smollm2|qwen2.5-7b]

The network has the shape of SmolLM2-135M or Qwen2.5-7B and random weights, in bfloat16. Attention is computed in
groups, by the kernel that reads cache blocks in place, and by it in recorded steps (CUDA graphs). Checked are logits
against float32 on the CPU (of the small shape), recorded steps against others, and in deterministic mode sequences
together against each alone, to the bit. Measured are tokens a second: of N sequences that decode after CONTEXT tokens,
and of a prompt of PROMPT tokens in chunks of CHUNK. The peer is `generate` of transformers with
scaled_dot_product_attention and its dynamic cache.
"""

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import torch
import transformers
from torch import Tensor

from polyhead.models.core.errors import InvarianceError
from polyhead.models.executors.contract import StepInput
from polyhead.models.executors.cuda_graphs import PagedAttention
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.invariant import make_invariant
from polyhead.models.network.heads import LanguageHead
from polyhead.models.network.model_config import ModelConfig
from polyhead.models.network.sequence_spans import Kernel
from polyhead.models.network.transformer import Transformer
from polyhead.models.network.varlen import find_kernel

COMMON = {"position": "rotary", "max_positions": 8192, "causal": True, "norm": "rms", "activation": "silu"}
NO_BIASES = {"qkv_bias": False, "output_bias": False, "mlp_bias": False, "gated_mlp": True}
SHAPES = {
    "smollm2": ModelConfig(
        width=576, depth=30, heads=9, kv_heads=3, head_width=64, mlp_width=1536, vocab_size=49_152, rope_base=1e5,
        **COMMON, **NO_BIASES,
    ),
    "qwen2.5-7b": ModelConfig(
        width=3584, depth=28, heads=28, kv_heads=4, head_width=128, mlp_width=18_944, vocab_size=152_064, rope_base=1e6,
        **COMMON, **NO_BIASES,
    ),
}  # fmt: skip
WIDTHS = (1, 8, 32, 128)  # sequences that decode
CONTEXT, PROMPT, CHUNK = 224, 2048, 512  # tokens
CHECKED, STEPS = 7, 32  # sequences, of which recorded steps make eight; steps of a round
BLOCK = 16  # tokens
TOGETHER = 16  # prompts in a step
ROOM = (CONTEXT + STEPS + BLOCK) // BLOCK  # blocks of a sequence
GPU = torch.device("cuda")
Built, Made = tuple[Transformer, LanguageHead], Callable[[int], TorchExecutor]  # with room for so many sequences


def build(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Built:
    torch.manual_seed(0)
    with device:
        network = Transformer(config).eval().to(device, dtype)
        head = LanguageHead(config, network.tokens).to(device, dtype)
    for parameter in (one for part in (network, head) for one in part.parameters() if one.dim() > 1):
        torch.nn.init.normal_(parameter, std=0.04)
    return network, head


def ways(built: Built, kernel: Kernel | None) -> dict[str, Made]:
    """How a step can be computed, by name."""
    hows = {"groups": None}
    if kernel:
        hows |= {"kernel": PagedAttention(kernel), "kernel, graphs": PagedAttention(kernel, max(WIDTHS))}
    return {
        name: lambda count, how=how: TorchExecutor(*built, block_count=count * ROOM, block_size=BLOCK, in_place=how)
        for name, how in hows.items()
    }


def blocks(sequence: int) -> list[int]:
    return list(range(sequence * ROOM, (sequence + 1) * ROOM))


def prompted(executor: TorchExecutor, width: int) -> list[Tensor]:
    """Prompts of CONTEXT tokens: logits after each."""
    span, out = list(range(CONTEXT)), []
    for first in range(0, width, TOGETHER):
        some = range(first, min(first + TOGETHER, width))
        starts = [CONTEXT * index for index in range(len(some) + 1)]
        tokens = [(31 * n + 7 * index) % 97 for n in some for index in span]
        tables, last = [blocks(n) for n in some], [start - 1 for start in starts[1:]]
        out.append(executor.step(StepInput(tokens, span * len(some), starts, tables, last)).clone())
    return out


def decode(executor: TorchExecutor, members: list[int], position: int) -> Tensor:
    """A step of sequences with one token each."""
    rows, tables = list(range(len(members))), [blocks(n) for n in members]
    return executor.step(StepInput([n + 3 for n in members], [position] * len(rows), [*rows, len(rows)], tables, rows))


def logits(make: Made, alone: bool = False) -> Tensor:
    """[CHECKED * 5, V] after prompts, and after four tokens more of each, together or each alone."""
    executor = make(CHECKED)
    out = prompted(executor, CHECKED)
    groups = [[n] for n in range(CHECKED)] if alone else [list(range(CHECKED))]
    for position in range(CONTEXT, CONTEXT + 4):
        out += [decode(executor, members, position).clone() for members in groups]
    return torch.cat(out).cpu()


def invariant(built: Built, name: str) -> str:
    """Whether sequences together equal each alone once the network is made so."""
    network, head = copy.deepcopy(built)
    kernel = None if name == "groups" else find_kernel(GPU, torch.bfloat16, invariant=True)
    try:
        make_invariant(network, head, kernel=kernel)
    except InvarianceError as error:
        return f"no: {error}"
    make = ways((network, head), kernel)[name]
    return "yes" if torch.equal(logits(make), logits(make, alone=True)) else "NO"


def decode_speed(make: Made, width: int) -> float:
    """Tokens a second."""
    executor, members = make(width), list(range(width))
    prompted(executor, width)
    decode(executor, members, CONTEXT)  # and record it, where that is done
    torch.cuda.synchronize()
    began = perf_counter()
    for step in range(STEPS):
        decode(executor, members, CONTEXT + step)
    torch.cuda.synchronize()
    return width * STEPS / (perf_counter() - began)


def prompt_speed(make: Made) -> float:
    """Tokens a second; the first of two prompts is not counted."""
    executor = make(PROMPT // (ROOM * BLOCK) + 1)
    for _ in range(2):
        torch.cuda.synchronize()
        began = perf_counter()
        for start in range(0, PROMPT, CHUNK):
            span = list(range(start, start + CHUNK))
            table = list(range((start + CHUNK) // BLOCK))
            executor.step(StepInput([n % 97 for n in span], span, [0, CHUNK], [table], [CHUNK - 1]))
        torch.cuda.synchronize()
        took = perf_counter() - began
    return PROMPT / took


class Peer:
    """A network of the same shape in transformers."""

    def __init__(self, config: ModelConfig) -> None:
        shape = transformers.LlamaConfig(
            hidden_size=config.width, num_hidden_layers=config.depth, num_attention_heads=config.heads,
            num_key_value_heads=config.of_layer(0).kv_heads, head_dim=config.of_layer(0).head_width,
            intermediate_size=config.mlp_width, vocab_size=config.vocab_size, max_position_embeddings=8192,
            dtype=torch.bfloat16, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        with GPU:
            self.network = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="sdpa").eval()
        self.network.to(torch.bfloat16)

    @torch.inference_mode()
    def _generate(self, rows: int, length: int, new: int) -> float:
        """Seconds."""
        prompt = torch.randint(3, 97, (rows, length), device=GPU)
        torch.cuda.synchronize()
        began = perf_counter()
        self.network.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new)
        torch.cuda.synchronize()
        return perf_counter() - began

    def decode_speed(self, width: int) -> float:
        whole = self._generate(width, CONTEXT, STEPS + 1)
        return width * STEPS / (whole - self._generate(width, CONTEXT, 1))

    def prompt_speed(self) -> float:
        self._generate(1, PROMPT, 1)
        return PROMPT / self._generate(1, PROMPT, 1)


def show(name: str, measure: Callable[[int], float], prompt: Callable[[], float], rounds: int) -> str:
    """The medians of a row of the table."""
    speeds = [statistics.median(measure(width) for _ in range(rounds)) for width in WIDTHS]
    speeds.append(statistics.median(prompt() for _ in range(rounds)))
    return f"{name:15s} " + "  ".join(f"{speed:10.0f}" for speed in speeds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu: torch finds no GPU here, and this measures nothing else")
    dtype, config = torch.bfloat16, SHAPES[given.shape]
    kernel, small = find_kernel(GPU, dtype), given.shape == "smollm2"
    print(given.shape, torch.cuda.get_device_name(), f"torch {torch.__version__}", "" if kernel else "no kernel")
    columns = "  ".join(f"decode {width:3d}" for width in WIDTHS)
    print(f"{'tokens/s':15s} {columns}  prompt {PROMPT}  off float32  off no graphs  together = alone")
    expected = None
    if small:
        cpu = build(config, torch.device("cpu"), torch.float32)
        expected = logits(lambda count: TorchExecutor(*cpu, block_count=count * ROOM, block_size=BLOCK))
        built = tuple(part.to(GPU, dtype) for part in cpu)
    else:
        built = build(config, GPU, dtype)
    seen = dict[str, Tensor]()
    for name, make in ways(built, kernel).items():
        seen[name] = logits(make)
        off = distance(seen[name], expected) if expected is not None else float("nan")
        eager = distance(seen[name], seen[name.removesuffix(", graphs")])
        row = show(
            name, lambda width, make=make: decode_speed(make, width), lambda make=make: prompt_speed(make), given.rounds
        )
        print(row, f"   {off:11.4f}  {eager:13.4f} ", invariant(built, name) if small else "not tried", flush=True)
    del built
    torch.cuda.empty_cache()
    peer = Peer(config)
    print(show("transformers", peer.decode_speed, peer.prompt_speed, given.rounds), transformers.__version__)


def distance(some: Tensor, other: Tensor) -> float:
    """The largest difference, in units of the largest number."""
    return float((some - other).abs().max() / other.abs().max())


if __name__ == "__main__":
    main()

"""Write GGUF files with the shapes of other generators and random weights, to measure ratios of further models.

    python -m benchmarks.peer_runs.shapes SHAPE SOURCE TARGET

Matrices are Q8_0, those of a mixture of experts Q4_0, with its output layer in Q6_K. The tokenizer is that of SOURCE,
with added words that do not occur in texts. Contexts are as long as the work needs. One tensor at a time is in memory.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

POSITIONS, EPS = 2048, 1e-5


@dataclass(frozen=True)
class Shape:
    """What GGUF calls the architecture, and its sizes."""

    architecture: str
    vocabulary: int
    width: int
    depth: int
    heads: int
    kv_heads: int
    hidden: int  # of an expert, where there are some
    experts: int = 0
    chosen: int = 0  # experts of a token
    attending: tuple[int, ...] = ()  # layers with attention, where the others have a short convolution


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 151_936, 896, 24, 14, 2, 4864),
    "gpt2-124m": Shape("gpt2", 50_257, 768, 12, 12, 12, 3072),
    "olmoe-1b-7b": Shape("olmoe", 50_304, 2048, 16, 16, 16, 1024, experts=64, chosen=8),
    "lfm2-350m": Shape("lfm2", 65_536, 1024, 16, 16, 8, 4608, attending=(2, 5, 8, 10, 12, 14)),
}
KERNEL = 3  # tokens of a short convolution
Sizes = Iterator[tuple[str, tuple[int, ...]]]
DEVIATION = 0.03  # of weights: small, so that answers stay numbers
EMBEDDING = 3.0  # of a mixture's embeddings: tokens differ in all layers, and so do the experts that they choose
# Blocks of random codes, which are drawn as fast as bytes. Scales have the field's name in ggml; the deviation is that
# of a code, times the scale of its part of a block.
BLOCKS = {
    Kind.Q4_0: (np.dtype([("d", "<f2"), ("codes", "u1", 16)]), 4.18),
    Kind.Q6_K: (np.dtype([("codes", "u1", 192), ("scales", "i1", 16), ("d", "<f2")]), 18.5 * 64),
}
# Codes of Q4_0 stand for -8 to 7. Without the least, whose place zero takes, their mean is zero: with another mean, all
# states would grow in the same direction, and all tokens choose the same experts.
NIBBLES = np.array([8, *range(1, 16)], np.uint8)
CENTRED = (NIBBLES[:, None] << 4 | NIBBLES).reshape(-1)  # by byte


def qwen2(shape: Shape) -> Sizes:
    """Names and sizes of tensors, rows first; the output layer is the embeddings."""
    width, kept = shape.width, shape.width // shape.heads * shape.kv_heads
    yield "token_embd.weight", (shape.vocabulary, width)
    yield "output_norm.weight", (width,)
    for layer in (f"blk.{n}." for n in range(shape.depth)):
        for name, rows in (("attn_q", width), ("attn_k", kept), ("attn_v", kept)):
            yield f"{layer}{name}.weight", (rows, width)
            yield f"{layer}{name}.bias", (rows,)
        yield f"{layer}attn_output.weight", (width, width)
        for name in ("ffn_gate", "ffn_up"):
            yield f"{layer}{name}.weight", (shape.hidden, width)
        yield f"{layer}ffn_down.weight", (width, shape.hidden)
        for name in ("attn_norm", "ffn_norm"):
            yield f"{layer}{name}.weight", (width,)


def gpt2(shape: Shape) -> Sizes:
    width, hidden = shape.width, shape.hidden
    yield "token_embd.weight", (shape.vocabulary, width)
    yield "position_embd.weight", (POSITIONS, width)
    matrices = (("attn_qkv", 3 * width, width), ("attn_output", width, width), ("ffn_up", hidden, width))
    for layer in (f"blk.{n}." for n in range(shape.depth)):
        for name, rows, columns in (*matrices, ("ffn_down", width, hidden)):
            yield f"{layer}{name}.weight", (rows, columns)
            yield f"{layer}{name}.bias", (rows,)
        for part in ("weight", "bias"):
            yield f"{layer}attn_norm.{part}", (width,)
            yield f"{layer}ffn_norm.{part}", (width,)
    for part in ("weight", "bias"):
        yield f"output_norm.{part}", (width,)


def olmoe(shape: Shape) -> Sizes:
    width, hidden, experts = shape.width, shape.hidden, shape.experts
    yield "token_embd.weight", (shape.vocabulary, width)
    yield "output_norm.weight", (width,)
    yield "output.weight", (shape.vocabulary, width)
    for layer in (f"blk.{n}." for n in range(shape.depth)):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            yield f"{layer}{name}.weight", (width, width)
        for name in ("attn_norm", "attn_q_norm", "attn_k_norm", "ffn_norm"):
            yield f"{layer}{name}.weight", (width,)
        yield f"{layer}ffn_gate_inp.weight", (experts, width)
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            yield f"{layer}{name}.weight", (experts, hidden, width)
        yield f"{layer}ffn_down_exps.weight", (experts, width, hidden)


def lfm2(shape: Shape) -> Sizes:
    """The output layer is the embeddings; the last norm has the name of one behind the embeddings."""
    width, hidden, head = shape.width, shape.hidden, shape.width // shape.heads
    yield "token_embd.weight", (shape.vocabulary, width)
    yield "token_embd_norm.weight", (width,)
    for n, layer in ((n, f"blk.{n}.") for n in range(shape.depth)):
        if n in shape.attending:
            for name, rows in (("attn_q", width), ("attn_k", head * shape.kv_heads), ("attn_v", head * shape.kv_heads)):
                yield f"{layer}{name}.weight", (rows, width)
            yield f"{layer}attn_output.weight", (width, width)
            for name in ("attn_q_norm", "attn_k_norm"):
                yield f"{layer}{name}.weight", (head,)
        else:
            yield f"{layer}shortconv.conv.weight", (width, KERNEL)
            yield f"{layer}shortconv.in_proj.weight", (3 * width, width)
            yield f"{layer}shortconv.out_proj.weight", (width, width)
        for name in ("ffn_gate", "ffn_up"):
            yield f"{layer}{name}.weight", (hidden, width)
        yield f"{layer}ffn_down.weight", (width, hidden)
        for name in ("attn_norm", "ffn_norm"):
            yield f"{layer}{name}.weight", (width,)


def kind_of(shape: Shape, name: str, size: tuple[int, ...]) -> Kind:
    if len(size) == 1 or name.startswith("position") or "ffn_gate_inp" in name or "shortconv.conv" in name:
        return Kind.F32
    if not shape.experts:
        return Kind.Q8_0
    return Kind.Q6_K if name == "output.weight" else Kind.Q4_0


def tensor(choice: np.random.Generator, name: str, size: tuple[int, ...], kind: Kind) -> NDArray[Any]:
    """Random numbers as `kind`, a matrix as its rows of bytes."""
    if kind in BLOCKS:
        return blocks(choice, name, size, kind)
    drawn = numbers(choice, name, size)
    return drawn if kind == Kind.F32 else gguf.quants.quantize(drawn, kind)


def blocks(choice: np.random.Generator, name: str, size: tuple[int, ...], kind: Kind) -> NDArray[np.uint8]:
    layout, deviation = BLOCKS[kind]
    shape = gguf.quants.quant_shape_to_byte_shape(size, kind)
    drawn = np.frombuffer(choice.bytes(math.prod(shape)), np.uint8).view(layout).copy()
    drawn["d"] = (EMBEDDING if name == "token_embd.weight" else DEVIATION) / deviation
    if kind == Kind.Q4_0:
        drawn["codes"] = CENTRED[drawn["codes"]]
    else:
        drawn["scales"] = 64
    return drawn.view(np.uint8).reshape(shape)


def numbers(choice: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms of about one; all else small."""
    drawn = choice.standard_normal(size, np.float32)
    return 1 + drawn * np.float32(0.1) if "norm.weight" in name else drawn * np.float32(DEVIATION)


def described(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.depth)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    if shape.attending:
        writer.add_head_count_kv([shape.kv_heads if n in shape.attending else 0 for n in range(shape.depth)])
        writer.add_shortconv_l_cache(KERNEL)
        writer.add_vocab_size(shape.vocabulary)
    else:
        writer.add_head_count_kv(shape.kv_heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0 if shape.experts else gguf.LlamaFileType.MOSTLY_Q8_0)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(shape.chosen)
    if shape.architecture == "gpt2":
        writer.add_layer_norm_eps(EPS)
    else:
        writer.add_layer_norm_rms_eps(EPS)
        writer.add_rope_freq_base(1_000_000.0)


def tokenizer(writer: gguf.GGUFWriter, source: Path, vocabulary: int) -> None:
    for field in gguf.GGUFReader(source).fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        inner = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        value: Any = field.contents()
        if field.name == "tokenizer.ggml.tokens":
            value = [*value, *(f"<unused{n}>" for n in range(len(value), vocabulary))]
        elif field.name == "tokenizer.ggml.token_type":
            value = [*value, *[int(gguf.TokenType.UNUSED)] * (vocabulary - len(value))]
        writer.add_key_value(field.name, value, field.types[0], inner)


ARCHITECTURES = {"qwen2": qwen2, "gpt2": gpt2, "olmoe": olmoe, "lfm2": lfm2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    shape, choice = SHAPES[options.shape], np.random.default_rng(0)
    writer = gguf.GGUFWriter(options.target, shape.architecture)
    described(writer, shape)
    tokenizer(writer, options.source, shape.vocabulary)
    tensors = [(name, size, kind_of(shape, name, size)) for name, size in ARCHITECTURES[shape.architecture](shape)]
    for name, size, kind in tensors:
        stored = gguf.quants.quant_shape_to_byte_shape(size, kind)
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), kind)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    for name, size, kind in tensors:
        writer.write_tensor_data(tensor(choice, name, size, kind))
    writer.close()


if __name__ == "__main__":
    main()

"""Write GGUF files with the shapes of other generators and random weights in Q8_0, to measure ratios of further models.

    python -m benchmarks.peer_runs.shapes SHAPE SOURCE TARGET

The tokenizer is that of SOURCE, with added words that do not occur in texts. Contexts are as long as the work needs.
"""

import argparse
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
    hidden: int


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 151_936, 896, 24, 14, 2, 4864),
    "gpt2-124m": Shape("gpt2", 50_257, 768, 12, 12, 12, 3072),
}
Sizes = Iterator[tuple[str, tuple[int, ...]]]


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


def numbers(choice: np.random.Generator, name: str, size: tuple[int, ...]) -> NDArray[np.float32]:
    """Norms of about one; all else small, so that answers stay numbers."""
    drawn = choice.standard_normal(size, np.float32)
    return 1 + drawn * np.float32(0.1) if "norm.weight" in name else drawn * np.float32(0.03)


def described(writer: gguf.GGUFWriter, shape: Shape) -> None:
    writer.add_context_length(POSITIONS)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.depth)
    writer.add_feed_forward_length(shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
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
    for name, size in {"qwen2": qwen2, "gpt2": gpt2}[shape.architecture](shape):
        drawn = numbers(choice, name, size)
        if len(size) == 1 or name.startswith("position"):
            writer.add_tensor(name, drawn)
        else:
            writer.add_tensor(name, gguf.quants.quantize(drawn, Kind.Q8_0), raw_dtype=Kind.Q8_0)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        write()
    writer.close()


if __name__ == "__main__":
    main()

"""Tiny GGUF files as llama.cpp's converter writes them: its names, its order of rows, its shifted norms."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
import transformers as tf
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from torch import Tensor

from tests.support import checkpoints

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
    "gpt2": gguf.MODEL_ARCH.GPT2,
    "bert": gguf.MODEL_ARCH.BERT,
}


def permuted(weight: Tensor, heads: int) -> Tensor:
    """As `LlamaModel.permute` in the converter: the halves of a head are interleaved."""
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)
    )


def converted(architecture: str, model: "tf.PreTrainedModel") -> dict[str, Tensor]:
    """The model's tensors under GGUF's names (the package's own table of names)."""
    config, found = model.config, {}
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith("position_ids") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name.startswith("pooler."):
            continue
        if architecture == "llama" and ".q_proj." in name:
            tensor = permuted(tensor, config.num_attention_heads)
        if architecture == "llama" and ".k_proj." in name:
            tensor = permuted(tensor, config.num_key_value_heads)
        if architecture == "gemma3" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.t()
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert theirs, name
        found[theirs] = tensor.contiguous()
    return found


def write(
    path: Path,
    architecture: str,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kind_of: Callable[[str, Tensor], str] = lambda name, tensor: "F32",
) -> Path:
    """Keys of `metadata` get the architecture as prefix, unless they begin with a dot.

    A tensor of bytes consists of blocks already."""
    writer = GGUFWriter(path, architecture)
    for key, value in metadata.items():
        add(writer, key[1:] if key.startswith(".") else f"{architecture}.{key}", value)
    for name, tensor in tensors.items():
        kind = GGMLQuantizationType[kind_of(name, tensor)]
        blocks = tensor.numpy() if tensor.dtype == torch.uint8 else quantize(tensor.detach().float().numpy(), kind)
        writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)


def decoder_metadata(config: Any) -> dict[str, Any]:
    """The metadata that the converter writes for a Llama-like configuration."""
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        **byte_level_metadata(checkpoints.byte_level_bpe()),
    }


def byte_level_metadata(tokenizer: "tf.PreTrainedTokenizerFast") -> dict[str, Any]:
    """The vocabulary of a byte-level BPE, and its chat template."""
    backend: Any = tokenizer.backend_tokenizer
    model = json.loads(backend.to_str())["model"]
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)
    return {
        ".tokenizer.ggml.model": "gpt2",
        ".tokenizer.ggml.pre": "gpt-2",
        ".tokenizer.ggml.tokens": pieces,
        ".tokenizer.ggml.token_type": [3 if piece in special else 1 for piece in pieces],
        ".tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
        ".tokenizer.ggml.bos_token_id": tokenizer.bos_token_id,
        ".tokenizer.ggml.eos_token_id": tokenizer.eos_token_id,
        ".tokenizer.chat_template": checkpoints.CHAT_TEMPLATE,
    }


def word_piece_metadata(tokenizer: "tf.PreTrainedTokenizerFast") -> dict[str, Any]:
    """The vocabulary of a WordPiece: words begin with a low line, their continuations do not."""
    pieces = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    special = set(tokenizer.all_special_tokens)

    def spelled(piece: str) -> str:
        if piece in special:
            return piece
        return piece[2:] if piece.startswith("##") else "▁" + piece

    return {
        ".tokenizer.ggml.model": "bert",
        ".tokenizer.ggml.tokens": [spelled(piece) for piece in pieces],
        ".tokenizer.ggml.token_type": [3 if piece in special else 1 for piece in pieces],
        ".tokenizer.ggml.cls_token_id": tokenizer.cls_token_id,
        ".tokenizer.ggml.seperator_token_id": tokenizer.sep_token_id,
        ".tokenizer.ggml.unknown_token_id": tokenizer.unk_token_id,
        ".tokenizer.ggml.padding_token_id": tokenizer.pad_token_id,
        ".tokenizer.ggml.mask_token_id": tokenizer.mask_token_id,
        ".tokenizer.ggml.token_type_count": 2,
    }


SCALE_OFFSETS = {
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    **dict.fromkeys(("IQ1_M", "MXFP4", "NVFP4"), ()),
}  # bytes of a block before each scale in half precision, where it is not the first two


def random_blocks(kind: str, rows: int, columns: int, seed: int = 0) -> numpy.ndarray[Any, Any]:
    """Random bytes as quantised blocks, with small and finite scales."""
    items, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = numpy.random.default_rng(seed).integers(0, 256, (rows * columns // items, size), dtype=numpy.uint8)
    scale = numpy.frombuffer(numpy.float16(0.01).tobytes(), dtype=numpy.uint8)
    for offset in SCALE_OFFSETS.get(kind, (0,)):
        raw[:, offset : offset + 2] = scale
    if kind == "MXFP4":
        raw[:, 0] = 120  # a power of two, 2 ** (120 - 127)
    if kind == "IQ1_M":  # four bits of the scale are above those of other numbers in each of the last four 16-bit words
        raw[:, 49::2] = raw[:, 49::2] & 15 | numpy.array([15, 1, 1, 2], dtype=numpy.uint8) << 4
    return raw.reshape(rows, columns // items * size)


def torch_seeded(model: "tf.PreTrainedModel", seed: int = 0) -> "tf.PreTrainedModel":
    """Random weights with a large spread, norms and biases too, so that a missing tensor changes the answer."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model.eval()

"""How GGUF files describe the families: metadata becomes a configuration with Hugging Face's field names, tensors get
our names.

What the converter did to the numbers (llama.cpp's convert_hf_to_gguf.py) is undone in `rename_tensor`. Key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .family import NamedTensors, Renames

Json = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]
LOCAL_BASE = 10_000.0  # of Gemma 3's windowed layers; older files do not store it
GEMMA_27B_LAYERS = 62  # layers of the one Gemma 3 whose scores are scaled by width / heads instead of the head width

DECODER: Renames = (
    (r"^token_embd\.", "tokens."),
    (r"^position_embd\.", "position.table."),
    (r"^output_norm\.", "final_norm."),
    (r"^output\.", "head.output."),
    (r"^blk\.", "blocks."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.attn_q\.", ".attention.query."),
    (r"\.attn_k\.", ".attention.key."),
    (r"\.attn_v\.", ".attention.value."),
    (r"\.attn_output\.", ".attention.output."),
    (r"\.attn_q_norm\.", ".attention.query_norm."),
    (r"\.attn_k_norm\.", ".attention.key_norm."),
    (r"\.post_attention_norm\.", ".attention_post_norm."),
    (r"\.post_ffw_norm\.", ".mlp_post_norm."),
    (r"\.ffn_norm\.", ".mlp_norm."),
    (r"\.ffn_(up|gate|down)\.", r".mlp.\1."),
)
ENCODER: Renames = (
    (r"^token_embd\.", "tokens."),
    (r"^token_types\.", "segments."),
    (r"^position_embd\.", "position.table."),
    (r"^token_embd_norm\.", "embedding_norm."),
    (r"^blk\.", "blocks."),
    (r"\.attn_output_norm\.", ".attention_norm."),
    (r"\.layer_output_norm\.", ".mlp_norm."),
    *DECODER[6:10],
    *DECODER[-1:],
)
DROP = r"^rope_freqs\.|\.attn_rot_embd\."  # constants that follow from the configuration


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF files store one family.

    `config` reads metadata (keys without the architecture's name) and tensor shapes. `interleaved`: rows of queries and
    keys were reordered for a rotation of neighbouring features. `unsupported_keys` are keys whose arithmetic is not
    implemented.
    """

    family: str
    config: Callable[[Json, Shapes], Json]
    renames: Renames = DECODER
    interleaved: bool = False
    unsupported_keys: tuple[str, ...] = (
        "expert_count",
        "logit_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    )


def rename_tensor(dialect: GgufArchitecture, config: ModelConfig, name: str, tensor: Tensor) -> NamedTensors:
    """A tensor under our names: an empty list if it is not used, several tensors if it is fused."""
    if re.search(DROP, name):
        return []
    pieces = [(name, tensor)]
    if ".attn_qkv." in name:
        parts = zip(("attn_q", "attn_k", "attn_v"), tensor.chunk(3), strict=True)
        pieces = [(name.replace("attn_qkv", part), piece) for part, piece in parts]
    elif dialect.interleaved and (found := re.search(r"\.attn_([qk])\.", name)):
        pieces = [(name, deinterleave_heads(tensor, config.heads if found[1] == "q" else config.kv_heads))]
    return [(_apply_renames(piece, dialect.renames), value) for piece, value in pieces]


def deinterleave_heads(tensor: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each head from (pairs, 2) to (2, pairs), so that features d and d + D / 2 form a pair
    again."""
    pairs = tensor.reshape(heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _apply_renames(name: str, renames: Renames) -> str:
    for pattern, ours in renames:
        name = re.sub(pattern, ours, name)
    return name


def read_llama(fields: Json, shapes: Shapes) -> Json:
    """The configuration of Llama and related families, with Hugging Face's field names."""
    heads, width = fields["attention.head_count"], fields["embedding_length"]
    head_width = fields.get("attention.key_length", width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if fields.get(key, head_width) != head_width:
            raise UnsupportedError(
                f"{key} {show_value(fields[key])} differs from the head width {show_value(head_width)}"
            )
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", heads),
        "head_dim": head_width,
        "intermediate_size": fields["feed_forward_length"],
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields.get("rope.freq_base", 10_000.0), **read_rope_scaling(fields)},
        "attention_bias": "blk.0.attn_output.bias" in shapes,
    }


def read_rope_scaling(fields: Json) -> Json:
    """Linear scaling of rotary frequencies. Llama 3's scaling is stored in a tensor, not in the metadata."""
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear", 1.0))
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in ("linear", "none"):
        raise UnsupportedError(f"rope.scaling.type {show_value(kind)} is not known; known are none and linear")
    return {} if kind == "none" or factor in (0.0, 1.0) else {"rope_type": "linear", "factor": factor}


def read_gemma3(fields: Json, shapes: Shapes) -> Json:
    """The configuration of Gemma 3. The converter does not write that one layer in six has full attention; it is the
    family's default."""
    shape = read_llama(fields, shapes)
    window = fields.get("attention.sliding_window", 0)
    scores = shape["hidden_size"] // shape["num_attention_heads"]
    return shape | {
        "sliding_window": window,
        "rope_local_base_freq": fields.get("rope.freq_base_swa", LOCAL_BASE),
        "query_pre_attn_scalar": scores if fields["block_count"] == GEMMA_27B_LAYERS else shape["head_dim"],
    }


def read_gpt2(fields: Json, shapes: Shapes) -> Json:
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "n_embd": fields["embedding_length"],
        "n_layer": fields["block_count"],
        "n_head": fields["attention.head_count"],
        "n_inner": fields["feed_forward_length"],
        "n_positions": shapes["position_embd.weight"][0],
        "layer_norm_epsilon": fields["attention.layer_norm_epsilon"],
    }


def read_bert(fields: Json, shapes: Shapes) -> Json:
    """The configuration of BERT, and of RoBERTa and DistilBERT, which the converter writes as BERT."""
    if fields.get("attention.causal"):
        raise UnsupportedError("attention.causal: only the bidirectional form of this family is known")
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields["embedding_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": fields["attention.head_count"],
        "intermediate_size": fields["feed_forward_length"],
        "max_position_embeddings": shapes["position_embd.weight"][0],
        "layer_norm_eps": fields["attention.layer_norm_epsilon"],
        "type_vocab_size": shapes.get("token_types.weight", (0,))[0],
    }


GGUF_ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", read_llama, interleaved=True),
    "qwen2": GgufArchitecture("qwen2", read_llama),
    "qwen3": GgufArchitecture("qwen3", read_llama),
    "gemma3": GgufArchitecture("gemma3_text", read_gemma3),
    "gpt2": GgufArchitecture("gpt2", read_gpt2),
    "bert": GgufArchitecture("bert", read_bert, ENCODER),
}  # by `general.architecture`

"""BERT with rotary positions, as Jina's third embeddings, Nomic and GTE have it: names of weights and fused matrices.

Weights have two sets of names: those of transformers, and those of the published code.
"""

import re
from dataclasses import replace

from torch import Tensor

from ..network.model_config import ModelConfig
from . import bert
from .family import Json, NamedTensors, read_rope

RENAMES = (
    (r"^embeddings\.word_embeddings\.", "tokens."),
    (r"^embeddings\.position_embeddings\.", "position.table."),
    (r"^embeddings\.token_type_embeddings\.", "segments."),
    (r"^(embeddings\.LayerNorm|emb_ln)\.", "embedding_norm."),
    (r"^(layers|encoder\.layers|encoder\.layer)\.", "blocks."),
    (r"\.self_attn\.q_proj\.", ".attention.query."),
    (r"\.self_attn\.k_proj\.", ".attention.key."),
    (r"\.self_attn\.v_proj\.", ".attention.value."),
    (r"\.(self_attn\.o_proj|attention\.o_proj|attn\.out_proj|mixer\.out_proj)\.", ".attention.output."),
    (r"\.(post_attention_layernorm|norm1|attn_ln)\.", ".attention_norm."),
    (r"\.(post_mlp_layernorm|norm2|mlp_ln)\.", ".mlp_norm."),
    (r"\.mlp\.(up|gate|down)_proj\.", r".mlp.\1."),
    (r"\.mlp\.fc1[1]?\.", ".mlp.up."),
    (r"\.mlp\.fc12\.", ".mlp.gate."),
    (r"\.mlp\.fc2\.", ".mlp.down."),
)
DROP = bert.DROP + r"|rotary_emb\.|inv_freq$|\.lora_[AB]$"
FUSED = re.compile(r"\.(attn\.Wqkv|mixer\.Wqkv|attention\.qkv_proj|mlp\.up_gate_proj)\.")
PARTS = {
    "mlp.up_gate_proj": ("mlp.up", "mlp.gate"),
    **dict.fromkeys(
        ("attn.Wqkv", "mixer.Wqkv", "attention.qkv_proj"), ("attention.query", "attention.key", "attention.value")
    ),
}


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Split the fused matrices. A weight with adapters for tasks beside it is the one without them."""
    name = re.sub(r"\.parametrizations\.weight\.original$", ".weight", name)
    found = FUSED.search(name)
    if found is None:
        return [(name, tensor)]
    parts = PARTS[found[1]]
    return [(name.replace(found[1], part), piece) for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True)]


def convert_with_bias(name: str, tensor: Tensor) -> NamedTensors:
    """As `convert_weight`, for a gated MLP in which only the last layer has a bias: that of the others is 0."""
    pieces = convert_weight(name, tensor)
    inner = [(ours, piece) for ours, piece in pieces if re.search(r"\.mlp\.(up|gate)(_proj)?\.weight$", ours)]
    return pieces + [(ours.removesuffix("weight") + "bias", piece.new_zeros(len(piece))) for ours, piece in inner]


def model_config(hf: Json, base: float) -> ModelConfig:
    """`base`: the rotary base if the configuration has none."""
    frequency, scaling = read_rope({"rope_theta": base, **hf})
    shape = bert.model_config({**hf, "position_embedding_type": "absolute"})
    return replace(shape, position="rotary", rope_base=frequency, rope_scaling=scaling)

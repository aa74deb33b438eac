"""What the families with layers of the gated delta rule (arXiv:2412.06464) have in common: how their files name tensors
and sizes."""

import re

import torch
from torch import Tensor

from ..network.model_config import MixerConfig, MixerName
from .family import Json, NamedTensors, Renames, read_sizes

RENAMES: Renames = (
    (r"\.linear_attn\.([qkv])_proj\.", r".linear_attn.\1."),
    (r"\.linear_attn\.q\.", ".attention.query."),
    (r"\.linear_attn\.k\.", ".attention.key."),
    (r"\.linear_attn\.v\.", ".attention.value."),
    (r"\.linear_attn\.(in_proj_z|g_proj)\.", ".attention.gate."),
    (r"\.linear_attn\.(in_proj_b|b_proj)\.", ".attention.rate."),
    (r"\.linear_attn\.(in_proj_a|a_proj)\.", ".attention.decay."),
    (r"\.linear_attn\.q_conv1d\.weight$", ".attention.query_taps"),
    (r"\.linear_attn\.k_conv1d\.weight$", ".attention.key_taps"),
    (r"\.linear_attn\.v_conv1d\.weight$", ".attention.value_taps"),
    (r"\.linear_attn\.A_log$", ".attention.log_decay"),
    (r"\.linear_attn\.dt_bias$", ".attention.step_bias"),
    (r"\.linear_attn\.(o_)?norm\.weight$", ".attention.norm_weight"),
    (r"\.linear_attn\.(out|o)_proj\.", ".attention.output."),
)
KINDS: dict[str, MixerName] = {"linear_attention": "delta", "full_attention": "attention"}
JOINED = re.compile(r"(.*\.linear_attn)\.(conv1d|in_proj_qkv)\.weight$")
LINEAR_SIZES = ("linear_num_value_heads", "linear_value_head_dim", "linear_num_key_heads", "linear_key_head_dim")


def read_recurrent(hf: Json, eps: float) -> MixerConfig:
    heads, head_width, key_heads, key_width = read_sizes(hf, *LINEAR_SIZES)
    return MixerConfig(
        kernel=hf.get("linear_conv_kernel_dim", 4),
        heads=heads,
        head_width=head_width,
        key_heads=key_heads,
        key_width=key_width,
        norm_eps=eps,
    )


def split_joined(sizes: MixerConfig, name: str, tensor: Tensor) -> NamedTensors:
    """Rows of queries, keys and values out of the matrix that has all of them, and out of the convolution's factors
    [C, 1, K]."""
    if name.endswith("_conv1d.weight"):
        return [(name, tensor.squeeze(1))]
    found = JOINED.match(name)
    if found is None:
        return [(name, tensor)]
    keys, inner = sizes.key_heads * sizes.key_width, sizes.heads * sizes.head_width
    parts = zip("qkv", torch.split(tensor, [keys, keys, inner]), strict=True)
    if found[2] == "conv1d":
        return [(f"{found[1]}.{part}_conv1d.weight", piece.squeeze(1)) for part, piece in parts]
    return [(f"{found[1]}.{part}.weight", piece) for part, piece in parts]

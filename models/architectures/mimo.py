"""MiMo-V2-Flash (https://huggingface.co/XiaomiMiMo/MiMo-V2-Flash): windows in most layers, with sinks and twice as many
key heads as in the others, and values narrower than keys.

All layers get the form of those with a window: key heads of the others are written twice, their sinks take no share of
the softmax, and values are padded with zeros. The answers are the same; the cache is larger.
"""

import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from . import experts, llama
from .family import (
    Family,
    Json,
    NamedTensors,
    layer_numbers,
    read_rope,
    read_rotary_width,
    read_sizes,
    read_windowed_layers,
)
from .qwen_moe import routed_experts

LOCAL = "sliding_attention"
RENAMES = (
    (r"\.self_attn\.(sinks|attention_sink_bias)$", ".attention.sinks"),
    *experts.RENAMES,
    *llama.RENAMES,
)
ATTENTION = re.compile(r"^layers\.(\d+)\.self_attn\.([qkvo])_proj\.(weight|bias)$")
DEFAULTS: Json = {
    "head_dim": 192,
    "v_head_dim": 128,
    "sliding_window": 129,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-5,
    "attention_value_scale": 0.707,
}
ROTATION: Json = {
    "full_attention": {"rope_theta": 5_000_000.0},
    LOCAL: {"rope_theta": 10_000.0},
}  # unless the configuration has its own
SHARE: Json = {"partial_rotary_factor": 0.334}


def fill_defaults(hf: Json) -> Json:
    """The configuration with what it leaves out. `sliding_window_size` counts the tokens before a row."""
    rotation = hf.get("rope_parameters") or ROTATION
    rotation = {kind: {**SHARE, **each} if isinstance(each, dict) else each for kind, each in rotation.items()}
    hf = {**DEFAULTS, **hf, "rope_parameters": rotation, "mlp_bias": False}
    if (size := hf.get("sliding_window_size")) is not None:
        hf["sliding_window"] = size + 1
    hf["routed_scaling_factor"] = 1.0 if hf.get("routed_scaling_factor") is None else hf["routed_scaling_factor"]
    return hf


def windowed_layers(hf: Json) -> tuple[bool, ...]:
    """All layers but the first and every sixth, unless `layer_types` lists them."""
    layers = layer_numbers(hf["num_hidden_layers"])
    return read_windowed_layers(hf) or tuple(layer > 0 and bool((layer + 1) % 6) for layer in layers)


def model_config(hf: Json) -> ModelConfig:
    hf = fill_defaults(hf)
    kinds = hf.get("mlp_layer_types")
    layers = tuple(kind == "sparse" for kind in kinds) if kinds else experts.layers_from(hf, 1)
    shape = llama.llama_config(hf)
    if hf["v_head_dim"] > shape.head_width:
        message = f"v_head_dim is {show_value(hf['v_head_dim'])}, which should be {shape.head_width} at most"
        raise UnsupportedError(f"{message}, the width of a key")
    local_base, scaling = read_rope(hf, LOCAL)
    local = read_rotary_width({"rope_parameters": hf["rope_parameters"].get(LOCAL) or {}}, shape.head_width)
    if scaling is not None or local != shape.rotary_width:
        raise UnsupportedError(f"rope_parameters: a scaling or a share of features of {LOCAL} alone is not known here")
    return replace(
        shape,
        kv_heads=2 * shape.kv_heads,
        window=hf["sliding_window"],
        windowed=windowed_layers(hf),
        window_rope_base=local_base,
        output_bias=False,
        sinks=True,
        experts=replace(routed_experts({**hf, "n_shared_experts": 0}), layers=layers),
    )


@dataclass(frozen=True)
class MimoRows:
    """The rows of the matrices of attention in the files: heads, the widths of keys and of values, the number by which
    values are multiplied, and which layers have twice the key heads."""

    heads: int
    kv_heads: int
    width: int
    value_width: int
    value_scale: float
    windowed: tuple[bool, ...]

    def convert(self, name: str, tensor: Tensor) -> NamedTensors:
        """The tensors of a layer's attention; others as they are, but for fused experts."""
        found = ATTENTION.match(name)
        if found is None:
            return experts.split_experts(name, tensor)
        layer, part = int(found[1]), found[2]
        is_windowed = layer < len(self.windowed) and self.windowed[layer]
        if part == "q":
            sinks = tensor.new_full((self.heads,), float("-inf"))
            extra = [] if is_windowed or found[3] == "bias" else [(f"layers.{layer}.self_attn.sinks", sinks)]
            return [(name, tensor), *extra]
        if part == "o":
            return [(name, self.pad_values(tensor.t(), self.heads).t())]
        kept = self.kv_heads * (2 if is_windowed else 1)
        rows = tensor if part == "k" else self.pad_values(tensor * self.value_scale, kept)
        return [(name, rows if is_windowed else self.write_twice(rows))]

    def pad_values(self, rows: Tensor, heads: int) -> Tensor:
        """[heads * value_width, ...] to [heads * width, ...], with zeros after the values of each head."""
        by_head = rows.reshape(heads, self.value_width, *rows.shape[1:])
        zeros = by_head.new_zeros(heads, self.width - self.value_width, *rows.shape[1:])
        return torch.cat((by_head, zeros), dim=1).flatten(0, 1)

    def write_twice(self, rows: Tensor) -> Tensor:
        """[KV * D, ...] to [2 * KV * D, ...], each head after itself."""
        return rows.reshape(self.kv_heads, -1, *rows.shape[1:]).repeat_interleave(2, dim=0).flatten(0, 1)


def choose_variant(family: Family, hf: Json) -> Family:
    hf = fill_defaults(hf)
    names = "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"
    heads, kv_heads, width, value_width = read_sizes(hf, *names)
    scale = 1.0 if hf["attention_value_scale"] is None else float(hf["attention_value_scale"])
    rows = MimoRows(heads, kv_heads, width, value_width, scale, windowed_layers(hf))
    return replace(family, convert=rows.convert)


MIMO_V2_FLASH = Family(
    name="mimo_v2_flash",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("MiMoV2Flash", ()),
    drop=rf"{llama.DROP}|^mtp\.",
    variant=choose_variant,
    rotates_share=True,
    rope_by_layer=True,
)

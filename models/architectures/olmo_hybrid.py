"""OLMo Hybrid: three of four layers follow the gated delta rule, with norms before each part; layers with attention
have them after each part, as in OLMo 3 (https://huggingface.co/allenai)."""

import re
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import MixerConfig, MixerName, ModelConfig
from . import delta_net, llama
from .family import Family, Json, NamedTensors, check_required_values, layer_numbers, read_mixers, rope_parameters

NORM_EPS = 1e-5  # of the norm within a recurrent layer
SIZES_BY_HEAD = ("linear_num_key_heads", "linear_num_value_heads")  # as many as attention has, unless they are given
RENAMES = (*delta_net.RENAMES, *llama.RENAMES)
NORM = re.compile(r"(layers\.(\d+))\.(\w+_layer_?norm)\.weight$")
# The names of norms, to those in Llama. In a layer with attention a norm of the same name has another place.
RECURRENT_NORMS = {"attention_layer_norm": "input_layernorm", "feedforward_layer_norm": "post_attention_layernorm"}
ATTENTION_NORMS = {
    "post_attention_layernorm": "input_layernorm",
    "feedforward_layer_norm": "input_layernorm",  # as transformers 5 saves it
    "post_feedforward_layernorm": "post_attention_layernorm",
}


def fill_sizes(hf: Json) -> Json:
    """The configuration with the sizes of recurrent layers that follow from others."""
    filled = {**hf, **{key: hf.get(key) or hf["num_attention_heads"] for key in SIZES_BY_HEAD}}
    key_width = hf.get("linear_key_head_dim") or int(0.75 * hf["hidden_size"] / filled["linear_num_key_heads"])
    value_width = hf.get("linear_value_head_dim") or 2 * key_width
    return {**filled, "linear_key_head_dim": key_width, "linear_value_head_dim": value_width}


def read_layers(hf: Json) -> tuple[MixerName, ...]:
    """What the layers have, from `layer_types`; otherwise the last of every four has attention, or the last of all."""
    if hf.get("layer_types"):
        return read_mixers(hf, delta_net.KINDS)
    depth = len(layer_numbers(hf["num_hidden_layers"]))
    return tuple(
        "attention" if layer % 4 == 3 or (depth < 4 and layer == depth - 1) else "delta" for layer in range(depth)
    )


def model_config(hf: Json) -> ModelConfig:
    """Published files have null as the base of the rotation, and no rotation."""
    check_required_values(hf, {"hidden_act": "silu"})
    recurrent = delta_net.read_recurrent(fill_sizes(hf), NORM_EPS)
    has_negative = hf.get("linear_allow_neg_eigval", True)
    parameters = {"rope_theta": hf.get("rope_theta", 10_000.0), **rope_parameters(hf)}
    return replace(
        llama.llama_config({**hf, "head_dim": None, "mlp_bias": False}),
        position="none" if parameters["rope_theta"] is None else "rotary",
        norm_order="inner",
        query_key_norm="joint",
        mixers=read_layers(hf),
        recurrent=replace(recurrent, update_scale=2.0 if has_negative else 1.0, is_pre_norm=True),
    )


def convert_weight(mixers: tuple[MixerName, ...], sizes: MixerConfig, name: str, tensor: Tensor) -> NamedTensors:
    """Name a norm by its place, which depends on the layer; take the convolution's factors apart."""
    if (found := NORM.match(name)) and int(found[2]) < len(mixers):
        names = ATTENTION_NORMS if mixers[int(found[2])] == "attention" else RECURRENT_NORMS
        return [(f"{found[1]}.{names.get(found[3], found[3])}.weight", tensor)]
    return delta_net.split_joined(sizes, name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    sizes = delta_net.read_recurrent(fill_sizes(hf), NORM_EPS)
    return replace(family, convert=partial(convert_weight, read_layers(hf), sizes))


OLMO_HYBRID = Family(
    name="olmo_hybrid",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads=llama.llama_heads("OlmoHybrid", ()),
    drop=llama.DROP,
    variant=choose_variant,
)

"""The text parts of Qwen2-VL, Qwen2.5-VL and Qwen3-VL, and of Qwen3-VL with experts. For text alone, their rotation by
three coordinates is the rotation by the position."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import ModelConfig
from . import experts, llama, qwen_moe
from .family import Family, Json, NamedTensors, read_sizes, rope_parameters
from .text_part import wrap_family


def qwen2_text_config(hf: Json) -> ModelConfig:
    return llama.qwen2_config({"rms_norm_eps": 1e-5, **plain_rotation(hf)})


def qwen3_text_config(hf: Json) -> ModelConfig:
    return llama.qwen3_config({"head_dim": 128, **plain_rotation(hf, 500_000.0), "use_sliding_window": False})


def plain_rotation(hf: Json, base: float = 1_000_000.0) -> Json:
    """The configuration without the coordinates of images, whose kind is named "mrope" in older ones."""
    parameters = dict(rope_parameters(hf))
    if parameters.get("rope_type", parameters.get("type")) == "mrope":
        parameters |= {"rope_type": "default", "type": "default"}
    return {"rope_theta": base, **hf, "rope_parameters": parameters, "rope_scaling": None}


def qwen3_moe_config(hf: Json) -> ModelConfig:
    hf = plain_rotation(hf, 500_000.0)
    return qwen_moe.qwen3_config({**hf, "use_sliding_window": False, "norm_topk_prob": True})


def turn_experts(width: int, name: str, tensor: Tensor) -> NamedTensors:
    """The experts' matrices, which published files have transposed: [E, W, 2 I] and [E, I, W]."""
    if found := experts.FUSED.match(name):
        inputs = tensor.size(2) if found[2] == "gate_up_proj" else tensor.size(1)
        if inputs != width:
            tensor = tensor.transpose(1, 2)
    return experts.split_experts(name, tensor)


def choose_variant(family: Family, hf: Json) -> Family:
    [width] = read_sizes(hf, "hidden_size")
    return replace(family, convert=partial(turn_experts, width))


QWEN3_MOE_TEXT = replace(qwen_moe.QWEN3_MOE, name="qwen3_vl_moe_text", config=qwen3_moe_config, variant=choose_variant)
QWEN2_TEXT = replace(llama.QWEN2, name="qwen2_vl_text", config=qwen2_text_config)
QWEN3_TEXT = replace(llama.QWEN3, name="qwen3_vl_text", config=qwen3_text_config)
QWEN2_IMAGES = wrap_family("qwen2_vl", "Qwen2VL", (QWEN2_TEXT,))
QWEN2_5_IMAGES = wrap_family("qwen2_5_vl", "Qwen2_5_VL", (QWEN2_TEXT,))
QWEN3_IMAGES = wrap_family("qwen3_vl", "Qwen3VL", (QWEN3_TEXT,))
QWEN3_MOE_IMAGES = wrap_family("qwen3_vl_moe", "Qwen3VLMoe", (QWEN3_MOE_TEXT,))

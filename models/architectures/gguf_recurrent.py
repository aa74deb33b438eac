"""How GGUF files store networks with recurrent layers: metadata becomes a configuration with Hugging Face's names of
fields, and what the converter did to the layers' tensors is undone.

`fields` are keys without the architecture's name; a missing field has llama.cpp's default. What a layer has follows
from the names of its tensors.
"""

import re

import torch
from torch import Tensor

from ..network.model_config import MixerConfig, ModelConfig
from .family import NamedTensors, layer_numbers
from .gguf_generators import Json, Shapes, read_decoder, read_granite, read_llama
from .gguf_mixtures import SIGMOID, ExpertFields, has_choice_bias, read_granite_moe, shared_width
from .qwen_next import split_gate, split_groups

BLOCK = re.compile(r"(blk\.(\d+))\.(.+)$")
STATE_SPACE = {
    "ssm_in.weight": "input.weight",
    "ssm_in.bias": "input.bias",
    "ssm_out.weight": "output.weight",
    "ssm_out.bias": "output.bias",
    "ssm_conv1d.weight": "taps",
    "ssm_conv1d.bias": "taps_bias",
    "ssm_dt.bias": "step_bias",
    "ssm_d": "skip",
    "ssm_a": "log_decay",
    "ssm_norm.weight": "norm_weight",
}
CONVOLUTION = {
    "shortconv.conv.weight": "taps",
    "shortconv.conv.bias": "taps_bias",
    "shortconv.in_proj.weight": "input.weight",
    "shortconv.in_proj.bias": "input.bias",
    "shortconv.out_proj.weight": "output.weight",
    "shortconv.out_proj.bias": "output.bias",
}
DELTA = {
    "attn_gate.weight": "gate.weight",
    "ssm_beta.weight": "rate.weight",
    "ssm_alpha.weight": "decay.weight",
    "ssm_out.weight": "output.weight",
    "ssm_dt.bias": "step_bias",
    "ssm_a": "log_decay",
    "ssm_norm.weight": "norm_weight",
}
NAMES = {"state_space": STATE_SPACE, "convolution": CONVOLUTION, "delta": DELTA}
BY_VALUE_HEAD = ("value", "gate", "rate", "decay", "step_bias", "log_decay", "value_taps")  # whose rows are of heads
GROUPED_NAMES = {"q": "query", "k": "key", "v": "value", "in_proj_z": "gate", "in_proj_b": "rate", "in_proj_a": "decay"}
FLAT = ("skip", "log_decay", "norm_weight")  # stored with further dimensions


def split_recurrent(config: ModelConfig, is_tiled: bool, name: str, tensor: Tensor) -> NamedTensors:
    """The parts of a tensor of a recurrent layer, or of attention beside such layers, under our names behind the file's
    name of the block; empty for any other tensor. `is_tiled`: of the value heads, the first ones of all key heads come
    first."""
    found, sizes = BLOCK.match(name), config.recurrent
    if found is None or sizes is None or int(found[2]) >= config.depth:
        return []
    block, leaf, mixer = found[1], found[3], config.mixer(int(found[2]))
    if mixer == "none" and leaf == "attn_norm.weight":
        return [(f"{block}.ffn_norm.weight", tensor)]
    if mixer == "attention" and config.attention_gate and leaf == "attn_q.weight":
        pieces = split_gate(f"{block}.q_proj.weight", tensor, config.heads)
        return [
            (piece.replace("q_proj", "attn_q").replace("gate_proj", "attention.gate"), rows) for piece, rows in pieces
        ]
    if mixer not in NAMES:
        return []
    pieces = split_delta(sizes, leaf, tensor) if mixer == "delta" else []
    if not pieces and leaf in NAMES[mixer]:
        pieces = [(NAMES[mixer][leaf], tensor)]
    restored = [(part, restore_numbers(sizes, is_tiled and mixer == "delta", part, value)) for part, value in pieces]
    return [(f"{block}.attention.{part}", value) for part, value in restored]


def split_delta(sizes: MixerConfig, leaf: str, tensor: Tensor) -> NamedTensors:
    """The parts of a tensor in which several are joined."""
    keys, inner = sizes.key_heads * sizes.key_width, sizes.heads * sizes.head_width
    if leaf in ("ssm_in.weight", "ssm_ba.weight"):  # as published files of Qwen3-Next have them
        grouped = split_groups(sizes, "", tensor, has_rates=leaf == "ssm_ba.weight")
        return [(f"{GROUPED_NAMES[part.split('.')[1]]}.weight", rows) for part, rows in grouped]
    if leaf in ("attn_qkv.weight", "ssm_conv1d.weight"):
        suffix = ".weight" if leaf == "attn_qkv.weight" else "_taps"
        rows = torch.split(tensor, [keys, keys, inner])
        return [(f"{part}{suffix}", piece) for part, piece in zip(("query", "key", "value"), rows, strict=True)]
    return []


def restore_numbers(sizes: MixerConfig, is_tiled: bool, part: str, tensor: Tensor) -> Tensor:
    """The numbers as we have them: decays as logarithms, value heads in the order of their key heads."""
    if part == "log_decay":
        tensor = (-tensor).log()
    if part in FLAT:
        tensor = tensor.flatten()
    if not is_tiled:
        return tensor
    if part.removesuffix(".weight") in BY_VALUE_HEAD:
        return group_heads(tensor, sizes)
    return group_heads(tensor.T, sizes).T if part == "output.weight" else tensor


def group_heads(tensor: Tensor, sizes: MixerConfig) -> Tensor:
    """[H * ..., ...] with the value heads of a key head side by side."""
    shape = (sizes.heads // sizes.key_heads, sizes.key_heads, -1, *tensor.shape[1:])
    return tensor.reshape(shape).transpose(0, 1).reshape(tensor.shape)


def list_kinds(fields: Json, shapes: Shapes, marks: dict[str, str], depth: int = 0) -> list[str]:
    """The kind of each layer: that of the first tensor in `marks` that the layer has, else attention."""
    layers = layer_numbers(depth or fields["block_count"])
    return [
        next((kind for mark, kind in marks.items() if f"blk.{layer}.{mark}" in shapes), "full_attention")
        for layer in layers
    ]


def largest(value: int | list[int]) -> int:
    """The largest of the numbers of layers; 0 stands for a layer without such a part."""
    return max(value, default=0) if isinstance(value, list) else value


def read_lfm2(fields: Json, shapes: Shapes) -> Json:
    kinds = list_kinds(fields, shapes, {"shortconv.conv.weight": "conv"})
    head_count = {"attention.head_count_kv": largest(fields["attention.head_count_kv"])}
    shape = read_llama({**fields, **head_count}, shapes)
    return shape | {
        "layer_types": kinds,
        "conv_L_cache": fields["shortconv.l_cache"],
        "conv_bias": any(name.endswith(".shortconv.in_proj.bias") for name in shapes),
        "norm_eps": shape["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def read_lfm2_moe(fields: Json, shapes: Shapes) -> Json:
    mixture = ExpertFields.of(fields, shapes, SIGMOID)
    return read_lfm2(fields, shapes) | {
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "moe_intermediate_size": mixture.width,
        "num_dense_layers": fields.get("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.get("expert_weights_scale") or 1.0,
        "use_expert_bias": has_choice_bias(shapes),
    }


def read_mamba2(fields: Json, shapes: Shapes) -> Json:
    heads = fields["ssm.time_step_rank"]
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields["embedding_length"],
        "num_hidden_layers": fields["block_count"],
        "layer_norm_epsilon": fields["attention.layer_norm_rms_epsilon"],
        "num_heads": heads,
        "head_dim": fields["ssm.inner_size"] // heads,
        "state_size": fields["ssm.state_size"],
        "n_groups": fields.get("ssm.group_count") or 1,
        "conv_kernel": fields["ssm.conv_kernel"],
        "use_bias": "blk.0.ssm_in.bias" in shapes,
        "use_conv_bias": "blk.0.ssm_conv1d.bias" in shapes,
    }


def read_granite_hybrid(fields: Json, shapes: Shapes) -> Json:
    """Granite 4, and Bamba, whose layers with attention are rotated; that is written as the kind of its scaling."""
    kinds = list_kinds(fields, shapes, {"ssm_in.weight": "linear_attention"})
    fields = {**fields, "attention.head_count_kv": largest(fields["attention.head_count_kv"])}
    shape, heads = read_mamba2(fields, shapes), fields["ssm.time_step_rank"]
    has_experts = bool(fields.get("expert_count"))
    if not has_experts:
        width = shapes["blk.0.ffn_up.weight"][0]
        granite = read_granite(fields, shapes) | {"num_local_experts": 0, "shared_intermediate_size": width}
    else:
        granite = read_granite_moe(fields, shapes)
    return granite | {
        "layer_types": kinds,
        "position_embedding_type": "rope" if fields.get("rope.scaling.finetuned") else None,
        "mamba_n_heads": heads,
        "mamba_d_head": shape["head_dim"],
        "mamba_n_groups": shape["n_groups"],
        "mamba_d_state": shape["state_size"],
        "mamba_d_conv": shape["conv_kernel"],
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in shapes),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in shapes),
    }


def read_nemotron_hybrid(fields: Json, shapes: Shapes) -> Json:
    marks = {"ssm_in.weight": "linear_attention", "ffn_up_exps.weight": "moe", "ffn_up.weight": "mlp"}
    depth = fields["block_count"] - fields.get("nextn_predict_layers", 0)
    eps = fields.get("attention.layer_norm_rms_epsilon", fields.get("attention.layer_norm_epsilon"))
    shape = read_mamba2({**fields, "attention.layer_norm_rms_epsilon": eps}, shapes)
    mixture: Json = {}
    if fields.get("expert_count"):
        experts = ExpertFields.of({**fields, "feed_forward_length": 0}, shapes, SIGMOID)
        mixture = {
            "n_routed_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.width,
            "moe_shared_expert_intermediate_size": shared_width(shapes),
            "routed_scaling_factor": fields.get("expert_weights_scale") or 1.0,
            "norm_topk_prob": fields.get("expert_weights_norm", True),
            "n_group": fields.get("expert_group_count") or 1,
            "topk_group": fields.get("expert_group_used_count") or 1,
        }
    return {
        **{key: shape[key] for key in ("vocab_size", "hidden_size", "layer_norm_epsilon", "n_groups", "conv_kernel")},
        **mixture,
        "layers_block_type": list_kinds(fields, shapes, marks, depth),
        "num_attention_heads": fields["attention.head_count"],
        "num_key_value_heads": largest(fields["attention.head_count_kv"]),
        "head_dim": fields["attention.key_length"],
        "intermediate_size": largest(fields["feed_forward_length"]) or 1,
        "max_position_embeddings": fields["context_length"],
        "time_step_min": 0.0,  # llama.cpp does not limit steps
        "mamba_num_heads": shape["num_heads"],
        "mamba_head_dim": shape["head_dim"],
        "ssm_state_size": shape["state_size"],
        "use_bias": any(name.endswith(".ssm_in.bias") for name in shapes),
        "use_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in shapes),
    }


def read_qwen_hybrid(fields: Json, shapes: Shapes) -> Json:
    """Qwen3-Next and Qwen3.5. The file counts the layers that predict further tokens, too."""
    depth, heads = fields["block_count"] - fields.get("nextn_predict_layers", 0), fields["ssm.time_step_rank"]
    width = fields.get("feed_forward_length") or fields.get("expert_feed_forward_length")
    shape = read_decoder({**fields, "feed_forward_length": width}, shapes)
    mixture: Json = {"num_experts": 0}
    if fields.get("expert_count"):
        experts = ExpertFields.of(fields, shapes)
        mixture = {
            "num_experts": experts.count,
            "num_experts_per_tok": experts.chosen,
            "moe_intermediate_size": experts.width,
            "shared_expert_intermediate_size": shared_width(shapes),
            "norm_topk_prob": fields.get("expert_weights_norm", True),
        }
    return {
        **shape,
        **mixture,
        "num_hidden_layers": depth,
        "layer_types": list_kinds(fields, shapes, {"ssm_out.weight": "linear_attention"}, depth),
        "linear_conv_kernel_dim": fields["ssm.conv_kernel"],
        "linear_key_head_dim": fields["ssm.state_size"],
        "linear_num_key_heads": fields["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_value_head_dim": fields["ssm.inner_size"] // heads,
    }

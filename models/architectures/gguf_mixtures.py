"""How GGUF files store mixtures of experts and latent attention: metadata becomes a configuration with Hugging Face's
names of fields, tensors of all experts become one matrix for each.

`fields` are keys without the architecture's name; a missing field has llama.cpp's default.
"""

import re
from dataclasses import dataclass

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import LatentConfig, ModelConfig
from .deepseek import LatentRows
from .experts import list_experts
from .family import NamedTensors
from .gguf_generators import Json, Shapes, read_decoder, read_granite, read_llama, read_rope_scaling, read_windowed

FUSED = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down|gate_up)_exps\.(weight|bias)$")
SEPARATE = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)\.(\d+)\.(weight|bias)$")  # of older files
SHARED = re.compile(r"(blk\.\d+)\.ffn_(gate|up|down)_shexp\.(weight|bias)$")
LATENT = re.compile(r"(blk\.\d+)\.attn_(q|q_b|kv_a_mqa|kv_b|k_b|v_b)\.(weight|bias)$")
BLOCK = re.compile(r"blk\.(\d+)\.")
SINGLE = {
    ".ffn_gate_inp.": ".mlp.router.",
    ".ffn_gate_inp_shexp.": ".mlp.shared_gate.",
    ".exp_probs_b.bias": ".mlp.choice_bias",
    ".attn_sinks.weight": ".attention.sinks",
    ".attn_q_a.": ".attention.query_down.",
    ".attn_q_a_norm.": ".attention.query_down_norm.",
    ".attn_kv_a_norm.": ".attention.down_norm.",
}
SOFTMAX, SIGMOID = 1, 2  # as llama.cpp numbers the functions of scores
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"


def split_mixture(config: ModelConfig, name: str, tensor: Tensor) -> NamedTensors:
    """The parts of a tensor of experts or of latent attention, under our names behind the file's name of the block.
    Other tensors as they are."""
    if found := FUSED.match(name):
        parts = ("gate", "up") if found[2] == "gate_up" else (found[2],)
        return [
            (f"{found[1]}.mlp.experts.{number}.{part}.{found[3]}", piece)
            for number, matrix in enumerate(list_experts(tensor))
            for part, piece in zip(parts, matrix.chunk(len(parts)), strict=True)
        ]
    if found := SEPARATE.match(name):
        return [(f"{found[1]}.mlp.experts.{found[3]}.{found[2]}.{found[4]}", tensor)]
    if found := SHARED.match(name):
        return [(f"{found[1]}.mlp.shared.{found[2]}.{found[3]}", tensor)]
    if config.latent is not None and (found := LATENT.match(name)):
        pieces = split_latent(config, config.latent, found[2], tensor)
        return [(f"{found[1]}.attention.{part}.{found[3]}", piece) for part, piece in pieces]
    for theirs, ours in SINGLE.items():
        if theirs in name:
            # The converter drops the dimension of the gate's one output.
            rows = tensor[None] if ours == ".mlp.shared_gate." and tensor.dim() == 1 else tensor
            return [(name.replace(theirs, ours), rows)]
    return [(name, tensor)]


def split_latent(config: ModelConfig, latent: LatentConfig, module: str, tensor: Tensor) -> NamedTensors:
    """The parts of a matrix of latent attention. Newer files have the matrices of keys, transposed [H, rank, plain],
    and of values [H, value, rank], older ones both in one."""
    plain = config.head_width - config.rotary_width
    rows = LatentRows(config.heads, latent.rank, plain, config.rotary_width, latent.value_width, interleaved=True)
    match module:
        case "q" | "q_b":
            return [("query", rows.reorder_query(tensor))]
        case "kv_a_mqa":
            return list(zip(("down", "key_rotated"), rows.split_down(tensor), strict=True))
        case "kv_b":
            return list(zip(("key", "value"), rows.split_up(tensor), strict=True))
        case "k_b":
            return [("key", tensor.transpose(1, 2).flatten(0, 1))]
        case _:
            return [("value", tensor.flatten(0, 1))]


def is_prediction_layer(config: ModelConfig, name: str) -> bool:
    """Whether a tensor belongs to a layer after the network's last one, which predicts further tokens in training."""
    found = BLOCK.match(name)
    return found is not None and int(found[1]) >= config.depth


@dataclass(frozen=True)
class ExpertFields:
    """The metadata of a mixture. `width` counts the inner features of an expert, `shared` the experts that all tokens
    use."""

    count: int
    chosen: int
    width: int
    shared: int

    @classmethod
    def of(cls, fields: Json, shapes: Shapes, gating: int = SOFTMAX) -> "ExpertFields":
        """UnsupportedError for another function of scores than `gating`."""
        if (stored := fields.get("expert_gating_func") or gating) != gating:
            raise UnsupportedError(f"expert_gating_func {show_value(stored)} is not known here; {gating} is")
        width = fields.get("expert_feed_forward_length") or fields["feed_forward_length"]
        return cls(fields["expert_count"], fields["expert_used_count"], width, shared_width(shapes) // width)


def shared_width(shapes: Shapes) -> int:
    """Inner features of the experts that all tokens use; 0: there are none."""
    return next((shape[0] for name, shape in shapes.items() if name.endswith(".ffn_up_shexp.weight") and shape), 0)


def read_mixtral(fields: Json, shapes: Shapes) -> Json:
    mixture = ExpertFields.of(fields, shapes)
    return read_llama(fields, shapes) | {
        "num_local_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "intermediate_size": mixture.width,
    }


def read_qwen_moe(fields: Json, shapes: Shapes) -> Json:
    """Qwen2 with experts does not divide weights by their sum, Qwen3 does."""
    mixture, is_newer = ExpertFields.of(fields, shapes), "blk.0.attn_q_norm.weight" in shapes
    return read_llama({"feed_forward_length": mixture.width, **fields}, shapes) | {
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "moe_intermediate_size": mixture.width,
        "shared_expert_intermediate_size": shared_width(shapes),
        "norm_topk_prob": fields.get("expert_weights_norm", is_newer),
        "qkv_bias": "blk.0.attn_q.bias" in shapes,
    }


def read_olmoe(fields: Json, shapes: Shapes) -> Json:
    mixture = ExpertFields.of(fields, shapes)
    return read_llama(fields, shapes) | {
        "num_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "intermediate_size": mixture.width,
        "norm_topk_prob": fields.get("expert_weights_norm", False),
    }


def read_granite_moe(fields: Json, shapes: Shapes) -> Json:
    mixture = ExpertFields.of(fields, shapes)
    return read_granite(fields, shapes) | {
        "num_local_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "intermediate_size": mixture.width,
        "shared_intermediate_size": shared_width(shapes),
    }


def read_gpt_oss(fields: Json, shapes: Shapes) -> Json:
    """The bounds of YaRN are not rounded in this family; the file does not say so."""
    mixture = ExpertFields.of({**fields, "expert_gating_func": None}, shapes)
    shape = read_windowed({"feed_forward_length": mixture.width, **fields}, shapes)
    shape["rope_parameters"] |= {"truncate": False}
    return shape | {
        "num_local_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "intermediate_size": mixture.width,
        "sliding_window": fields.get("attention.sliding_window", 128),
    }


def read_routed(fields: Json, shapes: Shapes) -> Json:
    """GLM-4.5 and dots.llm1: logistic scores. The file counts the layers that predict further tokens, too."""
    return read_decoder(fields, shapes) | read_routed_experts(fields, shapes, SIGMOID)


def read_routed_experts(fields: Json, shapes: Shapes, gating: int) -> Json:
    mixture = ExpertFields.of(fields, shapes, gating)
    return {
        "num_hidden_layers": fields["block_count"] - fields.get("nextn_predict_layers", 0),
        "n_routed_experts": mixture.count,
        "num_experts_per_tok": mixture.chosen,
        "moe_intermediate_size": mixture.width,
        "n_shared_experts": mixture.shared,
        "first_k_dense_replace": fields.get("leading_dense_block_count", 0),
        "routed_scaling_factor": fields.get("expert_weights_scale") or 1.0,
        "norm_topk_prob": fields.get("expert_weights_norm", False),
        "n_group": fields.get("expert_group_count") or 1,
        "topk_group": fields.get("expert_group_used_count") or 1,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in shapes,
    }


def read_ernie_moe(fields: Json, shapes: Shapes) -> Json:
    mixture = ExpertFields.of(fields, shapes)
    return read_decoder(fields, shapes) | {
        "moe_num_experts": mixture.count,
        "moe_k": mixture.chosen,
        "moe_intermediate_size": mixture.width,
        "moe_num_shared_experts": mixture.shared,
        "moe_layer_start_index": fields.get("leading_dense_block_count", 0),
        "moe_layer_interval": fields.get("interleave_moe_layer_step", 1),
    }


def read_dbrx(fields: Json, shapes: Shapes) -> Json:
    """The configuration of DBRX, with its parts for attention and experts."""
    mixture = ExpertFields.of(fields, shapes)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "d_model": fields["embedding_length"],
        "n_layers": fields["block_count"],
        "n_heads": fields["attention.head_count"],
        "max_seq_len": fields["context_length"],
        "rope_parameters": {"rope_theta": fields.get("rope.freq_base", 10_000.0), **read_rope_scaling(fields)},
        "attn_config": {
            "kv_n_heads": fields.get("attention.head_count_kv", fields["attention.head_count"]),
            "clip_qkv": fields.get("attention.clamp_kqv"),
        },
        "ffn_config": {
            "ffn_hidden_size": mixture.width,
            "moe_num_experts": mixture.count,
            "moe_top_k": mixture.chosen,
        },
    }


def read_deepseek(fields: Json, shapes: Shapes) -> Json:
    """DeepSeek-V2 and V3. Newer files give the widths of a head under keys of their own: there `attention.key_length`
    is that of the narrow vector with the rotated features."""
    key, value = (
        fields.get(f"attention.{name}_length_mla") or fields[f"attention.{name}_length"] for name in ("key", "value")
    )
    rotated, heads = fields["rope.dimension_count"], fields["attention.head_count"]
    gating = SIGMOID if has_choice_bias(shapes) else SOFTMAX
    scaling = read_rope_scaling({name: each for name, each in fields.items() if name != LOG_MULTIPLIER})
    if scaling.get("rope_type") == "yarn" and fields.get(LOG_MULTIPLIER):
        # The converter multiplies the published value by 0.1.
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), 10.0 * fields[LOG_MULTIPLIER])
    mixture = read_routed_experts(fields, shapes, gating)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields["embedding_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": fields["feed_forward_length"],
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_parameters": {"rope_theta": fields.get("rope.freq_base", 10_000.0), **scaling},
        "attention_bias": "blk.0.attn_kv_a_mqa.bias" in shapes,
        "kv_lora_rank": fields["attention.kv_lora_rank"],
        "q_lora_rank": fields.get("attention.q_lora_rank") or None,
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "topk_method": "noaux_tc" if gating == SIGMOID else "group_limited_greedy",
        **mixture,
    }


def has_choice_bias(shapes: Shapes) -> bool:
    """Whether there is a bias for the choice of experts, as in DeepSeek-V3."""
    return any(name.endswith(".exp_probs_b.bias") for name in shapes)

"""How GGUF files describe the families: metadata becomes a configuration with Hugging Face's field names, tensors get
our names.

What the converter did to the numbers (llama.cpp's convert_hf_to_gguf.py) is undone in `rename_tensor`. Key names:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .family import NamedTensors, Renames, deinterleave_heads
from .gguf_generators import (
    read_cohere,
    read_decoder,
    read_gemma2,
    read_gemma3,
    read_gemma4,
    read_granite,
    read_llama,
    read_minicpm,
    read_olmo2,
    read_rope_scaling,
    read_seed_oss,
    read_stablelm,
    read_windowed,
)
from .gguf_mixtures import (
    has_choice_bias,
    is_prediction_layer,
    read_dbrx,
    read_deepseek,
    read_ernie_moe,
    read_gpt_oss,
    read_granite_moe,
    read_mixtral,
    read_olmoe,
    read_qwen_moe,
    read_routed,
    shared_width,
    split_mixture,
)
from .gguf_recurrent import (
    read_granite_hybrid,
    read_lfm2,
    read_lfm2_moe,
    read_mamba2,
    read_nemotron_hybrid,
    read_qwen_hybrid,
    split_recurrent,
)

Json = dict[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

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
    (r"^cls\.output\.", "head.out."),
    (r"^cls\.(weight|bias)$", r"head.dense.\1"),
)
BLOOM: Renames = ((r"^token_embd_norm\.", "embedding_norm."), *DECODER)
FALCON_NORMS: Renames = (
    (r"\.attn_norm\.", ".mlp_norm."),
    (r"\.attn_norm_2\.", ".attention_norm."),
)  # where a block has two
INNER: Renames = (
    (r"\.post_attention_norm\.", ".attention_norm."),
    (r"\.post_ffw_norm\.", ".mlp_norm."),
    *DECODER,
)
DBRX: Renames = ((r"\.attn_output_norm\.", ".mlp_norm."), *DECODER)
SEED_OSS: Renames = ((r"\.post_attention_norm\.", ".mlp_norm."), *DECODER)
GEMMA4: Renames = (
    (r"^per_layer_token_embd\.", "layer_embedding.table."),
    (r"^per_layer_model_proj\.", "layer_embedding.projection."),
    (r"^per_layer_proj_norm\.", "layer_embedding.norm."),
    (r"\.inp_gate\.", ".input_gate."),
    (r"\.proj\.", ".input_up."),
    (r"\.post_norm\.", ".input_norm."),
    (r"\.layer_output_scale\.weight$", ".scale"),
    (r"\.mlp\.router\.scale$", ".mlp.router_input"),
    (r"\.ffn_down_exps\.scale$", ".mlp.output_scales"),
    (r"\.pre_ffw_norm_2\.weight$", ".mlp.chosen_input"),
    (r"\.post_ffw_norm_1\.", ".mlp.shared_norm."),
    (r"\.post_ffw_norm_2\.", ".mlp.chosen_norm."),
    *DECODER,
)
GEMMA4_MIXTURE: Renames = (
    (r"\.ffn_norm\.weight$", ".mlp.shared_input"),
    (r"\.ffn_(up|gate|down)\.", r".mlp.shared.\1."),
    *GEMMA4,
)
LFM2: Renames = ((r"^token_embd_norm\.", "final_norm."), *DECODER)
COUNTS_BY_LAYER = ("attention.head_count_kv", "feed_forward_length")  # of networks whose layers differ
OTHER_ARITHMETIC = ("logit_scale", "attn_logit_softcapping", "final_logit_softcapping", "attention.clamp_kqv")
DROP = r"^rope_(freqs|factors_long|factors_short)\.|\.attn_rot_embd\."  # what the configuration is read from

OWN_KEYS = re.compile(r"blk\.(\d{1,9})\.attn_(k|v|k_norm)\.")


def keep_dialect(dialect: "GgufArchitecture", shapes: Shapes) -> "GgufArchitecture":  # noqa: ARG001
    """The default of architectures whose files all have the same tensors."""
    return dialect


@dataclass(frozen=True)
class GgufArchitecture:
    """How GGUF files store one family.

    `config` reads metadata (keys without the architecture's name) and tensor shapes. `interleaved`: rows of queries and
    keys were reordered for a rotation of neighbouring features. `one_norm`: attention and MLP of a block read the
    output of one norm. `prediction_layers`: layers after the last one, which predict further tokens in training, are
    not read. `unsupported_keys` are keys whose arithmetic is not implemented, `layered_keys` those of which a file may
    have a number for each layer. `tiled_heads`: see models.architectures.gguf_recurrent. `variant` returns the
    architecture as the tensors of a file need it.
    """

    family: str
    config: Callable[[Json, Shapes], Json]
    renames: Renames = DECODER
    interleaved: bool = False
    unsupported_keys: tuple[str, ...] = ("expert_count", *OTHER_ARITHMETIC)
    one_norm: bool = False
    prediction_layers: bool = False
    layered_keys: tuple[str, ...] = ()
    tiled_heads: bool = False
    variant: Callable[["GgufArchitecture", Shapes], "GgufArchitecture"] = field(default=keep_dialect)


def rename_tensor(dialect: GgufArchitecture, config: ModelConfig, name: str, tensor: Tensor) -> NamedTensors:
    """A tensor under our names: an empty list if it is not used, several tensors if it is fused."""
    if re.search(DROP, name) or (dialect.prediction_layers and is_prediction_layer(config, name)):
        return []
    if (found := OWN_KEYS.match(name)) and config.key_layers and has_other_keys(config, int(found[1])):
        return []
    pieces = split_tensor(dialect, config, name, tensor)
    if dialect.interleaved:
        pieces = [(piece, order_pairs(config, piece, value)) for piece, value in pieces]
    return [(_apply_renames(piece, dialect.renames), value) for piece, value in pieces]


def has_other_keys(config: ModelConfig, layer: int) -> bool:
    """Whether a layer reads the keys and values of another; files may still have its own."""
    return layer < config.depth and config.key_layer(layer) != layer


def split_tensor(dialect: GgufArchitecture, config: ModelConfig, name: str, tensor: Tensor) -> NamedTensors:
    """A tensor, or the parts of a fused one, under the file's names of parts."""
    if pieces := split_recurrent(config, dialect.tiled_heads, name, tensor):
        return pieces
    if ".attn_qkv." in name:
        sizes = [heads * config.head_width for heads in (config.heads, config.kv_heads, config.kv_heads)]
        parts = zip(("attn_q", "attn_k", "attn_v"), torch.split(tensor, sizes), strict=True)
        return [(name.replace("attn_qkv", part), piece) for part, piece in parts]
    if ".ffn_up." in name and config.gated_mlp and len(tensor) == 2 * config.mlp_width:
        gate, up = tensor.chunk(2)
        return [(name.replace("ffn_up", "ffn_gate"), gate), (name, up)]
    if dialect.one_norm and ".attn_norm." in name:
        return [(name, tensor), (name.replace("attn_norm", "ffn_norm"), tensor)]
    return split_mixture(config, name, tensor) if config.experts or config.latent else [(name, tensor)]


def order_pairs(config: ModelConfig, name: str, tensor: Tensor) -> Tensor:
    """Queries, keys or their norms, with the two features of a pair half of the rotated features apart."""
    found = re.search(r"\.attn_([qk])(_norm)?\.", name)
    if found is None or (found[2] and config.query_key_norm != "per_head"):
        return tensor
    heads = config.heads if found[1] == "q" else config.kv_heads
    rows = tensor.flatten() if found[2] else tensor
    return deinterleave_heads(rows, heads, config.rotary_width).view_as(tensor)


def _apply_renames(name: str, renames: Renames) -> str:
    for pattern, ours in renames:
        name = re.sub(pattern, ours, name)
    return name


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


def read_gpt_neox(fields: Json, shapes: Shapes) -> Json:
    """The configuration of GPT-NeoX. The share of rotated features is rounded up, so that their number is the file's
    after it was multiplied and cut to a whole number."""
    heads, width = fields["attention.head_count"], fields["embedding_length"]
    head_width = width // heads
    share = (fields.get("rope.dimension_count", head_width) + 0.25) / head_width
    rotation = {"rope_theta": fields.get("rope.freq_base", 10_000.0), "partial_rotary_factor": share}
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": heads,
        "intermediate_size": fields["feed_forward_length"],
        "max_position_embeddings": fields["context_length"],
        "layer_norm_eps": fields["attention.layer_norm_epsilon"],
        "use_parallel_residual": fields.get("use_parallel_residual", True),
        "rope_parameters": {**rotation, **read_rope_scaling(fields)},
        "attention_bias": "blk.0.attn_output.bias" in shapes,
    }


def read_bloom(fields: Json, shapes: Shapes) -> Json:
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields["embedding_length"],
        "n_layer": fields["block_count"],
        "n_head": fields["attention.head_count"],
        "seq_length": fields["context_length"],
        "layer_norm_epsilon": fields["attention.layer_norm_epsilon"],
    }


def read_falcon(fields: Json, shapes: Shapes) -> Json:
    """The configuration of Falcon. Files with one key head are of the first form, those with several of the newer."""
    if (layout := fields.get("tensor_data_layout", "jploski")) != "jploski":
        raise UnsupportedError(f"tensor_data_layout {show_value(layout)} is not known; known is jploski")
    key_heads = fields.get("attention.head_count_kv", 1)
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": fields["embedding_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": fields["attention.head_count"],
        "num_kv_heads": key_heads,
        "new_decoder_architecture": key_heads != 1,
        "ffn_hidden_size": fields["feed_forward_length"],
        "max_position_embeddings": fields["context_length"],
        "layer_norm_epsilon": fields["attention.layer_norm_epsilon"],
        "rope_parameters": {"rope_theta": fields.get("rope.freq_base", 10_000.0), **read_rope_scaling(fields)},
    }


def choose_falcon_norms(dialect: GgufArchitecture, shapes: Shapes) -> GgufArchitecture:
    """Files of 40B have a norm for attention and one for the MLP, the others one for both."""
    if "blk.0.attn_norm_2.weight" not in shapes:
        return dialect
    return replace(dialect, one_norm=False, renames=(*FALCON_NORMS, *dialect.renames))


def choose_experts(dialect: GgufArchitecture, shapes: Shapes) -> GgufArchitecture:
    """Files of Llama with a router are of Mixtral."""
    if "blk.0.ffn_gate_inp.weight" not in shapes:
        return dialect
    return replace(dialect, family="mixtral", config=read_mixtral, unsupported_keys=OTHER_ARITHMETIC)


def choose_gemma4(dialect: GgufArchitecture, shapes: Shapes) -> GgufArchitecture:
    """Files with a router have experts beside the MLP."""
    return replace(dialect, renames=GEMMA4_MIXTURE) if "blk.0.ffn_gate_inp.weight" in shapes else dialect


def choose_deepseek(dialect: GgufArchitecture, shapes: Shapes) -> GgufArchitecture:
    """Files with a bias for the choice of experts are of the third version."""
    return replace(dialect, family="deepseek_v3") if has_choice_bias(shapes) else dialect


def choose_granite(dialect: GgufArchitecture, shapes: Shapes) -> GgufArchitecture:
    return replace(dialect, family="granitemoeshared") if shared_width(shapes) else dialect


def share_one_norm(dialect: GgufArchitecture, shapes: Shapes) -> GgufArchitecture:
    """Files without norms of MLPs have one norm for attention and MLP."""
    return replace(dialect, one_norm="blk.0.ffn_norm.weight" not in shapes)


def read_mpt(fields: Json, shapes: Shapes) -> Json:
    heads, rate = fields["attention.head_count"], fields.get("attention.max_alibi_bias", 0.0)
    if fields.get("attention.head_count_kv", heads) != heads:
        raise UnsupportedError(f"attention.head_count_kv differs from attention.head_count {show_value(heads)}")
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "d_model": fields["embedding_length"],
        "n_layers": fields["block_count"],
        "n_heads": heads,
        "expansion_ratio": fields["feed_forward_length"] // fields["embedding_length"],
        "max_seq_len": fields["context_length"],
        "layer_norm_epsilon": fields["attention.layer_norm_epsilon"],
        "attn_config": {"alibi": rate > 0, "alibi_bias_max": rate},
    }


def read_starcoder(fields: Json, shapes: Shapes) -> Json:
    if (key_heads := fields.get("attention.head_count_kv", 1)) != 1:
        raise UnsupportedError(f"attention.head_count_kv {show_value(key_heads)} is not known; known is 1")
    return {**read_gpt2(fields, shapes), "multi_query": True}


def read_starcoder2(fields: Json, shapes: Shapes) -> Json:
    shape = read_llama({"attention.layer_norm_rms_epsilon": 0.0, **fields}, shapes)
    return shape | {
        "norm_epsilon": fields["attention.layer_norm_epsilon"],
        "use_bias": "blk.0.attn_output.bias" in shapes,
        "sliding_window": fields.get("attention.sliding_window", 0),
    }


GGUF_ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", read_llama, interleaved=True, variant=choose_experts),
    "qwen2": GgufArchitecture("qwen2", read_llama),
    "qwen3": GgufArchitecture("qwen3", read_llama),
    "qwen2vl": GgufArchitecture("qwen2", read_llama),
    "qwen3vl": GgufArchitecture("qwen3", read_llama),
    "gemma": GgufArchitecture("gemma", read_llama),
    "gemma2": GgufArchitecture("gemma2", read_gemma2, unsupported_keys=("expert_count", "logit_scale")),
    "gemma3": GgufArchitecture("gemma3_text", read_gemma3),
    "gemma4": GgufArchitecture(
        "gemma4_text",
        read_gemma4,
        GEMMA4,
        unsupported_keys=tuple(key for key in OTHER_ARITHMETIC if "final" not in key),
        layered_keys=COUNTS_BY_LAYER,
        variant=choose_gemma4,
    ),
    "phi2": GgufArchitecture("phi", read_decoder, one_norm=True),
    "phi3": GgufArchitecture("phi3", read_windowed),
    "smollm3": GgufArchitecture("smollm3", read_llama, interleaved=True),
    "granite": GgufArchitecture("granite", read_granite, interleaved=True, unsupported_keys=("expert_count",)),
    "minicpm": GgufArchitecture("minicpm", read_minicpm, interleaved=True, unsupported_keys=("expert_count",)),
    "olmo": GgufArchitecture("olmo", read_decoder, interleaved=True),
    "olmo2": GgufArchitecture("olmo3", read_olmo2, INNER),
    "command-r": GgufArchitecture(
        "cohere", read_cohere, interleaved=True, one_norm=True, unsupported_keys=("expert_count",)
    ),
    "cohere2": GgufArchitecture(
        "cohere2", read_cohere, interleaved=True, one_norm=True, unsupported_keys=("expert_count",)
    ),
    "stablelm": GgufArchitecture("stablelm", read_stablelm, variant=share_one_norm),
    "chatglm": GgufArchitecture("glm", read_decoder, interleaved=True),
    "glm4": GgufArchitecture("glm4", read_decoder, interleaved=True),
    "exaone4": GgufArchitecture("exaone4", read_windowed, INNER),
    "internlm2": GgufArchitecture("internlm2", read_llama, interleaved=True),
    "seed_oss": GgufArchitecture("seed_oss", read_seed_oss, SEED_OSS),
    "nemotron": GgufArchitecture("nemotron", read_decoder),
    "arcee": GgufArchitecture("arcee", read_llama, interleaved=True),
    "jais2": GgufArchitecture("jais2", read_decoder),
    "hunyuan-dense": GgufArchitecture("hunyuan_v1_dense", read_llama),
    "ernie4_5": GgufArchitecture("ernie4_5", read_decoder, interleaved=True),
    "qwen2moe": GgufArchitecture("qwen2_moe", read_qwen_moe, unsupported_keys=OTHER_ARITHMETIC),
    "qwen3moe": GgufArchitecture("qwen3_moe", read_qwen_moe, unsupported_keys=OTHER_ARITHMETIC),
    "olmoe": GgufArchitecture("olmoe", read_olmoe, unsupported_keys=OTHER_ARITHMETIC),
    "granitemoe": GgufArchitecture(
        "granitemoe",
        read_granite_moe,
        interleaved=True,
        unsupported_keys=OTHER_ARITHMETIC[1:],
        variant=choose_granite,
    ),
    "gpt-oss": GgufArchitecture("gpt_oss", read_gpt_oss, SEED_OSS, unsupported_keys=OTHER_ARITHMETIC),
    "deepseek2": GgufArchitecture(
        "deepseek_v2",
        read_deepseek,
        unsupported_keys=OTHER_ARITHMETIC,
        prediction_layers=True,
        variant=choose_deepseek,
    ),
    "glm4moe": GgufArchitecture(
        "glm4_moe", read_routed, SEED_OSS, unsupported_keys=OTHER_ARITHMETIC, prediction_layers=True
    ),
    "dbrx": GgufArchitecture(
        "dbrx", read_dbrx, DBRX, unsupported_keys=tuple(key for key in OTHER_ARITHMETIC if "clamp" not in key)
    ),
    "dots1": GgufArchitecture("dots1", read_routed, unsupported_keys=OTHER_ARITHMETIC),
    "ernie4_5-moe": GgufArchitecture(
        "ernie4_5_moe", read_ernie_moe, interleaved=True, unsupported_keys=OTHER_ARITHMETIC
    ),
    "lfm2": GgufArchitecture("lfm2", read_lfm2, LFM2, layered_keys=COUNTS_BY_LAYER),
    "lfm2moe": GgufArchitecture(
        "lfm2_moe", read_lfm2_moe, LFM2, unsupported_keys=OTHER_ARITHMETIC, layered_keys=COUNTS_BY_LAYER
    ),
    "mamba2": GgufArchitecture("mamba2", read_mamba2),
    "granitehybrid": GgufArchitecture(
        "granitemoehybrid",
        read_granite_hybrid,
        interleaved=True,
        unsupported_keys=OTHER_ARITHMETIC[1:],
        layered_keys=COUNTS_BY_LAYER,
    ),
    "nemotron_h": GgufArchitecture("nemotron_h", read_nemotron_hybrid, layered_keys=COUNTS_BY_LAYER),
    "nemotron_h_moe": GgufArchitecture(
        "nemotron_h",
        read_nemotron_hybrid,
        unsupported_keys=("moe_latent_size", *OTHER_ARITHMETIC),
        prediction_layers=True,
        layered_keys=COUNTS_BY_LAYER,
    ),
    "qwen3next": GgufArchitecture(
        "qwen3_next", read_qwen_hybrid, SEED_OSS, unsupported_keys=OTHER_ARITHMETIC, prediction_layers=True
    ),
    "qwen35": GgufArchitecture("qwen3_5_text", read_qwen_hybrid, SEED_OSS, prediction_layers=True, tiled_heads=True),
    "qwen35moe": GgufArchitecture(
        "qwen3_5_moe_text",
        read_qwen_hybrid,
        SEED_OSS,
        unsupported_keys=OTHER_ARITHMETIC,
        prediction_layers=True,
        tiled_heads=True,
    ),
    "gpt2": GgufArchitecture("gpt2", read_gpt2),
    "gptneox": GgufArchitecture("gpt_neox", read_gpt_neox),
    "bloom": GgufArchitecture("bloom", read_bloom, BLOOM),
    "falcon": GgufArchitecture("falcon", read_falcon, one_norm=True, variant=choose_falcon_norms),
    "mpt": GgufArchitecture("mpt", read_mpt),
    "starcoder": GgufArchitecture("gpt_bigcode", read_starcoder),
    "starcoder2": GgufArchitecture("starcoder2", read_starcoder2),
    "bert": GgufArchitecture("bert", read_bert, ENCODER),
}  # by `general.architecture`

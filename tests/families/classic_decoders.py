"""Rows of decoder families of the first years: a configuration of transformers, its class, and its form as GGUF."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor

VOCABULARY = 384
POSITIONS = 64


@dataclass(frozen=True)
class GgufForm:
    """How llama.cpp's converter writes a family: `architecture`, the `fields` of the metadata, and what it does to a
    tensor, by the reference's name."""

    architecture: str
    fields: Callable[[Any], Mapping[str, Any]]
    convert: Callable[[Any, str, Tensor], Tensor] = lambda config, name, tensor: tensor


@dataclass(frozen=True)
class Row:
    """A network: configuration and class of the reference."""

    config: Callable[..., Any]
    kind: Any
    fields: Mapping[str, Any]
    gguf: GgufForm | None = None

    def make_config(self, **more: Any) -> Any:
        return self.config(**{"vocab_size": VOCABULARY, **self.fields, **more})


def grouped(config: Any, name: str, tensor: Tensor) -> Tensor:
    """The rows of a fused matrix as the converter writes them: all queries, all keys, all values."""
    if "query_key_value" not in name:
        return tensor
    heads = config.num_attention_heads
    groups = heads
    if config.model_type == "falcon":
        new = config.new_decoder_architecture
        groups = config.num_kv_heads if new else 1 if config.multi_query else heads
    rows = tensor.view(groups, heads // groups + 2, config.hidden_size // heads, -1)
    parts = rows[:, :-2], rows[:, -2], rows[:, -1]
    return torch.cat([part.reshape(-1, rows.size(-1)) for part in parts]).view(tensor.shape)


def neox_fields(config: Any) -> dict[str, Any]:
    share = config.rope_parameters["partial_rotary_factor"]
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "rope.dimension_count": int(share * (config.hidden_size // config.num_attention_heads)),
        "attention.head_count": config.num_attention_heads,
        "use_parallel_residual": config.use_parallel_residual,
        "attention.layer_norm_epsilon": config.layer_norm_eps,
    }


def bloom_fields(config: Any) -> dict[str, Any]:
    return {
        "context_length": POSITIONS,
        "embedding_length": config.hidden_size,
        "block_count": config.n_layer,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.n_head,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def falcon_fields(config: Any) -> dict[str, Any]:
    return {
        "context_length": 2048,
        "tensor_data_layout": "jploski",
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_kv_heads if config.new_decoder_architecture else 1,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def mpt_fields(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_seq_len,
        "embedding_length": config.d_model,
        "block_count": config.n_layers,
        "feed_forward_length": 4 * config.d_model,
        "attention.head_count": config.n_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.max_alibi_bias": float(config.attn_config.alibi_bias_max),
    }


def big_code_fields(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.n_positions,
        "embedding_length": config.n_embd,
        "block_count": config.n_layer,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": 1,
        "attention.layer_norm_epsilon": config.layer_norm_epsilon,
    }


def starcoder2_fields(config: Any) -> dict[str, Any]:
    return {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "attention.layer_norm_epsilon": config.norm_epsilon,
    }


NEOX_FORM = GgufForm("gptneox", neox_fields, grouped)
BLOOM_FORM = GgufForm("bloom", bloom_fields, grouped)
FALCON_FORM = GgufForm("falcon", falcon_fields, grouped)
SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=POSITIONS)
NEOX = dict(SHAPE, intermediate_size=48)
OPT = dict(SHAPE, ffn_dim=48)
GPT = dict(n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS)
BLOOM = dict(hidden_size=32, n_layer=2, n_head=4)
GPT_NEO = dict(
    hidden_size=32, num_layers=4, num_heads=4, max_position_embeddings=POSITIONS, window_size=4,
    attention_types=[[["global", "local"], 2]],
)  # fmt: skip
MPT = dict(d_model=32, n_heads=4, n_layers=2, max_seq_len=POSITIONS)
XGLM = dict(d_model=32, num_layers=2, attention_heads=4, ffn_dim=48, max_position_embeddings=POSITIONS)
STARCODER2 = dict(NEOX, num_key_value_heads=2)

BERT = dict(
    hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, is_decoder=True,
    type_vocab_size=2, max_position_embeddings=POSITIONS, pad_token_id=0,
)  # fmt: skip
ROWS: dict[str, Row] = {
    "openai-gpt": Row(tf.OpenAIGPTConfig, tf.OpenAIGPTLMHeadModel, GPT),
    "gpt2": Row(tf.GPT2Config, tf.GPT2LMHeadModel, GPT),
    "gpt_neox": Row(tf.GPTNeoXConfig, tf.GPTNeoXForCausalLM, NEOX, NEOX_FORM),
    "gpt_neox-serial": Row(
        tf.GPTNeoXConfig,
        tf.GPTNeoXForCausalLM,
        dict(NEOX, use_parallel_residual=False, rotary_pct=0.5, rotary_emb_base=500.0, attention_bias=False,
             hidden_act="gelu_fast", tie_word_embeddings=True),
    ),
    "gpt_neox-linear": Row(
        tf.GPTNeoXConfig,
        tf.GPTNeoXForCausalLM,
        dict(NEOX, rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e4, partial_rotary_factor=1.0)),
    ),
    "opt": Row(tf.OPTConfig, tf.OPTForCausalLM, OPT),
    "opt-untied": Row(
        tf.OPTConfig,
        tf.OPTForCausalLM,
        dict(OPT, tie_word_embeddings=False, enable_bias=False, layer_norm_elementwise_affine=False,
             activation_function="gelu"),
    ),
    "opt-350m": Row(tf.OPTConfig, tf.OPTForCausalLM, dict(OPT, do_layer_norm_before=False, word_embed_proj_dim=16)),
    "opt-narrow": Row(tf.OPTConfig, tf.OPTForCausalLM, dict(OPT, word_embed_proj_dim=16, tie_word_embeddings=False)),
    "opt-post": Row(tf.OPTConfig, tf.OPTForCausalLM, dict(OPT, do_layer_norm_before=False)),
    "gptj": Row(tf.GPTJConfig, tf.GPTJForCausalLM, dict(GPT, rotary_dim=4)),
    "gptj-tied": Row(
        tf.GPTJConfig, tf.GPTJForCausalLM, dict(GPT, rotary_dim=8, n_inner=40, tie_word_embeddings=True)
    ),
    "codegen": Row(tf.CodeGenConfig, tf.CodeGenForCausalLM, dict(GPT, n_head=8, rotary_dim=2, n_ctx=POSITIONS)),
    "codegen-4": Row(tf.CodeGenConfig, tf.CodeGenForCausalLM, dict(GPT, rotary_dim=6, n_ctx=POSITIONS)),
    "bloom": Row(tf.BloomConfig, tf.BloomForCausalLM, BLOOM, BLOOM_FORM),
    "bloom-6-heads": Row(
        tf.BloomConfig, tf.BloomForCausalLM, dict(BLOOM, hidden_size=48, n_head=6, tie_word_embeddings=False)
    ),
    "falcon-7b": Row(tf.FalconConfig, tf.FalconForCausalLM, SHAPE, FALCON_FORM),
    "falcon-40b": Row(
        tf.FalconConfig,
        tf.FalconForCausalLM,
        dict(SHAPE, new_decoder_architecture=True, num_kv_heads=2),
        FALCON_FORM,
    ),
    "falcon-11b": Row(
        tf.FalconConfig,
        tf.FalconForCausalLM,
        dict(SHAPE, new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, ffn_hidden_size=40,
             tie_word_embeddings=False, rope_theta=500_042.0),
    ),
    "falcon-rw": Row(
        tf.FalconConfig,
        tf.FalconForCausalLM,
        dict(SHAPE, alibi=True, multi_query=False, parallel_attn=False, bias=True),
    ),
    "falcon-alibi-parallel": Row(
        tf.FalconConfig, tf.FalconForCausalLM, dict(SHAPE, alibi=True, multi_query=False, num_attention_heads=2)
    ),
    "gpt_bigcode": Row(
        tf.GPTBigCodeConfig, tf.GPTBigCodeForCausalLM, GPT, GgufForm("starcoder", big_code_fields)
    ),
    "gpt_bigcode-heads": Row(
        tf.GPTBigCodeConfig,
        tf.GPTBigCodeForCausalLM,
        dict(GPT, multi_query=False, scale_attn_weights=False, n_inner=40, tie_word_embeddings=False),
    ),
    "starcoder2": Row(
        tf.Starcoder2Config, tf.Starcoder2ForCausalLM, STARCODER2, GgufForm("starcoder2", starcoder2_fields)
    ),
    "starcoder2-window": Row(
        tf.Starcoder2Config,
        tf.Starcoder2ForCausalLM,
        dict(STARCODER2, sliding_window=4, use_bias=False, tie_word_embeddings=False),
    ),
    "gpt_neo": Row(tf.GPTNeoConfig, tf.GPTNeoForCausalLM, GPT_NEO),
    "gpt_neo-untied": Row(
        tf.GPTNeoConfig,
        tf.GPTNeoForCausalLM,
        dict(GPT_NEO, attention_types=[[["local"], 1], [["global"], 3]], intermediate_size=40,
             tie_word_embeddings=False),
    ),
    "mpt": Row(tf.MptConfig, tf.MptForCausalLM, MPT, GgufForm("mpt", mpt_fields)),
    "mpt-6-heads": Row(
        tf.MptConfig,
        tf.MptForCausalLM,
        dict(MPT, d_model=48, n_heads=6, attn_config={"softmax_scale": 0.5}, tie_word_embeddings=False),
    ),
    "biogpt": Row(tf.BioGptConfig, tf.BioGptForCausalLM, NEOX),
    "biogpt-unscaled": Row(
        tf.BioGptConfig, tf.BioGptForCausalLM, dict(NEOX, scale_embedding=False, tie_word_embeddings=False)
    ),
    "xglm": Row(tf.XGLMConfig, tf.XGLMForCausalLM, XGLM),
    "xglm-untied": Row(
        tf.XGLMConfig, tf.XGLMForCausalLM, dict(XGLM, scale_embedding=False, tie_word_embeddings=False)
    ),
    "persimmon": Row(tf.PersimmonConfig, tf.PersimmonForCausalLM, NEOX),
    "persimmon-plain": Row(
        tf.PersimmonConfig,
        tf.PersimmonForCausalLM,
        dict(NEOX, qk_layernorm=False, partial_rotary_factor=1.0, hidden_act="gelu", tie_word_embeddings=True),
    ),
    "ctrl": Row(
        tf.CTRLConfig,
        tf.CTRLLMHeadModel,
        dict(n_embd=32, n_layer=3, n_head=4, dff=48, n_positions=POSITIONS),
    ),
    "bert": Row(tf.BertConfig, tf.BertLMHeadModel, BERT),
    "roberta": Row(tf.RobertaConfig, tf.RobertaForCausalLM, dict(BERT, max_position_embeddings=POSITIONS + 1)),
    "big-bird": Row(
        tf.BigBirdConfig, tf.BigBirdForCausalLM, dict(BERT, block_size=16, num_random_blocks=3, rescale_embeddings=True)
    ),
    "megatron-bert": Row(tf.MegatronBertConfig, tf.MegatronBertForCausalLM, BERT),
    "xlm-roberta-xl": Row(
        tf.XLMRobertaXLConfig, tf.XLMRobertaXLForCausalLM, dict(BERT, max_position_embeddings=POSITIONS + 2)
    ),
    "bert-generation": Row(
        tf.BertGenerationConfig,
        tf.BertGenerationDecoder,
        dict(
            hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48, is_decoder=True,
            max_position_embeddings=POSITIONS,
        ),
    ),
}  # fmt: skip

MODEL, TEXT, TAG, SPAN = "Model", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering"
HEADS: dict[str, tuple[str, ...]] = {
    "gpt_neox": (MODEL, TEXT, TAG, SPAN),
    "opt": (MODEL, TEXT, SPAN),
    "opt-350m": (MODEL, TEXT, SPAN),
    "gptj": (MODEL, TEXT, SPAN),
    "codegen": (MODEL,),
    "bloom": (MODEL, TEXT, TAG, SPAN),
    "falcon-7b": (MODEL, TEXT, TAG, SPAN),
    "gpt_bigcode": (MODEL, TEXT, TAG),
    "starcoder2": (MODEL, TEXT, TAG),
    "gpt_neo": (MODEL, TEXT, TAG, SPAN),
    "mpt": (MODEL, TEXT, TAG, SPAN),
    "biogpt": (MODEL, TEXT, TAG),
    "xglm": (MODEL,),
    "persimmon": (MODEL, TEXT, TAG),
}  # the classes beside that of a generator, by the row of the configuration
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("opt", {"_remove_final_layer_norm": True}, "_remove_final_layer_norm is True"),
    ("opt", {"activation_function": "mish"}, "activation 'mish'"),
    ("gpt_neox", {"num_attention_heads": 0}, "num_attention_heads is 0"),
    ("gpt_neox", {"num_attention_heads": "4"}, "num_attention_heads is '4'"),
    ("gptj", {"rotary_dim": 0}, "rotary_dim is 0"),
    ("gptj", {"rotary_dim": 12}, "rotary_width is 12"),
    ("gptj", {"rotary_dim": 3}, "rotary_width is 3"),
    ("bloom", {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm is True"),
    ("bloom", {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact is True"),
    ("falcon-40b", {"parallel_attn": False}, "parallel_attn false with new_decoder_architecture"),
    ("falcon-40b", {"num_kv_heads": 3}, "heads is 4, which should be a multiple of kv_heads"),
    ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is not known"),
    (
        "gpt_neo",
        {"attention_types": [[["global", "local"], 1]], "attention_layers": None},
        "one of global and local for each layer",
    ),
    ("gpt_neo", {"attention_types": [[["global"], 10**9]], "attention_layers": None}, "has more than 4 layers"),
    ("gpt_neo", {"attention_layers": ["global"] * 3}, "one of global and local for each layer"),
    ("gpt_neo", {"window_size": 0}, "window_size is 0, which should be a whole number from 1"),
    (
        "gpt_neo",
        {"attention_types": [[["sparse"], 4]], "attention_layers": None},
        "one of global and local for each layer",
    ),
    ("mpt", {"attn_config": {"clip_qkv": 6}}, "clip_qkv is 6"),
    ("mpt", {"attn_config": {"qk_ln": True}}, "qk_ln is True"),
    ("mpt", {"attn_config": {"alibi": False}}, "alibi is False"),
    ("mpt", {"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max is 16"),
    ("mpt", {"logit_scale": 2.0}, "logit_scale is 2.0"),
    ("ctrl", {"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is 1e-05: only 1e-06 is known"),
    ("bert", {"add_cross_attention": True}, "add_cross_attention is not known"),
    ("bert", {"is_decoder": False}, "is_decoder"),
    ("bert-generation", {"add_cross_attention": True}, "add_cross_attention is not known"),
    ("bert-generation", {"is_decoder": False}, "is_decoder"),
    ("xglm", {"add_cross_attention": True}, "add_cross_attention is not known"),
    ("xglm", {"max_position_embeddings": 2**30}, "max_positions is 1073741824, which should be .* at most"),
]  # a row, changes of its config.json, and what the error says

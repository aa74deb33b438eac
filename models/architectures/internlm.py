"""InternLM 2 and 3: Llama under other names, the second generation with one matrix of queries, keys and values."""

from dataclasses import replace
from functools import partial

from ..network.model_config import ModelConfig
from . import llama
from .family import LAST_TOKEN_HEAD, Family, HeadSpec, Json, read_head_counts
from .fused_matrices import split_fused

RENAMES = (
    (r"^tok_embeddings\.", "embed_tokens."),
    (r"\.attention_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.attention\.wo\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
    (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
    (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
    *llama.RENAMES,
)


def internlm2_config(hf: Json) -> ModelConfig:
    hf = {"attention_bias": hf.get("bias", False), **hf, "mlp_bias": False}
    return llama.llama_config(hf)


def internlm3_config(hf: Json) -> ModelConfig:
    """`attention_bias` is that of queries, keys and values, `mlp_bias` that of all other projections."""
    others, biased = bool(hf.get("mlp_bias", False)), bool(hf.get("attention_bias", False))
    shape = llama.llama_config(
        {"head_dim": 128, "rms_norm_eps": 1e-5, **hf, "attention_bias": biased, "mlp_bias": others}
    )
    return replace(shape, output_bias=others)


def choose_variant(family: Family, hf: Json) -> Family:
    heads, kv_heads = read_head_counts(hf)
    return replace(family, convert=partial(split_fused, "wqkv", kv_heads, heads // kv_heads))


INTERNLM2 = Family(
    name="internlm2",
    prefix="model",
    config=internlm2_config,
    renames=RENAMES,
    heads={
        "InternLM2ForCausalLM": HeadSpec("generate", ((r"^output\.", "head.output."),)),
        "InternLM2Model": HeadSpec("embed"),
        "InternLM2ForSequenceClassification": LAST_TOKEN_HEAD,
    },
    drop=r"^output\.|rotary_emb\.inv_freq$",
    variant=choose_variant,
)
INTERNLM3 = replace(
    llama.LLAMA,
    name="internlm3",
    config=internlm3_config,
    heads=llama.llama_heads("InternLM3", ()) | {"LlamaForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD)},
)

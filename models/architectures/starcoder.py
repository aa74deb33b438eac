"""StarCoder and SantaCoder (`gpt_bigcode`): GPT-2 with one key head for all query heads. StarCoder 2: Llama with layer
norms, biases and a plain MLP."""

from dataclasses import replace
from functools import partial

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import gpt2, llama
from .family import LAST_TOKEN_HEAD, SCORE_TAG_HEAD, TAG_HEAD, Family, HeadSpec, Json, read_sizes
from .fused_matrices import split_fused


def big_code_config(hf: Json) -> ModelConfig:
    if hf.get("add_cross_attention"):
        raise UnsupportedError("add_cross_attention is not known here")
    plain = {
        **hf,
        "scale_attn_weights": True,
        "activation_function": hf.get("activation_function", "gelu_pytorch_tanh"),
    }
    shape = gpt2.model_config(plain)
    groups = 1 if hf.get("multi_query", True) else shape.heads
    return replace(shape, kv_heads=groups, score_scale=0.0 if hf.get("scale_attn_weights", True) else 1.0)


def choose_variant(family: Family, hf: Json) -> Family:
    """The fused matrix is split by the heads that share a key."""
    (heads,) = read_sizes(hf, "n_head")
    groups = 1 if hf.get("multi_query", True) else heads
    return replace(family, convert=partial(split_fused, "c_attn", groups, heads // groups))


GPT_BIG_CODE = Family(
    name="gpt_bigcode",
    prefix="transformer",
    config=big_code_config,
    renames=gpt2.RENAMES,
    heads={
        "GPTBigCodeForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "GPTBigCodeModel": HeadSpec("embed"),
        "GPTBigCodeForSequenceClassification": LAST_TOKEN_HEAD,
        "GPTBigCodeForTokenClassification": TAG_HEAD,
    },
    drop=r"^lm_head\.|\.attn\.(bias|masked_bias)$|^bias$",
    variant=choose_variant,
)


def starcoder2_config(hf: Json) -> ModelConfig:
    shape = llama.model_config({"hidden_act": "gelu_pytorch_tanh", **hf})
    biased = bool(hf.get("use_bias", True))
    return replace(
        shape,
        windowed=(),
        norm="layer",
        norm_eps=hf.get("norm_epsilon", 1e-5),
        gated_mlp=False,
        qkv_bias=biased,
        output_bias=biased,
        mlp_bias=biased,
    )


STARCODER2 = Family(
    name="starcoder2",
    prefix="model",
    config=starcoder2_config,
    renames=((r"\.mlp\.c_fc\.", ".mlp.up."), (r"\.mlp\.c_proj\.", ".mlp.down."), *llama.RENAMES),
    heads={
        "Starcoder2ForCausalLM": HeadSpec("generate", llama.LANGUAGE_HEAD),
        "Starcoder2Model": HeadSpec("embed"),
        "Starcoder2ForSequenceClassification": LAST_TOKEN_HEAD,
        "Starcoder2ForTokenClassification": SCORE_TAG_HEAD,
    },
    drop=llama.DROP,
)

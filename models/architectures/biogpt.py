"""BioGPT and XGLM: causal with pre-norm, in the names of BART's decoder; positions are learned or sinusoidal."""

import math

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import ModelConfig
from .bart import RENAMES as BART_RENAMES
from .family import LAST_TOKEN_HEAD, TAG_HEAD, Family, HeadSpec, Json, activation_name

POSITION_OFFSET = 2  # the number of the first position
RENAMES = ((r"^embed_tokens\.", "tokens."), (r"^layer_norm\.", "final_norm."), *BART_RENAMES)


def biogpt_config(hf: Json) -> ModelConfig:
    """The reference does not use `layer_norm_eps`."""
    width, heads = hf["hidden_size"], hf["num_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["num_hidden_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        position_offset=POSITION_OFFSET,
        causal=True,
        embedding_scale=math.sqrt(width) if hf.get("scale_embedding", True) else 1.0,
        activation=activation_name(hf.get("hidden_act", "gelu")),
    )


def xglm_config(hf: Json) -> ModelConfig:
    if hf.get("add_cross_attention"):
        raise UnsupportedError("add_cross_attention is not known here")
    if (hf.get("pad_token_id") or 0) >= POSITION_OFFSET:  # the reference has no vector for the position of this number
        raise UnsupportedError(f"pad_token_id is {show_value(hf['pad_token_id'])}: only 0 and 1 are known")
    width, heads = hf["d_model"], hf["attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["num_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["ffn_dim"],
        max_positions=hf["max_position_embeddings"],
        position="closed-sines-cosines",
        position_offset=POSITION_OFFSET,
        causal=True,
        embedding_scale=math.sqrt(width) if hf.get("scale_embedding", True) else 1.0,
        activation=activation_name(hf.get("activation_function", "gelu")),
    )


BIOGPT = Family(
    name="biogpt",
    prefix="biogpt",
    config=biogpt_config,
    renames=RENAMES,
    heads={
        "BioGptForCausalLM": HeadSpec("generate", ((r"^output_projection\.", "head.output."),)),
        "BioGptModel": HeadSpec("embed"),
        "BioGptForSequenceClassification": LAST_TOKEN_HEAD,
        "BioGptForTokenClassification": TAG_HEAD,
    },
    drop=r"^output_projection\.",
)
XGLM = Family(
    name="xglm",
    prefix="model",
    config=xglm_config,
    renames=RENAMES,
    heads={
        "XGLMForCausalLM": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "XGLMModel": HeadSpec("embed"),
    },
    drop=r"^lm_head\.|^embed_positions\.",
)

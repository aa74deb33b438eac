"""CTRL: causal, pre-norm, sinusoidal positions, ReLU (Keskar et al. 2019, arXiv:1909.05858)."""

import math

from ..network.model_config import ModelConfig
from .family import LAST_TOKEN_HEAD, Family, HeadSpec, Json, check_required_values

RENAMES = (
    (r"^w\.", "tokens."),
    (r"^h\.", "blocks."),
    (r"^layernorm\.", "final_norm."),
    (r"\.layernorm1\.", ".attention_norm."),
    (r"\.layernorm2\.", ".mlp_norm."),
    (r"\.multi_head_attention\.Wq\.", ".attention.query."),
    (r"\.multi_head_attention\.Wk\.", ".attention.key."),
    (r"\.multi_head_attention\.Wv\.", ".attention.value."),
    (r"\.multi_head_attention\.dense\.", ".attention.output."),
    (r"\.ffn\.0\.", ".mlp.up."),
    (r"\.ffn\.2\.", ".mlp.down."),
)


def model_config(hf: Json) -> ModelConfig:
    """The reference uses `layer_norm_epsilon` in the last norm only, and 1e-6 in the others."""
    check_required_values(hf, {"layer_norm_epsilon": 1e-6})
    width, heads = hf["n_embd"], hf["n_head"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["dff"],
        max_positions=hf["n_positions"],
        causal=True,
        position="sines-cosines",
        embedding_scale=math.sqrt(width),
        norm_eps=1e-6,
        activation="relu",
        logit_bias=True,
    )


CTRL = Family(
    name="ctrl",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "CTRLLMHeadModel": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "CTRLModel": HeadSpec("embed"),
        "CTRLForSequenceClassification": LAST_TOKEN_HEAD,
    },
    drop=r"^lm_head\.|pos_encoding$",
)

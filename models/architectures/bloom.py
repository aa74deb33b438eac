"""BLOOM: causal, linear biases instead of positions, a norm of the embeddings, each head's query, key and value in one
matrix."""

from dataclasses import replace
from functools import partial

from ..network.model_config import ModelConfig
from .family import LAST_TOKEN_HEAD, SPAN_HEAD, TAG_HEAD, Family, HeadSpec, Json, check_required_values, read_sizes
from .fused_matrices import split_fused

RENAMES = (
    (r"^word_embeddings\.", "tokens."),
    (r"^word_embeddings_layernorm\.", "embedding_norm."),
    (r"^h\.", "blocks."),
    (r"^ln_f\.", "final_norm."),
    (r"\.input_layernorm\.", ".attention_norm."),
    (r"\.post_attention_layernorm\.", ".mlp_norm."),
    (r"\.self_attention\.", ".attention."),
    (r"\.attention\.dense\.", ".attention.output."),
    (r"\.mlp\.dense_h_to_4h\.", ".mlp.up."),
    (r"\.mlp\.dense_4h_to_h\.", ".mlp.down."),
)
DEFAULT_POSITIONS = 2048  # tokens, if the configuration has no limit


def model_config(hf: Json) -> ModelConfig:
    exact = hf.get("slow_but_exact", False) and hf.get("pretraining_tp", 1) > 1  # the reference then drops biases
    known = {"apply_residual_connection_post_layernorm": False, "slow_but_exact": False}
    check_required_values({**hf, "slow_but_exact": bool(exact)}, known)
    width, [heads] = read_width(hf), read_sizes(hf, "n_head")
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf["n_layer"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=4 * width,
        max_positions=hf.get("seq_length") or DEFAULT_POSITIONS,
        causal=True,
        position="alibi",
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        embedding_norm=True,
        activation="gelu_tanh",
    )


def read_width(hf: Json) -> int:
    width: int = hf["n_embed"] if hf.get("n_embed") else hf["hidden_size"]
    return width


def choose_variant(family: Family, hf: Json) -> Family:
    """The fused matrix is split by heads."""
    [heads] = read_sizes(hf, "n_head")
    return replace(family, convert=partial(split_fused, "query_key_value", heads, 1))


BLOOM = Family(
    name="bloom",
    prefix="transformer",
    config=model_config,
    renames=RENAMES,
    heads={
        "BloomForCausalLM": HeadSpec("generate", ((r"^lm_head\.", "head.output."),)),
        "BloomModel": HeadSpec("embed"),
        "BloomForSequenceClassification": LAST_TOKEN_HEAD,
        "BloomForTokenClassification": TAG_HEAD,
        "BloomForQuestionAnswering": SPAN_HEAD,
    },
    drop=r"^lm_head\.",
    variant=choose_variant,
)

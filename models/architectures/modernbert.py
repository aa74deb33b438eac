"""ModernBERT, and its causal form: pre-norm, rotary positions with two bases, sliding windows in most layers, gated
MLP."""

import re
from dataclasses import replace

from torch import Tensor

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from .family import (
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    activation_name,
    layer_numbers,
    read_padding,
    read_rope,
    read_sizes,
    read_windowed_layers,
)

RENAMES = (
    (r"^embeddings\.tok_embeddings\.", "tokens."),
    (r"^embeddings\.norm\.", "embedding_norm."),
    (r"^layers\.", "blocks."),
    (r"\.attn_norm\.", ".attention_norm."),
    (r"\.attn\.(query|key|value)\.", r".attention.\1."),
    (r"\.attn\.Wo\.", ".attention.output."),
    (r"\.mlp\.Wo\.", ".mlp.down."),
)
HEAD = ((r"^head\.(dense|norm)\.", r"head.\1."), (r"^classifier\.", "head.out."))
LANGUAGE_HEAD = ((r"^lm_head\.(dense|norm)\.", r"head.\1."), (r"^decoder\.", "head.output."))
DECODER_RENAMES = (
    (r"\.attn\.q_proj\.", ".attention.query."),
    (r"\.attn\.k_proj\.", ".attention.key."),
    (r"\.attn\.v_proj\.", ".attention.value."),
)
MASK_HEAD = (*HEAD[:1], (r"^decoder\.", "head.output."))
FUSED = {"attn.Wqkv": ("attn.query", "attn.key", "attn.value"), "mlp.Wi": ("mlp.gate", "mlp.up")}


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Split the fused matrix of query, key and value, and that of the MLP's gate and up projection."""
    found = re.search(r"\.(attn\.Wqkv|mlp\.Wi)\.", name)
    if found is None:
        return [(name, tensor)]
    parts = FUSED[found[1]]
    return [(name.replace(found[1], part), piece) for part, piece in zip(parts, tensor.chunk(len(parts)), strict=True)]


def model_config(hf: Json) -> ModelConfig:
    """Older configurations have two rotary bases and the interval of full-attention layers; newer ones list both per
    layer."""
    width, heads, depth = hf["hidden_size"], hf["num_attention_heads"], hf["num_hidden_layers"]
    every = hf.get("global_attn_every_n_layers", 3)
    base, scaling = read_rope({**hf, "rope_theta": hf.get("global_rope_theta", 160_000.0)})
    local = {**hf, "rope_theta": hf.get("local_rope_theta", 10_000.0) or base}
    window_base, window_scaling = read_rope(local, "sliding_attention")
    if window_scaling is not None:
        raise UnsupportedError("a rope scaling of windowed layers is not known here")
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=depth,
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf["intermediate_size"],
        max_positions=hf["max_position_embeddings"],
        causal=False,
        position="rotary",
        rope_base=base,
        rope_scaling=scaling,
        window=local_attention(hf) // 2 + 1,
        windowed=read_windowed_layers(hf) or tuple(bool(layer % every) for layer in layer_numbers(depth)),
        window_rope_base=window_base,
        norm_eps=hf.get("norm_eps", 1e-5),
        norm_bias=bool(hf.get("norm_bias", False)),
        opening_norm=False,
        embedding_norm=True,
        activation=activation_name(hf.get("hidden_activation", "gelu")),
        gated_mlp=True,
        qkv_bias=bool(hf.get("attention_bias", False)),
        output_bias=bool(hf.get("attention_bias", False)),
        mlp_bias=bool(hf.get("mlp_bias", False)),
    )


def local_attention(hf: Json) -> int:
    """The tokens that a windowed layer sees; `sliding_window`, one side of them, comes first."""
    if hf.get("sliding_window") is not None:
        [one_side] = read_sizes(hf, "sliding_window")
        return 2 * one_side
    [whole] = read_sizes({"local_attention": 128, **hf}, "local_attention")
    return whole


def decoder_config(hf: Json) -> ModelConfig:
    """A token sees `sliding_window` tokens, itself included; without this field, half of `local_attention`. Logits
    follow a dense layer and a norm."""
    shape = model_config(hf)
    [local] = read_sizes({"local_attention": 128, **hf}, "local_attention")
    [window] = read_sizes({"sliding_window": local // 2, **hf}, "sliding_window")
    return replace(
        shape,
        causal=True,
        window=window,
        logit_dense=activation_name(hf.get("classifier_activation", "gelu")),
        logit_dense_bias=bool(hf.get("classifier_bias", False)),
        logit_bias=bool(hf.get("decoder_bias", True)),
    )


def last_scoring(hf: Json) -> LabelScoring:
    """Scores of the last token that is not padding, which have a bias only with `classifier_bias`."""
    bias = bool(hf.get("classifier_bias", False))
    return replace(token_scoring(hf), pooling="last", bias=bias, padding=read_padding(hf))


def scoring_config(hf: Json) -> LabelScoring:
    pooling = hf.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise UnsupportedError(f"classifier_pooling {show_value(pooling)} is not one of cls, mean")
    return LabelScoring(
        pooling=pooling,
        activation=activation_name(hf.get("classifier_activation", "gelu")),
        dense_bias=bool(hf.get("classifier_bias", False)),
        norm=True,
    )


def token_scoring(hf: Json) -> LabelScoring:
    """The layers before the scores of tokens; they are those before the scores of texts."""
    return scoring_config({**hf, "classifier_pooling": "cls"})


def mask_scoring(hf: Json) -> LabelScoring:
    return replace(token_scoring(hf), bias=bool(hf.get("decoder_bias", True)))


MODERNBERT = Family(
    name="modernbert",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "ModernBertModel": HeadSpec("embed"),
        "ModernBertForSequenceClassification": HeadSpec("classify", HEAD, scoring_config),
        "ModernBertForMultipleChoice": HeadSpec("choose", HEAD, scoring_config),
        "ModernBertForTokenClassification": HeadSpec("tag", HEAD, token_scoring),
        "ModernBertForQuestionAnswering": HeadSpec("span", HEAD, token_scoring),
        "ModernBertForMaskedLM": HeadSpec("fill", MASK_HEAD, mask_scoring),
    },
    convert=convert_weight,
    drop=r"^(head|decoder|classifier)\.|rotary_emb\.",
    rope_by_layer=True,
)
MODERNBERT_DECODER = replace(
    MODERNBERT,
    name="modernbert-decoder",
    config=decoder_config,
    renames=(*DECODER_RENAMES, *RENAMES),
    heads={
        "ModernBertDecoderForCausalLM": HeadSpec("generate", LANGUAGE_HEAD),
        "ModernBertDecoderModel": HeadSpec("embed"),
        "ModernBertDecoderForSequenceClassification": HeadSpec("classify", HEAD, last_scoring),
    },
    drop=r"^(lm_head|head|decoder|classifier)\.|rotary_emb\.",
)

"""T5, T5 1.1, flan-T5, mT5 and umT5: encoder-decoders with pre-norm (RMS norm), no biases, and a distance bias instead
of position embeddings."""

from collections.abc import Callable
from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import EncoderDecoderConfig, ModelConfig
from .family import (
    CLASSIFICATION_HEAD,
    COPIED_EMBEDDINGS,
    SEQ2SEQ_HEAD,
    SPAN_HEAD,
    TAG_HEAD,
    Family,
    HeadSpec,
    Json,
    activation_name,
    last_token_scoring,
)

DEFAULT_POSITIONS = 512  # tokens, if the configuration has no limit
MAX_OUTPUT_POSITIONS = 1 << 16  # output tokens at most; there is no table of positions that would limit them
RENAMES = (
    *COPIED_EMBEDDINGS,
    (r"^shared\.", "tokens."),
    (r"^decoder\.", "head.decoder."),
    (r"^encoder\.", ""),
    (r"(^|\.)block\.0\.layer\.0\.SelfAttention\.relative_attention_bias\.", r"\1distances.table."),
    (r"(^|\.)block\.", r"\1blocks."),
    (r"^(head\.decoder\.blocks\.\d+)\.layer\.1\.layer_norm\.", r"\1.cross_norm."),
    (r"\.layer\.0\.layer_norm\.", ".attention_norm."),
    (r"\.layer\.[12]\.layer_norm\.", ".mlp_norm."),
    (r"\.layer\.0\.SelfAttention\.", ".attention."),
    (r"\.layer\.1\.EncDecAttention\.", ".cross."),
    (r"\.(attention|cross)\.q\.", r".\1.query."),
    (r"\.(attention|cross)\.k\.", r".\1.key."),
    (r"\.(attention|cross)\.v\.", r".\1.value."),
    (r"\.(attention|cross)\.o\.", r".\1.output."),
    (r"\.layer\.[12]\.DenseReluDense\.", ".mlp."),
    (r"\.mlp\.(wi|wi_1)\.", ".mlp.up."),
    (r"\.mlp\.wi_0\.", ".mlp.gate."),
    (r"\.mlp\.wo\.", ".mlp.down."),
    (r"(^|\.)final_layer_norm\.", r"\1final_norm."),
)

LAYER_BIAS_RENAMES = (
    (r"\.layer\.0\.SelfAttention\.relative_attention_bias\.", ".attention.distances.table."),
    *(rename for rename in RENAMES if "relative_attention_bias" not in rename[0]),
)
DROP = r"EncDecAttention\.relative_attention_bias"
ReadBoth = Callable[[Json, int], EncoderDecoderConfig]


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder. `dense_act_fn` and `is_gated_act`, which the reference makes of
    `feed_forward_proj` and saves, come before it."""
    gate, _, inner = hf.get("feed_forward_proj", "relu").rpartition("-")
    if gate not in ("", "gated"):
        raise UnsupportedError(f"feed_forward_proj {show_value(hf['feed_forward_proj'])} is neither plain nor gated")
    activation = activation_name("gelu_new" if (gate, inner) == ("gated", "gelu") else inner)
    named, is_gated = hf.get("dense_act_fn"), hf.get("is_gated_act")
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=hf["d_model"],
        depth=hf["num_layers"],
        heads=hf["num_heads"],
        kv_heads=hf["num_heads"],
        head_width=hf["d_kv"],
        mlp_width=hf["d_ff"],
        max_positions=hf.get("n_positions") or DEFAULT_POSITIONS,
        causal=False,
        position="bias",
        distances=hf.get("relative_attention_num_buckets", 32),
        farthest=hf.get("relative_attention_max_distance", 128),
        norm="rms",
        norm_eps=hf.get("layer_norm_epsilon", 1e-6),
        score_scale=1.0,
        activation=activation_name(named) if named else activation,
        gated_mlp=bool(gate if is_gated is None else is_gated),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def gated_config(hf: Json) -> ModelConfig:
    """mT5: the MLP has a gate unless the configuration says otherwise."""
    return model_config({"feed_forward_proj": "gated-gelu", **hf})


def layer_bias_config(hf: Json) -> ModelConfig:
    """umT5: each layer has a distance bias of its own."""
    return replace(gated_config(hf), position="layer_bias")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    """The first version ties the output matrix to the embeddings and scales the states before it."""
    scaled = hf.get("scale_decoder_outputs", hf.get("tie_word_embeddings") is not False)
    return join_stacks(hf, model_config(hf), start, scaled)


def gated_seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    """mT5 does not scale states before the output matrix."""
    return join_stacks(hf, gated_config(hf), start, hf.get("scale_decoder_outputs", False))


def layer_bias_seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    """States are scaled if the output matrix is that of the embeddings."""
    return join_stacks(hf, layer_bias_config(hf), start, hf.get("tie_word_embeddings") is not False)


def join_stacks(hf: Json, encoder: ModelConfig, start: int, scaled: bool) -> EncoderDecoderConfig:
    depth = hf.get("num_decoder_layers") or encoder.depth
    return EncoderDecoderConfig(
        encoder=encoder,
        decoder=replace(encoder, depth=depth, causal=True, max_positions=MAX_OUTPUT_POSITIONS),
        start=start,
        output_scale=encoder.width**-0.5 if scaled else 1.0,
    )


def t5_heads(name: str, both: ReadBoth) -> dict[str, HeadSpec]:
    """`name` is the prefix of the class names, `both` reads the configuration of both sides."""
    return {
        f"{name}ForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=both),
        f"{name}EncoderModel": HeadSpec("embed"),
        f"{name}ForTokenClassification": TAG_HEAD,
        f"{name}ForSequenceClassification": HeadSpec(
            "classify", CLASSIFICATION_HEAD, last_token_scoring, decoder=both, reads_decoder=True
        ),
        f"{name}ForQuestionAnswering": replace(SPAN_HEAD, decoder=both, reads_decoder=True),
    }


T5 = Family("t5", "transformer", model_config, RENAMES, t5_heads("T5", seq2seq_config), drop=DROP)
MT5 = Family("mt5", "transformer", gated_config, RENAMES, t5_heads("MT5", gated_seq2seq_config), drop=DROP)
UMT5 = Family(
    "umt5",
    "transformer",
    layer_bias_config,
    LAYER_BIAS_RENAMES,
    t5_heads("UMT5", layer_bias_seq2seq_config),
    drop=DROP,
)

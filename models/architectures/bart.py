"""BART: an encoder-decoder with post-norm, learned positions and a norm of the embeddings."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from .family import (
    CLASSIFICATION_HEAD,
    COPIED_EMBEDDINGS,
    SEQ2SEQ_HEAD,
    SPAN_HEAD,
    Family,
    HeadSpec,
    Json,
    NamedTensors,
    activation_name,
    check_required_values,
    last_token_scoring,
)

RENAMES = (
    *COPIED_EMBEDDINGS,
    (r"^shared\.", "tokens."),
    (r"^decoder\.", "head.decoder."),
    (r"^encoder\.", ""),
    (r"(^|\.)layers\.", r"\1blocks."),
    (r"(^|\.)embed_positions\.", r"\1position.table."),
    (r"(^|\.)layernorm_embedding\.", r"\1embedding_norm."),
    (r"\.self_attn\.", ".attention."),
    (r"\.encoder_attn\.", ".cross."),
    (r"\.(attention|cross)\.q_proj\.", r".\1.query."),
    (r"\.(attention|cross)\.k_proj\.", r".\1.key."),
    (r"\.(attention|cross)\.v_proj\.", r".\1.value."),
    (r"\.(attention|cross)\.out_proj\.", r".\1.output."),
    (r"\.self_attn_layer_norm\.", ".attention_norm."),
    (r"\.encoder_attn_layer_norm\.", ".cross_norm."),
    (r"\.final_layer_norm\.", ".mlp_norm."),
    (r"\.fc1\.", ".mlp.up."),
    (r"\.fc2\.", ".mlp.down."),
)
REQUIRED_VALUES: dict[str, Any] = {
    "normalize_before": False,
    "normalize_embedding": True,
    "add_final_layer_norm": False,
    "static_position_embeddings": False,
}


def convert_weight(name: str, tensor: Tensor) -> NamedTensors:
    """Flatten the bias of the logits, which the checkpoint stores as a matrix of one row."""
    return [(name, tensor.flatten() if name == "final_logits_bias" else tensor)]


def stack_config(hf: Json, name: str) -> ModelConfig:
    """The configuration of one stack; `name` is encoder or decoder."""
    width, heads = hf["d_model"], hf[f"{name}_attention_heads"]
    return ModelConfig(
        vocab_size=hf["vocab_size"],
        width=width,
        depth=hf[f"{name}_layers"],
        heads=heads,
        kv_heads=heads,
        head_width=width // heads,
        mlp_width=hf[f"{name}_ffn_dim"],
        max_positions=hf["max_position_embeddings"],
        position_offset=2,
        causal=name == "decoder",
        norm_order="post",
        embedding_norm=True,
        embedding_scale=math.sqrt(width) if hf.get("scale_embedding") else 1.0,
        activation=activation_name(hf.get("activation_function", "gelu")),
    )


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    check_required_values(hf, REQUIRED_VALUES)
    return stack_config(hf, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=stack_config(hf, "decoder"), start=start)


def label_heads(name: str, decoder: Callable[[Json, int], EncoderDecoderConfig]) -> dict[str, HeadSpec]:
    """The heads on the decoder's states; `name` is the prefix of the class names."""
    return {
        f"{name}ForSequenceClassification": HeadSpec(
            "classify", CLASSIFICATION_HEAD, last_token_scoring, decoder=decoder, reads_decoder=True
        ),
        f"{name}ForQuestionAnswering": replace(SPAN_HEAD, decoder=decoder, reads_decoder=True),
    }


BART = Family(
    name="bart",
    prefix="model",
    config=model_config,
    renames=RENAMES,
    heads={
        "BartForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config),
        **label_heads("Bart", seq2seq_config),
    },
    convert=convert_weight,
)

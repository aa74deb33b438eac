"""Pegasus: BART with pre-norm, sinusoidal positions and without a norm of the embeddings. BigBird-Pegasus: so, with
learned positions, as far as the attention of its encoder is full."""

from dataclasses import replace
from functools import partial

from torch import Tensor

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json, NamedTensors
from .long_bert import full_attention_length

BIG_BIRD_RENAMES = (
    (r"\.self_attn\.self\.(query|key|value)\.", r".attention.\1."),
    (r"\.self_attn\.output\.", ".attention.output."),
    (r"(^|\.)layernorm_embedding\.", r"\1final_norm."),
    *bart.RENAMES,
)


def stack_config(hf: Json, name: str) -> ModelConfig:
    shape = bart.stack_config(hf, name)
    return replace(shape, position="sines-cosines", position_offset=0, embedding_norm=False, norm_order="pre")


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return stack_config(hf, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=stack_config(hf, "decoder"), start=start)


def big_bird_stack(hf: Json, name: str) -> ModelConfig:
    biased = bool(hf.get("use_bias", False))
    shape = bart.stack_config({"activation_function": "gelu_new", "scale_embedding": True, **hf}, name)
    return replace(
        shape, position_offset=0, embedding_norm=False, norm_order="pre", qkv_bias=biased, output_bias=biased
    )


def big_bird_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder, which reads only the texts that are short enough for full attention."""
    shape = big_bird_stack(hf, "encoder")
    return replace(shape, max_positions=min(shape.max_positions, full_attention_length(hf)))


def big_bird_sides(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=big_bird_config(hf), decoder=big_bird_stack(hf, "decoder"), start=start)


def cut_positions(most: int, name: str, tensor: Tensor) -> NamedTensors:
    """Vectors of positions that no source has are not read."""
    return bart.convert_weight(name, tensor[:most] if name == "encoder.embed_positions.weight" else tensor)


def choose_big_bird_variant(family: Family, hf: Json) -> Family:
    return replace(family, convert=partial(cut_positions, full_attention_length(hf)))


PEGASUS = Family(
    name="pegasus",
    prefix="model",
    config=model_config,
    renames=(*bart.RENAMES, (r"(^|\.)layer_norm\.", r"\1final_norm.")),
    heads={"PegasusForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config)},
    convert=bart.convert_weight,
    drop=r"^(encoder|decoder)\.embed_positions\.",
)
BIGBIRD_PEGASUS = Family(
    name="bigbird_pegasus",
    prefix="model",
    config=big_bird_config,
    renames=BIG_BIRD_RENAMES,
    heads={
        "BigBirdPegasusForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=big_bird_sides),
        **bart.label_heads("BigBirdPegasus", big_bird_sides),
    },
    variant=choose_big_bird_variant,
)

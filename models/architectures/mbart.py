"""mBART (`mbart`, mBART-50): BART with pre-norm and a last norm. M2M-100 and NLLB (`m2m_100`): so, with sinusoidal
positions and without a norm of the embeddings. A generated text begins with the code of its language: the start token
or a forced first token."""

from dataclasses import replace

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json

RENAMES = (*bart.RENAMES, (r"(^|\.)layer_norm\.", r"\1final_norm."))


def mbart_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return replace(bart.stack_config(hf, "encoder"), norm_order="pre")


def mbart_sides(hf: Json, start: int) -> EncoderDecoderConfig:
    decoder = replace(bart.stack_config(hf, "decoder"), norm_order="pre")
    return EncoderDecoderConfig(encoder=mbart_config(hf), decoder=decoder, start=start, wraps_last=True)


def m2m_stack(hf: Json, name: str) -> ModelConfig:
    """Positions are counted from the one after the padding token's number."""
    shape = bart.stack_config({"scale_embedding": True, "activation_function": "relu", **hf}, name)
    padding = hf.get("pad_token_id", 1)
    return replace(
        shape,
        norm_order="pre",
        position="closed-sines-cosines",
        position_offset=padding + 1,
        embedding_norm=False,
    )


def m2m_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return m2m_stack(hf, "encoder")


def m2m_sides(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=m2m_config(hf), decoder=m2m_stack(hf, "decoder"), start=start)


MBART = Family(
    name="mbart",
    prefix="model",
    config=mbart_config,
    renames=RENAMES,
    heads={
        "MBartForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=mbart_sides),
        **bart.label_heads("MBart", mbart_sides),
    },
    convert=bart.convert_weight,
)
M2M_100 = Family(
    name="m2m_100",
    prefix="model",
    config=m2m_config,
    renames=RENAMES,
    heads={"M2M100ForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=m2m_sides)},
    drop=r"^(encoder|decoder)\.embed_positions\.",
)

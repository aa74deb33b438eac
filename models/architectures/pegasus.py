"""Pegasus: BART with pre-norm, sinusoidal positions and without a norm of the embeddings."""

from dataclasses import replace

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json


def stack_config(hf: Json, name: str) -> ModelConfig:
    shape = bart.stack_config(hf, name)
    return replace(shape, position="sines-cosines", position_offset=0, embedding_norm=False, norm_order="pre")


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return stack_config(hf, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=stack_config(hf, "decoder"), start=start)


PEGASUS = Family(
    name="pegasus",
    prefix="model",
    config=model_config,
    renames=(*bart.RENAMES, (r"(^|\.)layer_norm\.", r"\1final_norm.")),
    heads={"PegasusForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config)},
    convert=bart.convert_weight,
    drop=r"^(encoder|decoder)\.embed_positions\.",
)

"""BlenderBot: BART with pre-norm and a last norm, and without a norm of the embeddings. The small one is a BART whose
decoder adds positions after the norm of the embeddings."""

from dataclasses import replace

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart, mbart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json


def stack_config(hf: Json, name: str) -> ModelConfig:
    shape = bart.stack_config(hf, name)
    return replace(shape, norm_order="pre", position_offset=0, embedding_norm=False)


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return stack_config(hf, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=stack_config(hf, "decoder"), start=start)


def small_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return replace(bart.stack_config(hf, "encoder"), position_offset=0)


def small_sides(hf: Json, start: int) -> EncoderDecoderConfig:
    """The decoder's embeddings are not scaled, even if the configuration has the field."""
    shape = bart.stack_config(hf, "decoder")
    decoder = replace(shape, position_offset=0, position_last=True, embedding_scale=1.0)
    return EncoderDecoderConfig(encoder=small_config(hf), decoder=decoder, start=start)


BLENDERBOT = Family(
    name="blenderbot",
    prefix="model",
    config=model_config,
    renames=mbart.RENAMES,
    heads={"BlenderbotForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config)},
    convert=bart.convert_weight,
)
BLENDERBOT_SMALL = Family(
    name="blenderbot-small",
    prefix="model",
    config=small_config,
    renames=bart.RENAMES,
    heads={"BlenderbotSmallForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=small_sides)},
    convert=bart.convert_weight,
)

"""Pegasus: BART with norm before, positions told by sines, and no norm of the embeddings."""

from dataclasses import replace

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import WRITTEN, Family, HeadSpec, Json


def half(hf: Json, name: str) -> ModelConfig:
    shape = bart.half(hf, name)
    return replace(shape, position="sines-cosines", position_offset=0, embedding_norm=False, norm_order="pre")


def config(hf: Json) -> ModelConfig:
    """The half that reads."""
    return half(hf, "encoder")


def writing(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=config(hf), decoder=half(hf, "decoder"), start=start)


PEGASUS = Family(
    name="pegasus",
    prefix="model",
    config=config,
    renames=(*bart.RENAMES, (r"(^|\.)layer_norm\.", r"\1final_norm.")),
    heads={"PegasusForConditionalGeneration": HeadSpec("translate", WRITTEN, decoder=writing)},
    convert=bart.convert,
    drop=r"^(encoder|decoder)\.embed_positions\.",
)

"""Marian, as OPUS-MT's translators are kept: BART with positions told by sines, and no norm of the embeddings."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError
from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import WRITTEN, Family, HeadSpec, Json

KNOWN: dict[str, Any] = {
    **bart.KNOWN,
    "normalize_embedding": False,
    "static_position_embeddings": True,
    "share_encoder_decoder_embeddings": True,
}


def half(hf: Json, name: str) -> ModelConfig:
    shape = bart.half(hf, name)
    return replace(shape, position="sines-cosines", position_offset=0, embedding_norm=False)


def config(hf: Json) -> ModelConfig:
    """The half that reads."""
    bart.refuse_other(hf, KNOWN)
    if hf.get("decoder_vocab_size", hf["vocab_size"]) != hf["vocab_size"]:
        raise UnsupportedError(
            "decoder_vocab_size differs from vocab_size: only one vocabulary for both sides is known"
        )
    return half(hf, "encoder")


def writing(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=config(hf), decoder=half(hf, "decoder"), start=start)


MARIAN = Family(
    name="marian",
    prefix="model",
    config=config,
    renames=bart.RENAMES,
    heads={"MarianMTModel": HeadSpec("translate", WRITTEN, decoder=writing)},
    convert=bart.convert,
    drop=r"^(encoder|decoder)\.embed_positions\.",
)

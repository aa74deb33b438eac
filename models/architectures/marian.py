"""Marian, the architecture of the OPUS-MT translators: BART with sinusoidal positions and without a norm of the
embeddings."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError
from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json, check_required_values

REQUIRED_VALUES: dict[str, Any] = {
    **bart.REQUIRED_VALUES,
    "normalize_embedding": False,
    "static_position_embeddings": True,
    "share_encoder_decoder_embeddings": True,
}


def stack_config(hf: Json, name: str) -> ModelConfig:
    shape = bart.stack_config(hf, name)
    return replace(shape, position="sines-cosines", position_offset=0, embedding_norm=False)


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    check_required_values(hf, REQUIRED_VALUES)
    if hf.get("decoder_vocab_size", hf["vocab_size"]) != hf["vocab_size"]:
        raise UnsupportedError(
            "decoder_vocab_size differs from vocab_size: only one vocabulary for both sides is known"
        )
    return stack_config(hf, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=stack_config(hf, "decoder"), start=start)


MARIAN = Family(
    name="marian",
    prefix="model",
    config=model_config,
    renames=bart.RENAMES,
    heads={"MarianMTModel": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config)},
    convert=bart.convert_weight,
    drop=r"^(encoder|decoder)\.embed_positions\.",
)

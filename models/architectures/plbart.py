"""PLBart: BART for programs, with scaled embeddings. A generated text begins with the code of its language: the start
token or a forced first token."""

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, Family, HeadSpec, Json


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    return bart.stack_config({"scale_embedding": True, **hf}, "encoder")


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    decoder = bart.stack_config({"scale_embedding": True, **hf}, "decoder")
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=decoder, start=start, wraps_last=True)


PLBART = Family(
    name="plbart",
    prefix="model",
    config=model_config,
    renames=bart.RENAMES,
    heads={
        "PLBartForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config),
        "PLBartForSequenceClassification": bart.label_heads("PLBart", seq2seq_config)[
            "PLBartForSequenceClassification"
        ],
    },
    convert=bart.convert_weight,
)

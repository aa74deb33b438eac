"""LED: BART for long texts, with a window around each token of the source. Global attention, which a caller of the
reference asks for beside the text, is not computed: by default no token has it."""

from dataclasses import replace
from typing import Any

from ..core.errors import UnsupportedError, show_value
from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import SEQ2SEQ_HEAD, SPAN_HEAD, Family, HeadSpec, Json

RENAMES = (
    (r"\.self_attn\.longformer_self_attn\.", ".attention."),
    (r"\.self_attn\.output\.", ".attention.output."),
    *bart.RENAMES,
)


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    shape = bart.stack_config({**hf, "max_position_embeddings": hf["max_encoder_position_embeddings"]}, "encoder")
    return replace(shape, position_offset=0, embedding_scale=1.0, window=read_window(hf))


def read_window(hf: Json) -> int:
    """The tokens that a token sees on one side, its own included. UnsupportedError if layers differ."""
    windows: Any = hf.get("attention_window", 512)
    first = windows[0] if isinstance(windows, list) and windows else windows
    if isinstance(windows, list) and any(each != first for each in windows):
        raise UnsupportedError(f"attention_window {show_value(windows)}: only one width for all layers is known")
    if type(first) is not int or first < 2 or first % 2:
        raise UnsupportedError(f"attention_window is {show_value(first)}: even numbers from 2 on are known")
    return first // 2 + 1


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    shape = bart.stack_config({**hf, "max_position_embeddings": hf["max_decoder_position_embeddings"]}, "decoder")
    decoder = replace(shape, position_offset=0, embedding_scale=1.0)
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=decoder, start=start)


LED = Family(
    name="led",
    prefix="led",
    config=model_config,
    renames=RENAMES,
    heads={
        "LEDForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config),
        "LEDForQuestionAnswering": replace(SPAN_HEAD, decoder=seq2seq_config, reads_decoder=True),
    },
    convert=bart.convert_weight,
    drop=r"\.(query|key|value)_global\.",
)

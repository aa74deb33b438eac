"""MVP: BART trained on many tasks (Tang et al. 2022, arXiv:2206.12131), without its prompts of keys and values."""

from dataclasses import replace

from ..network.model_config import EncoderDecoderConfig, ModelConfig
from . import bart
from .family import CLASSIFICATION_HEAD, SEQ2SEQ_HEAD, SPAN_HEAD, Family, HeadSpec, Json, check_required_values
from .family import last_token_scoring as scoring


def model_config(hf: Json) -> ModelConfig:
    """The configuration of the encoder."""
    check_required_values(hf, {"use_prompt": False})
    return bart.model_config(hf)


def seq2seq_config(hf: Json, start: int) -> EncoderDecoderConfig:
    return EncoderDecoderConfig(encoder=model_config(hf), decoder=bart.stack_config(hf, "decoder"), start=start)


MVP = Family(
    name="mvp",
    prefix="model",
    config=model_config,
    renames=bart.RENAMES,
    heads={
        "MvpForConditionalGeneration": HeadSpec("translate", SEQ2SEQ_HEAD, decoder=seq2seq_config),
        "MvpForSequenceClassification": HeadSpec(
            "classify", CLASSIFICATION_HEAD, scoring, decoder=seq2seq_config, reads_decoder=True
        ),
        "MvpForQuestionAnswering": replace(SPAN_HEAD, decoder=seq2seq_config, reads_decoder=True),
    },
    convert=bart.convert_weight,
    drop=r"^lm_head\.",
)

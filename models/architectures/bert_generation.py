"""BERT as a generator (Rothe et al. 2020, arXiv:1907.12461): BERT without segments, causal as a decoder."""

from dataclasses import replace

from ..core.errors import UnsupportedError
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json

LANGUAGE_HEAD = ((r"^lm_head\.(decoder\.)?(weight|bias)$", r"head.output.\2"),)


def model_config(hf: Json) -> ModelConfig:
    if hf.get("add_cross_attention"):
        raise UnsupportedError("add_cross_attention is not known here")
    shape = bert.model_config({**hf, "is_decoder": False, "type_vocab_size": 0})
    return replace(shape, causal=bool(hf.get("is_decoder", False)), logit_bias=True)


BERT_GENERATION = Family(
    name="bert-generation",
    prefix="bert",
    config=model_config,
    renames=bert.RENAMES,
    heads={
        "BertGenerationDecoder": HeadSpec("generate", LANGUAGE_HEAD),
        "BertGenerationEncoder": HeadSpec("embed"),
    },
    drop=bert.DROP,
)

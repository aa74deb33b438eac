"""ELECTRA: BERT with another head, and with embeddings that may have a width of their own."""

from dataclasses import replace

from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json

RENAMES = (*bert.RENAMES, (r"^embeddings_project\.", "projection."))


def model_config(hf: Json) -> ModelConfig:
    width = hf.get("embedding_size", 128)
    return replace(bert.model_config(hf), embedding_width=0 if width == hf["hidden_size"] else width)


def scoring_config(_: Json) -> LabelScoring:
    return LabelScoring(activation="gelu")


ELECTRA = Family(
    name="electra",
    prefix="electra",
    config=model_config,
    renames=RENAMES,
    heads={
        "ElectraModel": HeadSpec("embed"),
        "ElectraForSequenceClassification": HeadSpec("classify", bert.ROBERTA_HEAD, scoring_config),
    },
    drop=bert.DROP + r"|^(discriminator_predictions|generator_predictions|generator_lm_head)\.",
)

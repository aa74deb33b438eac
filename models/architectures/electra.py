"""ELECTRA: BERT with another head, and with embeddings that may have a width of their own."""

from dataclasses import replace
from typing import Any

from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import bert
from .family import Family, HeadSpec, Json, activation_name, check_required_values

RENAMES = (*bert.RENAMES, (r"^embeddings_project\.", "projection."))


def model_config(hf: Json) -> ModelConfig:
    width = hf.get("embedding_size", 128)
    return replace(bert.model_config(hf), embedding_width=0 if width == hf["hidden_size"] else width)


def scoring_config(_: Json) -> LabelScoring:
    return LabelScoring(activation="gelu")


def replaced_token_scoring(hf: Json) -> LabelScoring:
    """Whether each token is one that a generator put in place of the text's own."""
    return LabelScoring(activation=activation_name(hf.get("hidden_act", "gelu")), two_labels=("O", "REPLACED"))


def choice_scoring(hf: Json) -> LabelScoring:
    """The summary of a text. Fields with other values than the published ones are refused."""
    check_required_values({**SUMMARY, **hf}, SUMMARY)
    return LabelScoring(activation="gelu")


def mask_scoring(hf: Json) -> LabelScoring:
    return LabelScoring(activation="gelu", norm=True, width=hf.get("embedding_size", 128))


SUMMARY: dict[str, Any] = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
CHOICE_HEAD = ((r"^sequence_summary\.summary\.", "head.dense."), (r"^classifier\.", "head.out."))
REPLACED_HEAD = (
    (r"^discriminator_predictions\.dense\.", "head.dense."),
    (r"^discriminator_predictions\.dense_prediction\.", "head.out."),
)
MASK_HEAD = (
    (r"^generator_predictions\.dense\.", "head.dense."),
    (r"^generator_predictions\.LayerNorm\.", "head.norm."),
    (r"^generator_lm_head\.", "head.output."),
)


ELECTRA = Family(
    name="electra",
    prefix="electra",
    config=model_config,
    renames=RENAMES,
    heads={
        **bert.bert_heads("Electra"),
        "ElectraForSequenceClassification": HeadSpec("classify", bert.ROBERTA_HEAD, scoring_config),
        "ElectraForMultipleChoice": HeadSpec("choose", CHOICE_HEAD, choice_scoring),
        "ElectraForMaskedLM": HeadSpec("fill", MASK_HEAD, mask_scoring),
        "ElectraForPreTraining": HeadSpec("tag", REPLACED_HEAD, replaced_token_scoring),
    },
    drop=bert.DROP + r"|^(discriminator_predictions|generator_predictions|generator_lm_head)\.",
)

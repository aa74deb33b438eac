"""EuroBERT: Llama that sees both sides."""

from dataclasses import replace

from ..core.errors import UnsupportedError, show_value
from ..network.heads import LabelScoring
from ..network.model_config import ModelConfig
from . import llama
from .family import TAG_HEAD, Family, HeadSpec, Json

TEXT_HEAD = ((r"^dense\.", "head.dense."), (r"^classifier\.", "head.out."))


def model_config(hf: Json) -> ModelConfig:
    return replace(llama.llama_config({"rms_norm_eps": 1e-5, **hf}), causal=False)


def scoring_config(hf: Json) -> LabelScoring:
    """Late pooling is the mean of the tokens' scores."""
    pooling = hf.get("classifier_pooling", hf.get("clf_pooling", "late"))
    match pooling:
        case "bos":
            return LabelScoring(activation="gelu")
        case "mean":
            return LabelScoring("mean", "gelu")
        case "late":
            return LabelScoring("mean", "gelu", pools_last=True)
        case _:
            raise UnsupportedError(f"classifier_pooling {show_value(pooling)} is not one of bos, mean, late")


def mask_scoring(hf: Json) -> LabelScoring:
    return LabelScoring(activation="none", bias=bool(hf.get("mlp_bias", False)))


EUROBERT = Family(
    "eurobert",
    "model",
    model_config,
    llama.RENAMES,
    {
        "EuroBertModel": HeadSpec("embed"),
        "EuroBertForSequenceClassification": HeadSpec("classify", TEXT_HEAD, scoring_config),
        "EuroBertForTokenClassification": TAG_HEAD,
        "EuroBertForMaskedLM": HeadSpec("fill", llama.LANGUAGE_HEAD, mask_scoring),
    },
    drop=llama.DROP,
    published_classes=frozenset(("EuroBertForQuestionAnswering",)),
)

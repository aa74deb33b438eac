"""Parameter counts of the networks of papers equal those of transformers and those that the papers print."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import nn

from polyhead.models.architectures import FAMILIES
from polyhead.models.network.heads import SequenceHead
from polyhead.models.network.transformer import Transformer

BASE = tf.BertConfig()
LARGE = tf.BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
GPT = tf.OpenAIGPTConfig()


def parameter_count(*modules: nn.Module) -> int:
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})


@pytest.mark.parametrize(
    ("config", "kind", "printed", "within"),
    [
        (BASE, tf.BertModel, 110e6, 0.01),
        (LARGE, tf.BertModel, 340e6, 0.015),  # the paper rounds 335 million to tens
        (GPT, tf.OpenAIGPTLMHeadModel, 117e6, 0.01),
    ],
    ids=["bert-base", "bert-large", "gpt"],
)
def test_parameter_counts_equal_transformers_and_the_papers(
    config: Any, kind: Any, printed: float, within: float
) -> None:
    """BERT with its pooler, without the pretraining heads; GPT with its output layer, tied to the token embedding."""
    family = FAMILIES[config.model_type]
    with torch.device("meta"):
        ours, theirs = Transformer(family.config(config.to_dict())), kind(config)
        parts = [ours]
        if kind is tf.BertModel:
            spec = family.heads["BertForSequenceClassification"]
            parts.append(SequenceHead(ours.config, 1, spec.scoring(config.to_dict()), "none").dense)
    assert parameter_count(*parts) == parameter_count(theirs)
    assert abs(parameter_count(*parts) / printed - 1) < within
    assert round(parameter_count(*parts) / printed, 1) == 1.0

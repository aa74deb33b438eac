"""How many numbers the networks of the papers have here: as many as in transformers, and as their papers print."""

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


def numbers(*modules: nn.Module) -> int:
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
def test_parameters_are_as_many_as_the_papers_say(config: Any, kind: Any, printed: float, within: float) -> None:
    """Of BERT with its pooler, without the heads of pretraining; of GPT with its output, whose matrix is that of the
    tokens."""
    family = FAMILIES[config.model_type]
    with torch.device("meta"):
        ours, theirs = Transformer(family.config(config.to_dict())), kind(config)
        parts = [ours]
        if kind is tf.BertModel:
            spec = family.heads["BertForSequenceClassification"]
            parts.append(SequenceHead(ours.config, 1, spec.scoring(config.to_dict()), "none").dense)
    assert numbers(*parts) == numbers(theirs)
    assert abs(numbers(*parts) / printed - 1) < within
    assert round(numbers(*parts) / printed, 1) == 1.0

"""The kinds of network that a recipe can train from scratch: their sizes, how each is built, and how it is written.

A new kind is a line in NETWORKS.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.models.network.heads import LabelScoring, LanguageHead, MaskHead, SequenceHead
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..data import vocabulary_training as vocabulary
from ..export import network_folder as export
from ..loop.dropout import add_dropout
from .network_size import TransformerSize
from .translators import (
    EncoderDecoderSize,
    RecurrentSize,
    build_recurrent,
    build_transformer,
    required_id,
    write_recurrent,
    write_transformer,
)

ObjectiveKind = Literal["causal", "masked", "translation"]
INIT_STD = 0.02  # of initial weights, as in Radford et al. 2018 and Devlin et al. 2019


@dataclass(frozen=True)
class NetworkKind:
    """A kind of network, as named by a recipe's `network.kind`.

    `train_vocabulary` learns a vocabulary from texts and writes it to a folder.  `build` creates the modules for a
    size, a vocabulary and a number of tokens.  `write` adds them to a folder that has the vocabulary.  `smoke_size` are
    the changes of a smoke run.
    """

    objective: ObjectiveKind
    size_type: type
    train_vocabulary: Callable[[Sequence[str], int, Path], None]
    build: Callable[[Any, Tokenizer, int], list[nn.Module]]
    write: Callable[[Sequence[nn.Module], Tokenizer, Path], None]
    smoke_size: Mapping[str, Any]


def initialise_weights(modules: Sequence[nn.Module], depth: int) -> None:
    """Initialise weights: normal, biases zero; outputs into the residual stream are smaller in deeper networks."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                last = name.endswith(("attention.output", "mlp.down"))
                nn.init.normal_(part.weight, std=INIT_STD / math.sqrt(2 * depth) if last else INIT_STD)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def build_generator(shape: TransformerSize, tokenizer: Tokenizer, max_tokens: int) -> list[nn.Module]:
    """Build a GPT: causal, pre-norm, learned positions (Radford et al. 2019)."""
    config = shape.model_config(tokenizer.vocab_size, max_tokens, causal=True, activation="gelu_tanh")
    network = Transformer(config)
    modules = [network, LanguageHead(config, tied=network.tokens)]
    initialise_weights(modules, shape.depth)
    add_dropout(network, shape.dropout)
    return modules


def build_encoder(shape: TransformerSize, tokenizer: Tokenizer, max_tokens: int) -> list[nn.Module]:
    """Build a BERT: bidirectional, post-norm, learned positions, two segments (Devlin et al. 2019)."""
    config = shape.model_config(
        tokenizer.vocab_size,
        max_tokens,
        causal=False,
        norm_order="post",
        norm_eps=1e-12,
        embedding_norm=True,
        segments=2,
    )
    network = Transformer(config)
    hidden = MaskHead(config, LabelScoring(activation="gelu", norm=True), tied=network.tokens)
    modules = [network, hidden, SequenceHead(config, 2, LabelScoring(), "softmax")]
    initialise_weights(modules, 1)
    add_dropout(network, shape.dropout)
    return modules


def write_generator(modules: Sequence[nn.Module], tokenizer: Tokenizer, folder: Path) -> None:
    end = required_id(tokenizer.eos_id)
    ends = {"bos_token_id": end, "eos_token_id": end}
    write_in_family(modules, "gpt2", "GPT2LMHeadModel", folder, ends)


def write_encoder(modules: Sequence[nn.Module], tokenizer: Tokenizer, folder: Path) -> None:  # noqa: ARG001
    write_in_family(modules, "bert", "BertForPreTraining", folder, {})


def write_in_family(
    modules: Sequence[nn.Module], family: str, architecture: str, folder: Path, config_fields: Mapping[str, object]
) -> None:
    form, network = export.FAMILY_FORMATS[family], modules[0]
    assert isinstance(network, Transformer)
    export.write_network(form, architecture, modules, folder, {**form.describe_config(network.config), **config_fields})


TINY_TRANSFORMER = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 0}
TINY_RECURRENT = {"width": 16, "hidden": 16, "depth": 1, "parameters": 0}
NETWORKS: Mapping[str, NetworkKind] = {
    "gpt": NetworkKind(
        "causal", TransformerSize, vocabulary.write_gpt_vocabulary, build_generator, write_generator, TINY_TRANSFORMER
    ),
    "bert": NetworkKind(
        "masked", TransformerSize, vocabulary.write_bert_vocabulary, build_encoder, write_encoder, TINY_TRANSFORMER
    ),
    "transformer": NetworkKind(
        "translation",
        EncoderDecoderSize,
        vocabulary.write_translator_vocabulary,
        build_transformer,
        write_transformer,
        TINY_TRANSFORMER,
    ),
    "recurrent": NetworkKind(
        "translation",
        RecurrentSize,
        vocabulary.write_translator_vocabulary,
        build_recurrent,
        write_recurrent,
        TINY_RECURRENT,
    ),
}


def choose_device(name: str) -> torch.device:
    """Return the device of a recipe; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)

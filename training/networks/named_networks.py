"""The networks that a recipe can name: what can be said of each, how it is made from chance, how it is written.

It doesn't know how they are taught.  A new network is a line in NETWORKS.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from polyhead.models.network.heads import LanguageHead, MaskHead, Scoring, SequenceHead
from polyhead.models.network.transformer import Transformer
from polyhead.models.tokenizer import Tokenizer

from ..data import vocabulary_training as vocabulary
from ..export import export
from ..loop.dropout import drop
from .network_size import Shape
from .translators import Cells, Halves, cells, transformer, write_cells, write_transformer

Aim = Literal["causal", "masked", "translation"]
SPREAD = 0.02  # of the first weights, as Radford et al. 2018 and Devlin et al. 2019 have it


@dataclass(frozen=True)
class Network:
    """What a recipe's `network.kind` names.

    `words` learns its vocabulary from texts into a folder; `build` makes its modules for a vocabulary and so many
    tokens; `write` adds them to a folder that has the vocabulary.  `smoke` is what a run of seconds changes.
    """

    aim: Aim
    shape: type
    words: Callable[[Sequence[str], int, Path], None]
    build: Callable[[Any, Tokenizer, int], list[nn.Module]]
    write: Callable[[Sequence[nn.Module], Tokenizer, Path], None]
    smoke: Mapping[str, Any]


def begin(modules: Sequence[nn.Module], depth: int) -> None:
    """First weights: small, biases zero, and what is added to the stream smaller the more layers add to it."""
    for module in modules:
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear | nn.Embedding):
                last = name.endswith(("attention.output", "mlp.down"))
                nn.init.normal_(part.weight, std=SPREAD / math.sqrt(2 * depth) if last else SPREAD)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def generator(shape: Shape, words: Tokenizer, most: int) -> list[nn.Module]:
    """A GPT: causal, norm before, learned positions (Radford et al. 2019)."""
    config = shape.config(words.vocab_size, most, causal=True, activation="gelu_tanh")
    network = Transformer(config)
    modules = [network, LanguageHead(config, tied=network.tokens)]
    begin(modules, shape.depth)
    drop(network, shape.dropout)
    return modules


def encoder(shape: Shape, words: Tokenizer, most: int) -> list[nn.Module]:
    """A BERT: bidirectional, norm after, learned positions, two segments (Devlin et al. 2019)."""
    config = shape.config(
        words.vocab_size, most, causal=False, norm_order="post", norm_eps=1e-12, embedding_norm=True, segments=2
    )
    network = Transformer(config)
    hidden = MaskHead(config, "gelu", tied=network.tokens)
    modules = [network, hidden, SequenceHead(config, 2, Scoring(), "softmax")]
    begin(modules, 1)
    drop(network, shape.dropout)
    return modules


def write_generator(modules: Sequence[nn.Module], words: Tokenizer, folder: Path) -> None:
    assert words.eos_id is not None
    ends = {"bos_token_id": words.eos_id, "eos_token_id": words.eos_id}
    write(modules, "gpt2", "GPT2LMHeadModel", folder, ends)


def write_encoder(modules: Sequence[nn.Module], words: Tokenizer, folder: Path) -> None:  # noqa: ARG001
    write(modules, "bert", "BertForPreTraining", folder, {})


def write(
    modules: Sequence[nn.Module], family: str, architecture: str, folder: Path, said: Mapping[str, object]
) -> None:
    form, network = export.FORMS[family], modules[0]
    assert isinstance(network, Transformer)
    export.write_network(form, architecture, modules, folder, {**form.config(network.config), **said})


TINY = {"width": 32, "depth": 2, "heads": 2, "mlp_width": 0}
TINY_CELLS = {"width": 16, "hidden": 16, "depth": 1, "parameters": 0}
NETWORKS: Mapping[str, Network] = {
    "gpt": Network("causal", Shape, vocabulary.write_generator, generator, write_generator, TINY),
    "bert": Network("masked", Shape, vocabulary.write_word_pieces, encoder, write_encoder, TINY),
    "transformer": Network("translation", Halves, vocabulary.write_translator, transformer, write_transformer, TINY),
    "recurrent": Network("translation", Cells, vocabulary.write_translator, cells, write_cells, TINY_CELLS),
}


def device_named(name: str) -> torch.device:
    """Where it is trained; "auto" is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)

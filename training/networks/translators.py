"""The encoder-decoders that a recipe can train from scratch: a Transformer and a recurrent network."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, NonNegativeInt, PositiveInt
from torch import nn

from polyhead.models.checkpoint import recurrent_folder as folders
from polyhead.models.network.encoder_decoder import EncoderDecoder
from polyhead.models.network.model_config import EncoderDecoderConfig
from polyhead.models.network.transformer import Transformer
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator, fit_hidden_width
from polyhead.models.tokenizer import Tokenizer

from ..export import network_folder as export
from ..loop.dropout import add_dropout
from ..loop.errors import RecipeError
from .network_size import TransformerSize


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderSize(TransformerSize):
    """Two stacks of `depth` layers each, with post-norm (the original) or pre-norm."""

    norm: Literal["post", "pre"] = "post"


@dataclass(frozen=True, kw_only=True)
class RecurrentSize:
    """A recurrent network (models.recurrent): its `hidden` width, or the number of `parameters` to approximate."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    width: PositiveInt
    hidden: NonNegativeInt = 0
    depth: PositiveInt = 1
    parameters: NonNegativeInt = 0
    cell: Literal["gru", "lstm"] = "gru"
    bidirectional: bool = True
    attention: Literal["none", "bahdanau", "luong"] = "none"
    score: Literal["dot", "general", "concat"] = "concat"
    reach: Literal["global", "local-m", "local-p"] = "global"
    window: PositiveInt = 10
    input_feeding: bool = False
    reversed_source: bool = False
    dropout: float = 0.0
    tied: bool = True

    def __post_init__(self) -> None:
        if (self.hidden > 0) == (self.parameters > 0):
            raise ValueError("say either how wide it is, hidden, or how many parameters it has")


def build_transformer(shape: EncoderDecoderSize, tokenizer: Tokenizer, max_tokens: int) -> list[nn.Module]:
    """Build the Transformer (Vaswani et al. 2017): sinusoidal positions, embeddings scaled by the root of the width,
    tied.
    """
    halves = [
        shape.model_config(
            tokenizer.vocab_size,
            max_tokens,
            causal=causal,
            position="sines-cosines",
            norm_order=shape.norm,
            activation="relu",
            embedding_scale=math.sqrt(shape.width),
        )
        for causal in (False, True)
    ]
    config = EncoderDecoderConfig(encoder=halves[0], decoder=halves[1], start=required_id(tokenizer.bos_id))
    network = EncoderDecoder(Transformer(halves[0]), config)
    for part in network.modules():
        if isinstance(part, nn.Linear) and part is not network.output:
            nn.init.xavier_uniform_(part.weight)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
    nn.init.normal_(network.encoder.tokens.weight, std=shape.width**-0.5)
    add_dropout(network, shape.dropout)
    return [network]


def build_recurrent(shape: RecurrentSize, tokenizer: Tokenizer, max_tokens: int) -> list[nn.Module]:
    fields = {name: value for name, value in asdict(shape).items() if name != "parameters"}
    fields["hidden"] = shape.hidden or 2  # even, for both directions
    ids: dict[str, Any] = {
        "start": required_id(tokenizer.bos_id),
        "end": required_id(tokenizer.eos_id),
        "pad": required_id(tokenizer.pad_id),
    }
    config = RecurrentConfig(vocab_size=tokenizer.vocab_size, max_positions=max_tokens, **fields, **ids)
    return [RecurrentTranslator(fit_hidden_width(config, shape.parameters) if shape.parameters else config)]


def required_id(role: int | None) -> int:
    """Return the id of a special token.  Raises RecipeError if the vocabulary, which a saved run has, lacks it."""
    if role is None:
        raise RecipeError("vocabulary: it lacks a special token of such networks: it was made for another kind")
    return role


def write_transformer(modules: Sequence[nn.Module], tokenizer: Tokenizer, folder: Path) -> None:
    network = modules[0]
    assert isinstance(network, EncoderDecoder)
    export.write_translator(
        network, network.config, (required_id(tokenizer.pad_id), required_id(tokenizer.eos_id)), folder
    )


def write_recurrent(modules: Sequence[nn.Module], tokenizer: Tokenizer, folder: Path) -> None:  # noqa: ARG001
    network = modules[0]
    assert isinstance(network, RecurrentTranslator)
    folders.save_recurrent(folder, network, folder / "tokenizer.json")

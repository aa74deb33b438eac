"""The configuration of a recurrent encoder-decoder, and the check of its values. The published variants are fields:
attention, score, reach and cell."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from ..core.errors import ModelError, show_value

CellKind = Literal["gru", "lstm"]
AttentionKind = Literal["none", "bahdanau", "luong"]
ScoreKind = Literal["dot", "general", "concat"]
ReachKind = Literal["global", "local-m", "local-p"]

CHOICE_FIELDS = {"cell": CellKind, "attention": AttentionKind, "score": ScoreKind, "reach": ReachKind}
SIZE_LIMIT = 2**31  # of any size
SIZE_LIMITS = {
    "vocab_size": SIZE_LIMIT,
    "width": 2**20,
    "hidden": 2**20,
    "depth": SIZE_LIMIT,
    "window": SIZE_LIMIT,
    "max_positions": SIZE_LIMIT,
}
BOOLEAN_FIELDS = ("bidirectional", "input_feeding", "reversed_source", "tied")
TOKEN_FIELDS = ("start", "end", "pad")


@dataclass(frozen=True, kw_only=True)
class RecurrentConfig:
    """One network over one vocabulary. Widths count features, windows and positions count tokens.

    ModelError names a field with an invalid value.
    """

    vocab_size: int
    width: int  # of token embeddings, and of the output matrix's input
    hidden: int  # of the decoder's state and of the encoder's annotations, of which each direction has half
    depth: int = 1
    cell: CellKind = "gru"
    bidirectional: bool = True
    attention: AttentionKind = "none"
    score: ScoreKind = "concat"  # of "luong"; the others have one each
    reach: ReachKind = "global"  # of "luong"
    window: int = 10  # tokens on each side that a local reach includes
    input_feeding: bool = False  # of "luong": each step reads the attentional vector of the previous one
    reversed_source: bool = False  # of an encoder in one direction: it reads the source backwards
    dropout: float = 0.0
    tied: bool = False  # the output matrix is the token embedding
    max_positions: int = 512  # of a source and of a target; a limit of the service, not of the arithmetic
    start: int  # before the first generated token
    end: int  # after the last token
    pad: int  # for padded layouts of other programs; unused here

    def __post_init__(self) -> None:
        for name, wrong in invalid_values(self):
            message = f"{name} is {show_value(getattr(self, name))}, which should be {wrong}"
            raise ModelError(message)

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def state_tensors(self) -> int:
        """The number of state tensors of a cell: 1, or 2 for an LSTM."""
        return 2 if self.cell == "lstm" else 1


def invalid_values(config: RecurrentConfig) -> Iterator[tuple[str, str]]:
    """The fields with invalid values, each with what it should be. A file may hold any value."""
    for name, most in SIZE_LIMITS.items():
        if type(getattr(config, name)) is not int or not 1 <= getattr(config, name) < most:
            yield name, f"a whole number from 1 to {most - 1}"
    for name in BOOLEAN_FIELDS:
        if type(getattr(config, name)) is not bool:
            yield name, "true or false"
    for name, choice in CHOICE_FIELDS.items():
        if getattr(config, name) not in get_args(choice):
            yield name, f"one of {', '.join(get_args(choice))}"
    for name in TOKEN_FIELDS:
        if type(getattr(config, name)) is not int or not 0 <= getattr(config, name) < config.vocab_size:
            yield name, f"a token below {config.vocab_size}"
    if type(config.dropout) not in (int, float) or not 0 <= config.dropout < 1:
        yield "dropout", "a share, less than 1"
    yield from ignored_fields(config)


def ignored_fields(config: RecurrentConfig) -> Iterator[tuple[str, str]]:
    """The fields with a value that the other fields would make ineffective."""
    if config.bidirectional and config.hidden % 2:
        yield "hidden", "even, half of it for each direction"
    if config.bidirectional and config.reversed_source:
        yield "reversed_source", "false if both directions are read"
    if config.attention != "luong":
        for name, only in (("score", "concat"), ("reach", "global"), ("input_feeding", False)):
            if getattr(config, name) != only:
                yield name, f"{only!r} where attention is {show_value(config.attention)}"

"""How much of what a client sends is read at all, and the sentences that say so.

Knows no HTTP and no tensor.
"""

from collections.abc import Sequence

from service.errors import BadRequest, TooLong
from service.model import Model

CHARACTERS = 64  # for every token a model takes, are read at most: a longer text can hardly be short enough
FEWEST = 1 << 16  # characters that are always read
GROWN = 1 << 25  # characters that a text may become while it is made tokens


def place(field: str, index: int, count: int) -> str:
    """What messages call one of `count` texts."""
    return field if count == 1 else f"{field}[{index}]"


def check_characters(model: Model, text: str, where: str, before: int = 0) -> None:
    """Turning text into tokens holds up everybody else; of an absurdly long one it is not begun.  `before` is the
    length of the prompt that is put before it."""
    most = max(FEWEST, min(CHARACTERS * model.max_tokens, int(GROWN / model.tokenizer.growth)))
    if before + len(text) > most:
        with_prompt = f" with its prompt of {before}" if before else ""
        length = f"has {before + len(text)} characters{with_prompt}"
        raise TooLong(
            f"{where}: {length}, at most {most} are read: the model takes {model.max_tokens} tokens", param=where
        )


def known_tokens(model: Model, ids: Sequence[int], where: str) -> list[int]:
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < model.vocab_size:
            raise BadRequest(f"{where}: token {token} is outside the vocabulary of {model.vocab_size}", param=where)
    return list(ids)

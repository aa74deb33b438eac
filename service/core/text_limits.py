"""Limits on the texts and tokens of a request, and the error messages for them."""

from collections.abc import Sequence
from typing import Literal

from .errors import BadRequest, TooLong
from .model import Model

CHARS_PER_TOKEN = 64  # a text with more characters for each token that the model takes is refused unread
MIN_CHARS = 1 << 16  # characters that are always accepted
MAX_WRITTEN_BYTES = 1 << 25  # bytes of the texts or names of a call's tokens; 262,144 common tokens have two million
MAX_NORMALIZED_CHARS = 1 << 27  # characters that a text may grow to when the tokenizer normalises it


def input_label(field: str, index: int, count: int) -> str:
    """The name of one of `count` inputs in messages."""
    return field if count == 1 else f"{field}[{index}]"


def context_words(limit: int) -> str:
    """The sentence of OpenAI's and vLLM's servers, by which clients recognise a text that is too long."""
    return f"This model's maximum context length is {limit} tokens"


def check_characters(model: Model, characters: int, where: str, before: int = 0) -> None:
    """Raise TooLong for a text that is too long to be tokenised, before any time is spent on it.

    `before` is the length of the prompt that is put before it.
    """
    most = max(MIN_CHARS, min(CHARS_PER_TOKEN * model.max_tokens, int(MAX_NORMALIZED_CHARS / model.tokenizer.growth)))
    if before + characters > most:
        with_prompt = f" with its prompt of {before}" if before else ""
        length = f"has {before + characters} characters{with_prompt}"
        why = context_words(model.max_tokens)
        if most < CHARS_PER_TOKEN * model.max_tokens:
            why = f"Its tokenizer may make {model.tokenizer.growth:g} characters of one"
        raise TooLong(f"{where}: {length}, at most {most} are read. {why}", param=where)


def check_token_ids(model: Model, ids: Sequence[int], where: str) -> list[int]:
    """`ids` as a list.  Raises BadRequest for ids outside of the vocabulary."""
    for token in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token < model.vocab_size:
            raise BadRequest(f"{where}: token {token} is outside the vocabulary of {model.vocab_size}", param=where)
    return list(ids)


def truncate_rows(special: Sequence[bool], limit: int, *, side: Literal["left", "right"], pair: bool) -> list[int]:
    """At most `limit` rows: special tokens stay, content is cut off at `side`, of a pair from the longer text first."""
    content = [row for row, is_special in enumerate(special) if not is_special]
    # the two texts of a pair have special tokens between them
    border = next((n for n in range(1, len(content)) if content[n] != content[n - 1] + 1), len(content)) if pair else 0
    texts = content[:border], content[border:]
    lengths = split_budget(len(texts[0]), len(texts[1]), max(0, limit - (len(special) - len(content))))
    kept = [row for row, is_special in enumerate(special) if is_special]
    for text, length in zip(texts, lengths, strict=True):
        kept += text[:length] if side == "right" else text[len(text) - length :]
    return sorted(kept)


def split_budget(first: int, second: int, budget: int) -> tuple[int, int]:
    """How much of two lengths fits into `budget`: the longer is cut first, then both evenly."""
    if first + second <= budget:
        return first, second
    shorter = min(first, second, budget // 2)
    return (shorter, budget - shorter) if first <= second else (budget - shorter, shorter)

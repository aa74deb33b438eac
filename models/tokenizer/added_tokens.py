"""Bounds of the tokens that a checkpoint adds to its vocabulary: control tokens and others that are matched whole.

The library searches texts for all of them with one automaton. It takes a kilobyte and a microsecond for each character
of an added token, and other threads wait until it is made. So the characters are counted before the library reads the
tokens.
"""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ..core.errors import CheckpointError
from .merges import ESCAPED_LETTER, parse_whole

MAX_ADDED_TOKENS = 1 << 17  # published vocabularies have up to 65,536, for sounds or pictures
MAX_ADDED_LENGTH = 256  # characters of one; published ones have up to 40
MAX_ADDED_CHARACTERS = 1 << 20  # of all; 65,536 published ones have 900,000
MAX_ITEM_LENGTH = 1 << 12  # characters of a token in JSON, with its flags and with escapes
LIST = re.compile(r'"added_tokens"\s*:\s*\[\s*')
NEXT = re.compile(r"\s*,\s*")


def check_added_tokens(text: str, file: str) -> None:
    """Raises CheckpointError for a tokenizer.json that adds too many tokens, or too long ones.

    Only the list of added tokens is parsed, because other threads wait while a large file is parsed.
    """
    check_added_contents(
        (token.get("content") for token in _listed_tokens(text, file) if isinstance(token, dict)), file
    )


def check_added_contents(contents: Iterable[Any], file: str = "") -> None:
    """Raises CheckpointError for too many added tokens, or too long ones. Only strings are counted, each once."""
    added = dict.fromkeys(content for content in contents if isinstance(content, str))
    longest = max(added, key=len, default="")
    if len(longest) > MAX_ADDED_LENGTH:
        message = f"the added token {longest[:40]!r}... has {len(longest)} characters; {MAX_ADDED_LENGTH} are the most"
        raise CheckpointError(message, file=file)
    if len(added) > MAX_ADDED_TOKENS:
        message = f"its vocabulary has {len(added)} added tokens; {MAX_ADDED_TOKENS} are the most"
        raise CheckpointError(message, file=file)
    if (characters := sum(map(len, added))) > MAX_ADDED_CHARACTERS:
        message = f"its added tokens have {characters} characters in all; {MAX_ADDED_CHARACTERS} are the most"
        raise CheckpointError(message, file=file)


def _listed_tokens(text: str, file: str) -> list[Any]:
    """The list of added tokens; empty if it cannot be read, for which the library has a better message."""
    found = list(LIST.finditer(text))
    if len(found) > 1:
        raise CheckpointError(f"has {len(found)} lists of added_tokens where one belongs", file=file)
    try:
        if ESCAPED_LETTER.search(text):  # the field's name may be written with it
            listed = parse_whole(text, file)["added_tokens"]
        else:
            listed = list(_parse_items(text, found[0].end(), file)) if found else []
    except (ValueError, RecursionError, KeyError, TypeError):
        return []
    return listed if isinstance(listed, list) else []


def _parse_items(text: str, at: int, file: str) -> Iterator[Any]:
    """The items of a list that begin at a place of the text, until one cannot be read. They are parsed one by one,
    since a long list would keep the interpreter. Raises CheckpointError for an item that is longer than any token."""
    decoder = json.JSONDecoder()
    for number in range(MAX_ADDED_TOKENS):
        part = text[at : at + MAX_ITEM_LENGTH]
        if part.startswith("]"):  # the list is empty
            return
        try:
            item, length = decoder.raw_decode(part)
        except ValueError as error:
            if len(part) == MAX_ITEM_LENGTH:
                message = f"added_tokens[{number}] is no token of at most {MAX_ITEM_LENGTH} characters: {error}"
                raise CheckpointError(message, file=file) from None
            return
        yield item
        if (gap := NEXT.match(text, at + length)) is None:
            return
        at = gap.end()
    raise CheckpointError(f"its vocabulary has more than {MAX_ADDED_TOKENS} added tokens", file=file)

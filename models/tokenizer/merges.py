"""Checks of a tokenizer.json that the tokenizers library does not make itself.

If the second piece of a merge does not begin with `continuing_subword_prefix`, the library cuts a character in half and
ends the process. A long prefix or suffix is added to every character of a text, so that a short text becomes millions
of tokens.
"""

import json
import re
from typing import Any

from ..core.errors import CheckpointError, show_value

MAX_AFFIX_LENGTH = 16  # characters
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
EMPTY_AFFIX = re.compile(r'"(continuing_subword_prefix|end_of_word_suffix)"\s*:\s*(null|"")')
AFFIX_NAME = re.compile("|".join(AFFIXES))
ESCAPED_LETTER = re.compile(r"\\u00[4-7]")  # an escaped letter or underscore, which may hide a name


def check_merges(text: str, file: str) -> None:
    """Raises CheckpointError for a tokenizer.json with harmful merges, prefix or suffix."""
    if len(AFFIX_NAME.findall(text)) == len(EMPTY_AFFIX.findall(text)) and not ESCAPED_LETTER.search(text):
        return  # it has no prefix and no suffix, like most
    try:
        model = json.loads(text)["model"]
        found: dict[str, Any] = {name: model.get(name) for name in (*AFFIXES, "merges")}
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return  # the library has a better message for it
    for name in AFFIXES:
        if isinstance(found[name], str) and len(found[name]) > MAX_AFFIX_LENGTH:
            message = f"model.{name} has {len(found[name])} characters, at most {MAX_AFFIX_LENGTH} are read"
            raise CheckpointError(message, file=file)
    prefix, merges = found["continuing_subword_prefix"], found["merges"]
    if isinstance(prefix, str) and isinstance(merges, list):
        for index, merge in enumerate(merges):
            second = (
                merge.partition(" ")[2]
                if isinstance(merge, str)
                else merge[-1]
                if isinstance(merge, list) and merge
                else ""
            )
            if not isinstance(second, str) or not second.startswith(prefix):
                message = (
                    f"model.merges[{index}] has {show_value(second)} where model.continuing_subword_prefix belongs"
                )
                raise CheckpointError(f"{message}, which is {show_value(prefix)}", file=file)

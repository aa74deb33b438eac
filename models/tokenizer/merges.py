"""Checks of a tokenizer.json that the tokenizers library does not make itself.

If the second piece of a merge does not begin with `continuing_subword_prefix`, the library cuts a character in half and
ends the process. A long prefix or suffix is added to every character of a text, so that a short text becomes millions
of tokens.
"""

import re
from typing import Any

from ..core.errors import CheckpointError, show_value
from ..core.json_files import count_values, parse_json

MAX_AFFIX_LENGTH = 16  # characters
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
EMPTY_AFFIX = re.compile(r'"(continuing_subword_prefix|end_of_word_suffix)"\s*:\s*(null|"")')
# An escaped small letter or underscore, which may hide a name.
ESCAPED_LETTER = re.compile(r"\\u00(5[fF]|6[1-9a-fA-F]|7[0-9aA])")
MAX_PARSED_VALUES = 1 << 20  # of a tokenizer.json that is parsed here; published ones have up to 725,000


def check_merges(text: str, file: str) -> None:
    """Raises CheckpointError for a tokenizer.json with harmful merges, prefix or suffix."""
    if not names_affix(text) and not ESCAPED_LETTER.search(text):
        return  # it has no prefix and no suffix, like most
    try:
        model = parse_whole(text, file)["model"]
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


def names_affix(text: str) -> bool:
    """Whether the text names a prefix or suffix that is not empty. A pattern that is searched for in all of the text
    would keep the interpreter for a second."""
    for name in AFFIXES:
        at = text.find(name)
        while at >= 0:
            if not EMPTY_AFFIX.match(text, max(at - 1, 0)):
                return True
            at = text.find(name, at + 1)
    return False


def parse_whole(text: str, file: str) -> Any:
    """The value of a tokenizer.json. Raises ValueError or RecursionError for one that is no JSON, CheckpointError for
    one with too many values."""
    raw = text.encode(errors="surrogatepass")
    if (count := count_values(raw)) > MAX_PARSED_VALUES:
        message = f"has {count} values, and {MAX_PARSED_VALUES} are the most with a prefix or suffix"
        raise CheckpointError(f"{message}, or with letters written as \\u00..; write it without", file=file)
    return parse_json(raw, lenient=True)

"""Words of a text as the package gliner2 splits it: addresses, words joined by hyphens, or one other character.

The package's pattern takes a time that grows with the square of the text's length, so addresses with a `@` are found
in another way here; the words are the same.
"""

import re
import sys
import unicodedata
from collections.abc import Iterator
from functools import cache

LOCAL_PART = re.compile(r"[a-z0-9._%+-]+", re.IGNORECASE)
DOMAIN = re.compile(r"@[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)
# The planes that have combining marks; the others hold ideographs and private characters.
MARK_RANGES = (range(0x20000), range(0xE0000, min(0xE0200, sys.maxunicode)))


@cache
def word_pattern() -> re.Pattern[str]:
    """A link, or a name, a word or a character. Letters may have combining marks and joiners."""
    marks = "".join(chr(code) for codes in MARK_RANGES for code in codes if unicodedata.category(chr(code))[0] == "M")
    letter = rf"[\w{marks}\u200c\u200d]"
    return re.compile(rf"(https?://\S+|www\.\S+)|@[a-z0-9_]+|{letter}+(?:[-_]{letter}+)*|\S", re.IGNORECASE)


def split_schema_words(text: str) -> Iterator[tuple[int, int]]:
    """The words of a text as ranges of code points."""
    addresses = list(find_addresses(text))[::-1]  # the next one is the last
    pattern, position = word_pattern(), 0
    while (found := pattern.search(text, position)) is not None:
        start, position = found.span()
        while addresses and addresses[-1][1] <= start:
            addresses.pop()
        if addresses and addresses[-1][0] <= start and found[1] is None:
            position = addresses[-1][2]
        yield start, position


def find_addresses(text: str) -> Iterator[tuple[int, int, int]]:
    """Where addresses of mail may begin, as the range of the part before the `@`, and where they end."""
    ends = {found.start(): found.end() for found in DOMAIN.finditer(text)}
    if not ends:
        return
    for found in LOCAL_PART.finditer(text):
        if found.end() in ends:
            yield found.start(), found.end(), ends[found.end()]

"""Words as gliner2 splits them: recorded with its WhitespaceTokenSplitter."""

import sys
import unicodedata

import pytest

from polyhead.service.text import schema_words
from polyhead.service.text.schema_words import split_schema_words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The fox-dog, it's a_b 3.5%", "The fox-dog , it ' s a_b 3 . 5 %"),
        ("see https://a.b/c?d=(1). www.x", "see https://a.b/c?d=(1). www.x"),
        ("mail a.b+c@d-e.example.com, @name_1 or x@y", "mail a.b+c@d-e.example.com , @name_1 or x @y"),
        ("éa@b.co a@b.c1 --a@b.cd www.a@b.co", "éa @b . co a @b . c1 --a@b.cd www.a@b.co"),
        ("@a.b@c.de a@b.co@d.ef", "@a .b@c.de a@b.co @d . ef"),
        ("cafe\u0301 \u0e01\u0e31\u0e1a a\u200db \U0001f642!", "cafe\u0301 \u0e01\u0e31\u0e1a a\u200db \U0001f642 !"),
        (" \n", ""),
    ],
)
def test_words(text: str, words: str) -> None:
    assert [text[start:end] for start, end in split_schema_words(text)] == words.split()


@pytest.mark.thorough
def test_all_combining_marks_are_known() -> None:
    known = {code for codes in schema_words.MARK_RANGES for code in codes}
    others = (code for code in range(sys.maxunicode + 1) if code not in known)
    assert not any(unicodedata.category(chr(code)).startswith("M") for code in others)

"""Regular expressions that may take very long are refused, and those of published tokenizers are not."""

import pytest

from polyhead.models.core.errors import CheckpointError
from polyhead.models.tokenizer.gguf_splits import SPLITS
from polyhead.models.tokenizer.regular_expression import PROBE_CHARACTERS, Expression, find_loops, remove_matches

SLOW = {
    "ж+ж+[xy]": "cubic",
    "ж*ж*ж*[xy]": "cubic",
    "ж{2,}ж{2,}x": "cubic",
    "[жa]+[жb]+x": "cubic",
    "(?:ab)+(?:ab)+c": "cubic",
    "ж+.*[xy]": "cubic",
    r"\p{Lu}+[^a-z]+z": "cubic",
    "(?i)ж+Ж+[xy]": "cubic",
    r"(?:[\x{436}]+[\u0436]+)x": "cubic",
    "(?x) ж + ж + [xy] # a comment": "cubic",
    "(?=(?:ж*ж*ж*[xy]))": "cubic",
    "(?:ж(?=ж*щ?))+[xy]": "cubic",
    "[[:alpha:]&&[^a-z]]+[ж-щ]+x": "cubic",
    "(?<one>ж+)(?#comment)(?'two'ж+)x": "cubic",
    "(?:ж+)+щ": "exponential",
    "(?:ж|жж)*[^ж]z": "exponential",
    "(?:a?b?)*x": "exponential",
    "(?i)(a|A)+b": "exponential",
    "(?:(?>ж+щ)|ж)+[xy]": "exponential",
    "(?:ж++щ|ж)+x": "exponential",
    "(?:ж{0,999}){0,999}z": "exponential",
    r"(ж+)+$": "exponential",
    r"(ж+?)+\z": "exponential",
    r"\s+$|(\s*[^\s]\s*)+#": "exponential",
}
CASED_POSSESSIVE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
HARMLESS = [
    *dict.fromkeys(pattern for split in SPLITS.values() for pattern in split.patterns),
    # cl100k_base, CLIP, SigLIP, GLiNER, molecules, SentencePiece's spaces
    CASED_POSSESSIVE,
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"""[!"\#\$%\&'\(\)\*\+,\-\.:;=\?@\[\\\]\^_`\{\|\}\~]""",
    r"\s{2,}|[\n\r\t]",
    r"(\[[^\]]+]|Br?|Cl?|N|O|S|P|F|I|b|c|n|o|s|p|\(|\)|\.|=|#|-|\+|\\|\/|:|~|@|\?|>>?|\*|\$|\%[0-9]{2}|[0-9])",
    r" {2,}",
    r"\w+(?:[-'’]\w+)*|[^\w\s]+",
    r"(?<=.)",
    r"\R|\X",
]


@pytest.mark.parametrize("text", SLOW)
def test_a_slow_expression_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match=f"so that its time is {SLOW[text]} in the length of a text"):
        Expression(text)


@pytest.mark.parametrize("text", HARMLESS)
def test_a_published_expression_is_read(text: str) -> None:
    expression = Expression(text)
    for probe in expression.probes():
        assert len(probe) > PROBE_CHARACTERS
        remove_matches(text, probe)


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("a", 1),
        ("a?", 0),
        (" {2,}", 2),
        ("a{3}b*", 3),
        ("a|bc", 1),
        (r"(?=abc)\b", 0),
        ("(?:ab){2,4}c", 5),
        ("a{,3}", 0),
    ],
)
def test_the_least_length_of_a_match(text: str, least: int) -> None:
    assert Expression(text).least == least


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (r"(a)\1", r"cannot be checked at '\\\\1'"),
        ("(?<n>a)\\g<n>", "cannot be checked at"),
        ("(?~ab)", "cannot be checked at"),
        ("(" * 100 + "a" + ")" * 100, "cannot be checked at"),
        ("a" * 10_000, "has 10000 characters; 8192 are the most"),
        ("(?:(?:(?:a{16}){16}){16}){16}", "has more than 8192 parts, repetitions included"),
        ("(?:" * 60 + "){16}" * 60, "has more than 8192 parts, repetitions included"),
        ("a?" * 1000, "has too many repetitions to be checked"),
        ("|".join(map(chr, range(0x4E00, 0x4F80))), "different parts of one character; 256 are the most"),
    ],
)
def test_what_cannot_be_checked_is_refused(text: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        Expression(text)


def test_texts_repeat_each_character_that_an_expression_distinguishes() -> None:
    """And have all others, without which the library would not begin to search."""
    probes = list(Expression("ж+щ").probes())
    assert {probe[0] for probe in probes} == {"ж", "щ"}
    assert all(probe.count(probe[0]) >= PROBE_CHARACTERS and {"ж", "щ"} <= set(probe) for probe in probes)


def test_loops_are_strongly_connected() -> None:
    assert set(find_loops({0: [1], 1: [2], 2: [1, 3], 3: [3], 4: []})) == {frozenset({1, 2}), frozenset({3})}

"""Patterns over module names, as in PEFT's rank_pattern and alpha_pattern.

PEFT matches them as regular expressions, and an untrusted expression may take unlimited time. Only literal parts,
`\\d+`, `.*`, `.+` and alternatives are supported here. They are matched without backtracking: every part is applied to
all positions where the parts before it may end.
"""

import re
from collections.abc import Callable, Iterable
from functools import lru_cache

MAX_PATTERN_LENGTH = 200  # characters of a pattern
CACHE_SIZE = 2048  # patterns that are kept parsed
# A character, an escaped dot, or a dot, as long as no quantifier follows.
_LITERAL = r"(?:(?:[\w-]|\\[._-]|\.)(?![*+?{]))+"
_PART = re.compile(
    rf"(?P<literal>{_LITERAL})|(?P<digits>(?:\\d|\[0-9\])\+)|(?P<any>\.\*)|(?P<some>\.\+)"
    rf"|\((?:\?:)?(?P<choice>{_LITERAL}(?:\|{_LITERAL})*)\)"
)
_DIGITS = re.compile(r"\d+")

PatternPart = tuple[str, tuple[re.Pattern[str], ...]]  # its kind, and its alternative literals
PatternBranch = tuple[bool, tuple[PatternPart, ...]]  # whether it must begin at the start of the name


class UnsupportedPattern(ValueError):
    """The pattern has unsupported syntax."""


def ignore_steps(count: int) -> None:
    """The default of `spend`: does nothing."""


def matches(pattern: str, module: str, spend: Callable[[int], None] = ignore_steps, *, whole: bool = False) -> bool:
    """Whether the pattern matches the module's whole name, or what follows one of the name's dots, as in PEFT. With
    `whole`: only the whole name. Raises UnsupportedPattern.

    `spend` is called with the number of positions before a part is applied to them, and may raise.
    """
    suffixes = {0, *(index + 1 for index, character in enumerate(module) if character == ".")}
    for anchored, parts in parse_pattern(pattern):
        places = {0} if anchored or whole else suffixes
        for part in parts:
            spend(len(places))
            places = _part_ends(part, module, places)
            if not places:
                break
        if len(module) in places:
            return True
    return False


@lru_cache(CACHE_SIZE)
def parse_pattern(pattern: str) -> tuple[PatternBranch, ...]:
    """The alternatives of a pattern. Raises UnsupportedPattern."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise UnsupportedPattern
    branches, parts, anchored, at = list[PatternBranch](), list[PatternPart](), pattern.startswith("^"), 0
    at += anchored
    while at < len(pattern):
        found = _PART.match(pattern, at)
        if found:
            parts.append(_parse_part(found))
            at = found.end()
        elif pattern[at] == "$" and pattern[at + 1 : at + 2] in ("", "|"):
            at += 1
        elif pattern[at] == "|":
            branches.append((anchored, tuple(parts)))
            anchored = pattern.startswith("^", at + 1)
            parts, at = [], at + 1 + anchored
        else:
            raise UnsupportedPattern
    return (*branches, (anchored, tuple(parts)))


def _parse_part(found: re.Match[str]) -> PatternPart:
    kind = found.lastgroup or ""
    literals = found[kind].split("|") if kind in ("literal", "choice") else []
    return kind, tuple(re.compile(literal, re.DOTALL) for literal in literals)


def _part_ends(part: PatternPart, module: str, places: Iterable[int]) -> set[int]:
    """The positions where a part may end that begins at one of `places`."""
    kind, literals = part
    if kind in ("any", "some"):
        return set(range(min(places) + (kind == "some"), len(module) + 1))
    if kind == "digits":
        ends = set[int]()
        for start, stop in (found.span() for found in _DIGITS.finditer(module)):
            first = min((place for place in places if start <= place < stop), default=stop)
            ends.update(range(first + 1, stop + 1))
        return ends
    return {found.end() for literal in literals for place in places if (found := literal.match(module, place))}

"""How many characters one character of a text may become in the steps of a tokenizer.

The steps are read from the last to the first. Each character has a weight: a bound of the characters that it becomes in
the steps that were read. A step that replaces a text by another gives the first the weight of the second. So what one
step makes and another makes longer is counted, also after Unicode forms, which make up to 18 characters of one.
"""

import base64
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from sys import byteorder
from typing import Any

from ..core.errors import CheckpointError
from .token_text import byte_alphabet

MAX_TABLES = 24  # steps of a tokenizer with a table of characters; published ones have up to four
MAX_MAP_UNITS = 1 << 20  # numbers of a charsmap's index; published ones have 80,000
MAX_MAP_KEYS = 1 << 18  # texts that a charsmap replaces; published ones have 20,000
MAX_KEY_BYTES = 5  # of a text that the library looks up in a charsmap
FORMS = ("NFC", "NFD", "NFKC", "NFKD")
COMPOSED = {"NFC", "NFKC"}
# Steps that make no text longer.
LOCAL_STEPS = {
    *("Strip", "StripAccents"),
    *("BertPreTokenizer", "CharDelimiterSplit", "Digits", "FixedLength", "Punctuation", "Split", "UnicodeScripts"),
    *("Whitespace", "WhitespaceSplit"),
    *("ByteFallback", "Fuse", "BPEDecoder", "CTC"),
}


@dataclass(frozen=True)
class CharacterTable:
    """The texts that characters become."""

    texts: dict[str, str]
    lengths: dict[str, int]  # of the texts
    places: dict[str, list[str]]  # of each character of the texts: the characters whose texts have it

    @classmethod
    def from_texts(cls, texts: dict[str, str]) -> "CharacterTable":
        places: dict[str, list[str]] = {}
        for character, text in texts.items():
            for part in {*text}:
                places.setdefault(part, []).append(character)
        return cls(texts, {character: len(text) for character, text in texts.items()}, places)

    def characters_of(self, parts: Iterable[str]) -> set[str]:
        """The characters whose texts have one of these parts."""
        return {character for part in parts for character in self.places.get(part, ())}


class CharacterWeights:
    """The weight of each character: `known`, or that of every `other` one. All are 1 before a step is read."""

    def __init__(self) -> None:
        self.known: dict[str, float] = {}
        self.other = 1.0
        self._tables = 0

    @property
    def most(self) -> float:
        return max(self.other, *self.known.values(), 0.0)

    def heavier_than(self, most: float) -> frozenset[str] | None:
        """The characters that weigh more than `most`; None: every character that is not known does."""
        if self.other > most:
            return None
        return frozenset(character for character, weight in self.known.items() if weight > most)

    def of(self, text: str) -> float:
        return sum(self.known.get(character, self.other) for character in text)

    def read_step(self, step: dict[str, Any], least: Callable[[str], int]) -> None:
        """Read the step before those that were read. `least` is the number of characters that an expression matches
        at least."""
        match step:
            case {"type": "Replace", "pattern": {"String": str(found)}, "content": str(content)} if found:
                self._replace(found, content)
            case {"type": "Replace", "pattern": pattern, "content": str(content)}:
                self._replace_matches(least(pattern["Regex"]) if "Regex" in pattern else 0, self.of(content))
            case {"type": "Prepend", "prepend": str(prepended)}:
                self._add(self.of(prepended))
            case {"type": "ByteLevel"}:
                self._make_bytes(1 if step.get("add_prefix_space") else 0)
            case {"type": "Metaspace", "replacement": str(mark)}:
                spaced = self.of(mark)
                self._add(spaced)
                self.known |= {mark: spaced, " ": spaced}
            case {"type": "WordPiece"}:  # a decoder, which puts a space before each piece
                self._add(self.of(" "))
            case {"type": "Precompiled", "precompiled_charsmap": str(encoded)}:
                self._count_table()
                self._apply_map(read_charsmap(base64.b64decode(encoded)))
            case {"type": "Lowercase"}:
                self._count_table()
                self._apply_table(lower_table())
            case {"type": "BertNormalizer"}:
                self._count_table()
                self._apply_table(lower_table())
                self._apply_table(form_table("NFD"))
                self._replace_spaces()
                spaces, space = 2 * self.of(" "), self.of(" ")
                self._add(spaces)  # around a Chinese character
                self.known[" "] = space
            case {"type": "Nmt"}:
                self._replace_spaces()
            case {"type": form} if form in FORMS:
                self._count_table()
                self._apply_table(form_table(form))
                if form in COMPOSED:
                    self._compose()
            case {"type": kind} if kind not in LOCAL_STEPS:
                raise CheckpointError(f"its tokenizer has the step {str(kind)[:40]!r}, which is not known here")

    def _count_table(self) -> None:
        self._tables += 1
        if self._tables > MAX_TABLES:
            raise CheckpointError(f"its tokenizer has more than {MAX_TABLES} steps that replace characters by a table")

    def _raise(self, character: str, weight: float) -> None:
        if weight > self.known.get(character, self.other):
            self.known[character] = weight

    def _add(self, more: float) -> None:
        """Text of this weight may be added to every character."""
        self.other += more
        self.known = {character: weight + more for character, weight in self.known.items()}

    def _replace(self, found: str, content: str) -> None:
        made = self.of(content)
        if len(found) == 1:
            self.known[found] = made
            return
        missing = made - self.of(found)
        if missing > 0:
            last = found[-1]
            self.known[last] = self.known.get(last, self.other) + missing / found.count(last)

    def _replace_matches(self, least: int, made: float) -> None:
        """Matches of an expression, of `least` characters each, are replaced by text of the weight `made`. Empty ones
        are before and after each character."""
        if not least:
            self._add(2 * made)
            return
        self.other = max(self.other, made / least)
        self.known = {character: max(weight, made / least) for character, weight in self.known.items()}

    def _replace_spaces(self) -> None:
        """Any character may become a space."""
        self._replace_matches(1, self.of(" "))

    def _make_bytes(self, prefix: int) -> None:
        """Each byte becomes a character; a character has up to four, and a word may get a space before it."""
        self.other, self.known = (4 + prefix) * max(map(self.of, byte_alphabet())), {}

    def _apply_table(self, table: CharacterTable) -> None:
        known, other = self.known, self.other
        made = {character: length * other for character, length in table.lengths.items()}
        made |= {character: self.of(table.texts[character]) for character in table.characters_of(known)}
        for character, weight in made.items():  # up to 17,000
            if weight > known.get(character, other):
                known[character] = weight

    def _compose(self) -> None:
        """What a character is composed of weighs as much as the character.

        If neither the character nor its parts are known, its parts weigh as much or more.
        """
        table = form_table("NFD")
        touched = self.known.keys() | table.characters_of(self.known)
        for character, parts in table.texts.items():
            if character not in touched:
                continue
            missing = self.known.get(character, self.other) - self.of(parts)
            if missing > 0:
                self._raise(parts[-1], self.of(parts[-1]) + missing)

    def _apply_map(self, pairs: Iterable[tuple[bytes, str]]) -> None:
        made = [(key, self.of(text)) for key, text in pairs]
        longer: list[tuple[str, float]] = []
        broken = 0.0
        for key, weight in made:
            try:
                found = key.decode()
            except UnicodeDecodeError:  # the beginning of some characters
                broken = max(broken, weight)
                continue
            if len(found) == 1:
                self._raise(found, weight)
            else:
                longer.append((found, weight))
        if broken:
            self._replace_matches(1, broken)
        for found, weight in longer:
            missing = weight - self.of(found)
            if missing > 0:
                self._raise(found[-1], self.of(found[-1]) + missing)


@cache
def form_table(form: str) -> CharacterTable:
    """What the characters become that a Unicode form changes."""
    changed = {}
    for code in (*range(0xA0, 0xD800), *range(0xF900, 0x20000), *range(0x2F800, 0x2FB00)):
        character = chr(code)
        made = unicodedata.normalize("NFKD" if form in ("NFKC", "NFKD") else "NFD", character)
        if made != character:
            changed[character] = made
    return CharacterTable.from_texts(changed)


@cache
def lower_table() -> CharacterTable:
    """What the characters become that have a lower case."""
    characters = (chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000)
    return CharacterTable.from_texts({each: made for each in characters if (made := each.lower()) != each})


def read_charsmap(raw: bytes) -> Iterator[tuple[bytes, str]]:
    """The texts that a SentencePiece charsmap replaces, up to the length that the library looks up, and by what.

    It is the size of an index in bytes, the index, then the replacements, each followed by a zero byte. The index is a
    double array (darts-clone): the units of the children of a unit have their label in the lowest bits of a position
    that is exclusively or-ed with the offset of the unit.
    """
    size = int.from_bytes(raw[:4], "little")
    if size // 4 > MAX_MAP_UNITS:
        raise CheckpointError(f"its charsmap has an index of {size // 4} numbers; {MAX_MAP_UNITS} are the most")
    units, texts = array("I", raw[4 : 4 + size // 4 * 4]), raw[4 + size :]
    if byteorder == "big":
        units.byteswap()
    if not units:
        return
    children: dict[int, list[tuple[int, int]]] = {}
    for position, unit in enumerate(units):
        label = unit & 0xFF
        if label and not unit >> 31:
            children.setdefault(position ^ label, []).append((label, position))
    waiting, found = [(0, b"")], 0
    while waiting:
        position, key = waiting.pop()
        unit = units[position]
        base = position ^ ((unit >> 10) << ((unit & 0x200) >> 6))
        if key and unit >> 8 & 1 and base < len(units):
            start = units[base] & 0x7FFFFFFF
            end = texts.find(b"\0", start)
            yield key, texts[start : end if end >= 0 else len(texts)].decode(errors="replace")
        if len(key) < MAX_KEY_BYTES:
            below = children.get(base, [])
            found += len(below)
            if found > MAX_MAP_KEYS:
                raise CheckpointError(f"its charsmap replaces more than {MAX_MAP_KEYS} texts")
            waiting += [(other, key + bytes([label])) for label, other in below]

"""Finds regular expressions that take very long on some text.

The tokenizers library searches with Oniguruma, which backtracks and cannot be interrupted. The time of a search is a
power of the text's length, or exponential, if the expression can match the same characters in two ways before a place
where the match may fail: `(?:a|aa)+b`, `a+a+b`. The check follows Weideman et al. (2016), "Analyzing matching time
behavior of backtracking regular expression matchers by using ambiguity of NFA": an automaton whose states are the
one-character parts of the expression, and pairs and triples of its states that read the same word.

What characters a part matches is asked of Oniguruma itself, for a sample of all characters. So no class, property or
folding of letters is read here.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from tokenizers import Regex, normalizers

from ..core.errors import CheckpointError, show_value
from .panics import load_failure, run_library

MAX_EXPRESSION_LENGTH = 1 << 13  # characters of an expression; published ones have up to 1,500
MAX_EXPRESSION_DEPTH = 64  # groups inside groups
MAX_STATES = 1 << 13  # parts, with their copies
MAX_EDGES = 1 << 18  # of the automaton; published expressions have some hundred
MAX_TUPLES = 1 << 18  # of states that are compared; published expressions need some thousand
MAX_QUANTIFIERS = 4  # of one part
MAX_COPIES = 16  # of a part that is repeated up to so often; more repetitions count as any number
MAX_ATOMS = 256  # different one-character parts; published expressions have up to 40
PROBE_CHARACTERS = 2048  # of each text on which an expression is tried; the time of published ones may be quadratic
MAX_PROBED = 64  # kinds of characters of which such texts are made
NONCHARACTER = "\ufdd1"
ASSERTION_ESCAPES = frozenset("bBAzZGyYK")
CODE_ESCAPES = re.compile(
    r"\\(?:x\{[0-9A-Fa-f ]*\}|x[0-9A-Fa-f]{1,2}|u[0-9A-Fa-f]{4}|[pP]\{[^}]*\}|[0-7]{1,3}|c.|C-.|M-.|.)", re.DOTALL
)
CODES = re.compile(r"\\x\{([0-9A-Fa-f]+)\}|\\x([0-9A-Fa-f]{1,2})|\\u([0-9A-Fa-f]{4})")
QUANTIFIER = re.compile(r"([?*+])([?+]?)|\{(\d*)(,?)(\d*)\}(\??)")
OPTIONS = re.compile(r"\?([a-zA-Z]*(?:-[a-zA-Z]*)?)([:)])")
NAMED = re.compile(r"\?(?:<([^>=!][^>]*)>|'([^']+)')")
IGNORES_CASE = re.compile(r"\(\?[a-zA-Z]*i")
MOST_FOLDED = 3  # letters that one character is, without regard to case
UNREAD = re.compile(r"\\(?:[1-9]|k[<']|g[<'])|\(\?[(~{]|\(\*")


@dataclass(frozen=True)
class Atom:
    """A part that matches one character: its spelling with the options in effect."""

    spelling: str


@dataclass(frozen=True)
class Sequence:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Choice:
    parts: tuple["Node", ...]


@dataclass(frozen=True)
class Repeat:
    """`most` is None without a bound."""

    part: "Node"
    least: int
    most: int | None
    possessive: bool = False


@dataclass(frozen=True)
class Assertion:
    """Matches no characters, and may fail; `body` is what a look ahead or behind matches."""

    body: "Node | None" = None


Node = Atom | Sequence | Choice | Repeat | Assertion
EMPTY = Sequence(())


class ExpressionReader:
    """Reads an expression that Oniguruma has accepted."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def read(self) -> Node:
        node = self._choice("")
        if self._at < len(self._text):
            raise self._unknown()
        return node

    def _unknown(self) -> CheckpointError:
        shown = show_value(self._text[self._at : self._at + 20])
        return CheckpointError(f"its regular expression {show_value(self._text)} cannot be checked at {shown}")

    def _choice(self, options: str) -> Node:
        self._depth += 1
        if self._depth > MAX_EXPRESSION_DEPTH:
            raise self._unknown()
        choices: list[Node] = []
        parts: list[Node] = []
        while self._at < len(self._text) and self._text[self._at] != ")":
            if self._text[self._at] == "|":
                self._at += 1
                choices.append(Sequence(tuple(parts)))
                parts = []
            elif switched := OPTIONS.match(self._text, self._at + 1) if self._text[self._at] == "(" else None:
                self._at = switched.end()
                inner = merge_options(options, switched[1])
                if switched[2] == ":":
                    parts.append(self._quantified(self._closed(self._choice(inner)), options))
                else:  # for the rest of the group, with all its choices
                    parts.append(self._choice(inner))
            elif (node := self._part(options)) is not None:
                parts.append(self._quantified(node, options))
        self._depth -= 1
        choices.append(Sequence(tuple(parts)))
        return choices[0] if len(choices) == 1 else Choice(tuple(choices))

    def _closed(self, node: Node) -> Node:
        if self._text[self._at : self._at + 1] != ")":
            raise self._unknown()
        self._at += 1
        return node

    def _part(self, options: str) -> Node | None:
        """One part without its quantifier; None for a comment."""
        text, at = self._text, self._at
        if UNREAD.match(text, at):
            raise self._unknown()
        character = text[at]
        if "x" in options.partition("-")[0] and (character.isspace() or character == "#"):
            end = text.find("\n", at) if character == "#" else at
            self._at = len(text) if end < 0 else end + 1
            return None
        if character == "(":
            return self._group(options)
        if character in "^$":
            self._at += 1
            return Assertion()
        if character == "[":
            self._at = self._class_end(at)
        elif character == "\\":
            found = CODE_ESCAPES.match(text, at)
            if found is None:
                raise self._unknown()
            self._at = found.end()
            if found[0][1] in ASSERTION_ESCAPES:
                return Assertion()
            if found[0][1] == "R":
                return Sequence(
                    (self._atom("[\\n-\\r\\x{85}\\x{2028}\\x{2029}]", ""), Repeat(self._atom("\\n", ""), 0, 1))
                )
            if found[0][1] == "X":
                return Repeat(self._atom("(?m:.)", ""), 1, None, possessive=True)
        else:
            self._at += 1
        return self._atom(text[at : self._at], options)

    def _atom(self, spelling: str, options: str) -> Atom:
        return Atom(f"(?{options}:{spelling})" if options else spelling)

    def _class_end(self, at: int) -> int:
        """Where a class in brackets ends, with the classes in it."""
        text, depth = self._text, 0
        while at < len(text):
            character = text[at]
            if character == "\\":
                found = CODE_ESCAPES.match(text, at)
                at = found.end() if found else at + 2
                continue
            if character == "[":
                if depth and text.startswith("[:", at) and (end := text.find(":]", at + 2)) >= 0 and end - at < 20:
                    at = end + 2
                    continue
                depth += 1
                at += 1 + text.startswith("^", at + 1)
                at += text.startswith("]", at)  # the first is a literal
                continue
            at += 1
            if character == "]":
                depth -= 1
                if not depth:
                    return at
        raise self._unknown()

    def _group(self, options: str) -> Node | None:
        text, at = self._text, self._at
        if text.startswith("(?#", at):
            end = text.find(")", at)
            if end < 0:
                raise self._unknown()
            self._at = end + 1
            return None
        for opening in ("(?=", "(?!", "(?<=", "(?<!"):
            if text.startswith(opening, at):
                self._at = at + len(opening)
                return Assertion(self._closed(self._choice(options)))
        if text.startswith("(?>", at):
            self._at = at + 3
        elif text.startswith("(?", at):
            named = NAMED.match(text, at + 1)
            if named is None:
                raise self._unknown()
            self._at = named.end()
        else:
            self._at = at + 1
        return self._closed(self._choice(options))

    def _quantified(self, node: Node, options: str) -> Node:
        """The part with the quantifiers that follow it."""
        extended = "x" in options.partition("-")[0]
        for _ in range(MAX_QUANTIFIERS + 1):
            while extended and self._text[self._at : self._at + 1].isspace():
                self._at += 1
            found = QUANTIFIER.match(self._text, self._at)
            if found is None or (not found[1] and not found[3] and not found[5]):
                return node
            self._at = found.end()
            if found[1]:
                least, most = {"?": (0, 1), "*": (0, None), "+": (1, None)}[found[1]]
                node = Repeat(node, least, most, possessive=found[2] == "+" and isinstance(node, Atom))
            else:
                least = int(found[3] or 0)
                most = (int(found[5]) if found[5] else None) if found[4] else least
                if found[6] and not found[4]:  # {n}? is {0,n}
                    least = 0
                node = Repeat(node, min(least, most if most is not None else least), most)
        raise self._unknown()


def merge_options(outer: str, inner: str) -> str:
    on = set(outer.partition("-")[0]) | set(inner.partition("-")[0])
    off = (set(outer.partition("-")[2]) - set(inner.partition("-")[0])) | set(inner.partition("-")[2])
    return "".join(sorted(on - off)) + ("-" + "".join(sorted(off)) if off else "")


def remove_matches(expression: str, text: str) -> str:
    """The text without what the library finds in it. CheckpointError if the library gives up."""
    return run_library(
        lambda: normalizers.Replace(Regex(expression), "").normalize_str(text), load_failure(), load_failure()
    )


@lru_cache(maxsize=1)
def sample_characters() -> str:
    """A character of each category of each 64 code points, and all of the first 256."""
    found = list(map(chr, range(256)))
    for start in (*range(256, 0x33480, 64), *range(0xE0000, 0xE0200, 64), 0xF0000, 0x100000):
        kinds = dict[str, str]()
        for code in range(start, start + 64):
            kinds.setdefault(unicodedata.category(chr(code)), chr(code))
        found += [character for kind, character in kinds.items() if kind != "Cs"]
    return "".join(found)


def spelled_characters(text: str) -> set[str]:
    """The characters that an expression spells, and those beside them, where its ranges end."""
    codes = {ord(character) for character in text}
    codes |= {int(next(filter(None, found.groups())), 16) for found in CODES.finditer(text)}
    near = {code + step for code in codes for step in (-1, 0, 1)}
    return {chr(code) for code in near if 0 <= code < 0x110000 and not 0xD800 <= code < 0xE000}


@dataclass
class Part:
    """A part of the automaton: the states it may begin and end with, whether it may match no characters, and whether
    that or the end needs an assertion."""

    first: frozenset[int] = frozenset()
    last: dict[int, bool] = field(default_factory=dict)  # whether the end is reached without an assertion
    empty: bool = False
    free: bool = False  # matches no characters without an assertion
    least: int = 0  # characters


def count_least(text: str, parts: int) -> int:
    """The characters that an expression of so many parts takes out of a text at least.

    Without regard to case one character may match three parts (U+FB03, "ffi"); \\K keeps what was matched before it.
    """
    if "\\K" in text:
        return 0
    return -(-parts // MOST_FOLDED) if IGNORES_CASE.search(text) else parts


class Expression:
    """A regular expression of a checkpoint, which Oniguruma has accepted. CheckpointError if it may take very long.

    `least` is the number of characters that it matches at least. `probes` are texts for a measurement of its time.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        if len(text) > MAX_EXPRESSION_LENGTH:
            raise self._refuse(f"has {len(text)} characters; {MAX_EXPRESSION_LENGTH} are the most")
        self._atoms: list[str] = []  # of each state
        self._possessive = set[int]()
        self._final = set[int]()  # states after which a match cannot fail
        self._next: dict[int, Counter[int]] = {}
        self._compared = self._built = self._edges = 0
        self._loops = 0  # repetitions without a bound around the part that is built
        whole = self._build(ExpressionReader(text).read())
        self._final |= {state for state, free in whole.last.items() if free}
        self.least = count_least(text, whole.least)
        self._read_characters()
        self._check_ambiguity()

    def _refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"its regular expression {show_value(self.text)} {problem}")

    def _build(self, node: Node) -> Part:
        self._built += 1
        if self._built > MAX_STATES:
            raise self._refuse(f"has more than {MAX_STATES} parts, repetitions included")
        match node:
            case Atom(spelling):
                state = len(self._atoms)
                self._atoms.append(spelling)
                self._next[state] = Counter()
                return Part(frozenset({state}), {state: True}, least=1)
            case Assertion(body):
                if body is None:
                    return Part(empty=True)
                inner = self._build(body)
                if not self._loops:  # in a loop the same characters are read again
                    self._final |= {state for state, free in inner.last.items() if free}
                return Part(inner.first, {}, empty=True)  # its states lead nowhere
            case Choice(parts):
                made = [self._build(each) for each in parts]
                last: dict[int, bool] = {}
                for each in made:
                    last |= each.last
                return Part(
                    frozenset().union(*(each.first for each in made)),
                    last,
                    any(each.empty for each in made),
                    any(each.free for each in made),
                    min(each.least for each in made),
                )
            case Sequence(parts):
                joined = Part(empty=True, free=True)
                for piece in parts:
                    joined = self._join(joined, self._build(piece))
                return joined
            case Repeat():
                return self._repeat(node)

    def _join(self, one: Part, other: Part) -> Part:
        self._add_edges(one.last, other.first)
        last = dict(other.last)
        if other.empty:
            last |= {state: free and other.free for state, free in one.last.items()}
        return Part(
            one.first | other.first if one.empty else one.first,
            last,
            one.empty and other.empty,
            one.free and other.free,
            one.least + other.least,
        )

    def _add_edges(self, states: Collection[int], others: Collection[int]) -> None:
        self._edges += len(states) * len(others)
        if self._edges > MAX_EDGES:
            raise self._refuse("has too many repetitions to be checked")
        for state in states:
            self._next[state].update(others)

    def _repeat(self, node: Repeat) -> Part:
        if node.most == 0:
            return Part(empty=True, free=True)
        unbounded = node.most is None or node.most > MAX_COPIES
        copies = min(node.least, MAX_COPIES) if unbounded else node.most or 0
        joined = Part(empty=True, free=True)
        begin = len(self._atoms)
        self._loops += unbounded
        for number in range(max(copies, 1)):
            part = self._build(node.part)
            least = part.least
            if number >= node.least:
                part = Part(part.first, part.last, empty=True, free=True)
            if unbounded and number == max(copies, 1) - 1:
                self._add_edges(part.last, part.first)
            joined = self._join(joined, part)
        self._loops -= unbounded
        joined.least = node.least * least
        if node.possessive:
            self._possessive |= set(range(begin, len(self._atoms)))
        return joined

    def _read_characters(self) -> None:
        """Ask the library which characters of a sample each atom matches; keep one character of each kind."""
        spellings = list(dict.fromkeys(self._atoms))
        if len(spellings) > MAX_ATOMS:
            raise self._refuse(f"has {len(spellings)} different parts of one character; {MAX_ATOMS} are the most")
        sample = "".join(dict.fromkeys([*sample_characters(), *sorted(spelled_characters(self.text))]))
        kinds: dict[str, int] = dict.fromkeys(sample, 0)
        for number, spelling in enumerate(spellings):
            left = set(remove_matches(spelling, sample))
            for character in sample:
                if character not in left:
                    kinds[character] |= 1 << number
        self._kinds: dict[int, str] = {}  # a character of each kind; a kind is the set of atoms that match it
        for character, kind in kinds.items():
            self._kinds.setdefault(kind, character)
        masks = [0] * len(spellings)
        for index, kind in enumerate(self._kinds):
            for number in range(len(spellings)):
                masks[number] |= (kind >> number & 1) << index
        numbers = {spelling: number for number, spelling in enumerate(spellings)}
        self._masks = [masks[numbers[spelling]] for spelling in self._atoms]

    def _check_ambiguity(self) -> None:
        """Only states after which a match may fail are compared: after the others it ends, whatever was chosen."""
        followers = {
            state: [other for other in found if other not in self._final]
            for state, found in self._next.items()
            if state not in self._final
        }
        loops = list(find_loops(followers))
        for loop in loops:
            inside = {state: [other for other in followers[state] if other in loop] for state in loop}
            if any(self._next[state][other] > 1 for state, found in inside.items() for other in found):
                raise self._ambiguous("exponential")
            self._check_loop(inside)
        for start in loops:
            reached = reachable(followers, start)
            for end in loops:
                if end is not start and end <= reached:
                    self._check_loops(followers, start, end)

    def _ambiguous(self, growth: str) -> CheckpointError:
        problem = "can match the same characters in two ways before a place where it may fail"
        return self._refuse(f"{problem}, so that its time is {growth} in the length of a text")

    def _count(self) -> None:
        self._compared += 1
        if self._compared > MAX_TUPLES:
            raise self._refuse("has too many repetitions to be checked")

    def _check_loop(self, followers: dict[int, list[int]]) -> None:
        """CheckpointError if a loop reads a word in two ways from a state to itself: the time is exponential."""
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        waiting = [(state, state) for state in followers]
        while waiting:
            pair = waiting.pop()
            if pair in pairs:
                continue
            self._count()
            pairs[pair] = [
                (one, other)
                for one in followers[pair[0]]
                for other in followers[pair[1]]
                if self._masks[one] & self._masks[other]
            ]
            waiting += pairs[pair]
        back: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for pair, found in pairs.items():
            for other in found:
                back.setdefault(other, []).append(pair)
        seen, waiting = set[tuple[int, int]](), [(state, state) for state in followers]
        while waiting:
            pair = waiting.pop()
            if pair in seen:
                continue
            seen.add(pair)
            if pair[0] != pair[1]:
                raise self._ambiguous("exponential")
            waiting += back.get(pair, [])

    def _check_loops(self, followers: dict[int, list[int]], start: frozenset[int], end: frozenset[int]) -> None:
        """CheckpointError if a word leads around in one loop, around in a later one, and from the first to the later:
        the time of a match is quadratic, and of a search cubic."""
        for one in start - self._possessive:
            for other in end:
                seen, waiting = set[tuple[int, int, int]](), [(one, one, other)]
                while waiting:
                    first, middle, last = waiting.pop()
                    for a in followers[first]:
                        if a not in start:
                            continue
                        for b in followers[middle]:
                            if not (mask := self._masks[a] & self._masks[b]):
                                continue
                            for c in followers[last]:
                                found = (a, b, c)
                                if c not in end or not mask & self._masks[c] or found in seen:
                                    continue
                                if found == (one, other, other):
                                    raise self._ambiguous("cubic")
                                self._count()
                                seen.add(found)
                                waiting.append(found)

    def probes(self) -> Iterator[str]:
        """Texts on which a slow search shows: each character that the expression distinguishes, repeated, and ended by
        one that the same parts do not match, and by one that hardly any part matches.

        All characters follow, because the library searches no text that lacks one which each match has.
        """
        kinds = {kind: character for kind, character in [*self._kinds.items()][: MAX_PROBED + 1] if kind}
        for kind, character in kinds.items():
            other = next((end for mask, end in self._kinds.items() if not mask & kind), NONCHARACTER)
            for end in {other, NONCHARACTER}:
                yield character * PROBE_CHARACTERS + end + "".join(kinds.values())


def find_loops(followers: dict[int, list[int]]) -> Iterator[frozenset[int]]:
    """The strongly connected components that have an edge (Tarjan, without recursion)."""
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    waiting = set[int]()
    for root in followers:
        if root in index:
            continue
        work = [(root, iter(followers[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        waiting.add(root)
        while work:
            state, rest = work[-1]
            for other in rest:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    waiting.add(other)
                    work.append((other, iter(followers[other])))
                    break
                if other in waiting:
                    low[state] = min(low[state], index[other])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[state])
                if low[state] == index[state]:
                    found = set[int]()
                    while state not in found:
                        found.add(stack.pop())
                    waiting -= found
                    if len(found) > 1 or state in followers[state]:
                        yield frozenset(found)


def reachable(followers: dict[int, list[int]], start: frozenset[int]) -> set[int]:
    seen, waiting = set[int](), list(start)
    while waiting:
        state = waiting.pop()
        if state not in seen:
            seen.add(state)
            waiting += followers[state]
    return seen

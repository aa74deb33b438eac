"""Escapes the control tokens that a client's text spells, inside a prompt from a chat template.

Before the template gets a text, a mark is inserted into every control token in it. So the intact control tokens in the
prompt are the template's own; the rest is encoded as plain text, without the marks. The search is the automaton of the
`tokenizers` library: its time is linear in the text whatever the control tokens are, and other threads run meanwhile.
"""

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO
from itertools import pairwise

from tokenizers import AddedToken, Encoding, Tokenizer, models

from ..core.errors import CheckpointError
from .panics import run_library, text_failure

ESCAPE_MARK = "\ufdd0"  # a noncharacter, which Unicode reserves for internal use
MAX_CONTROL_TOKENS = 1 << 17  # control tokens of a vocabulary; published ones have up to some ten thousand
WINDOW_CHARACTERS = 1 << 14  # characters searched at a time
SEARCHED_AT_ONCE = 1 << 10  # control tokens searched for others at a time
PLAIN_TEXT = 0  # the automaton's token for text between control tokens


class SpecialTokenEscape:
    """For the `control` tokens of a vocabulary. Tokens of one character cannot be escaped."""

    def __init__(self, control: Iterable[str]) -> None:
        spelled = [piece for piece in control if len(piece) > 1]
        self._longest = max(map(len, spelled), default=0)
        self._every = build_automaton(spelled)
        self._inner = build_automaton(innermost_tokens(spelled, self._every))

    def quote(self, text: str) -> str:
        """The text with a mark before the last character of control tokens, so that none of them is intact.

        Only control tokens without others inside them are searched for. A mark breaks all tokens that overlap with the
        one found, except for one that begins with its last character; those are found in the second round and do not
        overlap.
        """
        while True:
            marked, done = StringIO(), 0
            for _, end in self._found(self._inner, text):
                marked.write(text[done : end - 1] + ESCAPE_MARK)
                done = end - 1
            if not done:
                return text
            marked.write(text[done:])
            text = marked.getvalue()

    def split_control(self, text: str) -> list[str]:
        """An escaped text as a list: plain, control token, plain, control token, ..., plain."""
        borders = [border for found in self._found(self._every, text) for border in found]
        return [text[one:other].replace(ESCAPE_MARK, "") for one, other in pairwise((0, *borders, len(text)))]

    def _found(self, sought: Tokenizer, text: str) -> Iterator[tuple[int, int]]:
        """The ranges [from, to) of the control tokens in the text: of those with the same start the longest, none
        inside another."""
        start = 0
        while start < len(text):
            [encoding] = search_texts(sought, [text[start : start + WINDOW_CHARACTERS + self._longest]])
            after = start + WINDOW_CHARACTERS
            for id, (begin, end) in zip(encoding.ids, encoding.offsets, strict=True):
                if id != PLAIN_TEXT and begin < WINDOW_CHARACTERS:  # a token that begins later may be cut off
                    yield start + begin, start + end
                    after = max(after, start + end)
            start = after


def check_control_tokens(control: Sequence[str]) -> None:
    """CheckpointError for control tokens that cannot be escaped."""
    if len(control) > MAX_CONTROL_TOKENS:
        raise CheckpointError(f"its vocabulary has {len(control)} control tokens; {MAX_CONTROL_TOKENS} are the most")
    if marked := next((piece for piece in control if ESCAPE_MARK in piece), ""):
        message = f"its vocabulary has the control token {marked[:40]!r}, with the character U+{ord(ESCAPE_MARK):04X}"
        raise CheckpointError(f"{message}; Unicode keeps it for use inside programs, and no control token may have it")


def build_automaton(control: Sequence[str]) -> Tokenizer:
    """A tokenizer that finds these control tokens; the text between two of them is one token, PLAIN_TEXT."""
    backend = Tokenizer(models.WordLevel({"": PLAIN_TEXT}, unk_token=""))
    backend.add_special_tokens([AddedToken(piece, normalized=False) for piece in control])
    return backend


def innermost_tokens(control: Sequence[str], every: Tokenizer) -> list[str]:
    """The control tokens that contain no other one."""
    kept: list[str] = []
    for first in range(0, len(control), SEARCHED_AT_ONCE):
        some = control[first : first + SEARCHED_AT_ONCE]
        heads, tails = (search_texts(every, [piece[part] for piece in some]) for part in (slice(-1), slice(1, None)))
        found = [{*head.ids, *tail.ids} for head, tail in zip(heads, tails, strict=True)]
        kept += [piece for piece, ids in zip(some, found, strict=True) if ids == {PLAIN_TEXT}]
    return kept


def search_texts(sought: Tokenizer, texts: Sequence[str]) -> list[Encoding]:
    return run_library(lambda: list(sought.encode_batch(list(texts), add_special_tokens=False)), text_failure)

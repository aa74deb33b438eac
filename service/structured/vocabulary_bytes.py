"""The tokens of a model's vocabulary as bytes, which is how llguidance knows them.

Knows no grammar and no request.  The one idea: whatever kind of vocabulary it is, a token adds certain bytes to a text
that has begun, and how a text is cut into tokens is asked of the checkpoint's own tokenizer.
"""

import weakref
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from ..core.errors import BadRequest
from ..core.model import Model

Bits = NDArray[np.int32]  # [ceil(V / 32)], bit i for token i
MOST_BYTES = 1 << 22  # of all tokens, and one for each; llguidance's tree of them holds so many nodes
LONGEST = 1 << 10  # bytes of a token, not included, that the tree holds
WALL = "\x02"  # before a text so that it is not the first, where that would make it begin with a space


@dataclass(frozen=True, slots=True)
class Tag:
    """A text that ends or begins a part of an answer, and what may write it.  Each list is by how much is there."""

    text: bytes
    rest: tuple[list[int], ...]  # the tokens that write what is missing
    along: tuple[Bits, ...]  # that go on with it, to its end at most
    over: tuple[Bits, ...]  # that write it to its end and go on


class Lexicon:
    """`ends` are the tokens that end an answer.  BadRequest if the model has none, nor one that says nothing, or if its
    tokens are more bytes than llguidance takes."""

    def __init__(self, model: Model) -> None:
        tokenizer, self.size = model.tokenizer, model.vocab_size
        self.spelled = token_bytes(model)
        special = {token for token in range(self.size) if tokenizer.is_special(token)}
        silent = [token for token, spelled in enumerate(self.spelled) if token in special or not spelled]
        self.ends = tuple(sorted(model.stop_tokens)) or tuple(silent[:1])
        if not self.ends:
            raise BadRequest(f"{model.name} has no token that could end an answer: its form cannot be given")
        self.special = special | set(self.ends)
        self._tokenizer = weakref.ref(tokenizer)  # which keeps this
        self._tags: dict[str, Tag] = {}
        self.tokenizer = LLTokenizer(TokenizerWrapper(Spoken(self)), eos_token=list(self.ends))

    @property
    def outline(self) -> dict[str, Any]:
        """What a grammar may name, and how large the vocabulary is."""
        special = [(token, self.spelled[token].decode(errors="replace")) for token in sorted(self.special)]
        return {"size": self.size, "ends": self.ends, "special": special}

    def tokens(self, text: bytes, *, special: bool = False) -> list[int]:
        """Tokens that spell exactly `text` within a text: the tokenizer's own if it can be, `special` ones too."""
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return self._greedy(text)
        for before in ("", WALL):
            cut = tokenizer.encode_batch([before, before + text.decode()], special=False, offsets=False)
            ids = cut[1].ids[len(cut[0]) :]
            if b"".join(self.spelled[token] for token in ids) == text and (special or self.special.isdisjoint(ids)):
                return ids
        return self._greedy(text)

    def tag(self, text: str) -> Tag:
        if text not in self._tags:
            whole = text.encode()
            ahead = [whole[at:] for at in range(len(whole))]
            inside = [token for token, spelled in enumerate(self.spelled) if whole in spelled]
            self._tags[text] = Tag(
                whole,
                tuple(self.tokens(rest, special=True) for rest in ahead),
                tuple(
                    self.bits(t for n in range(1, len(rest) + 1) for t in self._spelling(rest[:n])) for rest in ahead
                ),
                (
                    self.bits(token for token in inside if not self.spelled[token].endswith(whole)),
                    *(self.bits(set(self._beginning(rest)) - set(self._spelling(rest))) for rest in ahead[1:]),
                ),
            )
        return self._tags[text]

    def bits(self, tokens: Iterable[int]) -> Bits:
        marks = np.zeros(-(-self.size // 32) * 32, np.uint8)
        marks[list(tokens)] = 1
        return np.packbits(marks, bitorder="little").view(np.int32)

    @cached_property
    def open(self) -> Bits:
        """All tokens but those that end an answer."""
        return self.bits(set(range(self.size)) - set(self.ends))

    @cached_property
    def _order(self) -> list[int]:
        return sorted(range(self.size), key=self.spelled.__getitem__)

    def _place(self, spelled: bytes) -> int:
        return bisect_left(self._order, spelled, key=self.spelled.__getitem__)

    def _spelling(self, text: bytes) -> list[int]:
        return self._order[self._place(text) : self._place(text + b"\0")]

    def _beginning(self, text: bytes) -> list[int]:
        """Tokens that begin with `text`, whose last byte is of ASCII."""
        return self._order[self._place(text) : self._place(text[:-1] + bytes([text[-1] + 1]))]

    def _greedy(self, text: bytes) -> list[int]:
        found = []
        while text:
            sizes = range(min(len(text), 64), 0, -1)
            known = ((size, set(self._spelling(text[:size])) - self.special) for size in sizes)
            size, tokens = next(((size, tokens) for size, tokens in known if tokens), (len(text), set()))
            found += [min(tokens)] if tokens else []
            text = text[size:]
        return found


def token_bytes(model: Model) -> list[bytes]:
    """The bytes of each token.  BadRequest where llguidance, which panics then, cannot take them."""
    found, size = list[bytes](), model.vocab_size
    for token in range(model.vocab_size):
        found.append(model.tokenizer.piece_bytes(token))
        size += len(found[-1])
        if len(found[-1]) >= LONGEST or size > MOST_BYTES:
            said = f"more than {MOST_BYTES - model.vocab_size} bytes in all its {model.vocab_size} tokens"
            if len(found[-1]) >= LONGEST:
                said = f"token {token} of {len(found[-1])} bytes, at most {LONGEST - 1} are taken"
            raise BadRequest(f"the vocabulary of {model.name} has {said}: its answers cannot be given a form")
    return found


class Spoken:
    """A lexicon as TokenizerWrapper wants it; the lexicon itself may be forgotten meanwhile."""

    bos_token_id = None

    def __init__(self, lexicon: Lexicon) -> None:
        self._lexicon = weakref.ref(lexicon)
        self.tokens, self.eos_token_id = lexicon.spelled, lexicon.ends[0]
        self.special_token_ids = sorted(lexicon.special)

    def __call__(self, text: bytes) -> list[int]:
        lexicon = self._lexicon()
        return lexicon.tokens(text) if lexicon is not None else []

"""The tokens of a vocabulary as bytes, in the form that llguidance needs.

In every kind of vocabulary, a token adds certain bytes to a text that has begun.  The checkpoint's own tokenizer splits
texts into tokens.
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

TokenMask = NDArray[np.int32]  # [ceil(V / 32)], bit i for token i
MAX_TREE_NODES = 1 << 22  # bytes of all tokens, plus one for each: the nodes of llguidance's tree
MAX_TOKEN_BYTES = 1 << 10  # bytes of a token: the tree holds shorter ones
TEXT_BEFORE = "\x02"  # put before a text where the tokenizer would add a space to the first word


@dataclass(frozen=True, slots=True)
class TagTokens:
    """The tokens of a text that begins or ends a part of an answer.  Tuples are indexed by the bytes written so far."""

    text: bytes
    completions: tuple[list[int], ...]  # the tokens that spell the rest
    inside_masks: tuple[TokenMask, ...]  # tokens that continue it, at most to its end
    crossing_masks: tuple[TokenMask, ...]  # tokens that complete it and continue after it


class VocabularyBytes:
    """The bytes of all tokens of a model.  `end_tokens` end an answer.

    Raises BadRequest if the model has no such token, nor one without text, or if llguidance cannot take its tokens.
    """

    def __init__(self, model: Model) -> None:
        tokenizer, self.size = model.tokenizer, model.vocab_size
        self.token_bytes = token_bytes(model)
        special = {token for token in range(self.size) if tokenizer.is_special(token)}
        textless = [token for token, piece in enumerate(self.token_bytes) if token in special or not piece]
        self.end_tokens = tuple(sorted(model.stop_tokens)) or tuple(textless[:1])
        if not self.end_tokens:
            raise BadRequest(f"{model.name} has no token that could end an answer: its form cannot be given")
        self.special_tokens = special | set(self.end_tokens)
        self._tokenizer = weakref.ref(tokenizer)  # weak, because the tokenizer keeps this alive
        self._tags: dict[str, TagTokens] = {}
        self.tokenizer = LLTokenizer(TokenizerWrapper(LibraryTokenizer(self)), eos_token=list(self.end_tokens))

    @property
    def outline(self) -> dict[str, Any]:
        """The special tokens that a grammar may name, and the size of the vocabulary."""
        special = [(token, self.token_bytes[token].decode(errors="replace")) for token in sorted(self.special_tokens)]
        return {"size": self.size, "ends": self.end_tokens, "special": special}

    def tokenize(self, text: bytes, *, special: bool = False) -> list[int]:
        """Tokens that spell exactly `text` inside a text: those of the tokenizer if possible.

        Special tokens are used only if `special`.
        """
        tokenizer = self._tokenizer()
        if tokenizer is None:
            return self._tokenize_greedily(text)
        for before in ("", TEXT_BEFORE):
            encodings = tokenizer.encode_batch([before, before + text.decode()], special=False, offsets=False)
            ids = encodings[1].ids[len(encodings[0]) :]
            if b"".join(self.token_bytes[token] for token in ids) == text and (
                special or self.special_tokens.isdisjoint(ids)
            ):
                return ids
        return self._tokenize_greedily(text)

    def tag_tokens(self, text: str) -> TagTokens:
        if text not in self._tags:
            whole = text.encode()
            ahead = [whole[at:] for at in range(len(whole))]
            inside = [token for token, piece in enumerate(self.token_bytes) if whole in piece]
            self._tags[text] = TagTokens(
                whole,
                tuple(self.tokenize(rest, special=True) for rest in ahead),
                tuple(
                    self.mask_of(t for n in range(1, len(rest) + 1) for t in self._tokens_equal_to(rest[:n]))
                    for rest in ahead
                ),
                (
                    self.mask_of(token for token in inside if not self.token_bytes[token].endswith(whole)),
                    *(
                        self.mask_of(set(self._tokens_starting_with(rest)) - set(self._tokens_equal_to(rest)))
                        for rest in ahead[1:]
                    ),
                ),
            )
        return self._tags[text]

    def mask_of(self, tokens: Iterable[int]) -> TokenMask:
        marks = np.zeros(-(-self.size // 32) * 32, np.uint8)
        marks[list(tokens)] = 1
        return np.packbits(marks, bitorder="little").view(np.int32)

    @cached_property
    def continuing_mask(self) -> TokenMask:
        """All tokens but those that end an answer."""
        return self.mask_of(set(range(self.size)) - set(self.end_tokens))

    @cached_property
    def _sorted_tokens(self) -> list[int]:
        return sorted(range(self.size), key=self.token_bytes.__getitem__)

    def _sorted_index(self, piece: bytes) -> int:
        return bisect_left(self._sorted_tokens, piece, key=self.token_bytes.__getitem__)

    def _tokens_equal_to(self, text: bytes) -> list[int]:
        return self._sorted_tokens[self._sorted_index(text) : self._sorted_index(text + b"\0")]

    def _tokens_starting_with(self, text: bytes) -> list[int]:
        """Tokens that begin with `text`, whose last byte is ASCII."""
        return self._sorted_tokens[self._sorted_index(text) : self._sorted_index(text[:-1] + bytes([text[-1] + 1]))]

    def _tokenize_greedily(self, text: bytes) -> list[int]:
        found = []
        while text:
            sizes = range(min(len(text), 64), 0, -1)
            known = ((size, set(self._tokens_equal_to(text[:size])) - self.special_tokens) for size in sizes)
            size, tokens = next(((size, tokens) for size, tokens in known if tokens), (len(text), set()))
            found += [min(tokens)] if tokens else []
            text = text[size:]
        return found


def token_bytes(model: Model) -> list[bytes]:
    """The bytes of each token.  Raises BadRequest where llguidance would panic on them."""
    pieces, size = list[bytes](), model.vocab_size
    for token in range(model.vocab_size):
        pieces.append(model.tokenizer.piece_bytes(token))
        size += len(pieces[-1])
        if len(pieces[-1]) >= MAX_TOKEN_BYTES or size > MAX_TREE_NODES:
            problem = f"more than {MAX_TREE_NODES - model.vocab_size} bytes in all its {model.vocab_size} tokens"
            if len(pieces[-1]) >= MAX_TOKEN_BYTES:
                problem = f"token {token} of {len(pieces[-1])} bytes, at most {MAX_TOKEN_BYTES - 1} are taken"
            raise BadRequest(f"the vocabulary of {model.name} has {problem}: its answers cannot be given a form")
    return pieces


class LibraryTokenizer:
    """A vocabulary with the attributes that TokenizerWrapper needs; it holds only a weak reference to it."""

    bos_token_id = None

    def __init__(self, vocabulary: VocabularyBytes) -> None:
        self._vocabulary = weakref.ref(vocabulary)
        self.tokens, self.eos_token_id = vocabulary.token_bytes, vocabulary.end_tokens[0]
        self.special_token_ids = sorted(vocabulary.special_tokens)

    def __call__(self, text: bytes) -> list[int]:
        vocabulary = self._vocabulary()
        return vocabulary.tokenize(text) if vocabulary is not None else []

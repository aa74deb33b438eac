"""Decodes token ids to text one token at a time.

A token stands for bytes that depend only on whether it is the first. A stream appends the bytes of each token, and an
incremental UTF-8 decoder holds back incomplete characters. The joined pieces equal the text of all tokens decoded at
once. If pieces mark the end of a word (`</w>`), the space is held back until another token follows.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from tokenizers import Tokenizer, decoders

from ..core.errors import UnsupportedError
from .panics import run_library, text_failure

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INVALID_BYTE = re.compile(
    "[\udc80-\udcff]"
)  # what the error handler "surrogateescape" makes of a byte that is no text
_JOINED_TOKENS = 256  # tokens whose texts are joined at a time
_KNOWN_STEPS = ("ByteLevel", "BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


def byte_alphabet() -> dict[str, int]:
    """The 256 characters of byte-level vocabularies, and the byte of each (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TokenSpelling:
    """The bytes of every token of a vocabulary.

    `special` are its control tokens, except for those in `text_tags`, which are text.

    UnsupportedError for a decoder under which a token's text depends on more than whether it is the first.
    """

    def __init__(self, backend: Tokenizer, text_tags: frozenset[str] = frozenset()) -> None:
        self._backend = backend
        self._decoder: decoders.Decoder | None = backend.decoder
        steps = _steps(json.loads(self._decoder.__getstate__())) if self._decoder is not None else []
        for step in steps:
            if not _is_local(step, alone=len(steps) == 1):
                raise UnsupportedError(
                    f"the tokenizer's decoder {step['type']} cannot decode one token at a time; "
                    f"known decoders: {', '.join(_KNOWN_STEPS)}"
                )
        kinds = {step["type"] for step in steps}
        # The suffix that marks the end of a word.
        self.word_end: str = steps[0]["suffix"] if "BPEDecoder" in kinds else ""
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds
        added = backend.get_added_tokens_decoder().items()
        self.special = {i for i, token in added if token.special and token.content not in text_tags}
        self._bytes_by_token: dict[tuple[int, bool], bytes] = {}

    def is_special(self, token: int) -> bool:
        return token in self.special

    def is_token(self, token: int) -> bool:
        """Whether the id has a token; padding rows of an embedding have none."""
        return token >= 0 and self._backend.id_to_token(token) is not None

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """The bytes of a token; empty for an id without a token."""
        known = self._bytes_by_token.get((token, first))
        if known is None:
            piece = self._backend.id_to_token(token) if token >= 0 else None
            known = self._bytes_by_token[token, first] = b"" if piece is None else self._piece_bytes(piece, first)
        return known

    def split_word_end(self, token: int) -> tuple[bytes, bytes, bytes]:
        """A token's bytes up to the end of a word; what follows if there is a next token; what follows if there is
        none."""
        open_, _, rest = (self._backend.id_to_token(token) or "").partition(self.word_end)
        last = rest.replace(self.word_end, "").encode()
        return open_.encode(), self.token_bytes(token).removeprefix(open_.encode()), last

    def stream(self, *, skip_special: bool = True) -> "TokenStream":
        if self.word_end:
            return WordStream(self, skip_special=skip_special)
        return TokenStream(self, skip_special=skip_special)

    def decode_text(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        stream, parts = self.stream(skip_special=skip_special), list[str]()
        left = iter(tokens)
        while some := list(islice(left, _JOINED_TOKENS)):  # an object for each token of a text takes much more memory
            parts.append(stream.push_all(some))
        return "".join(parts) + stream.flush()

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """A UTF-8 decoder. Invalid bytes become one replacement character for a sequence in a byte-level vocabulary,
        and one for each byte with byte fallback, as in the libraries the vocabularies come from."""
        return codecs.getincrementaldecoder("utf-8")("surrogateescape" if self._fallback else "replace")

    def _piece_bytes(self, piece: str, first: bool) -> bytes:
        if self._alphabet:
            known = [self._alphabet.get(character, -1) for character in piece]
            return piece.encode() if -1 in known else bytes(known)
        if self._fallback and (byte := _BYTE.fullmatch(piece)) and int(byte[1], 16) >= 0x80:
            return bytes([int(byte[1], 16)])
        if self.word_end:
            return piece.replace(self.word_end, " ").encode()
        if self._decoder is None:
            return piece.encode() if first else b" " + piece.encode()
        # The piece before is arbitrary: the decoded text does not depend on it.
        decoder = self._decoder
        text = run_library(lambda: decoder.decode([piece]) if first else decoder.decode(["a", piece])[1:], text_failure)
        return text.encode()


class TokenStream:
    """The text of tokens as they arrive. One stream is one text; it ends with `flush`."""

    def __init__(self, spelling: TokenSpelling, *, skip_special: bool = True) -> None:
        self._spelling, self._skip = spelling, skip_special
        self._utf8 = spelling.utf8_decoder()
        self._first = True

    def push(self, token: int) -> str:
        """The new text after a token; it may be empty and never ends inside a character."""
        if self._skip and self._spelling.is_special(token):
            return ""
        spelled = self._spelling.token_bytes(token, first=self._first)
        self._first = self._first and not self._spelling.is_token(token)
        return _INVALID_BYTE.sub("\ufffd", self._utf8.decode(spelled))

    def push_all(self, tokens: Sequence[int]) -> str:
        """The new text after several tokens: that of `push` for each of them, in a fifth of the time."""
        at, parts = 0, list[str]()
        while self._first and at < len(tokens):
            parts.append(self.push(tokens[at]))
            at += 1
        hidden, token_bytes = self._spelling.special if self._skip else (), self._spelling.token_bytes
        spelled = b"".join([token_bytes(token) for token in tokens[at:] if token not in hidden])
        return "".join(parts) + _INVALID_BYTE.sub("\ufffd", self._utf8.decode(spelled))

    def flush(self) -> str:
        """The rest: replacement characters for an incomplete character."""
        return _INVALID_BYTE.sub("\ufffd", self._utf8.decode(b"", final=True))


class WordStream(TokenStream):
    """A stream for pieces that mark the end of a word; the end of the last word is known only at `flush`."""

    _word_end = _last = b""

    def push(self, token: int) -> str:
        if not self._spelling.is_token(token) or (self._skip and self._spelling.is_special(token)):
            return ""
        shown, followed, last = self._spelling.split_word_end(token)
        text = (self._word_end + shown).decode()
        self._word_end, self._last = followed, last
        return text

    def push_all(self, tokens: Sequence[int]) -> str:
        return "".join(map(self.push, tokens))

    def flush(self) -> str:
        return self._last.decode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _is_local(step: dict[str, Any], *, alone: bool) -> bool:
    """Whether this decoding step depends on one token at a time, or on the start of the text, and nothing else; or, if
    it is the only step, on whether a token is the last."""
    if step["type"] == "Strip":
        return bool(step["start"] <= 1 and step["stop"] == 0)
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    if step["type"] == "BPEDecoder":
        return bool(step["suffix"]) and alone
    return step["type"] in _KNOWN_STEPS

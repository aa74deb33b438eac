"""From token ids back to text, one token at a time.  Knows no file and no model, only how a vocabulary spells.

The one idea: a token stands for bytes, and which bytes depends on nothing but whether it is the first.  So text grows
by the bytes of each token, an incremental UTF-8 decoder holds back what is not a whole character yet, and the parts
of a stream join up to exactly what decoding all of it at once gives.  Where tokens say that a word ends (`</w>`), the
space is held back too, until another token comes: behind the last one there is none.
"""

import codecs
import json
import re
from collections.abc import Iterable
from typing import Any

from tokenizers import Tokenizer, decoders

from ..core.errors import UnsupportedError
from .panics import run_library, text_failure

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INVALID_BYTE = re.compile(
    "[\udc80-\udcff]"
)  # what the error handler "surrogateescape" makes of a byte that is no text
_KNOWN_STEPS = ("ByteLevel", "BPEDecoder", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "WordPiece")


def byte_alphabet() -> dict[str, int]:
    """The 256 characters that byte-level vocabularies are spelled in, and the byte each stands for (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


class TokenSpelling:
    """What every token of a vocabulary stands for, in bytes.

    `special` are its control tokens; those `said` are none, whatever it calls them.

    UnsupportedError for a decoder under which a token's text depends on more than whether it is the first.
    """

    def __init__(self, backend: Tokenizer, said: frozenset[str] = frozenset()) -> None:
        self._backend = backend
        self._decoder: decoders.Decoder | None = backend.decoder
        steps = _steps(json.loads(self._decoder.__getstate__())) if self._decoder is not None else []
        for step in steps:
            if not _is_local(step, alone=len(steps) == 1):
                raise UnsupportedError(
                    f"the tokenizer's decoder {step['type']} cannot be followed one token at a time; "
                    f"known decoders: {', '.join(_KNOWN_STEPS)}"
                )
        kinds = {step["type"] for step in steps}
        self.word_end: str = steps[0]["suffix"] if "BPEDecoder" in kinds else ""  # which says that a word ends
        self._alphabet = byte_alphabet() if "ByteLevel" in kinds else {}
        self._fallback = "ByteFallback" in kinds
        added = backend.get_added_tokens_decoder().items()
        self.special = {i for i, token in added if token.special and token.content not in said}
        self._bytes_by_token: dict[tuple[int, bool], bytes] = {}

    def is_special(self, token: int) -> bool:
        return token in self.special

    def is_token(self, token: int) -> bool:
        """Whether the id names a token; the rows that pad an embedding do not."""
        return token >= 0 and self._backend.id_to_token(token) is not None

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """The bytes of a token; none for an id that names no token."""
        known = self._bytes_by_token.get((token, first))
        if known is None:
            piece = self._backend.id_to_token(token) if token >= 0 else None
            known = self._bytes_by_token[token, first] = b"" if piece is None else self._piece_bytes(piece, first)
        return known

    def split_word_end(self, token: int) -> tuple[bytes, bytes, bytes]:
        """Of a token its bytes up to where a word ends; what follows if another token does; what follows if none."""
        open_, _, rest = (self._backend.id_to_token(token) or "").partition(self.word_end)
        last = rest.replace(self.word_end, "").encode()
        return open_.encode(), self.token_bytes(token).removeprefix(open_.encode()), last

    def stream(self, *, skip_special: bool = True) -> "TokenStream":
        if self.word_end:
            return WordStream(self, skip_special=skip_special)
        return TokenStream(self, skip_special=skip_special)

    def decode_text(self, tokens: Iterable[int], *, skip_special: bool = True) -> str:
        stream = self.stream(skip_special=skip_special)
        return "".join(map(stream.push, tokens)) + stream.flush()

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """Bytes that are no text show as one replacement character where they break off in a byte-level vocabulary,
        and as one each where they are a fallback: so do the libraries that the two come from."""
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
        # Any piece may stand before: what follows it does not depend on which.
        decoder = self._decoder
        text = run_library(lambda: decoder.decode([piece]) if first else decoder.decode(["a", piece])[1:], text_failure)
        return text.encode()


class TokenStream:
    """Text from tokens as they come.  One stream is one text; it ends with `flush`."""

    def __init__(self, spelling: TokenSpelling, *, skip_special: bool = True) -> None:
        self._spelling, self._skip = spelling, skip_special
        self._utf8 = spelling.utf8_decoder()
        self._first = True

    def push(self, token: int) -> str:
        """What can be read now that was not before; may be empty, never ends in half a character."""
        if self._skip and self._spelling.is_special(token):
            return ""
        spelled = self._spelling.token_bytes(token, first=self._first)
        self._first = self._first and not self._spelling.is_token(token)
        return _INVALID_BYTE.sub("\ufffd", self._utf8.decode(spelled))

    def flush(self) -> str:
        """What is left: replacement characters for a character that was never completed."""
        return _INVALID_BYTE.sub("\ufffd", self._utf8.decode(b"", final=True))


class WordStream(TokenStream):
    """The same where pieces say that a word ends: of the last token it is known only once there is no other."""

    _word_end = _last = b""

    def push(self, token: int) -> str:
        if not self._spelling.is_token(token) or (self._skip and self._spelling.is_special(token)):
            return ""
        shown, followed, last = self._spelling.split_word_end(token)
        text = (self._word_end + shown).decode()
        self._word_end, self._last = followed, last
        return text

    def flush(self) -> str:
        return self._last.decode()


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]


def _is_local(step: dict[str, Any], *, alone: bool) -> bool:
    """Whether this decoding step looks at one token at a time, or at the start of the text, and nowhere else; or, where
    it is the only one, at whether a token is the last."""
    if step["type"] == "Strip":
        return bool(step["start"] <= 1 and step["stop"] == 0)
    if step["type"] == "Replace":
        return len(step["pattern"].get("String", "")) == 1
    if step["type"] == "BPEDecoder":
        return bool(step["suffix"]) and alone
    return step["type"] in _KNOWN_STEPS

"""The tokenizer of a checkpoint: text to token ids and back. A Tokenizer is immutable, so any number of threads may use
it at the same time.

A text may spell a control token (`<|im_start|>`). `encode` turns it into that token; with `untrusted=True` it stays
plain text. A prompt from a chat template has both, so the texts given to the template are quoted (`quote`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import orjson
import tokenizers

from ..core.errors import CheckpointError, EncodingError, GrowthError
from . import gguf_vocabulary as gguf
from . import patterns
from . import tokenizer_files as folder
from .fill_in_middle import FillMarks, find_fill_marks
from .memory_size import count_memory, count_spelled
from .panics import TokenizerError, encoding_failure, load_failure, run_library, text_failure
from .regular_expression import Expression
from .special_token_escape import ESCAPE_MARK, SpecialTokenEscape, check_control_tokens
from .token_text import TokenSpelling, TokenStream
from .vocabulary import Vocabulary, run_build

__all__ = ["Encoding", "Text", "TokenStream", "Tokenizer", "TokenizerError", "check_well_formed", "require_well_formed"]

Text = str | tuple[str, str]
T = TypeVar("T")
TEST_TEXTS: tuple[Text, ...] = ("a", ("a", "b"), "A fox's 2nd  word\n", "\u65e5\u672c \u00e9\U0001f642", " ")
MAX_MEAN_GROWTH = 16  # how many characters the steps may make of each of a text, on average; of Hangul forms make 15
MAX_FREE_GROWTH = 1 << 12  # characters that they may make in any case
MAX_VOCAB_SIZE = 1 << 24  # of a vocabulary; the largest published ones have a million


class CachedLists:
    """The lists of the library's encoding, each made when it is first read, and cached."""

    def __init__(self, encoded: tokenizers.Encoding) -> None:
        self._encoded = encoded

    def __len__(self) -> int:
        return len(self._encoded)

    def __getattr__(self, name: str) -> list[Any]:
        made: list[Any] = getattr(self._encoded, name)
        setattr(self, name, made)
        return made


class Encoding:
    """A text as tokens; `len` is their number.

    The library makes a list of Python objects when it is read, for a long text millions, and holds the interpreter
    meanwhile. So only requested lists are made; callers check `len` before they read one.
    """

    def __init__(self, encoded: tokenizers.Encoding | CachedLists, rows: Sequence[int] | None = None) -> None:
        self._encoded, self._rows = encoded, rows

    def __len__(self) -> int:
        return len(self._encoded) if self._rows is None else len(self._rows)

    def select_rows(self, rows: Sequence[int]) -> "Encoding":
        """The encoding of some of its tokens."""
        return Encoding(self._encoded, rows if self._rows is None else [self._rows[row] for row in rows])

    def cache_lists(self) -> "Encoding":
        """The same encoding with cached lists, for callers that take many parts of it."""
        return Encoding(
            self._encoded if isinstance(self._encoded, CachedLists) else CachedLists(self._encoded), self._rows
        )

    @cached_property
    def ids(self) -> list[int]:
        """[T]"""
        return self._select(self._encoded.ids)

    @cached_property
    def segments(self) -> list[int]:
        """[T] the segments, which distinguish the texts of a pair."""
        return self._select(self._encoded.type_ids)

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        """[T] the range of code points [from, to) of the caller's text that a token covers; for a pair, in its own
        text."""
        return self._select(self._encoded.offsets)

    @cached_property
    def special(self) -> list[bool]:
        """[T] True for special tokens that were added around the text."""
        return [bool(mark) for mark in self._select(self._encoded.special_tokens_mask)]

    @cached_property
    def pieces(self) -> list[str]:
        """[T]"""
        return self._select(self._encoded.tokens)

    @cached_property
    def words(self) -> list[int | None]:
        """[T] the index of the word that a token belongs to, as the pre-tokenizer splits the text."""
        return self._select(self._encoded.word_ids)

    @cached_property
    def texts(self) -> list[int | None]:
        """[T] which text of a pair a token belongs to; None for tokens added around it."""
        return self._select(self._encoded.sequence_ids)

    def _select(self, every: list[T]) -> list[T]:
        return every if self._rows is None else [every[row] for row in self._rows]


class Tokenizer:
    """A checkpoint's tokenizer. `bos_id` and the ids of other roles are None if there is no such token.

    `marks_words`: a piece shows whether it continues a word ("##ing"). `growth`: how many characters one character of a
    text may become before it is split into tokens. `text_size`: an upper bound of the characters of all tokens.
    `memory_bytes`: an upper bound of what it takes in memory, with the texts of all tokens `spelled_bytes` more.
    """

    def __init__(self, vocabulary: Vocabulary, measured_bytes: int = 0) -> None:
        self._vocabulary, self._backend = vocabulary, vocabulary.backend
        known = self._backend.get_vocab(with_added_tokens=True)
        self.text_size = patterns.check_piece_lengths(self._backend, known)
        patterns.check_model(self._backend, known)
        self._weights = patterns.check_growth(self._backend)
        self.growth = self._weights.most
        self._heavy = self._weights.heavier_than(MAX_MEAN_GROWTH)
        self._spelling = TokenSpelling(self._backend)
        self._literal = copy_without_control(self._backend)
        self._tagged: dict[frozenset[str], Tokenizer] = {}
        check_control_tokens([self.piece(id) for id in self._spelling.special])
        self.bos_token, self.eos_token = vocabulary.bos, vocabulary.eos
        self.bos_id, self.eos_id, self.pad_id = map(self.token_id, (vocabulary.bos, vocabulary.eos, vocabulary.pad))
        self.unk_id, self.mask_id = map(self.token_id, (vocabulary.unk, vocabulary.mask))
        self.marks_words = bool(getattr(self._backend.model, "continuing_subword_prefix", None))
        self.vocab_size: int = max(known.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB_SIZE:  # a list of all ids would exhaust the memory
            raise CheckpointError(
                f"the vocabulary has ids up to {self.vocab_size - 1}; {MAX_VOCAB_SIZE} are known here"
            )
        counted = count_memory(self._backend, known, self.vocab_size)
        self.spelled_bytes = count_spelled(self.vocab_size, self.text_size)
        self._measured_bytes, self.memory_bytes = measured_bytes, max(counted, measured_bytes)

    @classmethod
    def from_folder(cls, path: Path, measured_bytes: int = 0) -> "Tokenizer":
        """The tokenizer of a checkpoint folder; CheckpointError names the faulty file. `measured_bytes`: what it took
        in a process that tried it."""
        file = path / "tokenizer.json"
        name = str(file if file.is_file() else path)
        return build_tokenizer(lambda: cls(folder.read_vocabulary(path), measured_bytes), name)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any], measured_bytes: int = 0) -> "Tokenizer":
        """The tokenizer in a GGUF file's metadata; CheckpointError names the faulty field. `measured_bytes`: as in
        `from_folder`."""

        return run_library(lambda: cls(gguf.read_gguf_vocabulary(fields), measured_bytes), load_failure())

    @staticmethod
    def select_gguf_fields(metadata: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that `from_gguf` reads; CheckpointError if they are longer than those of any vocabulary."""
        return gguf.select_fields(metadata)

    @property
    def parts(self) -> tuple[str, ...]:
        """Everything it is made of, as text; `from_parts` makes an equal tokenizer, for example in another process."""
        current = self._vocabulary
        return self._backend.to_str(), current.bos, current.eos, current.pad, current.unk, current.mask

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the `parts`; equal tokenizers have equal ones. The library writes a large vocabulary in half a
        second, while other threads wait, so it does so once."""
        return sha256("\0".join(self.parts).encode()).digest()

    @classmethod
    def from_parts(cls, backend: str, *roles: str) -> "Tokenizer":
        """The tokenizer with these `parts`."""
        return run_library(lambda: cls(Vocabulary(tokenizers.Tokenizer.from_str(backend), *roles)), load_failure())

    @cached_property
    def unknown_id(self) -> int | None:
        """The token that the vocabulary's own model has for unknown text, whatever the checkpoint names."""
        model = self._backend.model
        if isinstance(model, tokenizers.models.Unigram):
            found = orjson.loads(self._backend.to_str())["model"].get("unk_id")
            return found if isinstance(found, int) else None
        return self.token_id(getattr(model, "unk_token", None) or "")

    def with_text_tags(self, tags: frozenset[str]) -> "Tokenizer":
        """The tokenizer with `tags` decoded as text, even if the vocabulary has them as control tokens.

        It makes what `quote` needs, which takes long for many control tokens, so that no request waits for it. The same
        tags give the same tokenizer: a model and its adapters share it.
        """
        if tags not in self._tagged:
            other = copy(self)
            other._spelling, other._tagged = TokenSpelling(self._backend, tags), {}
            other.__dict__["_quoting"] = other._build_quoting()
            self._tagged[tags] = other
        return self._tagged[tags]

    def lower_case(self) -> "Tokenizer":
        """The tokenizer that reads every text in lower case, as sentence-transformers' `do_lower_case` does."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        steps = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = tokenizers.normalizers.Sequence([tokenizers.normalizers.Lowercase(), *steps])
        return type(self)(replace(self._vocabulary, backend=backend), self._measured_bytes)

    def without_boundary_tokens(self) -> "Tokenizer":
        """The tokenizer that adds no tokens around a text."""
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.post_processor = tokenizers.processors.Sequence([])
        return type(self)(replace(self._vocabulary, backend=backend), self._measured_bytes)

    def expressions(self) -> list[Expression]:
        """The regular expressions of its steps."""
        return list(patterns.read_expressions(self._backend).values())

    def literals(self) -> list[str]:
        """The texts that its steps search for, other than by regular expressions."""
        return patterns.read_literals(self._backend)

    @property
    def boundary_tokens(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        plain, whole = self.encode("a", special=False).ids, self.encode("a").ids
        starts = range(len(whole) - len(plain) + 1)
        start = next((start for start in starts if whole[start : start + len(plain)] == plain), 0)
        return whole[:start], whole[start + len(plain) :]

    def encode(self, text: str, *, special: bool = True, untrusted: bool = False) -> Encoding:
        """`special` adds the special tokens around the text. `untrusted` keeps spelled control tokens as plain text.
        Raises EncodingError for lone surrogates, TokenizerError if the library fails."""
        return self.encode_batch([text], special=special, untrusted=untrusted)[0]

    def encode_batch(
        self, texts: Sequence[Text], *, special: bool = True, untrusted: bool = False, offsets: bool = True
    ) -> list[Encoding]:
        """`encode` for many texts, or pairs of texts, at once. Without `offsets` all of them are (0, 0), which takes
        half the time.

        The library releases the interpreter lock in this call, but not when it encodes a single text.
        """

        self._check_growth([text] if isinstance(text, str) else text for text in texts)

        def run() -> list[tokenizers.Encoding]:
            backend = self._literal if untrusted else self._backend
            encode = backend.encode_batch if offsets else backend.encode_batch_fast
            return encode(list(texts), add_special_tokens=special)

        try:
            found = run_library(run, text_failure, encoding_failure)
        except (TypeError, UnicodeError):
            check_well_formed(texts)
            raise
        return [Encoding(each) for each in found]

    def _check_growth(self, texts: Iterable[Sequence[str]]) -> None:
        """Raise GrowthError for a text, given in parts, that may become many times as long: its memory was counted by
        its length."""
        for parts in texts:
            if self._heavy is not None and all(map(self._heavy.isdisjoint, parts)):
                continue
            length, grown = sum(map(len, parts)), sum(map(self._weights.of, parts))
            if grown > (most := MAX_MEAN_GROWTH * length + MAX_FREE_GROWTH):
                message = f"the steps of the tokenizer may make {grown:.0f} characters of the {length} of a text"
                raise GrowthError(f"{message}; {most} are the most")

    def encode_words(self, texts: Sequence[Sequence[str]]) -> list[Encoding]:
        """Texts that are split into words already, with special tokens around them; `Encoding.words` has the index of
        each token's word. Raises the errors of `encode`."""

        self._check_growth(texts)

        def run() -> list[tokenizers.Encoding]:
            return self._backend.encode_batch([list(words) for words in texts], is_pretokenized=True)

        try:
            found = run_library(run, text_failure, encoding_failure)
        except (TypeError, UnicodeError):
            check_well_formed([word for words in texts for word in words])
            raise
        return [Encoding(each) for each in found]

    def check_list_lengths(self, encoding: Encoding, file: str = "") -> None:
        """CheckpointError if its lists have different lengths, which a faulty post_processor may cause."""
        lists: dict[str, Sequence[Any]] = {
            "ids": encoding.ids,
            "tokens": encoding.pieces,
            "segments": encoding.segments,
        }
        lists |= {"offsets": encoding.offsets, "special": encoding.special}
        if len({len(each) for each in lists.values()}) > 1:
            counts = ", ".join(f"{len(each)} {name}" for name, each in lists.items())
            raise CheckpointError(
                f"post_processor: what it adds around a text has {counts}, which should be equal numbers", file=file
            )

    def quote(self, text: str) -> str:
        """The text, marked so that `encode_quoted` reads nothing in it as a control token."""
        return self._quoting.quote(text)

    def unquote(self, text: str) -> str:
        return text.replace(ESCAPE_MARK, "")

    def encode_quoted(self, text: str) -> list[Encoding]:
        """The encodings of a text with quoted parts, in order, without special tokens around it."""
        if ESCAPE_MARK not in text:
            return self.encode_batch([text], special=False, offsets=False)
        parts = self._quoting.split_control(text)
        plain = self.encode_batch(parts[::2], special=False, untrusted=True, offsets=False)
        control = self.encode_batch(parts[1::2], special=False, offsets=False)
        return [each for pair in zip(plain, control, strict=False) for each in pair] + plain[len(control) :]

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of tokens. Invalid bytes become replacement characters; ids without a token (padding rows of an
        embedding) give no text."""
        return self._spelling.decode_text(ids, skip_special=skip_special)

    def stream(self, *, skip_special: bool = True) -> TokenStream:
        """A decoder for one token at a time; its pieces joined equal the result of `decode`."""
        return self._spelling.stream(skip_special=skip_special)

    def piece(self, id: int) -> str:
        """A token as the vocabulary spells it; empty for an id without a token."""
        return (self._backend.id_to_token(id) or "") if self._spelling.is_token(id) else ""

    def piece_bytes(self, id: int, *, first: bool = False) -> bytes:
        """The bytes that a token adds to a text that has begun, or as its `first`; empty for an id without a token."""
        return self._spelling.token_bytes(id, first=first)

    def join_pieces(self, pieces: Sequence[str]) -> str:
        """The text of tokens given as the vocabulary spells them."""
        decoder = self._backend.decoder
        return (
            " ".join(pieces)
            if decoder is None
            else run_library(lambda: str(decoder.decode(list(pieces))), text_failure)
        )

    def token_id(self, piece: str) -> int | None:
        """The id of the token with this spelling, or None."""
        return self._backend.token_to_id(piece)

    def has_same_tokens(self, other: "Tokenizer") -> bool:
        """Whether the same ids have the same spelling."""
        mine, theirs = self._backend.id_to_token, other._backend.id_to_token
        # One token in a call: other threads wait while the library makes a table of a whole vocabulary.
        return self.vocab_size == other.vocab_size and all(mine(id) == theirs(id) for id in range(self.vocab_size))

    def is_special(self, id: int) -> bool:
        """Whether a token is a control token, which is never text."""
        return self._spelling.is_special(id)

    @cached_property
    def fill_marks(self) -> FillMarks | None:
        """The control tokens for a text between two others; None if the vocabulary has none."""
        return find_fill_marks(self.token_id, self.is_special)

    @cached_property
    def _quoting(self) -> SpecialTokenEscape:
        return self._build_quoting()

    def _build_quoting(self) -> SpecialTokenEscape:
        return SpecialTokenEscape(self.piece(id) for id in self._spelling.special)


def copy_without_control(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """An equal encoder that reads a spelled control token as plain text; it shares the vocabulary with `backend`.

    It is another object because the switch applies to a whole encoder, which other threads are using.
    """
    other = tokenizers.Tokenizer(backend.model)
    for part in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        if (made := getattr(backend, part)) is not None:
            setattr(other, part, made)
    # In the order of their ids, in which the library gives them the same ids again.
    other.add_tokens([token for _, token in sorted(backend.get_added_tokens_decoder().items(), key=itemgetter(0))])
    other.encode_special_tokens = True
    return other


def build_tokenizer(make: Callable[[], Tokenizer], file: str) -> Tokenizer:
    """A tokenizer that was tested on a few texts. CheckpointError names the `file` if the library fails, or if the
    lists of an encoding have different lengths."""

    def build_and_test() -> Tokenizer:
        tokenizer = make()
        for probe in TEST_TEXTS:
            with suppress(EncodingError):  # it cannot encode this text; a request with it is refused later
                [encoding] = tokenizer.encode_batch([probe])
                tokenizer.check_list_lengths(encoding, file)
        return tokenizer

    try:
        return run_build(build_and_test, file)
    except TokenizerError as problem:
        raise CheckpointError(str(problem), file=file) from None


def check_well_formed(texts: Sequence[Text]) -> None:
    """Raises EncodingError for the first text with lone surrogates."""
    for index, text in enumerate(texts):
        for part in (text,) if isinstance(text, str) else text:
            require_well_formed(part, f"text {index} of the batch" if len(texts) > 1 else "the text")


def require_well_formed(text: str, name: str = "the text") -> str:
    """The text itself; EncodingError if it has a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        half = f"U+{ord(text[problem.start]):04X}"
        raise EncodingError(f"{name} has a lone surrogate, {half}, at position {problem.start}") from problem
    return text

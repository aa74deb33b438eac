"""Reads a vocabulary from a SentencePiece model file (.spm, .model; Kudo and Richardson 2018): unigram or merges (BPE).

The file is a protocol buffer (sentencepiece_model.proto). Only the fields that determine how a text is split are read;
unsupported values are refused by name.
"""

import math
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..core import files
from ..core.errors import CheckpointError, UnsupportedError, show_value
from .vocabulary import MAX_PIECE_LENGTH, SPACE, merges_from_scores

Value = int | bytes
PIECES, TRAINER, NORMALIZER, DENORMALIZER = 1, 2, 3, 5  # of the model
PIECE, SCORE, KIND = 1, 2, 3  # of a piece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # kinds of pieces
MODEL_KIND, SPACE_BEHIND, BYTES_FOR_UNKNOWN = 3, 24, 35  # of the trainer
UNIGRAM, MERGES = 1, 2  # kinds of models
MAP, SPACE_FIRST, ONE_SPACE, SPELLED_SPACE = 2, 3, 4, 5  # of the normalizer
OTHER_SIDE_SCORE = (
    -1e9
)  # the score of a character that only the other side's texts have: less likely than all, but known
TIKTOKEN_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+")  # bytes in base64, and their rank


@dataclass(frozen=True)
class Piece:
    """A token of a model: its text, its score (of a unigram model a log-probability) and its kind."""

    text: str
    score: float = 0.0
    kind: int = NORMAL


@dataclass(frozen=True)
class SentencePieceModel:
    """The pieces in the order of their ids, the kind of the model, and the normalization of texts."""

    pieces: Sequence[Piece]
    kind: int
    bytes_for_unknown: bool
    map: bytes
    space_first: bool
    one_space: bool


@dataclass(frozen=True)
class Unigram:
    """Pieces with their log-probabilities, and the normalization of texts."""

    scores: Mapping[str, float]
    map: bytes
    space_first: bool
    one_space: bool


def read_model(path: Path) -> SentencePieceModel:
    """The model in a file. CheckpointError if it is none, UnsupportedError if it is of another kind."""
    content = files.read_content(path, files.MAX_VOCABULARY_BYTES)
    if TIKTOKEN_LINE.fullmatch(content.partition(b"\n")[0].rstrip(b"\r")):
        message = "is a vocabulary of tiktoken (lines of base64), which does not say how texts are split"
        raise UnsupportedError(f"{message}; put the tokenizer.json of the same model beside it", file=str(path))
    try:
        found = ProtoMessage.parse(content)
        messages = [ProtoMessage.parse(each) for each in found.all(PIECES)]
        trainer, normalizer = found.message(TRAINER), found.message(NORMALIZER)
        pieces = [Piece(each.text(PIECE), each.score(), each.number(KIND, NORMAL)) for each in messages]
        charsmap = normalizer.all(MAP)[-1:]
    except (ValueError, IndexError, struct.error) as problem:
        raise CheckpointError(f"is no SentencePiece model: {problem}", file=str(path)) from None
    kind = trainer.number(MODEL_KIND, UNIGRAM)
    refused = {
        "words or characters for pieces": kind not in (UNIGRAM, MERGES),
        "spaces after words": bool(trainer.number(SPACE_BEHIND, 0)),
        "unescaped spaces": not normalizer.number(SPELLED_SPACE, 1),
        "a denormalizer": bool(found.message(DENORMALIZER).all(MAP)),
    }
    if wrong := [name for name, is_so in refused.items() if is_so]:
        raise UnsupportedError(f"is a SentencePiece model with {wrong[0]}, which is not read here", file=str(path))
    check_pieces(pieces, path)
    first, one = (bool(normalizer.number(field, 1)) for field in (SPACE_FIRST, ONE_SPACE))
    bytes_for_unknown = bool(trainer.number(BYTES_FOR_UNKNOWN, 0))
    return SentencePieceModel(pieces, kind, bytes_for_unknown, b"".join(charsmap), first, one)


def check_pieces(pieces: Sequence[Piece], path: Path) -> None:
    """CheckpointError for pieces that occur twice, are too long, or have a score that is no number."""
    seen = set[str]()
    for index, piece in enumerate(pieces):
        if len(piece.text) > MAX_PIECE_LENGTH:
            message = f"its piece {index} has {len(piece.text)} characters; {MAX_PIECE_LENGTH} are the most"
            raise CheckpointError(message, file=str(path))
        if not math.isfinite(piece.score):
            raise CheckpointError(f"its piece {index} has the score {piece.score}, which is no number", file=str(path))
        if piece.text in seen:
            raise CheckpointError(f"has the piece {show_value(piece.text)} twice", file=str(path))
        seen.add(piece.text)


def read_unigram(path: Path) -> Unigram:
    """The unigram model in a file, without pieces for bytes or of users. Raises as `read_model` does."""
    model = read_model(path)
    refused = {
        "merges (BPE)": model.kind != UNIGRAM,
        "byte pieces or user-defined pieces": any(piece.kind in (USER_DEFINED, BYTE) for piece in model.pieces),
    }
    if wrong := [name for name, is_so in refused.items() if is_so]:
        raise UnsupportedError(f"is a SentencePiece model with {wrong[0]}, which is not read here", file=str(path))
    scores = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
    return Unigram(scores, model.map, model.space_first, model.one_space)


def build_model_backend(model: SentencePieceModel, *, every_section: bool = True) -> Tokenizer:
    """A tokenizer that splits texts as the model does; ids are the places of its pieces.

    Control pieces and user-defined ones are matched whole. `every_section`: where the model puts a space before a text,
    one is put after each control token, too; else only at the beginning of the text.
    """
    ids = {piece.text: index for index, piece in enumerate(model.pieces)}
    spaced = next((each.text for each in model.pieces if each.kind == USER_DEFINED and SPACE in each.text), "")
    if spaced and model.space_first:  # they would be searched in a text that has a space before each of its parts
        message = f"it has the user-defined piece {show_value(spaced)} and puts a space before texts"
        raise UnsupportedError(f"{message}, which is not supported together")
    unknown = next((piece.text for piece in model.pieces if piece.kind == UNKNOWN), "")
    if not unknown:
        raise ValueError("it has no piece for unknown text")
    if model.kind == UNIGRAM:
        backend = Tokenizer(unigram_model(model, ids[unknown]))
    else:
        normal = {piece.text: piece.score for piece in model.pieces if piece.kind == NORMAL}
        merges = merges_from_scores(normal)
        backend = Tokenizer(
            models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes(model))
        )
    backend.normalizer = normalizers.Sequence(list(normalizer_steps(model, every_section=every_section)))
    if model.space_first and not every_section:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    elif splits_words(model):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=True)
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if model.space_first:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    backend.add_tokens(
        [
            AddedToken(piece.text, normalized=SPACE in piece.text, special=piece.kind == CONTROL)
            for piece in model.pieces
            if piece.kind in (CONTROL, USER_DEFINED)
        ]
    )
    return backend


def unigram_model(model: SentencePieceModel, unknown: int) -> models.Unigram:
    """The library's unigram model. Pieces that no text may contain are less likely than all others."""
    likely = (NORMAL, USER_DEFINED)
    scores = [each.score if each.kind in likely else OTHER_SIDE_SCORE * max(1, len(each.text)) for each in model.pieces]
    scored = [(each.text, score) for each, score in zip(model.pieces, scores, strict=True)]
    return models.Unigram(scored, unk_id=unknown, byte_fallback=has_bytes(model))


def has_bytes(model: SentencePieceModel) -> bool:
    """Whether unknown characters are spelled in bytes."""
    return model.bytes_for_unknown and any(piece.kind == BYTE for piece in model.pieces)


def splits_words(model: SentencePieceModel) -> bool:
    """Whether no piece goes over a space, so that words can be split apart first."""
    return model.kind == UNIGRAM and not any(
        SPACE in piece.text[1:] for piece in model.pieces if piece.kind in (NORMAL, USER_DEFINED)
    )


def normalizer_steps(model: SentencePieceModel, *, every_section: bool) -> Iterator[normalizers.Normalizer]:
    """The normalization of a text before it is split: characters, then spaces, then the space before the text."""
    if model.map:
        yield normalizers.Precompiled(model.map)
    if model.one_space:
        yield normalizers.Strip()
        yield normalizers.Replace(Regex(" {2,}"), " ")
    if model.space_first and every_section:
        yield normalizers.Prepend(SPACE)
    if not model.space_first or every_section:
        yield normalizers.Replace(" ", SPACE)


@dataclass(frozen=True)
class ProtoMessage:
    """The fields of a protocol buffer message by number, each as often as it occurs."""

    values: Mapping[int, list[Value]]

    @classmethod
    def parse(cls, raw: Value) -> "ProtoMessage":
        """Raises ValueError, IndexError or struct.error if `raw` is no message."""
        if isinstance(raw, int):
            raise ValueError("a number stands where a message belongs")
        found: dict[int, list[Value]] = {}
        for number, value in parse_fields(raw):
            found.setdefault(number, []).append(value)
        return cls(found)

    def all(self, number: int) -> list[bytes]:
        return [value for value in self.values.get(number, []) if isinstance(value, bytes)]

    def message(self, number: int) -> "ProtoMessage":
        return ProtoMessage.parse(b"".join(self.all(number)))  # by the format, the parts of a message are concatenated

    def number(self, number: int, default: int) -> int:
        [*_, last] = [default, *(value for value in self.values.get(number, []) if isinstance(value, int))]
        return last

    def text(self, number: int) -> str:
        return self.all(number)[-1].decode()

    def score(self) -> float:
        """The score; 0, the default, if there is none."""
        [*_, last] = [bytes(4), *self.all(SCORE)]
        value: float = struct.unpack("<f", last)[0]
        return value


def parse_fields(raw: bytes) -> Iterator[tuple[int, Value]]:
    """Each field's number and value: a number, or bytes of any type."""
    at = 0
    while at < len(raw):
        key, at = read_varint(raw, at)
        kind = key & 7
        if kind == 0:
            value, at = read_varint(raw, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"a field of kind {kind} at byte {at}")
        length, at = read_varint(raw, at) if kind == 2 else (8 if kind == 1 else 4, at)
        if at + length > len(raw):
            raise ValueError(f"it ends within a field, at byte {at}")
        yield key >> 3, raw[at : at + length]
        at += length


def read_varint(raw: bytes, at: int) -> tuple[int, int]:
    """A base-128 number, least significant digit first, and the index after it."""
    value = 0
    for place in range(10):
        value |= (raw[at + place] & 127) << 7 * place
        if raw[at + place] < 128:
            return value, at + place + 1
    raise ValueError(f"a number without an end at byte {at}")


@dataclass(frozen=True)
class UnigramRules:
    """How texts are normalized: the compiled map of characters, a space before the text, and runs of spaces as one,
    with none at the ends."""

    charsmap: bytes
    space_first: bool
    one_space: bool


def build_unigram(scored: list[tuple[str, float]], unknown: int, rules: UnigramRules) -> Tokenizer:
    """A tokenizer of pieces with log-probabilities, in the order of their ids; `unknown` is an id.

    Unless a piece has a space inside, text is split at spaces first, which changes no result and takes less time.
    """
    bytes_there = {f"<0x{byte:02X}>" for byte in range(256)} <= {piece for piece, _ in scored}
    backend = Tokenizer(models.Unigram(scored, unk_id=unknown, byte_fallback=bytes_there))
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(rules.charsmap)] if rules.charsmap else []
    if rules.one_space:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = rules.space_first or rules.one_space
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Prepend(SPACE)] if prefix else steps)
    split = not any(SPACE in piece[1:] for piece, _ in scored)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=split)
    steps_back: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        steps_back.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps_back)
    return backend


def build_unigram_backend(model: Unigram, ids: Mapping[str, int], unknown: str) -> Tokenizer:
    """A tokenizer that splits texts as the model does, with ids from a vocabulary of both sides.

    A piece that only the vocabulary has is used for output, and for input if it is a single character: SentencePiece
    leaves unknown characters unsplit, so their ids are looked up.
    """
    pieces = sorted(ids, key=ids.__getitem__)
    if [ids[piece] for piece in pieces] != list(range(len(pieces))):
        raise ValueError("its numbers are not those from 0 on")
    scored = [(piece, model.scores.get(piece, OTHER_SIDE_SCORE * max(1, len(piece)))) for piece in pieces]
    backend = Tokenizer(models.Unigram(scored, unk_id=ids[unknown], byte_fallback=False))
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.map)] if model.map else []
    if model.one_space:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.space_first else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme=scheme, split=True)
    backend.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always", split=True)
    return backend

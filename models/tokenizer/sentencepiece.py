"""Reads a unigram vocabulary from a SentencePiece model file (.spm; Kudo and Richardson 2018).

The file is a protocol buffer (sentencepiece_model.proto). Only the fields that determine how a text is split are read;
unsupported values are refused by name.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..core import files
from ..core.errors import CheckpointError, UnsupportedError
from .vocabulary import SPACE

Value = int | bytes
PIECES, TRAINER, NORMALIZER, DENORMALIZER = 1, 2, 3, 5  # of the model
PIECE, SCORE, KIND = 1, 2, 3  # of a piece
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5  # kinds of pieces
MODEL_KIND, SPACE_BEHIND = 3, 24  # of the trainer
UNIGRAM = 1
MAP, SPACE_FIRST, ONE_SPACE, SPELLED_SPACE = 2, 3, 4, 5  # of the normalizer
OTHER_SIDE_SCORE = (
    -1e9
)  # the score of a character that only the other side's texts have: less likely than all, but known


@dataclass(frozen=True)
class Unigram:
    """Pieces with their log-probabilities, and the normalization of texts."""

    scores: Mapping[str, float]
    map: bytes
    space_first: bool
    one_space: bool


def read_unigram(path: Path) -> Unigram:
    """The model in a file. CheckpointError if it is none, UnsupportedError if it is of another kind."""
    try:
        found = ProtoMessage.parse(files.read_content(path, files.MAX_VOCABULARY_BYTES))
        pieces = [ProtoMessage.parse(each) for each in found.all(PIECES)]
        trainer, normalizer = found.message(TRAINER), found.message(NORMALIZER)
        scored_pieces = [(each.text(PIECE), each.score(), each.number(KIND, NORMAL)) for each in pieces]
        charsmap = normalizer.all(MAP)[-1:]
    except (ValueError, IndexError, struct.error) as problem:
        raise CheckpointError(f"is no SentencePiece model: {problem}", file=str(path)) from None
    refused = {
        "merges (BPE, words or characters)": trainer.number(MODEL_KIND, UNIGRAM) != UNIGRAM,
        "spaces after words": bool(trainer.number(SPACE_BEHIND, 0)),
        "unescaped spaces": not normalizer.number(SPELLED_SPACE, 1),
        "byte pieces or user-defined pieces": any(
            kind not in (NORMAL, UNKNOWN, CONTROL, UNUSED) for *_, kind in scored_pieces
        ),
        "a denormalizer": bool(found.message(DENORMALIZER).all(MAP)),
    }
    if wrong := [name for name, is_so in refused.items() if is_so]:
        raise UnsupportedError(f"is a SentencePiece model with {wrong[0]}, which is not read here", file=str(path))
    scores = {piece: score for piece, score, kind in scored_pieces if kind == NORMAL}
    first, one = (bool(normalizer.number(field, 1)) for field in (SPACE_FIRST, ONE_SPACE))
    return Unigram(scores, b"".join(charsmap), first, one)


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

"""Token classification: the labels of a text's tokens, merged into words and entities as the pipeline of transformers
does it.

Tokens are merged into words, and words into groups; either step may be left out. Offsets are code points [start, end)
of the caller's text.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from polyhead.models.tokenizer import Encoding, Tokenizer

Aggregation = Literal["none", "simple", "first", "average", "max"]
ScoreArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Entity:
    """A part of a text and its label. `index` is the token's if the entity is a single token, else -1."""

    label: str
    score: float
    word: str
    start: int
    end: int
    index: int = -1


@dataclass(frozen=True, kw_only=True)
class TaggingSettings:
    """How tokens become entities.

    `none` returns every token. `simple` groups neighbouring tokens with the same label, without regard to words. The
    others first merge the tokens of each word: with the scores of its first token, with the mean of their scores, or
    with the scores of the token with the highest one. Entities with one of `ignored_labels` are left out.
    """

    tokenizer: Tokenizer
    labels: tuple[str, ...]
    aggregation: Aggregation = "none"
    ignored_labels: frozenset[str] = field(default=frozenset(("O",)))


@dataclass(frozen=True, slots=True)
class TextPiece:
    """A token of the text, or the merged tokens of a word."""

    word: str
    scores: ScoreArray  # [labels]
    start: int
    end: int
    index: int
    continues_word: bool  # the word before it


def find_entities(tagging: TaggingSettings, text: str, encoding: Encoding, scores: ScoreArray) -> list[Entity]:
    """Return the entities of `text` in its order. `scores` [T, labels] are the probabilities of its tokens."""
    pieces = text_pieces(tagging.tokenizer, text, encoding, scores)
    if tagging.aggregation not in ("none", "simple"):
        pieces = [merge_word(tagging, parts) for parts in group_words(pieces)]
    found = [label_piece(tagging, piece) for piece in pieces]
    if tagging.aggregation != "none":
        found = [merge_group(tagging.tokenizer, members) for members in group_entities(found)]
    return [entity for entity in found if entity.label not in tagging.ignored_labels]


def text_pieces(tokenizer: Tokenizer, text: str, encoding: Encoding, scores: ScoreArray) -> list[TextPiece]:
    """Return the tokens of the text itself. If the tokenizer does not mark words, a token continues a word unless there
    is a space next to its start.
    """
    pieces = []
    for index, (word, (start, end)) in enumerate(zip(encoding.pieces, encoding.offsets, strict=True)):
        if encoding.special[index]:
            continue
        if encoding.ids[index] == tokenizer.unk_id:
            word, continues = text[start:end], False
        elif tokenizer.marks_words:
            continues = len(word) != end - start
        else:
            continues = start > 0 and " " not in text[start - 1 : start + 1]
        pieces.append(TextPiece(word, scores[index], start, end, index, continues))
    return pieces


def group_words(pieces: Iterable[TextPiece]) -> list[list[TextPiece]]:
    found: list[list[TextPiece]] = []
    for piece in pieces:
        if found and piece.continues_word:
            found[-1].append(piece)
        else:
            found.append([piece])
    return found


def merge_word(tagging: TaggingSettings, parts: Sequence[TextPiece]) -> TextPiece:
    """Merge the pieces of a word."""
    match tagging.aggregation:
        case "first":
            scores = parts[0].scores
        case "max":
            scores = max(parts, key=lambda part: float(part.scores.max())).scores
        case _:
            scores = np.mean([part.scores for part in parts], axis=0)
    word = tagging.tokenizer.join_pieces([part.word for part in parts])
    return TextPiece(word, scores, parts[0].start, parts[-1].end, -1, False)


def label_piece(tagging: TaggingSettings, piece: TextPiece) -> Entity:
    best = int(piece.scores.argmax())
    return Entity(tagging.labels[best], float(piece.scores[best]), piece.word, piece.start, piece.end, piece.index)


def group_entities(found: Iterable[Entity]) -> list[list[Entity]]:
    """Group neighbours with the same label; the prefix "B-" begins a group."""
    made: list[list[Entity]] = []
    for entity in found:
        if made and not entity.label.startswith("B-") and label_kind(entity.label) == label_kind(made[-1][-1].label):
            made[-1].append(entity)
        else:
            made.append([entity])
    return made


def label_kind(label: str) -> str:
    """Return the label without its prefix "B-" or "I-"."""
    return label[2:] if label.startswith(("B-", "I-")) else label


def merge_group(tokenizer: Tokenizer, members: Sequence[Entity]) -> Entity:
    score = sum(member.score for member in members) / len(members)
    name = members[0].label.split("-", 1)[-1]
    word = tokenizer.join_pieces([member.word for member in members])
    return Entity(name, score, word, members[0].start, members[-1].end)


def merge_windows(found: Iterable[Entity]) -> list[Entity]:
    """Merge the entities of overlapping windows: of two that overlap, keep the longer one, or the one with the higher
    score.
    """
    kept: list[Entity] = []
    for entity in sorted(found, key=lambda entity: entity.start):
        if not kept or not kept[-1].start <= entity.start < kept[-1].end:
            kept.append(entity)
        elif (entity.end - entity.start, entity.score) > (kept[-1].end - kept[-1].start, kept[-1].score):
            kept[-1] = entity
    return kept

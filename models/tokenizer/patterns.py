"""Checks that a tokenizer's patterns and replacements are safe to run on every client's text.

A tokenizer.json has regular expressions and replacements. Expressions that may take very long are refused when the
checkpoint is loaded, and so are those on which the library gives up a runaway search, by a panic, on a few short texts,
and replacements that make long texts of short ones.
"""

import json
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from tokenizers import Tokenizer, models

from ..core.errors import CheckpointError, EncodingError
from .panics import encoding_failure, load_failure, run_library
from .regular_expression import Expression
from .text_growth import CharacterWeights
from .vocabulary import MAX_PIECE_LENGTH, MAX_VOCABULARY_TEXT

HARD_TEXTS = tuple(
    f"{character * 48}{end}" for character in ("a", "A", "0", " ", "\n", ".", "é") for end in ("", "!", "z")
)
MAX_GROWTH = 256  # characters that one character may become
MAX_STEPS = 256  # of a normalizer, or of any other part; published ones have a dozen
MAX_BOUNDARY_TOKENS = 1024  # special tokens around a text, or around a pair
MAX_BOUNDARY_CHARACTERS = 4096  # characters of those tokens
MAX_UNKNOWN_LENGTH = 64  # characters of the unknown token, which one character may become
MAX_WORD_LENGTH = 256  # characters of a word that WordPiece splits; published tokenizers have 100, few have up to 250
SHORT_PIECE = 128  # characters; published unigram pieces have up to 16, few have more
MAX_COMMON_BEGINNINGS = 1 << 13  # characters of longer unigram pieces that one place of a text may begin with
MAX_TEMPLATE_PIECES = 64  # special tokens and texts in a template; published ones have up to five
# And the key of their steps.
PARTS = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}


def check_growth(backend: Tokenizer) -> CharacterWeights:
    """How many characters each character may become. CheckpointError for a tokenizer that would block its thread."""
    _check_templates(backend)
    unknown = getattr(backend.model, "unk_token", None) or ""
    if len(unknown) > MAX_UNKNOWN_LENGTH:
        message = f"its unknown token, {unknown[:40]!r}..., has {len(unknown)} characters"
        raise CheckpointError(f"{message}; {MAX_UNKNOWN_LENGTH} are the most")
    expressions = read_expressions(backend)
    weights = CharacterWeights()
    for part in ("pre_tokenizer", "normalizer"):
        read_part(weights, backend, part, expressions)
    read_part(CharacterWeights(), backend, "decoder", expressions)  # which runs on one token at a time
    for kind, pair in (("text", None), ("pair", "")):  # a panic here is no fault of a pattern
        encoded = run_library(lambda pair=pair: backend.encode("", pair), load_failure(), load_failure())  # type: ignore[misc]
        if len(encoded) > MAX_BOUNDARY_TOKENS:
            raise CheckpointError(f"it puts {len(encoded)} tokens around a {kind}; {MAX_BOUNDARY_TOKENS} are the most")
        if (length := sum(map(len, encoded.tokens))) > MAX_BOUNDARY_CHARACTERS:
            raise CheckpointError(
                f"it puts tokens of {length} characters around a {kind}; {MAX_BOUNDARY_CHARACTERS} are the most"
            )
    for text in HARD_TEXTS:
        failure = CheckpointError(f"a pattern of its tokenizer takes too long on a text as short as {text!r}")
        with suppress(EncodingError):  # if it cannot encode the text
            run_library(partial(backend.encode, text), lambda _, failure=failure: failure, encoding_failure)  # type: ignore[misc]
    return weights


def check_piece_lengths(backend: Tokenizer, pieces: Collection[str]) -> int:
    """An upper bound of the characters of all pieces, added tokens included. CheckpointError for a vocabulary in which
    the text of a piece, or of all pieces, is or becomes too long."""
    longest = max(pieces, key=len, default="")
    weights = CharacterWeights()
    for step in reversed(part_steps(backend, "decoder")):
        if step.get("type") == "Replace":  # other steps add no text
            weights.read_step(step, lambda _: 0)
            if weights.most > MAX_GROWTH:
                break
    grown = weights.most
    if len(longest) * grown > MAX_PIECE_LENGTH:
        message = (
            f"its vocabulary has a piece of {len(longest)} characters, {longest[:40]!r}..., which the decoder makes"
        )
        raise CheckpointError(f"{message} {len(longest) * grown:.0f}; {MAX_PIECE_LENGTH} are the most")
    text = int(sum(map(len, pieces)) * grown)
    if text > MAX_VOCABULARY_TEXT:
        raise CheckpointError(
            f"its {len(pieces)} tokens become {text} characters of text; {MAX_VOCABULARY_TEXT} are the most"
        )
    return text


def check_model(backend: Tokenizer, pieces: Iterable[str]) -> None:
    """CheckpointError for a model that takes much longer than published ones for each character of a text, whatever
    the text: no text is known in advance on which a given vocabulary is slow.

    WordPiece compares every part of a word with the vocabulary, which takes the cube of the word's length. A unigram
    model spells every piece that begins at a place of the text.
    """
    model = backend.model
    if isinstance(model, models.WordPiece) and (longest := model.max_input_chars_per_word) > MAX_WORD_LENGTH:
        message = f"max_input_chars_per_word of its model is {longest}; {MAX_WORD_LENGTH} are the most, 100 are usual"
        raise CheckpointError(f"{message}; longer words become the unknown token")
    if isinstance(model, models.Unigram):
        check_beginnings(pieces)


def check_beginnings(pieces: Iterable[str]) -> None:
    """CheckpointError for long pieces of which many begin with each other, so that one place of a text has them all."""
    begun, characters = list[str](), 0  # the pieces with which the current one begins, and the current one
    for piece in sorted(piece for piece in pieces if len(piece) > SHORT_PIECE):
        while begun and not piece.startswith(begun[-1]):
            characters -= len(begun.pop())
        begun.append(piece)
        characters += len(piece)
        if characters > MAX_COMMON_BEGINNINGS:
            message = f"its vocabulary has {len(begun)} pieces of {characters} characters that begin with each other"
            raise CheckpointError(
                f"{message}, as {piece[:40]!r}...; {MAX_COMMON_BEGINNINGS} are the most of pieces over {SHORT_PIECE}"
            )


def _check_templates(backend: Tokenizer) -> None:
    """CheckpointError for a post_processor that repeats the text or leaves it out."""
    made = backend.post_processor
    steps = list(_steps(json.loads(made.__getstate__()), "processors")) if made else []
    if len(steps) > MAX_STEPS:
        raise CheckpointError(f"its post_processor has {len(steps)} steps; {MAX_STEPS} are the most")
    templates = [step for step in steps if step.get("type") == "TemplateProcessing"]
    for template in templates:
        for key, expected in (("single", ["A"]), ("pair", ["A", "B"])):
            placed = template[key]
            if len(placed) > MAX_TEMPLATE_PIECES:
                message = (
                    f"its post_processor's {key!r} template has {len(placed)} parts; {MAX_TEMPLATE_PIECES} are the most"
                )
                raise CheckpointError(message)
            texts = sorted(each["Sequence"]["id"] for each in placed if "Sequence" in each)
            if texts != expected:
                message = f"has the texts {texts}, which should be each of {expected} once"
                raise CheckpointError(f"its post_processor's {key!r} template {message}")


def read_expressions(backend: Tokenizer) -> dict[str, Expression]:
    """The regular expressions of a tokenizer. CheckpointError for one that may take very long."""
    found = dict[str, Expression]()
    for part in PARTS:
        for step in part_steps(backend, part):
            match step:
                case {"pattern": {"Regex": str(text)}} if text not in found:
                    found[text] = Expression(text)
    return found


def read_literals(backend: Tokenizer) -> list[str]:
    """The texts that a tokenizer's steps search for, other than by regular expressions."""
    found = dict[str, None]()
    for part in PARTS:
        for step in part_steps(backend, part):
            match step:
                case {"pattern": {"String": str(text)}} if text:
                    found[text] = None
    return list(found)


def part_steps(backend: Tokenizer, part: str) -> list[dict[str, Any]]:
    """The steps of a part; CheckpointError for too many."""
    made = getattr(backend, part)
    steps = list(_steps(json.loads(made.__getstate__()), PARTS[part])) if made else []
    if len(steps) > MAX_STEPS:
        raise CheckpointError(f"its {part} has {len(steps)} steps; {MAX_STEPS} are the most")
    return steps


def read_part(weights: CharacterWeights, backend: Tokenizer, part: str, expressions: dict[str, Expression]) -> None:
    """Read the steps of a part. CheckpointError if a character may become too many."""
    for step in reversed(part_steps(backend, part)):
        weights.read_step(step, lambda text: expressions[text].least)
        if weights.most > MAX_GROWTH:
            raise CheckpointError(f"its {part} makes more than {MAX_GROWTH} characters of one")


def _steps(step: Any, inside: str) -> Iterator[dict[str, Any]]:
    if step.get("type") == "Sequence":
        for each in step[inside]:
            yield from _steps(each, inside)
    else:
        yield step

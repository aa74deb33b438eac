"""Extractive question answering: the best spans of a context, decoded as the pipeline of transformers does it.

A long context is read in windows. Each window has a probability distribution over its own spans, and the scores of
spans with the same text are added. Offsets are code points of the caller's context.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from polyhead.models.tokenizer import Encoding

from ..core.errors import AnswerTooLarge

MASKED_LOGIT = -10_000.0  # the logit of tokens that cannot be part of an answer
MAX_SPAN_CHARACTERS = 1 << 26  # of the spans of all windows that are compared, each range counted once
EXTRA_SPANS = 10  # spans examined beyond twice `top_k`: several may lie in the same words

Probabilities = NDArray[np.float32]
WordKey = tuple[int | None, int | None]  # the text of a pair, and the word in it


@dataclass(frozen=True, slots=True)
class SpanAnswer:
    """`text` is context[start:end]. An empty text, from 0 to 0, means that the context has no answer."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """The tokens of a question and of a part of its context. `scores` [T, 2]: the start and end logit of each token."""

    encoding: Encoding
    scores: Probabilities


@dataclass(frozen=True, kw_only=True)
class SpanOptions:
    """At most `top_k` answers of at most `max_tokens` tokens. With `allows_no_answer`, "no answer" is one of the
    candidates.

    With `whole_words`, an answer is extended to whole words.
    """

    top_k: int = 1
    max_tokens: int = 15
    allows_no_answer: bool = False
    whole_words: bool = True

    @property
    def spans_per_window(self) -> int:
        """The most spans of a window that are compared."""
        return self.top_k * 2 + EXTRA_SPANS if self.whole_words else self.top_k


@dataclass(slots=True)
class AnswerRange:
    """An answer without its text, which is context[start:end]."""

    score: float
    start: int
    end: int


def find_answers(options: SpanOptions, context: str, windows: Iterable[ScoredWindow]) -> list[SpanAnswer]:
    """Return the best answers, the most probable first. The context is the second text of each window's pair."""
    return name_answers(context, find_ranges(options, context, windows, lambda: None))


def name_answers(context: str, ranges: Iterable[AnswerRange]) -> list[SpanAnswer]:
    return [SpanAnswer(context[each.start : each.end], each.score, each.start, each.end) for each in ranges]


def find_ranges(
    options: SpanOptions, context: str, windows: Iterable[ScoredWindow], check: Callable[[], None]
) -> list[AnswerRange]:
    """Return the ranges of the best answers, as `find_answers` does. `check` is called before each window, and stops
    the work by raising. Raises AnswerTooLarge if the spans that are compared have too many characters together.
    """
    found: dict[bytes, AnswerRange] = {}  # by the hash of the text: many spans may share most of a long context
    known: dict[tuple[int, int], AnswerRange] = {}
    none, characters = 1.0, 0
    for window in windows:
        check()
        start, end = (position_probabilities(window.encoding, column) for column in window.scores.T)
        none = min(none, float(start[0] * end[0]))
        words = word_ends(window.encoding) if options.whole_words else {}
        for first, last, score in best_spans(start, end, options.spans_per_window, options.max_tokens):
            place = span_offsets(window.encoding, words, first, last)
            if place not in known:
                characters += place[1] - place[0]
                check_characters(characters)
                known[place] = found.setdefault(hash_text(context[slice(*place)]), AnswerRange(0.0, *place))
            known[place].score += score
    every = [*found.values(), *([AnswerRange(none, 0, 0)] if options.allows_no_answer else [])]
    return sorted(every, key=lambda answer: -answer.score)[: options.top_k]


def check_characters(count: int) -> None:
    if count > MAX_SPAN_CHARACTERS:
        message = (
            f"parameters.top_k: the spans that are compared have more than {MAX_SPAN_CHARACTERS} characters together; "
            "ask for fewer or shorter answers (parameters.max_answer_len), or send a shorter context"
        )
        raise AnswerTooLarge(message, param="parameters.top_k")


def hash_text(text: str) -> bytes:
    """Return 16 bytes that are equal for texts that differ only in capitals."""
    return blake2b(text.lower().encode("utf-8", "surrogatepass"), digest_size=16).digest()


def position_probabilities(encoding: Encoding, logits: Probabilities) -> Probabilities:
    """Return the probabilities [T] of the context's tokens and of the first special token, which stands for "no
    answer".
    """
    open_rows = np.array([text == 1 for text in encoding.texts])
    open_rows[0] |= encoding.special[0]
    shown = np.where(open_rows, logits, MASKED_LOGIT)
    powers = np.exp(shown - shown.max())
    return np.asarray(powers / powers.sum(), np.float32)


def best_spans(start: Probabilities, end: Probabilities, count: int, most: int) -> Iterator[tuple[int, int, float]]:
    """Yield the `count` most probable spans [first, last] of at most `most` tokens, each with its probability; of two
    equal ones the earlier first.

    Row 0 is never part of a context. Of T tokens, at most `count` are looked at as the first of a span: those whose
    best spans are the most probable ones.
    """
    lengths = min(most, len(start))
    padded = np.concatenate([end, np.zeros(lengths - 1, np.float32)])
    best = start * window_maxima(padded, lengths)  # [T] of the spans that begin at a token
    best[0] = 0
    rows = np.sort(np.argsort(-best, kind="stable")[:count])  # [R]
    rows = rows[best[rows] > 0]
    scores = (start[rows, None] * sliding_window_view(padded, lengths)[rows]).ravel()  # [R x lengths]
    for index in largest_indices(scores, count).tolist():
        row, length = divmod(index, lengths)
        if scores[index] > 0:
            yield int(rows[row]), int(rows[row]) + length, float(scores[index])


def window_maxima(values: Probabilities, size: int) -> Probabilities:
    """Return the maximum of every `size` neighbours, from [N] values, in log(size) passes."""
    width = 1
    while 2 * width <= size:
        values, width = np.maximum(values[:-width], values[width:]), 2 * width
    return values if width == size else np.maximum(values[: width - size], values[size - width :])


def largest_indices(values: Probabilities, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` largest values, in falling order; of equal ones the first."""
    if count >= len(values):
        return np.argsort(-values, kind="stable")
    least = np.partition(values, -count)[-count]
    larger = np.flatnonzero(values > least)
    equal = np.flatnonzero(values == least)[: count - len(larger)]
    return np.concatenate([larger[np.argsort(-values[larger], kind="stable")], equal])


def word_ends(encoding: Encoding) -> dict[WordKey, tuple[int, int]]:
    """Return the start and end of each word in its text."""
    ends: dict[WordKey, tuple[int, int]] = {}
    for text, word, (start, end) in zip(encoding.texts, encoding.words, encoding.offsets, strict=True):
        if word is not None:
            ends[text, word] = ends.get((text, word), (start, end))[0], end
    return ends


def span_offsets(
    encoding: Encoding, words: Mapping[WordKey, tuple[int, int]], first: int, last: int
) -> tuple[int, int]:
    """Return the start and end in the context of a span of tokens, or of the `words` that both its ends are in."""
    before, after = ((encoding.texts[row], encoding.words[row]) for row in (first, last))
    if before in words and after in words:
        return words[before][0], words[after][1]
    return encoding.offsets[first][0], encoding.offsets[last][1]

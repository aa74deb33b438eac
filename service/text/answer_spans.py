"""Extractive question answering: the best spans of a context, decoded as the pipeline of transformers does it.

A long context is read in windows. Each window has a probability distribution over its own spans, and the scores of
spans with the same text are added. Offsets are code points of the caller's context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyhead.models.tokenizer import Encoding

MASKED_LOGIT = -10_000.0  # the logit of tokens that cannot be part of an answer
EXTRA_SPANS = 10  # spans examined beyond twice `top_k`: several may lie in the same words

Probabilities = NDArray[np.float32]


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


def find_answers(options: SpanOptions, context: str, windows: Sequence[ScoredWindow]) -> list[SpanAnswer]:
    """Return the best answers, the most probable first. The context is the second text of each window's pair."""
    count = options.top_k * 2 + EXTRA_SPANS if options.whole_words else options.top_k
    found: dict[str, SpanAnswer] = {}
    none = 1.0
    for window in windows:
        start, end = (position_probabilities(window.encoding, column) for column in window.scores.T)
        none = min(none, float(start[0] * end[0]))
        for first, last, score in best_spans(start, end, count, options.max_tokens):
            begins, ends = span_offsets(window.encoding, first, last, options.whole_words)
            text = context[begins:ends]
            known = found.get(text.lower(), SpanAnswer(text, 0.0, begins, ends))
            found[text.lower()] = SpanAnswer(known.text, known.score + score, known.start, known.end)
    every = [*found.values(), *([SpanAnswer("", none, 0, 0)] if options.allows_no_answer else [])]
    return sorted(every, key=lambda answer: -answer.score)[: options.top_k]


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

    Row 0 is never part of a context. Spans are laid out as [T, lengths], which is far less than [T, T] for short
    answers.
    """
    tokens = len(start)
    lasts = np.arange(tokens)[:, None] + np.arange(min(most, tokens))  # [T, L]
    scores = np.where(lasts < tokens, start[:, None] * end[np.minimum(lasts, tokens - 1)], 0)
    scores[0] = 0
    for index in np.argsort(-scores, axis=None, kind="stable")[:count]:
        first, length = divmod(int(index), scores.shape[1])
        if scores[first, length] > 0:
            yield first, first + length, float(scores[first, length])


def span_offsets(encoding: Encoding, first: int, last: int, whole_words: bool) -> tuple[int, int]:
    """Return the start and end of a span of tokens in the context."""
    if whole_words and encoding.words[first] is not None and encoding.words[last] is not None:
        first, last = word_rows(encoding, first)[0], word_rows(encoding, last)[-1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


def word_rows(encoding: Encoding, token: int) -> list[int]:
    """Return all tokens of the word that a token belongs to."""
    own = encoding.texts[token], encoding.words[token]
    return [row for row, other in enumerate(zip(encoding.texts, encoding.words, strict=True)) if other == own]

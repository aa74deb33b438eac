"""Where in a context the answer to a question stands: as the question-answering pipeline of transformers decoded it.

Knows logits and offsets, no model and no HTTP.  The one idea: a long context is read in windows, each window is a
distribution over its own spans, and spans that spell the same answer add up; offsets are code points of the caller's
own context.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polyhead.models.tokenizer import Encoding

MASKED_LOGIT = -10_000.0  # the logit of what can be no part of an answer
EXTRA_SPANS = 10  # spans looked at beyond twice those asked for: several may be parts of the same words

Probabilities = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class SpanAnswer:
    """`text` is context[start:end]; empty, from 0 to 0, says that there is no answer."""

    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ScoredWindow:
    """A question and a part of its context, as tokens; `scores` [T, 2], how well an answer starts and ends at each."""

    encoding: Encoding
    scores: Probabilities


@dataclass(frozen=True, kw_only=True)
class SpanOptions:
    """At most `top_k` answers of at most `most_tokens` tokens.  `impossible`: that there is none is an answer too.

    `whole_words` gives an answer the whole of the words that it begins and ends in.
    """

    top_k: int = 1
    max_tokens: int = 15
    allows_no_answer: bool = False
    whole_words: bool = True


def find_answers(asking: SpanOptions, context: str, windows: Sequence[ScoredWindow]) -> list[SpanAnswer]:
    """The likeliest first.  The context is the second text of each window's pair."""
    count = asking.top_k * 2 + EXTRA_SPANS if asking.whole_words else asking.top_k
    found: dict[str, SpanAnswer] = {}
    none = 1.0
    for window in windows:
        start, end = (position_probabilities(window.encoding, column) for column in window.scores.T)
        none = min(none, float(start[0] * end[0]))
        for first, last, score in best_spans(start, end, count, asking.max_tokens):
            begins, ends = span_offsets(window.encoding, first, last, asking.whole_words)
            text = context[begins:ends]
            known = found.get(text.lower(), SpanAnswer(text, 0.0, begins, ends))
            found[text.lower()] = SpanAnswer(known.text, known.score + score, known.start, known.end)
    every = [*found.values(), *([SpanAnswer("", none, 0, 0)] if asking.allows_no_answer else [])]
    return sorted(every, key=lambda answer: -answer.score)[: asking.top_k]


def position_probabilities(encoding: Encoding, logits: Probabilities) -> Probabilities:
    """[T] over the context and the first special token, by which a model says that there is no answer."""
    open_rows = np.array([text == 1 for text in encoding.texts])
    open_rows[0] |= encoding.special[0]
    shown = np.where(open_rows, logits, MASKED_LOGIT)
    powers = np.exp(shown - shown.max())
    return np.asarray(powers / powers.sum(), np.float32)


def best_spans(start: Probabilities, end: Probabilities, count: int, most: int) -> Iterator[tuple[int, int, float]]:
    """The `count` likeliest spans [first, last] of at most `most` tokens, and how likely; the earlier first of two.

    Row 0 is no part of a context.  Spans are laid out as [T, lengths]: far fewer than [T, T] for short answers.
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
    """Where a span of tokens stands in the context."""
    if whole_words and encoding.words[first] is not None and encoding.words[last] is not None:
        first, last = word_rows(encoding, first)[0], word_rows(encoding, last)[-1]
    return encoding.offsets[first][0], encoding.offsets[last][1]


def word_rows(encoding: Encoding, token: int) -> list[int]:
    """All tokens of the word that one is a part of."""
    mine = encoding.texts[token], encoding.words[token]
    return [row for row, their in enumerate(zip(encoding.texts, encoding.words, strict=True)) if their == mine]

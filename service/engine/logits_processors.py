"""What is done to logits before a token is drawn from them: for the batch at once, from each answer's own history.

Knows tokens and what was asked of them; nothing of sequences, and nothing of drawing.  The one idea: what changes is a
few words of a row, so these are looked up, changed and put back, for all rows together; which words may come at all is
a row of bits.

What is asked applies in the order in which transformers' `_get_logits_processor` has it, and means what it means there:
bias (SequenceBias), repetition penalty, then frequency and presence penalty (which it lacks: as the OpenAI API defines
them, of the answer alone), rows that came already (NoRepeatNGram), banned rows (NoBadWords: a stop token is never
banned by itself), least tokens (MinNewTokensLength), allowed tokens (PrefixConstrained).  A row of which nothing is
left is minus infinity throughout, where transformers would let allowed tokens come after all: nothing can be drawn from
it, as `sampler.sample` tells.  Tokens that the model does not have change nothing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from itertools import chain, count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.seq2seq.decoding import repeated_ngram_tokens

from ..core.request import Generate, Sampling

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
MaskWords = NDArray[np.int32]
NEVER = float("-inf")
BIAS, FACTOR, CHANGE = range(3)  # what is done to a word, in this order: add, repeat less, add
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTE_CHANGES = np.where(BITS == 1, 0, NEVER).astype(np.float32)  # [256, 8]: what is added to eight words, by their bits


class TokenHistory:
    """Tokens that came, in one array with room for more."""

    def __init__(self, tokens: Sequence[int] | Ints) -> None:
        self._buffer, self._count = np.array(tokens, np.int64), len(tokens)

    @property
    def tokens(self) -> Ints:
        return self._buffer[: self._count]

    def push(self, token: int) -> None:
        if self._count == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.zeros(self._count + 16, np.int64)])
        self._buffer[self._count] = token
        self._count += 1

    def fork(self) -> "TokenHistory":
        return TokenHistory(self.tokens)


class LogitsProcessor:
    """What one request asks of its logits: a table of words and of what is done to them, as its history has it."""

    def __init__(self, request: Generate) -> None:
        sampling = self._sampling = request.sampling
        self._has_repetition_penalty = sampling.repetition_penalty != 1
        self._has_count_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._answer_length, self._answer_counts = 0, Counter[int]()
        self._stops = request.stop_tokens if sampling.min_tokens else frozenset[int]()
        prompt = request.tokens if self._has_repetition_penalty else ()
        single = {row[0] for row in sampling.banned if len(row) == 1} - request.stop_tokens
        bias = dict(sampling.bias)
        self._columns = {token: n for n, token in enumerate(dict.fromkeys(chain(bias, prompt, single, self._stops)))}
        self._tokens = np.fromiter(self._columns, np.int64)
        self._values = np.zeros((3, len(self._tokens)), np.float32)
        self._values[BIAS, : len(bias)] = list(bias.values())
        self._values[FACTOR] = 1
        self._values[FACTOR, self._columns_of(prompt)] = sampling.repetition_penalty
        self._values[CHANGE, self._columns_of(single | self._stops)] = NEVER
        self._max_token = max(self._columns, default=0)
        self._banned_rows: dict[int, list[tuple[int, ...]]] = {}  # banned ones of several tokens, by the last but one
        for row in sampling.banned:
            if len(row) > 1:
                self._banned_rows.setdefault(row[-2], []).append(row)
        self._max_banned_length = max(map(len, sampling.banned), default=0)
        self._tail = request.tokens[-self._max_banned_length :] if self._banned_rows else ()
        self._allowed_words: dict[int, MaskWords] = {}  # by the size of the vocabulary; forks share it
        self._history = TokenHistory(request.tokens if sampling.no_repeat_ngram_size else ())
        if sampling.no_repeat_ngram_size == 1:
            self._ban(set(request.tokens))

    def push(self, token: int) -> None:
        """`token` was drawn and is kept."""
        self._answer_length += 1
        if self._sampling.no_repeat_ngram_size:
            self._history.push(token)
        if self._sampling.no_repeat_ngram_size == 1:
            self._ban({token})
        if self._has_repetition_penalty:
            place = self._column_of(token)
            self._values[FACTOR, place] = self._sampling.repetition_penalty
        if self._has_count_penalty:
            self._answer_counts[token] += 1
            self._update_penalty(token)
        if self._answer_length == self._sampling.min_tokens:
            for stop in self._stops:
                self._values[CHANGE, self._columns[stop]] = 0
                self._update_penalty(stop)
            if self._sampling.no_repeat_ngram_size == 1:
                self._ban(self._stops.intersection(self._history.tokens.tolist()))
        if self._banned_rows:
            self._tail = (*self._tail[1 - self._max_banned_length :], token)

    def fork(self) -> "LogitsProcessor":
        """Another with this history."""
        other = copy(self)
        other._answer_counts, other._columns = self._answer_counts.copy(), self._columns.copy()
        other._tokens, other._values = self._tokens.copy(), self._values.copy()
        other._history = self._history.fork()
        return other

    def after_drafts(self, drafts: tuple[int, ...]) -> "LogitsProcessor":
        """As it is once these have come, next to which nothing comes that would end a banned row."""
        shape = self.fork() if drafts else self
        for token in drafts:
            shape.push(token)
        rows = shape._banned_rows.get(shape._tail[-1], ()) if shape._tail else ()
        last = {row[-1] for row in rows if shape._tail[1 - len(row) :] == row[:-1]}
        if (once := self._sampling.no_repeat_ngram_size) > 1:
            last.update(repeated_ngram_tokens(shape._history.tokens, once))
        if last:
            shape = self.fork() if shape is self else shape
            shape._ban(last)
        return shape

    @property
    def changes(self) -> tuple[Ints, Floats]:
        """[K] words, each once, and [3, at least K] what is done to them."""
        return self._tokens[: len(self._columns)], self._values

    def changes_within(self, vocabulary: int) -> tuple[Ints, Floats]:
        """[K] words that there are, each once, and [3, K] what is done to them."""
        tokens, values = self._tokens[: len(self._columns)], self._values[:, : len(self._columns)]
        if self._max_token < vocabulary:
            return tokens, values
        return tokens[tokens < vocabulary], values[:, tokens < vocabulary]

    def allowed_words(self, vocabulary: int) -> MaskWords:
        """Bit i for token i; empty: all."""
        if vocabulary not in self._allowed_words:
            bits = np.zeros(-(-vocabulary // 32) * 32 if self._sampling.allowed else 0, np.bool_)
            bits[[token for token in self._sampling.allowed if token < vocabulary]] = True
            self._allowed_words[vocabulary] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._allowed_words[vocabulary]

    def _columns_of(self, tokens: Iterable[int]) -> Ints:
        return np.fromiter((self._columns[token] for token in tokens), np.int64)

    def _column_of(self, token: int) -> int:
        """Of a word in the table, put there if need be."""
        if token not in self._columns:
            self._add_tokens([token])
        return self._columns[token]

    def _add_tokens(self, tokens: list[int]) -> None:
        """Words that are not in the table yet, each once."""
        first = len(self._columns)
        self._columns.update(zip(tokens, count(first), strict=False))
        many = len(self._columns)
        if many > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(many + 16, np.int64)])
            fresh = np.zeros((3, many + 16), np.float32)
            fresh[FACTOR] = 1
            self._values = np.concatenate([self._values, fresh], axis=1)
        self._tokens[first:many] = tokens
        self._max_token = max(self._max_token, *tokens)

    def _ban(self, tokens: AbstractSet[int]) -> None:
        """None of them comes next."""
        if new := [token for token in tokens if token not in self._columns]:
            self._add_tokens(new)
        self._values[CHANGE, self._columns_of(tokens)] = NEVER

    def _update_penalty(self, token: int) -> None:
        """By how much a word of the answer is less likely, unless it never comes."""
        place = self._column_of(token)
        if (count := self._answer_counts[token]) and self._values[CHANGE, place] > NEVER:
            less = count * self._sampling.frequency_penalty + self._sampling.presence_penalty
            self._values[CHANGE, place] = -less


def needs_processing(sampling: Sampling) -> bool:
    """Whether there is anything to do before a token is drawn."""
    penalties = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    return bool(
        penalties
        or sampling.bias
        or sampling.allowed
        or sampling.banned
        or sampling.min_tokens
        or sampling.no_repeat_ngram_size
    )


def process_logits(logits: Tensor, shapes: Sequence[LogitsProcessor | None], out: Tensor | None = None) -> Tensor:
    """[N, V], of which rows with a shape are as it asks after its history.

    `logits` stay as they are; they come back themselves where no row has a shape.  `out` [N, V] is where the others go.
    """
    asked = [(number, shape) for number, shape in enumerate(shapes) if shape is not None]
    if not asked:
        return logits
    out, vocabulary = empty_logits(logits) if out is None else out, logits.size(1)
    out.copy_(logits)
    tables = [(number, *shape.changes_within(vocabulary)) for number, shape in asked]
    places = np.concatenate([number * vocabulary + tokens for number, tokens, _ in tables])
    values = np.concatenate([values for _, _, values in tables], axis=1)
    apply_changes(out.view(-1), torch.from_numpy(places).to(out.device), torch.from_numpy(values).to(out.device))
    for number, shape in asked:
        if len(words := shape.allowed_words(vocabulary)):
            apply_mask(out[number], words, out[number])
    return out


def apply_masks(logits: Tensor, words: Mapping[int, MaskWords], out: Tensor | None = None) -> Tensor:
    """[N, V], of which a row of `words` is minus infinity where bit i of its words [ceil(V / 32)] is 0.

    `logits` come back themselves where there are no words; else they stay as they are, or are `out` [N, V] themselves.
    """
    if not words:
        return logits
    out = empty_logits(logits) if out is None else out
    for number, (row, place) in enumerate(zip(logits.unbind(), out.unbind(), strict=True)):
        if number in words:
            apply_mask(row, words[number], place)
        elif out is not logits:
            place.copy_(row)
    return out


def empty_logits(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def apply_changes(flat: Tensor, places: Tensor, values: Tensor) -> None:
    found = flat[places].add_(values[BIAS])
    found = torch.where(found < 0, found * values[FACTOR], found / values[FACTOR])
    flat[places] = found.add_(values[CHANGE])


def apply_mask(row: Tensor, words: MaskWords, out: Tensor) -> None:
    """Put into `out` [V] what `row` [V] has where the bits of `words` are 1, minus infinity elsewhere."""
    changes = np.take(BYTE_CHANGES, np.ascontiguousarray(words).view(np.uint8), axis=0, mode="clip").ravel()
    torch.add(row, torch.from_numpy(changes[: len(row)]).to(row.device), out=out)

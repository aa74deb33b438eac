"""Logits processors: change rows of logits by the requests' options and tokens so far, for a whole batch at once.

Most changes concern a few tokens of a row, which are gathered, changed and scattered for all rows together.  Which
tokens are allowed at all is a row of bits.

The changes are applied in the order of transformers' `_get_logits_processor` and mean the same: bias (SequenceBias),
repetition penalty, then frequency and presence penalty (transformers lacks these: as the OpenAI API defines them, of
the answer alone), repeated n-grams (NoRepeatNGram), banned sequences (NoBadWords: a stop token is never banned by
itself), minimal length (MinNewTokensLength), allowed tokens (PrefixConstrained).  A row where no token is left is minus
infinity throughout, where transformers would allow the allowed tokens after all; nothing can be sampled from it, see
`sampler.sample_rows`.  Tokens outside of the vocabulary change nothing.
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
BIAS, FACTOR, CHANGE = range(3)  # what is done to a token, in this order: add, divide by the penalty, add
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
BYTE_CHANGES = np.where(BITS == 1, 0, NEVER).astype(np.float32)  # [256, 8]: added to eight logits, by their bits


class TokenHistory:
    """The tokens so far, in one array with spare capacity."""

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
    """The changes of one request's logits: a table of tokens with the change of each, updated with every new token."""

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
        self._banned_rows: dict[int, list[tuple[int, ...]]] = {}  # banned sequences, by their last token but one
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
        """`token` was sampled and is kept."""
        self._answer_length += 1
        if self._sampling.no_repeat_ngram_size:
            self._history.push(token)
        if self._sampling.no_repeat_ngram_size == 1:
            self._ban({token})
        if self._has_repetition_penalty:
            column = self._column_of(token)
            self._values[FACTOR, column] = self._sampling.repetition_penalty
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
        """A copy with the same history."""
        other = copy(self)
        other._answer_counts, other._columns = self._answer_counts.copy(), self._columns.copy()
        other._tokens, other._values = self._tokens.copy(), self._values.copy()
        other._history = self._history.fork()
        return other

    def after_drafts(self, drafts: tuple[int, ...]) -> "LogitsProcessor":
        """The processor after the tokens `drafts`.  Tokens that complete a banned sequence or an n-gram are banned."""
        processor = self.fork() if drafts else self
        for token in drafts:
            processor.push(token)
        rows = processor._banned_rows.get(processor._tail[-1], ()) if processor._tail else ()
        last = {row[-1] for row in rows if processor._tail[1 - len(row) :] == row[:-1]}
        if (ngram_size := self._sampling.no_repeat_ngram_size) > 1:
            last.update(repeated_ngram_tokens(processor._history.tokens, ngram_size))
        if last:
            processor = self.fork() if processor is self else processor
            processor._ban(last)
        return processor

    @property
    def changes(self) -> tuple[Ints, Floats]:
        """[K] tokens, each once, and [3, at least K] what is done to them."""
        return self._tokens[: len(self._columns)], self._values

    def changes_within(self, vocabulary: int) -> tuple[Ints, Floats]:
        """[K] tokens below `vocabulary`, each once, and [3, K] what is done to them."""
        tokens, values = self._tokens[: len(self._columns)], self._values[:, : len(self._columns)]
        if self._max_token < vocabulary:
            return tokens, values
        return tokens[tokens < vocabulary], values[:, tokens < vocabulary]

    def allowed_words(self, vocabulary: int) -> MaskWords:
        """The allowed tokens, bit i for token i; empty: all are."""
        if vocabulary not in self._allowed_words:
            bits = np.zeros(-(-vocabulary // 32) * 32 if self._sampling.allowed else 0, np.bool_)
            bits[[token for token in self._sampling.allowed if token < vocabulary]] = True
            self._allowed_words[vocabulary] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._allowed_words[vocabulary]

    def _columns_of(self, tokens: Iterable[int]) -> Ints:
        return np.fromiter((self._columns[token] for token in tokens), np.int64)

    def _column_of(self, token: int) -> int:
        """The column of a token in the table, which is added if need be."""
        if token not in self._columns:
            self._add_tokens([token])
        return self._columns[token]

    def _add_tokens(self, tokens: list[int]) -> None:
        """Add tokens that are not in the table yet, each once."""
        first = len(self._columns)
        self._columns.update(zip(tokens, count(first), strict=False))
        size = len(self._columns)
        if size > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(size + 16, np.int64)])
            fresh = np.zeros((3, size + 16), np.float32)
            fresh[FACTOR] = 1
            self._values = np.concatenate([self._values, fresh], axis=1)
        self._tokens[first:size] = tokens
        self._max_token = max(self._max_token, *tokens)

    def _ban(self, tokens: AbstractSet[int]) -> None:
        """Set the change of these tokens to minus infinity."""
        if new := [token for token in tokens if token not in self._columns]:
            self._add_tokens(new)
        self._values[CHANGE, self._columns_of(tokens)] = NEVER

    def _update_penalty(self, token: int) -> None:
        """Recompute the frequency and presence penalty of a token of the answer, unless it is banned."""
        column = self._column_of(token)
        if (count := self._answer_counts[token]) and self._values[CHANGE, column] > NEVER:
            penalty = count * self._sampling.frequency_penalty + self._sampling.presence_penalty
            self._values[CHANGE, column] = -penalty


def needs_processing(sampling: Sampling) -> bool:
    """Whether these options change logits at all."""
    penalties = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1
    return bool(
        penalties
        or sampling.bias
        or sampling.allowed
        or sampling.banned
        or sampling.min_tokens
        or sampling.no_repeat_ngram_size
    )


def process_logits(logits: Tensor, processors: Sequence[LogitsProcessor | None], out: Tensor | None = None) -> Tensor:
    """[N, V] logits, of which the rows with a processor are changed.

    `logits` themselves stay as they are, and are returned where no row has a processor.  `out` [N, V] is an optional
    buffer for the result.
    """
    active = [(row, processor) for row, processor in enumerate(processors) if processor is not None]
    if not active:
        return logits
    out, vocabulary = empty_logits(logits) if out is None else out, logits.size(1)
    out.copy_(logits)
    tables = [(row, *processor.changes_within(vocabulary)) for row, processor in active]
    places = np.concatenate([row * vocabulary + tokens for row, tokens, _ in tables])
    values = np.concatenate([values for _, _, values in tables], axis=1)
    apply_changes(out.view(-1), torch.from_numpy(places).to(out.device), torch.from_numpy(values).to(out.device))
    for row, processor in active:
        if len(allowed := processor.allowed_words(vocabulary)):
            apply_mask(out[row], allowed, out[row])
    return out


def apply_masks(logits: Tensor, masks: Mapping[int, MaskWords], out: Tensor | None = None) -> Tensor:
    """[N, V] logits; a row with a mask in `masks` [ceil(V / 32)] is minus infinity where bit i of the mask is 0.

    `logits` themselves are returned where there are no masks; else they stay as they are, or are `out` [N, V]
    themselves.
    """
    if not masks:
        return logits
    out = empty_logits(logits) if out is None else out
    for index, (row, target) in enumerate(zip(logits.unbind(), out.unbind(), strict=True)):
        if index in masks:
            apply_mask(row, masks[index], target)
        elif out is not logits:
            target.copy_(row)
    return out


def empty_logits(logits: Tensor) -> Tensor:
    return torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)


def apply_changes(flat: Tensor, places: Tensor, values: Tensor) -> None:
    changed = flat[places].add_(values[BIAS])
    changed = torch.where(changed < 0, changed * values[FACTOR], changed / values[FACTOR])
    flat[places] = changed.add_(values[CHANGE])


def apply_mask(row: Tensor, mask: MaskWords, out: Tensor) -> None:
    """Write into `out` [V] the values of `row` [V] where the bits of `mask` are 1, minus infinity elsewhere."""
    changes = np.take(BYTE_CHANGES, np.ascontiguousarray(mask).view(np.uint8), axis=0, mode="clip").ravel()
    torch.add(row, torch.from_numpy(changes[: len(row)]).to(row.device), out=out)

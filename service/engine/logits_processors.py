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
from collections.abc import Collection, Iterable, Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import count
from weakref import WeakValueDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from polyhead.models.seq2seq.decoding import repeated_ngram_tokens

from ..core.errors import BadRequest
from ..core.request import Generate, Sampling

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Changes = tuple[Ints, Floats]
MaskWords = NDArray[np.int32]
OptionIdentities = tuple[int, int, int, int]
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


class ChangeTable:
    """Tokens, each once, and what is done to each."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.columns = {token: column for column, token in enumerate(dict.fromkeys(tokens))}
        self._tokens = np.fromiter(self.columns, np.int64)
        self._values = np.zeros((3, len(self._tokens)), np.float32)
        self._values[FACTOR] = 1
        self._max_token = max(self.columns, default=0)

    def __len__(self) -> int:
        return len(self.columns)

    @property
    def changes(self) -> Changes:
        """[K] tokens, each once, and [3, at least K] what is done to them."""
        return self._tokens[: len(self.columns)], self._values

    def changes_within(self, vocabulary: int) -> Changes:
        """[K] tokens below `vocabulary`, each once, and [3, K] what is done to them."""
        tokens, values = self._tokens[: len(self.columns)], self._values[:, : len(self.columns)]
        if self._max_token < vocabulary:
            return tokens, values
        return tokens[tokens < vocabulary], values[:, tokens < vocabulary]

    def set_all(self, kind: int, tokens: Collection[int], value: float | Floats) -> None:
        """Set one kind of change of these tokens: one value, or a value [len(tokens)] for each."""
        if new := [token for token in dict.fromkeys(tokens) if token not in self.columns]:
            self._add_tokens(new)
        self._values[kind, np.fromiter((self.columns[token] for token in tokens), np.int64, len(tokens))] = value

    def set_penalty(self, token: int, penalty: float) -> None:
        """Set the change of a token, unless it is banned."""
        if token not in self.columns:
            self._add_tokens([token])
        if self._values[CHANGE, self.columns[token]] > NEVER:
            self._values[CHANGE, self.columns[token]] = -penalty

    def fork(self) -> "ChangeTable":
        other = copy(self)
        other.columns, other._tokens, other._values = self.columns.copy(), self._tokens.copy(), self._values.copy()
        return other

    def _add_tokens(self, tokens: list[int]) -> None:
        """Add tokens that are not in the table yet, each once."""
        first = len(self.columns)
        self.columns.update(zip(tokens, count(first), strict=False))
        size = len(self.columns)
        if size > len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(size + 16, np.int64)])
            fresh = np.zeros((3, size + 16), np.float32)
            fresh[FACTOR] = 1
            self._values = np.concatenate([self._values, fresh], axis=1)
        self._tokens[first:size] = tokens
        self._max_token = max(self._max_token, *tokens)


class TokenRules:
    """What requests with the same options have in common: it is made once, and is not changed.

    Raises BadRequest for a token below 0, because logits are indexed with them.
    """

    def __init__(self, request: Generate) -> None:
        self.options = option_identities(request)
        self._sampling, self._stops = request.sampling, request.stop_tokens
        sampling = self._sampling
        if min(request.option_tokens, default=0) < 0:
            raise BadRequest("a token has a number below 0; numbers of tokens begin at 0", param="logit_bias")
        bias, single = dict(sampling.bias), {row[0] for row in sampling.banned if len(row) == 1} - self._stops
        self.table = ChangeTable()
        self.table.set_all(BIAS, bias, np.fromiter(bias.values(), np.float32, len(bias)))
        self.table.set_all(CHANGE, single, NEVER)
        self.banned_rows: dict[int, list[tuple[int, ...]]] = {}  # banned sequences, by their last token but one
        for row in sampling.banned:
            if len(row) > 1:
                self.banned_rows.setdefault(row[-2], []).append(row)
        self.max_banned_length = max(map(len, sampling.banned), default=0)
        self._allowed_words: dict[int, MaskWords] = {}  # by the size of the vocabulary

    @cached_property
    def table_without_stops(self) -> ChangeTable:
        """The table with all stop tokens banned."""
        table = self.table.fork()
        table.set_all(CHANGE, self._stops, NEVER)
        return table

    def allowed_words(self, vocabulary: int) -> MaskWords:
        """The allowed tokens, bit i for token i; empty: all are."""
        if vocabulary not in self._allowed_words:
            allowed = np.fromiter(self._sampling.allowed, np.int64, len(self._sampling.allowed))
            bits = np.zeros(-(-vocabulary // 32) * 32 if len(allowed) else 0, np.bool_)
            bits[allowed[allowed < vocabulary]] = True
            self._allowed_words[vocabulary] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._allowed_words[vocabulary]


class SharedRules:
    """The rules of requests that are open, each once for all answers of a call."""

    def __init__(self) -> None:
        self._rules: WeakValueDictionary[OptionIdentities, TokenRules] = WeakValueDictionary()

    def find(self, request: Generate) -> TokenRules:
        """The rules of the request's options.  Raises as TokenRules does."""
        rules = self._rules.get(option_identities(request))
        if rules is None:
            rules = TokenRules(request)
            self._rules[rules.options] = rules
        return rules


def option_identities(request: Generate) -> OptionIdentities:
    """Equal for requests with the same options, in the same objects, as long as one of the requests exists."""
    sampling = request.sampling
    return id(request.stop_tokens), id(sampling.bias), id(sampling.allowed), id(sampling.banned)


class LogitsProcessor:
    """The changes of one request's logits: those of its `rules`, and after them those of its own tokens, which are
    updated with every new token.
    """

    def __init__(self, request: Generate, rules: TokenRules) -> None:
        sampling = self._sampling = request.sampling
        self._rules = rules
        self._has_repetition_penalty = sampling.repetition_penalty != 1
        self._has_count_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._answer_length, self._answer_counts = 0, Counter[int]()
        self._tail = request.tokens[-rules.max_banned_length :] if rules.banned_rows else ()
        self._history = TokenHistory(request.tokens if sampling.no_repeat_ngram_size else ())
        self._own = ChangeTable()
        if self._has_repetition_penalty:
            self._own.set_all(FACTOR, request.tokens, sampling.repetition_penalty)
        if sampling.no_repeat_ngram_size == 1:
            self._own.set_all(CHANGE, request.tokens, NEVER)

    def push(self, token: int) -> None:
        """`token` was sampled and is kept."""
        self._answer_length += 1
        if self._sampling.no_repeat_ngram_size:
            self._history.push(token)
        if self._sampling.no_repeat_ngram_size == 1:
            self._own.set_all(CHANGE, [token], NEVER)
        if self._has_repetition_penalty:
            self._own.set_all(FACTOR, [token], self._sampling.repetition_penalty)
        if self._has_count_penalty:
            self._answer_counts[token] += 1
            count = self._answer_counts[token]
            self._own.set_penalty(token, count * self._sampling.frequency_penalty + self._sampling.presence_penalty)
        if self._rules.banned_rows:
            self._tail = (*self._tail[1 - self._rules.max_banned_length :], token)

    def fork(self) -> "LogitsProcessor":
        """A copy with the same history."""
        other = copy(self)
        other._answer_counts, other._own = self._answer_counts.copy(), self._own.fork()
        other._history = self._history.fork()
        return other

    def after_drafts(self, drafts: tuple[int, ...]) -> "LogitsProcessor":
        """The processor after the tokens `drafts`.  Tokens that complete a banned sequence or an n-gram are banned."""
        processor = self.fork() if drafts else self
        for token in drafts:
            processor.push(token)
        rows = self._rules.banned_rows.get(processor._tail[-1], ()) if processor._tail else ()
        last = {row[-1] for row in rows if processor._tail[1 - len(row) :] == row[:-1]}
        if (ngram_size := self._sampling.no_repeat_ngram_size) > 1:
            last.update(repeated_ngram_tokens(processor._history.tokens, ngram_size))
        if last:
            processor = self.fork() if processor is self else processor
            processor._own.set_all(CHANGE, last, NEVER)
        return processor

    @property
    def tables(self) -> tuple[ChangeTable, ChangeTable]:
        """What is done to tokens: first the changes that are shared, then its own.  A token may be in both."""
        ends_too_early = self._answer_length < self._sampling.min_tokens
        return self._rules.table_without_stops if ends_too_early else self._rules.table, self._own

    @property
    def changes(self) -> Changes:
        """[K] tokens, and [3, at least K] what is done to them in this order.  A token may occur twice."""
        tables = [table for table in self.tables if len(table)] or [self._own]
        if len(tables) == 1:
            return tables[0].changes
        tokens, values = zip(*(table.changes for table in tables), strict=True)
        lengths = map(len, tokens)
        own = [some[:, :length] for some, length in zip(values, lengths, strict=True)]
        return np.concatenate(tokens), np.concatenate(own, axis=1)

    def allowed_words(self, vocabulary: int) -> MaskWords:
        """The allowed tokens, bit i for token i; empty: all are."""
        return self._rules.allowed_words(vocabulary)


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
    for tables in zip(*(processor.tables for _, processor in active), strict=True):
        changes = [table.changes_within(vocabulary) for table in tables]
        places = np.concatenate([row * vocabulary + own for (row, _), (own, _) in zip(active, changes, strict=True)])
        values = np.concatenate([values for _, values in changes], axis=1)
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

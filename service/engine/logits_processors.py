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

from ..core.errors import BadRequest
from ..core.request import Generate, Sampling

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
Changes = tuple[Ints, Floats]
MaskWords = NDArray[np.int32]
OptionIdentities = tuple[int, int, int, int]
PromptIdentity = tuple[int, float, int]
NEVER = float("-inf")
BIAS, FACTOR, CHANGE = range(3)  # what is done to a token, in this order: add, divide by the penalty, add
BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
NO_TOKENS: Ints = np.empty(0, np.int64)
NO_CHANGES: Changes = NO_TOKENS, np.empty((3, 0), np.float32)
BYTE_CHANGES = np.where(BITS == 1, 0, NEVER).astype(np.float32)  # [256, 8]: added to eight logits, by their bits


class RepeatedNgrams:
    """Which tokens would repeat an n-gram of `size` tokens, at least 2, of the tokens so far.

    A new token takes one pass over the tokens before it, whatever `size` is.
    """

    def __init__(self, tokens: Sequence[int], size: int) -> None:
        count, self._most = len(tokens), size - 1
        self._tokens, self._count = np.array(tokens, np.int32), count
        # [T] for each place, how many tokens before it are equal to the last ones, `_most` at most
        self._runs = np.zeros(count, np.int32)
        alike = np.ones(count, np.bool_)
        for back in range(1, min(self._most, count) + 1):
            alike[:back] = False
            alike[back:] &= self._tokens[:-back] == self._tokens[-back]
            if not alike.any():
                break
            self._runs += alike

    @property
    def next_tokens(self) -> Ints:
        """[K] the tokens that would repeat one, each once."""
        found = self._tokens[: self._count][self._runs[: self._count] == self._most]
        is_found = np.zeros(int(found.max(initial=-1)) + 1, np.bool_)
        is_found[found] = True
        return np.flatnonzero(is_found)

    def push(self, token: int) -> None:
        count = self._count
        if count == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(count + 16, np.int32)])
            self._runs = np.concatenate([self._runs, np.zeros(count + 16, np.int32)])
        longer = np.minimum(self._runs[:count] + 1, self._most)
        self._runs[1 : count + 1] = np.where(self._tokens[:count] == token, longer, 0)
        self._runs[0] = 0
        self._tokens[count] = token
        self._count += 1

    def fork(self) -> "RepeatedNgrams":
        other = copy(self)
        other._tokens, other._runs = self._tokens[: self._count].copy(), self._runs[: self._count].copy()
        return other


class BannedSequences:
    """Sequences of more than one token that end with the same `depth` tokens before the last one.

    They are a tree that is read from the end of the tokens so far.  A branch is made when it is first taken: then each
    sequence of it is looked at once, and never again.
    """

    def __init__(self, rows: Sequence[tuple[int, ...]], depth: int = 0) -> None:
        self.last_tokens = np.array(sorted({row[-1] for row in rows if len(row) == depth + 1}), np.int64)
        self._longer = [row for row in rows if len(row) > depth + 1]
        self._branches: dict[int, BannedSequences | list[tuple[int, ...]]] = {}
        self._depth = depth

    def find_last_tokens(self, before: Sequence[int]) -> Ints:
        """The last tokens of the sequences that `before` ends with but for these."""
        found, tree = [NO_TOKENS], self
        for token in reversed(before):
            branch = tree._take_branch(token)
            if branch is None:
                break
            found.append(branch.last_tokens)
            tree = branch
        return np.concatenate(found)

    def _take_branch(self, token: int) -> "BannedSequences | None":
        if self._longer:
            rows, self._longer = self._longer, []
            for row in rows:
                some = self._branches.setdefault(row[-2 - self._depth], [])
                assert isinstance(some, list)
                some.append(row)
        branch = self._branches.get(token)
        if isinstance(branch, list):
            branch = self._branches[token] = BannedSequences(branch, self._depth + 1)
        return branch


class ChangeTable:
    """Tokens, each once, and what is done to each."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.columns = {token: column for column, token in enumerate(dict.fromkeys(tokens))}
        self._tokens = np.fromiter(self.columns, np.int64)
        self._values = np.zeros((3, len(self._tokens)), np.float32)
        self._values[FACTOR] = 1

    @property
    def changes(self) -> Changes:
        """[K] tokens, each once, and [3, at least K] what is done to them."""
        return self._tokens[: len(self.columns)], self._values

    def fill(self, kind: int, value: float) -> None:
        """Set one kind of change of all tokens."""
        self._values[kind] = value

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
        longer = [row for row in sampling.banned if len(row) > 1]
        self.banned, self.max_banned_length = BannedSequences(longer), max(map(len, longer), default=0)
        self._allowed_words: dict[int, MaskWords] = {}  # by the size of the vocabulary
        self._prompts: WeakValueDictionary[PromptIdentity, PromptRules] = WeakValueDictionary()

    @cached_property
    def table_without_stops(self) -> ChangeTable:
        """The table with all stop tokens banned."""
        table = self.table.fork()
        table.set_all(CHANGE, self._stops, NEVER)
        return table

    def prompt_rules(self, request: Generate) -> "PromptRules":
        """What the tokens of the request's prompt change: the same for all answers to one prompt, while one is open."""
        sampling = request.sampling
        key = id(request.tokens), sampling.repetition_penalty, sampling.no_repeat_ngram_size
        rules = self._prompts.get(key)
        if rules is None:
            rules = self._prompts[key] = PromptRules(request)
        return rules

    def allowed_words(self, vocabulary: int) -> MaskWords:
        """The allowed tokens, bit i for token i; empty: all are."""
        if vocabulary not in self._allowed_words:
            allowed = np.fromiter(self._sampling.allowed, np.int64, len(self._sampling.allowed))
            bits = np.zeros(-(-vocabulary // 32) * 32 if len(allowed) else 0, np.bool_)
            bits[allowed[allowed < vocabulary]] = True
            self._allowed_words[vocabulary] = np.packbits(bits, bitorder="little").view(np.int32)
        return self._allowed_words[vocabulary]


class PromptRules:
    """What the tokens of a prompt change: they are read once for all answers, and this is not changed."""

    def __init__(self, request: Generate) -> None:
        self.tokens, sampling = request.tokens, request.sampling  # kept: they are found by their identity
        is_penalized, size = sampling.repetition_penalty != 1, sampling.no_repeat_ngram_size
        self.table = ChangeTable(request.tokens if is_penalized or size == 1 else ())
        if is_penalized:
            self.table.fill(FACTOR, sampling.repetition_penalty)
        if size == 1:
            self.table.fill(CHANGE, NEVER)
        self.ngrams = RepeatedNgrams(request.tokens, size) if size > 1 else None


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
    """The changes of one request's logits: those of its `rules`, those of its prompt, and after them those of its own
    tokens, which are updated with every new token.
    """

    def __init__(self, request: Generate, rules: TokenRules) -> None:
        sampling = self._sampling = request.sampling
        self._rules, self._prompt = rules, rules.prompt_rules(request)
        self._has_repetition_penalty = sampling.repetition_penalty != 1
        self._has_count_penalty = sampling.frequency_penalty != 0 or sampling.presence_penalty != 0
        self._answer_length, self._answer_counts = 0, Counter[int]()
        self._tail = request.tokens[-rules.max_banned_length :] if rules.max_banned_length else ()
        self._ngrams = self._prompt.ngrams and self._prompt.ngrams.fork()
        self._own, self._next_changes = ChangeTable(), NO_CHANGES

    def push(self, token: int) -> None:
        """`token` was sampled and is kept."""
        self._answer_length += 1
        if self._ngrams is not None:
            self._ngrams.push(token)
        is_new = token not in self._prompt.table.columns
        if self._sampling.no_repeat_ngram_size == 1 and is_new:
            self._own.set_all(CHANGE, [token], NEVER)
        if self._has_repetition_penalty and is_new:
            self._own.set_all(FACTOR, [token], self._sampling.repetition_penalty)
        if self._has_count_penalty:
            self._answer_counts[token] += 1
            count = self._answer_counts[token]
            self._own.set_penalty(token, count * self._sampling.frequency_penalty + self._sampling.presence_penalty)
        if self._rules.max_banned_length:
            self._tail = (*self._tail[1 - self._rules.max_banned_length :], token)

    def fork(self) -> "LogitsProcessor":
        """A copy with the same history."""
        other = copy(self)
        other._answer_counts, other._own = self._answer_counts.copy(), self._own.fork()
        other._ngrams = self._ngrams and self._ngrams.fork()
        return other

    def after_drafts(self, drafts: tuple[int, ...]) -> "LogitsProcessor":
        """The processor after the tokens `drafts`, for the next token alone: no token is pushed to it.

        Tokens that complete a banned sequence or an n-gram are banned.
        """
        processor = self.fork() if drafts else self
        for token in drafts:
            processor.push(token)
        banned = processor._find_next_banned()
        if len(banned):
            processor = copy(self) if processor is self else processor
            processor._next_changes = ban_tokens(banned)
        return processor

    def _find_next_banned(self) -> Ints:
        """[K] the tokens that would complete a banned sequence or an n-gram.  A token may occur twice."""
        banned = self._rules.banned.find_last_tokens(self._tail)
        return banned if self._ngrams is None else np.concatenate([banned, self._ngrams.next_tokens])

    @property
    def steps(self) -> tuple[Changes, ...]:
        """What is done to tokens, one after the other: changes that are shared, its prompt's, its own, and those of the
        next token alone.  A token may be in several.
        """
        ends_too_early = self._answer_length < self._sampling.min_tokens
        shared = self._rules.table_without_stops if ends_too_early else self._rules.table
        return shared.changes, self._prompt.table.changes, self._own.changes, self._next_changes

    @property
    def changes(self) -> Changes:
        """[K] tokens, and [3, at least K] what is done to them in this order.  A token may occur twice."""
        steps = [step for step in self.steps if len(step[0])] or [self._own.changes]
        if len(steps) == 1:
            return steps[0]
        tokens = np.concatenate([tokens for tokens, _ in steps])
        return tokens, np.concatenate([values[:, : len(tokens)] for tokens, values in steps], axis=1)

    def allowed_words(self, vocabulary: int) -> MaskWords:
        """The allowed tokens, bit i for token i; empty: all are."""
        return self._rules.allowed_words(vocabulary)


def ban_tokens(tokens: Ints) -> Changes:
    """The changes that ban all of `tokens`."""
    values = np.zeros((3, len(tokens)), np.float32)
    values[FACTOR], values[CHANGE] = 1, NEVER
    return tokens, values


def changes_within(changes: Changes, vocabulary: int) -> Changes:
    """[K] the tokens below `vocabulary`, and [3, K] what is done to them."""
    tokens, values = changes
    values, is_known = values[:, : len(tokens)], tokens < vocabulary
    return (tokens, values) if is_known.all() else (tokens[is_known], values[:, is_known])


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
    for step in zip(*(processor.steps for _, processor in active), strict=True):
        changes = [changes_within(each, vocabulary) for each in step]
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

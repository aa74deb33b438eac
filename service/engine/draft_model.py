"""Drafts tokens with a smaller model of the same vocabulary (speculative decoding).

The draft model's cache has as many blocks, of the same size, as that of the model it drafts for, so a sequence uses the
same block numbers in both.  Each block has a label of what was computed into it.  A block whose label does not match
is computed again.  An error here makes drafts worse, never an answer.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import torch

from polyhead.models.executors.contract import Executor, StepInput

from .speculation_stats import StepCosts

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class DraftCacheState:
    """What the draft model's cache holds of one sequence."""

    block_names: list[int] = field(default_factory=list)  # of its full blocks: hashes of all tokens up to their ends
    stored_draft: list[int] = field(default_factory=list)  # drafted tokens in the cache,
    known_count: int = 0  # which follow so many tokens of the sequence


class DraftQuery(NamedTuple):
    """A sequence for which up to `max_tokens` next tokens are to be drafted."""

    cache_state: DraftCacheState
    tokens: Sequence[int]
    blocks: Sequence[int]
    max_tokens: int


class DraftChunk(NamedTuple):
    """Tokens of the query with index `number`, to be computed from position `start` on."""

    number: int
    query: DraftQuery
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class DraftModel:
    """Drafts with `executor`: at most `budget` rows in a step, up to `longest` tokens of a sequence.

    `words` is the number of tokens that both vocabularies have.  `costs` are measured of the draft model's own steps.
    Used on the engine thread only.
    """

    def __init__(self, executor: Executor, *, budget: int, longest: int, words: int) -> None:
        self.costs = StepCosts()
        self._executor, self._budget, self._max_length = executor, budget, longest
        self._vocab_size, self._block_size = words, executor.block_size
        self._labels: list[object] = [None] * executor.block_count  # a name, or state and index of a block not full yet
        self._has_failed = False

    def uncomputed_tokens(self, query: DraftQuery) -> int:
        """Tokens that must be computed before anything can be drafted; 0: nothing can be drafted."""
        end = len(query.tokens)
        room = min(len(query.blocks) * self._block_size, self._max_length)
        return end - self._cached_length(query) if end <= room and not self._has_failed else 0

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Greedy next tokens for each query, as many as wanted and as fit.

        Empty for a sequence with more uncomputed tokens than the budget allows: some of them are computed in each call.
        """
        try:
            with torch.inference_mode():
                return self._propose(queries)
        except RuntimeError as error:
            self._has_failed = True
            log.error("the draft model failed and is not used any more: %s", error)
            return [[] for _ in queries]

    def _propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        drafts: list[list[int]] = [[] for _ in queries]
        chunks = self._plan_chunks(queries)
        while chunks:
            for chunk, token in zip(chunks, self._compute(chunks), strict=True):
                if chunk.end >= len(chunk.query.tokens):
                    drafts[chunk.number].append(token)
                self._label_blocks(chunk, drafts[chunk.number][:-1])
            chunks = [
                DraftChunk(chunk.number, chunk.query, chunk.end, drafts[chunk.number][-1:])
                for chunk in chunks
                if drafts[chunk.number] and len(drafts[chunk.number]) < self._max_draft(chunk.query)
            ]
        return drafts

    def _plan_chunks(self, queries: Sequence[DraftQuery]) -> list[DraftChunk]:
        """Chunks of uncomputed tokens within the budget, the shortest first."""
        chunks: list[DraftChunk] = []
        left, taken = self._budget, set[int]()
        for missing, number in sorted((self.uncomputed_tokens(query), number) for number, query in enumerate(queries)):
            query = queries[number]
            start = len(query.tokens) - missing
            written = set(query.blocks[start // self._block_size :])
            count = min(missing, left)
            if count and taken.isdisjoint(written):  # forked sequences share their last blocks until these are computed
                chunks.append(DraftChunk(number, query, start, query.tokens[start : start + count]))
                taken |= written
                left -= count
        return chunks

    def _max_draft(self, query: DraftQuery) -> int:
        """Tokens that can be drafted: each but the last is stored in the cache to compute the next."""
        return min(
            query.max_tokens, min(len(query.blocks) * self._block_size, self._max_length) - len(query.tokens) + 1
        )

    def _compute(self, chunks: Sequence[DraftChunk]) -> list[int]:
        """The greedy token after each chunk."""
        tokens = [token if token < self._vocab_size else 0 for chunk in chunks for token in chunk.tokens]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        starts = list(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        tables = [list(chunk.query.blocks[: -(-chunk.end // self._block_size)]) for chunk in chunks]
        began = perf_counter()
        logits = self._executor.step(StepInput(tokens, positions, starts, tables, [end - 1 for end in starts[1:]]))
        greedy: list[int] = self._executor.argmax or logits.argmax(dim=1).tolist()
        self.costs.record(len(tokens), perf_counter() - began)
        return [token if 0 <= token < self._vocab_size else 0 for token in greedy]  # -1 where logits are not finite

    def _cached_length(self, query: DraftQuery) -> int:
        """How many leading tokens are in the cache, at most all but the last: its logits are needed."""
        state, tokens, size = query.cache_state, query.tokens, self._block_size
        accepted = 0
        while (
            accepted < min(len(state.stored_draft), len(tokens) - state.known_count)
            and state.stored_draft[accepted] == tokens[state.known_count + accepted]
        ):
            accepted += 1
        state.known_count += accepted
        state.stored_draft = state.stored_draft[accepted:] if state.known_count == len(tokens) else []
        self._extend_names(state, tokens)
        cached = 0
        for index, block in enumerate(query.blocks[: -(-len(tokens) // size)]):
            end, label = cached + size, self._labels[block]
            if label == (state, index) and state.known_count >= end:  # filled by accepted draft tokens
                label = self._labels[block] = state.block_names[index]
            if index >= len(state.block_names) or label != state.block_names[index]:
                cached = max(cached, state.known_count) if label == (state, index) else cached
                break
            cached = end
        return min(cached, len(tokens) - 1)

    def _label_blocks(self, chunk: DraftChunk, draft: list[int]) -> None:
        """Label the blocks that a chunk was computed into."""
        state, full = chunk.query.cache_state, min(chunk.end, len(chunk.query.tokens)) // self._block_size
        state.known_count, state.stored_draft = min(chunk.end, len(chunk.query.tokens)), draft
        for index in range(chunk.start // self._block_size, -(-chunk.end // self._block_size)):
            self._labels[chunk.query.blocks[index]] = state.block_names[index] if index < full else (state, index)

    def _extend_names(self, state: DraftCacheState, tokens: Sequence[int]) -> None:
        names, size = state.block_names, self._block_size
        for start in range(len(names) * size, len(tokens) // size * size, size):
            names.append(hash((names[-1] if names else 0, *tokens[start : start + size])))

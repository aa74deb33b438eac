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

    def uncomputed_tokens(self, asked: DraftQuery) -> int:
        """Tokens that must be computed before anything can be drafted; 0: nothing can be drafted."""
        end = len(asked.tokens)
        room = min(len(asked.blocks) * self._block_size, self._max_length)
        return end - self._cached_length(asked) if end <= room and not self._has_failed else 0

    def propose(self, wanted: Sequence[DraftQuery]) -> list[list[int]]:
        """Greedy next tokens for each query, as many as wanted and as fit.

        Empty for a sequence with more uncomputed tokens than the budget allows: some of them are computed in each call.
        """
        try:
            with torch.inference_mode():
                return self._propose(wanted)
        except RuntimeError as error:
            self._has_failed = True
            log.error("the draft model failed and is not used any more: %s", error)
            return [[] for _ in wanted]

    def _propose(self, wanted: Sequence[DraftQuery]) -> list[list[int]]:
        told: list[list[int]] = [[] for _ in wanted]
        chunks = self._plan_chunks(wanted)
        while chunks:
            for chunk, token in zip(chunks, self._compute(chunks), strict=True):
                if chunk.end >= len(chunk.query.tokens):
                    told[chunk.number].append(token)
                self._label_blocks(chunk, told[chunk.number][:-1])
            chunks = [
                DraftChunk(chunk.number, chunk.query, chunk.end, told[chunk.number][-1:])
                for chunk in chunks
                if told[chunk.number] and len(told[chunk.number]) < self._max_draft(chunk.query)
            ]
        return told

    def _plan_chunks(self, wanted: Sequence[DraftQuery]) -> list[DraftChunk]:
        """Chunks of uncomputed tokens within the budget, the shortest first."""
        chunks: list[DraftChunk] = []
        left, taken = self._budget, set[int]()
        for behind, number in sorted((self.uncomputed_tokens(asked), number) for number, asked in enumerate(wanted)):
            asked = wanted[number]
            start = len(asked.tokens) - behind
            written = set(asked.blocks[start // self._block_size :])
            count = min(behind, left)
            if count and taken.isdisjoint(written):  # forked sequences share their last blocks until these are computed
                chunks.append(DraftChunk(number, asked, start, asked.tokens[start : start + count]))
                taken |= written
                left -= count
        return chunks

    def _max_draft(self, asked: DraftQuery) -> int:
        """Tokens that can be drafted: each but the last is stored in the cache to compute the next."""
        return min(
            asked.max_tokens, min(len(asked.blocks) * self._block_size, self._max_length) - len(asked.tokens) + 1
        )

    def _compute(self, chunks: Sequence[DraftChunk]) -> list[int]:
        """The greedy token after each chunk."""
        tokens = [token if token < self._vocab_size else 0 for chunk in chunks for token in chunk.tokens]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        starts = list(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        tables = [list(chunk.query.blocks[: -(-chunk.end // self._block_size)]) for chunk in chunks]
        began = perf_counter()
        logits = self._executor.step(StepInput(tokens, positions, starts, tables, [end - 1 for end in starts[1:]]))
        likeliest: list[int] = self._executor.argmax or logits.argmax(dim=1).tolist()
        self.costs.record(len(tokens), perf_counter() - began)
        return [token if 0 <= token < self._vocab_size else 0 for token in likeliest]  # -1 where logits are not finite

    def _cached_length(self, asked: DraftQuery) -> int:
        """How many leading tokens are in the cache, at most all but the last: its logits are needed."""
        depth, tokens, size = asked.cache_state, asked.tokens, self._block_size
        came = 0
        while (
            came < min(len(depth.stored_draft), len(tokens) - depth.known_count)
            and depth.stored_draft[came] == tokens[depth.known_count + came]
        ):
            came += 1
        depth.known_count += came
        depth.stored_draft = depth.stored_draft[came:] if depth.known_count == len(tokens) else []
        self._extend_names(depth, tokens)
        stored = 0
        for index, block in enumerate(asked.blocks[: -(-len(tokens) // size)]):
            end, label = stored + size, self._labels[block]
            if label == (depth, index) and depth.known_count >= end:  # filled by accepted draft tokens
                label = self._labels[block] = depth.block_names[index]
            if index >= len(depth.block_names) or label != depth.block_names[index]:
                stored = max(stored, depth.known_count) if label == (depth, index) else stored
                break
            stored = end
        return min(stored, len(tokens) - 1)

    def _label_blocks(self, chunk: DraftChunk, told: list[int]) -> None:
        """Label the blocks that a chunk was computed into."""
        depth, full = chunk.query.cache_state, min(chunk.end, len(chunk.query.tokens)) // self._block_size
        depth.known_count, depth.stored_draft = min(chunk.end, len(chunk.query.tokens)), told
        for index in range(chunk.start // self._block_size, -(-chunk.end // self._block_size)):
            self._labels[chunk.query.blocks[index]] = depth.block_names[index] if index < full else (depth, index)

    def _extend_names(self, depth: DraftCacheState, tokens: Sequence[int]) -> None:
        names, size = depth.block_names, self._block_size
        for start in range(len(names) * size, len(tokens) // size * size, size):
            names.append(hash((names[-1] if names else 0, *tokens[start : start + size])))

"""Tokens foretold by a smaller model of the same vocabulary: the draft of a generator.

Knows an executor and, of sequences, tokens and cache blocks.  The one idea: its cache has as many blocks, of the same
size, as that of the model it drafts for, so whatever blocks a sequence holds there are its own here.  Nobody tells who
wrote what: each block has a label, and what is labelled otherwise is computed again.  Whatever is wrong here makes
drafts worse, never an answer.
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
    """How far the draft model has come with a sequence."""

    block_names: list[int] = field(default_factory=list)  # of its full blocks: hashes of all tokens up to their ends
    stored_draft: list[int] = field(default_factory=list)  # what is stored of it that was foretold,
    known_count: int = 0  # after so many tokens that were known


class DraftQuery(NamedTuple):
    """A sequence of which the next `most` tokens are wanted."""

    cache_state: DraftCacheState
    tokens: Sequence[int]
    blocks: Sequence[int]
    max_tokens: int


class DraftChunk(NamedTuple):
    """Tokens of the sequence asked about as the `number`th, to be computed from position `start` on."""

    number: int
    query: DraftQuery
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class DraftModel:
    """Drafts by `executor`, at most `budget` rows at once, up to `longest` tokens of a sequence.

    `words` are what both vocabularies have rows for; what is beyond them is no token of any text.
    On the thread that computes.  `costs` are of its own steps.
    """

    def __init__(self, executor: Executor, *, budget: int, longest: int, words: int) -> None:
        self.costs = StepCosts()
        self._executor, self._budget, self._max_length = executor, budget, longest
        self._vocab_size, self._block_size = words, executor.block_size
        self._labels: list[object] = [None] * executor.block_count  # a name; or whose and which block is not full yet
        self._has_failed = False

    def uncomputed_tokens(self, asked: DraftQuery) -> int:
        """Tokens of a sequence that are to be computed before anything of it can be foretold; 0: nothing can."""
        end = len(asked.tokens)
        room = min(len(asked.blocks) * self._block_size, self._max_length)
        return end - self._cached_length(asked) if end <= room and not self._has_failed else 0

    def propose(self, wanted: Sequence[DraftQuery]) -> list[list[int]]:
        """The likeliest next tokens of each, as many as wanted and there is room for.

        None of a sequence that is further behind than the budget allows: it catches up a little each time.
        """
        try:
            with torch.inference_mode():
                return self._propose(wanted)
        except RuntimeError as error:
            self._has_failed = True
            log.error("the draft model cannot compute, nothing is foretold by it any more: %s", error)
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
        """What is missing of each, as far as the budget goes: of those first of whom least is."""
        chunks: list[DraftChunk] = []
        left, taken = self._budget, set[int]()
        for behind, number in sorted((self.uncomputed_tokens(asked), number) for number, asked in enumerate(wanted)):
            asked = wanted[number]
            start = len(asked.tokens) - behind
            written = set(asked.blocks[start // self._block_size :])
            count = min(behind, left)
            if count and taken.isdisjoint(written):  # forked sequences share the last blocks until they are computed
                chunks.append(DraftChunk(number, asked, start, asked.tokens[start : start + count]))
                taken |= written
                left -= count
        return chunks

    def _max_draft(self, asked: DraftQuery) -> int:
        """Tokens that can be foretold: each but the last is stored, to foretell the next."""
        return min(
            asked.max_tokens, min(len(asked.blocks) * self._block_size, self._max_length) - len(asked.tokens) + 1
        )

    def _compute(self, chunks: Sequence[DraftChunk]) -> list[int]:
        """The likeliest token after each."""
        tokens = [token if token < self._vocab_size else 0 for chunk in chunks for token in chunk.tokens]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        starts = list(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        tables = [list(chunk.query.blocks[: -(-chunk.end // self._block_size)]) for chunk in chunks]
        began = perf_counter()
        logits = self._executor.step(StepInput(tokens, positions, starts, tables, [end - 1 for end in starts[1:]]))
        likeliest: list[int] = self._executor.argmax or logits.argmax(dim=1).tolist()
        self.costs.record(len(tokens), perf_counter() - began)
        return [token if 0 <= token < self._vocab_size else 0 for token in likeliest]  # -1, where logits are no numbers

    def _cached_length(self, asked: DraftQuery) -> int:
        """How many of its leading tokens are here; the last counts as not, its logits are wanted."""
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
            if label == (depth, index) and depth.known_count >= end:  # it became full of what was foretold
                label = self._labels[block] = depth.block_names[index]
            if index >= len(depth.block_names) or label != depth.block_names[index]:
                stored = max(stored, depth.known_count) if label == (depth, index) else stored
                break
            stored = end
        return min(stored, len(tokens) - 1)

    def _label_blocks(self, chunk: DraftChunk, told: list[int]) -> None:
        """Remember whose blocks a chunk was stored in, and what."""
        depth, full = chunk.query.cache_state, min(chunk.end, len(chunk.query.tokens)) // self._block_size
        depth.known_count, depth.stored_draft = min(chunk.end, len(chunk.query.tokens)), told
        for index in range(chunk.start // self._block_size, -(-chunk.end // self._block_size)):
            self._labels[chunk.query.blocks[index]] = depth.block_names[index] if index < full else (depth, index)

    def _extend_names(self, depth: DraftCacheState, tokens: Sequence[int]) -> None:
        names, size = depth.block_names, self._block_size
        for start in range(len(names) * size, len(tokens) // size * size, size):
            names.append(hash((names[-1] if names else 0, *tokens[start : start + size])))

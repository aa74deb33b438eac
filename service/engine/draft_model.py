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

from polyhead.models.executors.contract import Executor, Rows

from .speculation_stats import Costs

log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Depth:
    """How far the draft model has come with a sequence."""

    names: list[int] = field(default_factory=list)  # of its full blocks: hashes of all tokens up to their ends
    told: list[int] = field(default_factory=list)  # what is stored of it that was foretold,
    known: int = 0  # after so many tokens that were known


class Asked(NamedTuple):
    """A sequence of which the next `most` tokens are wanted."""

    depth: Depth
    tokens: Sequence[int]
    blocks: Sequence[int]
    most: int


class Chunk(NamedTuple):
    """Tokens of the sequence asked about as the `number`th, to be computed from position `start` on."""

    number: int
    asked: Asked
    start: int
    tokens: Sequence[int]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Drafter:
    """Drafts by `executor`, at most `budget` rows at once, up to `longest` tokens of a sequence.

    `words` are what both vocabularies have rows for; what is beyond them is no token of any text.
    On the thread that computes.  `costs` are of its own steps.
    """

    def __init__(self, executor: Executor, *, budget: int, longest: int, words: int) -> None:
        self.costs = Costs()
        self._executor, self._budget, self._longest = executor, budget, longest
        self._words, self._size = words, executor.block_size
        self._labels: list[object] = [None] * executor.block_count  # a name; or whose and which block is not full yet
        self._broken = False

    def behind(self, asked: Asked) -> int:
        """Tokens of a sequence that are to be computed before anything of it can be foretold; 0: nothing can."""
        end = len(asked.tokens)
        room = min(len(asked.blocks) * self._size, self._longest)
        return end - self._stored(asked) if end <= room and not self._broken else 0

    def propose(self, wanted: Sequence[Asked]) -> list[list[int]]:
        """The likeliest next tokens of each, as many as wanted and there is room for.

        None of a sequence that is further behind than the budget allows: it catches up a little each time.
        """
        try:
            with torch.inference_mode():
                return self._propose(wanted)
        except RuntimeError as error:
            self._broken = True
            log.error("the draft model cannot compute, nothing is foretold by it any more: %s", error)
            return [[] for _ in wanted]

    def _propose(self, wanted: Sequence[Asked]) -> list[list[int]]:
        told: list[list[int]] = [[] for _ in wanted]
        chunks = self._caught_up(wanted)
        while chunks:
            for chunk, token in zip(chunks, self._compute(chunks), strict=True):
                if chunk.end >= len(chunk.asked.tokens):
                    told[chunk.number].append(token)
                self._label(chunk, told[chunk.number][:-1])
            chunks = [
                Chunk(chunk.number, chunk.asked, chunk.end, told[chunk.number][-1:])
                for chunk in chunks
                if told[chunk.number] and len(told[chunk.number]) < self._most(chunk.asked)
            ]
        return told

    def _caught_up(self, wanted: Sequence[Asked]) -> list[Chunk]:
        """What is missing of each, as far as the budget goes: of those first of whom least is."""
        chunks: list[Chunk] = []
        left, taken = self._budget, set[int]()
        for behind, number in sorted((self.behind(asked), number) for number, asked in enumerate(wanted)):
            asked = wanted[number]
            start = len(asked.tokens) - behind
            written = set(asked.blocks[start // self._size :])
            count = min(behind, left)
            if count and taken.isdisjoint(written):  # forked sequences share the last blocks until they are computed
                chunks.append(Chunk(number, asked, start, asked.tokens[start : start + count]))
                taken |= written
                left -= count
        return chunks

    def _most(self, asked: Asked) -> int:
        """Tokens that can be foretold: each but the last is stored, to foretell the next."""
        return min(asked.most, min(len(asked.blocks) * self._size, self._longest) - len(asked.tokens) + 1)

    def _compute(self, chunks: Sequence[Chunk]) -> list[int]:
        """The likeliest token after each."""
        tokens = [token if token < self._words else 0 for chunk in chunks for token in chunk.tokens]
        positions = [position for chunk in chunks for position in range(chunk.start, chunk.end)]
        starts = list(accumulate((len(chunk.tokens) for chunk in chunks), initial=0))
        tables = [list(chunk.asked.blocks[: -(-chunk.end // self._size)]) for chunk in chunks]
        began = perf_counter()
        logits = self._executor.step(Rows(tokens, positions, starts, tables, [end - 1 for end in starts[1:]]))
        likeliest: list[int] = self._executor.likeliest or logits.argmax(dim=1).tolist()
        self.costs.learn(len(tokens), perf_counter() - began)
        return [token if 0 <= token < self._words else 0 for token in likeliest]  # -1, where logits are no numbers

    def _stored(self, asked: Asked) -> int:
        """How many of its leading tokens are here; the last counts as not, its logits are wanted."""
        depth, tokens, size = asked.depth, asked.tokens, self._size
        came = 0
        while came < min(len(depth.told), len(tokens) - depth.known) and depth.told[came] == tokens[depth.known + came]:
            came += 1
        depth.known += came
        depth.told = depth.told[came:] if depth.known == len(tokens) else []
        self._name(depth, tokens)
        stored = 0
        for index, block in enumerate(asked.blocks[: -(-len(tokens) // size)]):
            end, label = stored + size, self._labels[block]
            if label == (depth, index) and depth.known >= end:  # it became full of what was foretold
                label = self._labels[block] = depth.names[index]
            if index >= len(depth.names) or label != depth.names[index]:
                stored = max(stored, depth.known) if label == (depth, index) else stored
                break
            stored = end
        return min(stored, len(tokens) - 1)

    def _label(self, chunk: Chunk, told: list[int]) -> None:
        """Remember whose blocks a chunk was stored in, and what."""
        depth, full = chunk.asked.depth, min(chunk.end, len(chunk.asked.tokens)) // self._size
        depth.known, depth.told = min(chunk.end, len(chunk.asked.tokens)), told
        for index in range(chunk.start // self._size, -(-chunk.end // self._size)):
            self._labels[chunk.asked.blocks[index]] = depth.names[index] if index < full else (depth, index)

    def _name(self, depth: Depth, tokens: Sequence[int]) -> None:
        names, size = depth.names, self._size
        for start in range(len(names) * size, len(tokens) // size * size, size):
            names.append(hash((names[-1] if names else 0, *tokens[start : start + size])))

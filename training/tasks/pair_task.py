"""The task of ranking passages for a query: a cross-encoder reads both together and scores how well they fit.

The right passage competes with others of the same part of the data.  Half of them are hard: those that share most words
with the query (BM25, Robertson and Zaragoza 2009).  The others are random ones of the right passage's domain.  Words
choose them rather than the base model's vectors, because the vectors are the baseline.
"""

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..data.examples import WORD, Example
from ..loop.errors import RecipeError
from .task import EmbedTexts, Figures, TaskBatch
from .text_reader import TextReader

# Passages per query, in measuring and in training, where the first few of them are used.
MEASURED_PASSAGES, TRAINED_PASSAGES = 20, 3
BM25_K1, BM25_B = 1.2, 0.75  # BM25's k1 and b, as usual


@dataclass(frozen=True)
class PairItem:
    """A query and its passages; the first passage is the right one."""

    query: str
    passages: tuple[str, ...]
    is_truncated: bool


@dataclass(frozen=True)
class PairTask:
    """Ranking of passages for a query, `trained_passages` in a training step, `measured_passages` for a figure."""

    measured_passages: int = MEASURED_PASSAGES
    trained_passages: int = TRAINED_PASSAGES
    kind: Literal["classify"] = "classify"

    def items(self, examples: Sequence[Example[str]], read: TextReader) -> list[PairItem]:
        if len(examples) <= 2 * MEASURED_PASSAGES:
            raise RecipeError(
                f"data: {len(examples)} passages are too few to rank one among {MEASURED_PASSAGES} others"
            )
        own = read([(example.label, example.text) for example in examples])
        others = list_distractors(examples)
        return [
            PairItem(each.label, (each.text, *(examples[row].text for row in rows)), text.is_truncated)
            for text, each, rows in zip(own, examples, others, strict=True)
        ]

    def truncated_count(self, items: Sequence[PairItem]) -> int:
        return sum(item.is_truncated for item in items)

    def pack(self, items: Sequence[PairItem], read: TextReader, learning: bool) -> TaskBatch:
        among = self.trained_passages if learning else self.measured_passages
        texts = read([(item.query, passage) for item in items for passage in item.passages[:among]])
        tokens, segments = [text.tokens for text in texts], [text.segments for text in texts]
        return TaskBatch(tokens, segments, list(range(len(texts))), [0] * len(items))

    def figures(self, items: Sequence[PairItem], scores: Tensor) -> Figures:  # noqa: ARG002 - the first is the right one
        """Return the mean reciprocal rank and recall at 1 and 5; a tie ranks before the right passage."""
        ranks = (scores >= scores[:, :1]).sum(dim=1).float()
        return {
            "MRR": (1 / ranks).mean().item(),
            "recall@1": (ranks == 1).float().mean().item(),
            "recall@5": (ranks <= 5).float().mean().item(),
        }

    def baselines(self, trained: Sequence[PairItem], items: Sequence[PairItem], embed: EmbedTexts) -> Figures:  # noqa: ARG002
        """Return the same figures for the cosine of the base model's vectors, and the mean reciprocal rank of random
        order.
        """
        texts = sorted({text for item in items for text in (item.query, *item.passages)})
        row = {text: index for index, text in enumerate(texts)}
        vectors = embed(texts)
        near = torch.stack(
            [vectors[[row[passage] for passage in item.passages]] @ vectors[row[item.query]] for item in items]
        )
        count = near.size(1)
        lots = {"by lot MRR": sum(1 / rank for rank in range(1, count + 1)) / count}
        return {**{f"embeddings {name}": value for name, value in self.figures(items, near).items()}, **lots}


def list_distractors(examples: Sequence[Example[str]]) -> list[list[int]]:
    """Return the distractors of each example: MEASURED_PASSAGES - 1 others with another query, hard and easy in
    turn.
    """
    index = Bm25Index([example.text for example in examples])
    domains: dict[str, list[int]] = defaultdict(list)
    for row, example in enumerate(examples):
        domains[example.domain].append(row)
    return [
        choose_distractors(examples, row, index.nearest(examples[row].label), domains) for row in range(len(examples))
    ]


def choose_distractors(
    examples: Sequence[Example[str]], row: int, near: Sequence[int], domains: dict[str, list[int]]
) -> list[int]:
    """Choose the distractors of one example.  The random seed is the example's source, so a rerun chooses the same."""
    query, rng = examples[row].label, random.Random(examples[row].source)
    hard = [other for other in near if examples[other].label != query][: MEASURED_PASSAGES // 2]
    same_domain, rest = domains[examples[row].domain], range(len(examples))
    easy: list[int] = []
    for pool in (same_domain, rest):
        drawn = [
            other for other in rng.sample(pool, min(len(pool), 4 * MEASURED_PASSAGES)) if examples[other].label != query
        ]
        easy += [other for other in drawn if other not in hard and other not in easy]
    mixed = [each for pair in zip(hard, easy, strict=False) for each in pair]
    return [*mixed, *(other for other in (*hard, *easy) if other not in mixed)][: MEASURED_PASSAGES - 1]


class Bm25Index:
    """An index of texts by their words, ranked by BM25."""

    def __init__(self, texts: Sequence[str]) -> None:
        bags = [Counter(WORD.findall(text.lower())) for text in texts]
        mean = sum(bag.total() for bag in bags) / len(bags)
        found: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for row, bag in enumerate(bags):
            slack = BM25_K1 * (1 - BM25_B + BM25_B * bag.total() / mean)
            for word, count in bag.items():
                found[word].append((row, count * (BM25_K1 + 1) / (count + slack)))
        self.text_count = len(texts)
        self.postings = {word: tuple(map(torch.tensor, zip(*rows, strict=True))) for word, rows in found.items()}

    def nearest(self, query: str, count: int = 4 * MEASURED_PASSAGES) -> list[int]:
        """Return at most `count` texts that share a word with the query, best first."""
        sums = torch.zeros(self.text_count, dtype=torch.float64)
        for word in sorted(set(WORD.findall(query.lower()))):
            if word in self.postings:
                rows, weights = self.postings[word]
                rarity = math.log(1 + (self.text_count - len(rows) + 0.5) / (len(rows) + 0.5))
                sums.index_add_(0, rows, weights.double() * rarity)
        best = sums.topk(min(count, self.text_count))
        return [row for row, value in zip(best.indices.tolist(), best.values.tolist(), strict=True) if value > 0]

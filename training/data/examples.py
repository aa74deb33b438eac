"""Labelled examples, and their split into training, validation and held-out parts.

Held-out texts must not occur in training in another form.  Texts of one source (a review), on one subject (a film's
title), or in nearly the same words are one group, and a group is never split.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

Label = TypeVar("Label")
WORD = re.compile(r"\w+(?:'\w+)*")


@dataclass(frozen=True)
class Example(Generic[Label]):
    """A text or a pair of texts (first, second), its label, and its origin: `source` names the document, `subjects` its
    topics.
    """

    text: Any  # a str or a tuple of two, depending on the task
    label: Label
    domain: str
    source: str
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Corpus(Generic[Label]):
    """All examples of a data source, and their labels.

    `group_similar`: whether texts in nearly the same words are one group, as mails of one sender are.  It is off where
    short sentences recur: all documents would be one group.  `left_out` counts texts without anything to learn.
    """

    examples: list[Example[Label]]
    labels: tuple[str, ...]
    group_similar: bool = True
    left_out: int = 0


@dataclass(frozen=True)
class Split(Generic[Label]):
    """The parts of a corpus.  `validation` is for choosing between recipes; `held_out` is measured once, for the
    reported figure.
    """

    train: list[Example[Label]]
    validation: list[Example[Label]]
    held_out: list[Example[Label]]


class DisjointSets:
    """Disjoint sets of the numbers below `size` (union-find with path halving)."""

    def __init__(self, size: int) -> None:
        self.parents = list(range(size))

    def find(self, item: int) -> int:
        while self.parents[item] != item:
            self.parents[item] = self.parents[self.parents[item]]
            item = self.parents[item]
        return item

    def join(self, one: int, other: int) -> None:
        self.parents[self.find(one)] = self.find(other)


def word_set(text: str) -> frozenset[str]:
    """Return the words of a text without case and punctuation; a text without words (an emoticon) is its own word."""
    return frozenset(WORD.findall(text.lower())) or frozenset((text,))


def near_duplicates(texts: Sequence[str], threshold: float) -> list[tuple[int, int]]:
    """Return pairs of texts whose words overlap by at least `threshold` (Jaccard).

    Two such texts share one of their rarest words, so only those are compared (prefix filtering, Chaudhuri et al. 2006,
    "A primitive operator for similarity joins in data cleaning").
    """
    bags = [word_set(text) for text in texts]
    counts = Counter(word for bag in bags for word in bag)
    holders: dict[str, list[int]] = defaultdict(list)
    pairs: list[tuple[int, int]] = []
    for index, bag in enumerate(bags):
        rarest = sorted(bag, key=lambda word: (counts[word], word))[: len(bag) - math.ceil(threshold * len(bag)) + 1]
        near = sorted({other for word in rarest for other in holders[word] if sizes_allow(bag, bags[other], threshold)})
        pairs.extend((other, index) for other in near if len(bag & bags[other]) >= threshold * len(bag | bags[other]))
        for word in rarest:
            holders[word].append(index)
    return pairs


def sizes_allow(one: frozenset[str], other: frozenset[str], threshold: float) -> bool:
    """Whether their sizes allow so large an overlap."""
    return min(len(one), len(other)) >= threshold * max(len(one), len(other))


def group_names(examples: Sequence[Example[Any]], group_similar: bool = True, threshold: float = 0.6) -> list[str]:
    """Return the group of each example, named after its alphabetically first source, so that order does not matter."""
    sets = DisjointSets(len(examples))
    first: dict[tuple[str, str], int] = {}
    for index, example in enumerate(examples):
        for key in [(example.domain, example.source), *(("subject", subject) for subject in example.subjects)]:
            sets.join(index, first.setdefault(key, index))
    if group_similar:
        for one, other in near_duplicates([join_texts(example.text) for example in examples], threshold):
            sets.join(one, other)
    names: dict[int, str] = {}
    for index, example in enumerate(examples):
        name, root = f"{example.domain} {example.source}", sets.find(index)
        names[root] = min(name, names.get(root, name))
    return [names[sets.find(index)] for index in range(len(examples))]


def join_texts(text: str | tuple[str, str]) -> str:
    return text if isinstance(text, str) else "\n".join(text)


def hash_share(group: str) -> float:
    """Return the place of a group in [0, 1), a hash that does not depend on other data."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8]) / 2**64


def split_by_source(corpus: Corpus[Label], validation: float, held_out: float) -> Split[Label]:
    """Split by group; `validation` and `held_out` are shares of the groups."""
    parts: Split[Label] = Split([], [], [])
    for example, group in zip(corpus.examples, group_names(corpus.examples, corpus.group_similar), strict=True):
        place = hash_share(group)
        if place < held_out:
            parts.held_out.append(example)
        elif place < held_out + validation:
            parts.validation.append(example)
        else:
            parts.train.append(example)
    return parts


def split_by_domain(corpus: Corpus[Label], left_out: str, validation: float) -> Split[Label]:
    """Hold out one whole domain, and split the others by group.  Groups with examples in the domain are dropped."""
    examples, names = corpus.examples, group_names(corpus.examples, corpus.group_similar)
    touched = {name for example, name in zip(examples, names, strict=True) if example.domain == left_out}
    held_out = [example for example in examples if example.domain == left_out]
    rest = [example for example, name in zip(examples, names, strict=True) if name not in touched]
    parts = split_by_source(replace(corpus, examples=rest), validation, 0.0)
    return Split(parts.train, parts.validation, held_out)

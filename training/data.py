"""Labelled sentences and how they are divided.

It doesn't know where sentences come from or what a network makes of them.  The one idea: what is held out must not
have been seen in another dress.  Sentences of one source (a review), on one subject (a film's title), or in nearly
the same words form a group, and a group falls whole on one side of the split.
"""

import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

WORD = re.compile(r"\w+(?:'\w+)*")


@dataclass(frozen=True)
class Example:
    """A sentence, its label, and where it is from: `source` names the document, `subjects` what it is about."""

    text: str
    label: int
    domain: str
    source: str
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True)
class Split:
    """`validation` is for choosing between recipes; `held_out` is looked at once, for the figure that is reported."""

    train: list[Example]
    validation: list[Example]
    held_out: list[Example]


class Sets:
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


def words(text: str) -> frozenset[str]:
    """The words of a text, case and punctuation gone; a text without any (an emoticon) is its own word."""
    return frozenset(WORD.findall(text.lower())) or frozenset((text,))


def near_duplicates(texts: Sequence[str], threshold: float) -> list[tuple[int, int]]:
    """Pairs of texts whose words overlap by at least `threshold` (Jaccard).

    Two such texts share one of their rarest words, so only those are compared (prefix filtering, Chaudhuri et al.
    2006, "A primitive operator for similarity joins in data cleaning").
    """
    bags = [words(text) for text in texts]
    counts = Counter(word for bag in bags for word in bag)
    holders: dict[str, list[int]] = defaultdict(list)
    pairs: list[tuple[int, int]] = []
    for index, bag in enumerate(bags):
        rarest = sorted(bag, key=lambda word: (counts[word], word))[: len(bag) - math.ceil(threshold * len(bag)) + 1]
        near = sorted({other for word in rarest for other in holders[word]})
        pairs.extend((other, index) for other in near if len(bag & bags[other]) >= threshold * len(bag | bags[other]))
        for word in rarest:
            holders[word].append(index)
    return pairs


def groups(examples: Sequence[Example], threshold: float = 0.6) -> list[str]:
    """Each example's group, named after its alphabetically first source so that order does not matter."""
    sets = Sets(len(examples))
    first: dict[tuple[str, str], int] = {}
    for index, example in enumerate(examples):
        for key in [(example.domain, example.source), *(("subject", subject) for subject in example.subjects)]:
            sets.join(index, first.setdefault(key, index))
    for one, other in near_duplicates([example.text for example in examples], threshold):
        sets.join(one, other)
    names: dict[int, str] = {}
    for index, example in enumerate(examples):
        name, root = f"{example.domain} {example.source}", sets.find(index)
        names[root] = min(name, names.get(root, name))
    return [names[sets.find(index)] for index in range(len(examples))]


def share(group: str) -> float:
    """Where in [0, 1) a group falls: the same on every machine, whatever else is in the data."""
    return int.from_bytes(hashlib.sha256(group.encode()).digest()[:8]) / 2**64


def split_by_source(examples: Sequence[Example], validation: float, held_out: float) -> Split:
    """Divide by group; `validation` and `held_out` are shares of the groups."""
    parts: Split = Split([], [], [])
    for example, group in zip(examples, groups(examples), strict=True):
        place = share(group)
        if place < held_out:
            parts.held_out.append(example)
        elif place < held_out + validation:
            parts.validation.append(example)
        else:
            parts.train.append(example)
    return parts


def split_by_domain(examples: Sequence[Example], left_out: str, validation: float) -> Split:
    """Hold out one domain whole; the others are divided by group.  Groups that reach into the domain are dropped."""
    names = groups(examples)
    touched = {name for example, name in zip(examples, names, strict=True) if example.domain == left_out}
    held_out = [example for example in examples if example.domain == left_out]
    rest = [example for example, name in zip(examples, names, strict=True) if name not in touched]
    parts = split_by_source(rest, validation, 0.0)
    return Split(parts.train, parts.validation, held_out)

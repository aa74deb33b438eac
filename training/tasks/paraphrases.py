"""Pairs of English sentences of one program's user interface, with the same meaning or with different ones.

Two sentences with the same German translation have the same meaning.  For each such pair there is one with different
meanings and about the same word overlap and lengths, so neither predicts the label.  A pair whose one meaning was
translated in two ways is labelled different, wrongly.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

from ..data import home
from ..data.examples import WORD, Corpus, Example
from .pair_task import Bm25Index
from .similarity_task import jaccard_overlap

LABEL_NAMES = ("different", "same")
NEIGHBOURS = 24  # nearest sentences, in each language
Translations = Mapping[str, tuple[str, ...]]  # the translations of each sentence


def corpus(downloads: Path) -> Corpus[int]:
    """Read pairs of Home Assistant's sentences."""
    return pair_sentences(home.corpus(downloads).examples)


def pair_sentences(translated: Sequence[Example[str]]) -> Corpus[int]:
    """Build the corpus.  Pairs that share a sentence are of one group."""
    spelled: dict[str, str] = {}
    found: dict[str, set[str]] = defaultdict(set)
    for example in translated:
        if normalised_text(example.text):
            spelled.setdefault(normalised_text(example.text), example.text)
            found[normalised_text(example.text)].add(normalised_text(example.label))
    meanings = {text: tuple(sorted(meant)) for text, meant in found.items()}
    pairs = same_meaning_pairs(meanings)
    both = [*((pair, 1) for pair in pairs), *((pair, 0) for pair in other_meaning_pairs(meanings, pairs))]
    examples = [
        Example((spelled[one], spelled[other]), label, "en", f"{one} / {other}", (one, other))
        for (one, other), label in both
    ]
    return Corpus(examples, LABEL_NAMES, group_similar=False)


def normalised_text(text: str) -> str:
    """Return the text without case and punctuation."""
    return " ".join(WORD.findall(text.lower()))


def same_meaning_pairs(meanings: Translations) -> list[tuple[str, str]]:
    """Return the pairs of sentences with a common translation."""
    by_translation: dict[str, list[str]] = defaultdict(list)
    for text in sorted(meanings):
        for meaning in meanings[text]:
            by_translation[meaning].append(text)
    return sorted({pair for texts in by_translation.values() for pair in combinations(texts, 2)})


def other_meaning_pairs(meanings: Translations, pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return, for each pair, its first sentence with one of another meaning and about the same similarity.

    That sentence is in no other pair; otherwise nearly all pairs would be of one group.
    """
    texts = sorted(set(meanings) - {text for pair in pairs for text in pair})
    english, german = Bm25Index(texts), Bm25Index([" ".join(meanings[text]) for text in texts])
    chosen: dict[str, tuple[str, str]] = {}
    for one, other in pairs:
        near = [*english.nearest(one, NEIGHBOURS), *german.nearest(" ".join(meanings[one]), NEIGHBOURS)]
        fit = [
            (similarity_distance(surface_similarity(one, texts[row]), surface_similarity(one, other)), rank)
            for rank, row in enumerate(near)
            if texts[row] not in chosen
        ]
        if fit:
            found = texts[near[min(fit)[1]]]
            chosen[found] = (one, found)
    return list(chosen.values())


def surface_similarity(one: str, other: str) -> tuple[float, float]:
    """Return the word overlap of two sentences and the ratio of their lengths."""
    return jaccard_overlap(one, other), min(len(one), len(other)) / max(len(one), len(other))


def similarity_distance(one: tuple[float, float], other: tuple[float, float]) -> float:
    return sum(abs(mine - theirs) for mine, theirs in zip(one, other, strict=True))

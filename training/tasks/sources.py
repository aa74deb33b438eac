"""The data that recipes can name: what is read, and what is learned of it.

Knows neither networks nor recipes.  A new source is a reader and a line here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data import brown, home, prose, questions, samples, spam, vader, wiki
from ..data.examples import Corpus
from . import paraphrases
from .choice_task import Choices
from .label_task import Labels
from .pair_task import Pairs
from .similarity_task import Similar
from .span_task import Spans
from .tag_task import Tags
from .task import Lesson


@dataclass(frozen=True)
class Source:
    """`corpus` reads what it downloads into a folder; `lesson` is made for the labels found there; `sample` is a little
    that is made up, of the same shape; `said` is what a config.json says of a network that learned it."""

    corpus: Callable[[Path], Corpus[Any]]
    lesson: Callable[[tuple[str, ...]], Lesson[Any]]
    sample: Callable[[], Corpus[Any]]
    said: Mapping[str, bool] = field(default_factory=dict)


SOURCES: Mapping[str, Source] = {
    "vader": Source(vader.corpus, Labels, samples.labelled),
    "spam": Source(spam.corpus, Labels, samples.labelled),
    "topics": Source(wiki.topics, Labels, samples.labelled),
    "brown": Source(brown.corpus, lambda _: Tags(), samples.tagged),
    "leads": Source(wiki.leads, lambda _: Pairs(), samples.described),
    "entailment": Source(wiki.entailment, Labels, samples.entailed),
    "questions": Source(questions.corpus, lambda _: Spans(), samples.asked),
    "paraphrases": Source(paraphrases.corpus, Similar, samples.entailed, {"both_orders": True}),
    "choices": Source(wiki.leads, lambda _: Choices(), samples.described),
}


@dataclass(frozen=True)
class Texts:
    """What whole networks learn from: of one language, or with translations.  `sample` is a little that is made up."""

    corpus: Callable[[Path], Corpus[Any]]
    sample: Callable[[], Corpus[Any]]
    translated: bool = False


TEXTS: Mapping[str, Texts] = {
    "prose": Texts(prose.corpus, samples.documents),
    "en-de": Texts(home.corpus, samples.pairs, translated=True),
}

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
from .choice_task import ChoiceTask
from .label_task import LabelTask
from .pair_task import PairTask
from .similarity_task import SimilarityTask
from .span_task import SpanTask
from .tag_task import TagTask
from .task import Task


@dataclass(frozen=True)
class TaskSource:
    """`corpus` reads what it downloads into a folder; `lesson` is made for the labels found there; `sample` is a little
    that is made up, of the same shape; `said` is what a config.json says of a network that learned it."""

    read_corpus: Callable[[Path], Corpus[Any]]
    create_task: Callable[[tuple[str, ...]], Task[Any]]
    create_sample: Callable[[], Corpus[Any]]
    config_fields: Mapping[str, bool] = field(default_factory=dict)


TASK_SOURCES: Mapping[str, TaskSource] = {
    "vader": TaskSource(vader.corpus, LabelTask, samples.labelled_sentences),
    "spam": TaskSource(spam.corpus, LabelTask, samples.labelled_sentences),
    "topics": TaskSource(wiki.topics, LabelTask, samples.labelled_sentences),
    "brown": TaskSource(brown.corpus, lambda _: TagTask(), samples.tagged_sentences),
    "leads": TaskSource(wiki.leads, lambda _: PairTask(), samples.described_sentences),
    "entailment": TaskSource(wiki.entailment, LabelTask, samples.entailment_pairs),
    "questions": TaskSource(questions.corpus, lambda _: SpanTask(), samples.span_questions),
    "paraphrases": TaskSource(paraphrases.corpus, SimilarityTask, samples.entailment_pairs, {"both_orders": True}),
    "choices": TaskSource(wiki.leads, lambda _: ChoiceTask(), samples.described_sentences),
}


@dataclass(frozen=True)
class TextSource:
    """What whole networks learn from: of one language, or with translations.  `sample` is a little that is made up."""

    read_corpus: Callable[[Path], Corpus[Any]]
    create_sample: Callable[[], Corpus[Any]]
    is_translated: bool = False


TEXT_SOURCES: Mapping[str, TextSource] = {
    "prose": TextSource(prose.corpus, samples.documents),
    "en-de": TextSource(home.corpus, samples.translated_sentences, is_translated=True),
}

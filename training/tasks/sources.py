"""The data sources that recipes can name, and the task of each.  A new source is a reader and a line here."""

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
    """A source of labelled data.

    `read_corpus` downloads into a folder and reads.  `create_task` gets the labels found there.  `create_sample`
    generates a few examples of the same form.  `config_fields` are added to the config.json of a model trained on it.
    """

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
    """A source of texts to train networks from scratch, with or without translations.  `create_sample` generates a
    few.
    """

    read_corpus: Callable[[Path], Corpus[Any]]
    create_sample: Callable[[], Corpus[Any]]
    is_translated: bool = False


TEXT_SOURCES: Mapping[str, TextSource] = {
    "prose": TextSource(prose.corpus, samples.documents),
    "en-de": TextSource(home.corpus, samples.translated_sentences, is_translated=True),
}

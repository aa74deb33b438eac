"""Compare formats of the prompts with which generators are asked typed questions, on labelled texts.

A part of benchmarks.decisions (`--figures formats`). A format says how the text, the question, the options and the
labels are written; the first is the one that the server uses. All formats but one end with the question, so that the
questions of a call share the tokens of their text. Figures of each model and set:

| figure | meaning |
|---|---|
| accuracy | share of texts whose likeliest option is the answer |
| AUC | how well probabilities order the texts, the mean of each option against the others |
| log loss | mean of -log(probability of the answer), in nats |
| label mass | probability of all labels together, among all tokens |

Rows of several orders of the options are the means over choices and scores: a predicate's options have no order.

A constant preference for an option changes the accuracy and not the AUC. Calibration removes such a preference.
"""

import math
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from unittest.mock import patch

from benchmarks.decision_sets import LabelledSet
from benchmarks.speculation import Counting
from polyhead.service.api.dialects.systemone.wire import SystemOneRequest, read_systemone
from polyhead.service.api.shared.decision_calls import score_read
from polyhead.service.config.settings import Settings
from polyhead.service.core.model import Model
from polyhead.service.core.request import DEFAULT_TERMS
from polyhead.service.decisions import generator_reads, label_tree
from polyhead.service.decisions.label_tree import Spellings
from polyhead.service.decisions.option_orders import Order
from polyhead.service.decisions.question import (
    DecisionRequest,
    OptionScores,
    Question,
    QuestionKind,
    average_orders,
)
from polyhead.service.engine.engine import Engine
from polyhead.service.metrics import Metrics
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from polyhead.service.text.encoder_outputs import SubmittedAhead
from polyhead.service.text.generation_request import ChatMessages

Row = dict[str, object]
SERVED = "as served"
SHORT: Mapping[QuestionKind, str] = {
    "predicate": "Answer Yes or No.",
    "choice": "Answer with a letter.",
    "score": "Answer with a number.",
}
AHEAD = 4096  # tokens of prompts in the engine at once


@dataclass(frozen=True)
class Format:
    """`text` holds {state}; `question` {question}, and an option {label} and {option}. `begun` begins the answer.

    `letters`: predicates too are answered by a letter.
    """

    system: str = ""
    text: str = "{state}"
    question: str = "Question: {question}"
    option: str = "{label}: {option}"
    options: str = "Options:"  # a line above them
    hints: Mapping[QuestionKind, str] = field(default_factory=lambda: generator_reads.ANSWER_HINTS)
    begun: str = generator_reads.ANSWER
    letters: bool = False
    listed: bool = False  # yes and no stand in lines of their own
    first: bool = False  # the question before the text

    def labels(self, kind: QuestionKind, count: int) -> tuple[Spellings, ...]:
        kind = "choice" if self.letters and kind == "predicate" else kind
        return label_tree.choose_labels(kind, count)

    def ask(self, question: Question, order: Order) -> str:
        labels = self.labels(question.kind, len(question.options))
        lines = [self.question.format(question=question.instructions)] if question.instructions else []
        plain = question.kind == "predicate" and not self.letters
        options = list[str]()
        for (label, *_), option in zip(labels, (question.options[index] for index in order), strict=True):
            if plain and self.listed and not option.description:
                options.append(label.lower())
            elif not plain or option.description:
                text = option.description if plain else option.text
                options.append(self.option.format(label=label, option=text))
        lines += [self.options, *options] if self.options and not plain else options
        hint = self.hints["choice" if self.letters and question.kind == "predicate" else question.kind]
        return "\n".join((*lines, hint) if hint else lines)


VLLM: Mapping[QuestionKind, str] = {  # the wording of vLLM's route of the same name
    "predicate": "Answer with yes or no only.",
    "choice": "Answer with the letter of one option only.",
    "score": "Answer with the number of one level only.",
}
NONE: Mapping[QuestionKind, str] = {"predicate": "", "choice": "", "score": ""}
FORMATS = {
    SERVED: Format(),
    "short hints": Format(hints=SHORT),
    "as vLLM": Format(hints=VLLM, listed=True),
    "no hint": Format(hints=NONE),
    "text named": Format(text="Text: {state}"),
    "text quoted": Format(text='Text:\n"""\n{state}\n"""'),
    "task first": Format(text="Read the text, then answer the question about it.\n\n{state}"),
    "task first, text quoted": Format(
        text='Read the text, then answer the question about it.\n\nText:\n"""\n{state}\n"""'
    ),
    "task as system": Format(system="You answer questions about a text.", text="Text: {state}"),
    "no Question:": Format(question="{question}"),
    "A. option": Format(option="{label}. {option}"),
    "(A) option": Format(option="({label}) {option}"),
    "no Options:": Format(options=""),
    "The answer is": Format(begun="The answer is"),
    "letters for yes": Format(letters=True),
    "question first": Format(first=True, text="Text: {state}"),
}


def prompts_of(format: Format) -> type[generator_reads.QuestionPrompts]:
    """The class that writes prompts in a format."""

    class FormattedPrompts(generator_reads.QuestionPrompts):
        def __init__(self, model: Model, request: DecisionRequest) -> None:
            self._model, self._request = model, request
            self._before: list[int] = []
            state = "\n\n".join(filter(None, (request.instructions, request.state)))
            self._text = format.text.format(state=state)

        def encode(self, question: Question, order: Order) -> list[int]:
            asked = format.ask(question, order)
            parts = (asked, self._text) if format.first else (self._text, asked)
            content = "\n\n".join(parts)
            system = ({"role": "system", "content": format.system},) if format.system else ()
            chat = ChatMessages((*system, {"role": "user", "content": content}))
            written = generator_reads.render_chat(self._model, chat, question.field) + format.begun
            return self._encode(written, question.field)

    return FormattedPrompts


@dataclass(frozen=True)
class Quality:
    """Figures of one set; see the module's table. `ece` is the expected calibration error over ten equal bins."""

    texts: int
    accuracy: float
    auc: float
    log_loss: float
    brier: float
    ece: float
    label_mass: float


def measure(answers: Sequence[int], found: Sequence[OptionScores]) -> Quality:
    shares = [each.probabilities for each in found]
    right = [each.chosen == answer for each, answer in zip(found, answers, strict=True)]
    options = range(len(shares[0]))
    return Quality(
        len(answers),
        statistics.fmean(right),
        statistics.fmean(
            area_under_curve([each[option] for each in shares], [answer == option for answer in answers])
            for option in options
            if option in answers
        ),
        statistics.fmean(-math.log(max(each[answer], 1e-12)) for each, answer in zip(shares, answers, strict=True)),
        statistics.fmean(
            sum((each[option] - (option == answer)) ** 2 for option in options)
            for each, answer in zip(shares, answers, strict=True)
        ),
        calibration_error([max(each) for each in shares], right),
        statistics.fmean(each.label_mass for each in found),
    )


def area_under_curve(scores: Sequence[float], positives: Sequence[bool]) -> float:
    """The share of pairs of a positive and another in which the positive scores higher; equal ones count half."""
    yes = [score for score, positive in zip(scores, positives, strict=True) if positive]
    no = [score for score, positive in zip(scores, positives, strict=True) if not positive]
    if not yes or not no:
        return math.nan
    return sum((a > b) + (a == b) / 2 for a in yes for b in no) / (len(yes) * len(no))


def calibration_error(confidences: Sequence[float], right: Sequence[bool], bins: int = 10) -> float:
    """The expected calibration error: of each bin |accuracy - mean confidence|, weighted by its texts."""
    groups: dict[int, list[tuple[float, bool]]] = {}
    for confidence, hit in zip(confidences, right, strict=True):
        groups.setdefault(min(int(confidence * bins), bins - 1), []).append((confidence, hit))
    gaps = (abs(sum(confidence for confidence, _ in each) - sum(hit for _, hit in each)) for each in groups.values())
    return sum(gaps) / len(right)


@dataclass
class Asking:
    """A model in an engine of this process, which is asked below the dialects."""

    registry: ModelRegistry
    model: Model

    async def answer(self, labelled: LabelledSet, permutations: int = 1) -> list[OptionScores]:
        """The scores of each text, in order. Prompts are written by what generator_reads has at the time."""
        reads = []
        for number, example in enumerate(labelled.examples):
            question = {**labelled.ask(example), "permutations": permutations}
            wire = SystemOneRequest.model_validate({"state": example.text, "questions": {"it": question}})
            [orders] = generator_reads.read_labels(
                self.model, read_systemone(wire), f"{number}", DEFAULT_TERMS, lambda size: None
            )
            reads.append(orders)
        requests = [each for orders in reads for read in orders for each in read.requests]
        sources = SubmittedAhead(requests, lambda batch: self.registry.submit(self.model, batch), AHEAD)
        return [average_orders([await score_read(read, sources) for read in orders]) for orders in reads]


@asynccontextmanager
async def asking(source: str, threads: int) -> AsyncIterator[Asking]:
    chosen = Settings(models={"model": source}, threads=threads, draft_tokens=0)
    engine = Engine(Counting(), threads=choose_placement(chosen).torch_threads)
    registry = ModelRegistry(engine, chosen, Metrics([]))
    engine.start()
    try:
        await registry.load_all()
        [model] = registry.models()
        yield Asking(registry, model)
    finally:
        await engine.close(0)


async def compare(
    it: Asking, sets: Sequence[LabelledSet], formats: Sequence[str], permutations: Sequence[int] = ()
) -> AsyncIterator[Row]:
    """A row for each set and format, then one for each number of orders in which options are read.

    Formats take turns on a set, so that they find its texts in the cache.
    """
    for labelled in sets:
        answers = [each.answer for each in labelled.examples]
        for title in formats:
            with ExitStack() as patches:
                if title != SERVED:
                    form = FORMATS[title]
                    patches.enter_context(patch.object(generator_reads, "QuestionPrompts", prompts_of(form)))
                    patches.enter_context(patch.object(generator_reads, "choose_labels", form.labels))
                found = await it.answer(labelled)
            yield {"format": title, "set": labelled.name, **asdict(measure(answers, found))}
        for orders in permutations:
            if labelled.question["type"] != "noul":
                found = await it.answer(labelled, orders)
                yield {"format": f"{orders} orders", "set": labelled.name, **asdict(measure(answers, found))}

"""Questions to encoders: which texts a head reads for a question, and how its scores become those of the options.

| head | reads | score of an option |
|---|---|---|
| entailment (NLI) | the text and a hypothesis for each option | its entailment |
| cross-encoder | the question with an option, and the text | its relevance |
| labels of its own | the text | the probability of the label with its name |
| labels of the request | the text with the options | its score |
| multiple choice | the text with the question, and the options | its score |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.errors import BadRequest, TooMany
from ..core.model import Model
from ..core.request import Task
from ..core.text_limits import check_characters
from ..text.answer_delta import NO_USAGE, Usage
from ..text.encoder_inputs import EncodingRequest
from ..text.zero_shot import PLACEHOLDER, fill_hypothesis, softmax
from .option_orders import Order, choose_orders
from .question import DecisionRequest, Option, OptionScores, Question

Table = NDArray[np.float64]  # scores of a head [inputs, columns]
Scored = tuple[NDArray[np.float64], float]  # probabilities of the options, and the mass of their labels
Cell = tuple[int, int]  # an input and a column of its scores
HYPOTHESIS = f"This example is {PLACEHOLDER}."
MAX_SHOWN_LABELS = 20
MAX_READ_OPTIONS = 1 << 16  # of all questions of a call, in all of their orders


@dataclass(frozen=True, slots=True)
class HeadRead:
    """The inputs of one question for a head, and the function from its scores to the probabilities of the options with
    the mass of the labels.

    `cells` has for each option the input and the column that its score comes from; the text is the `text_index`-th of
    its pair, and begins `text_start` characters into it. `ignored` are the fields of the question that the head does
    not read.
    """

    encoding: EncodingRequest
    score: Callable[[Table], Scored]
    cells: Sequence[Cell]
    text_index: int = 0
    text_start: int = 0
    ignored: tuple[str, ...] = ()

    def score_options(self, values: Sequence[Sequence[float]], usage: Usage = NO_USAGE) -> OptionScores:
        """The probabilities from the head's outputs for the inputs, in their order."""
        probabilities, mass = self.score(np.asarray(values, np.float64))
        return OptionScores(tuple(probabilities.tolist()), mass, usage=usage)


def read_heads(model: Model, request: DecisionRequest, check: Callable[[], None]) -> list[list[HeadRead]]:
    """What the head reads for each question, once for each order of its options where the order changes its scores.

    `check` is called before each question, and stops the work by raising. Raises BadRequest for a question that it
    cannot answer.
    """
    state = "\n\n".join(filter(None, (request.instructions, request.state)))
    reads = list[list[HeadRead]]()
    for question in request.questions:
        check()
        orders = choose_orders(len(question.options), count_orders(model, question))
        reads.append([HEAD_READS[model.task](model, state, request.field, question, order) for order in orders])
    return reads


def count_orders(model: Model, question: Question) -> int:
    """How many orders of the options are asked for, where the order changes the scores of the head."""
    return question.permutations if model.task == "label_texts" and question.kind != "predicate" else 1


def check_read_size(model: Model, request: DecisionRequest) -> None:
    """Raise TooMany or TooLong for questions that make too many or too long texts, before any is made."""
    check_characters(model, len(request.instructions) + len(request.state), request.field)
    for question in request.questions:
        check_characters(model, len(question.instructions), question.field)
    count = sum(count_orders(model, question) * len(question.options) for question in request.questions)
    if count > MAX_READ_OPTIONS:
        message = f"they have {count} options in all orders, at most {MAX_READ_OPTIONS} a call are read"
        raise TooMany(f"questions: {message}; ask fewer, or in fewer orders", param="questions")


def count_written_characters(model: Model, request: DecisionRequest) -> int:
    """Characters of all texts that `read_heads` makes, at most: a text holds the instructions and an option, which
    takes each of their places, or the whole text and the instructions.
    """
    state = len(request.instructions) + len(request.state)
    total = 0
    for question in request.questions:
        asked, places = len(question.instructions), 1 + question.instructions.count(PLACEHOLDER)
        options = sum(len(HYPOTHESIS) + places * len(option.text) for option in question.options)
        total += count_orders(model, question) * (state + asked * (1 + len(question.options)) + options)
    return total


def read_entailment(model: Model, state: str, field: str, question: Question, _: Order) -> HeadRead:
    """A hypothesis for each option, whose entailments are compared; of a predicate without descriptions one."""
    entails = model.entailment_label
    assert entails is not None, "the classifier has an entailment label"
    contradicts = len(model.labels) - 1 if entails == 0 else 0
    if question.is_statement:
        hypotheses, cells = [require_instructions(question)], [(0, entails), (0, contradicts)]
    else:
        hypotheses = [write_hypothesis(question, option) for option in question.options]
        cells = [(index, entails) for index in range(len(hypotheses))]

    def score(table: Table) -> Scored:
        return compare(np.array([table[cell] for cell in cells]))

    return read_pairs(field, [(state, hypothesis) for hypothesis in hypotheses], score, cells)


def write_hypothesis(question: Question, option: Option) -> str:
    """The statement that an option is the answer. A place for it in the instructions is filled with the option."""
    if PLACEHOLDER in question.instructions:
        return fill_hypothesis(question.instructions, option.description or option.name)
    stated = option.description or fill_hypothesis(HYPOTHESIS, option.name)
    return f"{question.instructions} {stated}" if question.instructions else stated


def read_relevance(_: Model, state: str, field: str, question: Question, __: Order) -> HeadRead:
    """The question with each option as a query, whose relevances are compared; of a predicate without descriptions the
    question alone.
    """
    if question.is_statement:
        queries, cells = [require_instructions(question)], [(0, 0), (0, 0)]
    else:
        queries = [" ".join(filter(None, (question.instructions, option.text))) for option in question.options]
        cells = [(index, 0) for index in range(len(queries))]

    def score(table: Table) -> Scored:
        return compare(with_zero(table[:, 0]) if question.is_statement else table[:, 0])

    return replace(read_pairs(field, [(query, state) for query in queries], score, cells), text_index=1)


def read_own_labels(model: Model, state: str, field: str, question: Question, _: Order) -> HeadRead:
    """The text; the options are labels of the classifier. A predicate asks for one of them."""
    wanted = [question.instructions] if question.kind == "predicate" else [each.name for each in question.options]
    columns = [find_label(model, name, question) for name in wanted]

    def score(table: Table) -> Scored:
        shares = table[0, columns]
        if question.kind == "predicate":
            return np.array([shares[0], 1 - shares[0]]), 1.0
        mass = float(shares.sum())
        return shares / mass if mass else np.full(len(shares), 1 / len(shares)), min(mass, 1.0)

    ignored = ["instructions"] if question.kind != "predicate" and question.instructions else []
    ignored += [question.options_field] if question.has_descriptions else []
    cells = [(0, columns[index % len(columns)]) for index in range(len(question.options))]
    fields = tuple(f"{question.field}.{name}" for name in ignored)
    return HeadRead(EncodingRequest(field=field, inputs=(state,)), score, cells, ignored=fields)


def find_label(model: Model, name: str, question: Question) -> int:
    """The index of a label. BadRequest if the classifier has none of that name."""
    known = [label.casefold() for label in model.labels]
    if name.casefold() in known:
        return known.index(name.casefold())
    shown = ", ".join(model.labels[:MAX_SHOWN_LABELS])
    part = "instructions" if question.kind == "predicate" else "options"
    message = f"{model.name} is a classifier, so {part} must be labels of it ({shown}), got {name[:60]!r}"
    raise BadRequest(f"{question.field}: {message}", param=question.field)


def read_given_labels(_: Model, state: str, field: str, question: Question, order: Order) -> HeadRead:
    """The question and the text, with the options as labels; of a predicate the text with the question as the only
    label.
    """
    if question.kind == "predicate":
        text = state
        labels: tuple[str, ...] = (require_instructions(question),)
    else:
        text = "\n\n".join(filter(None, (question.instructions, state)))
        labels = tuple(question.options[index].text for index in order)

    def score(table: Table) -> Scored:
        return compare(with_zero(table[0]) if question.kind == "predicate" else table[0, np.argsort(order)])

    is_dropped = question.kind == "predicate" and question.has_descriptions
    ignored = (f"{question.field}.{question.options_field}",) if is_dropped else ()
    places = np.argsort(order).tolist()  # of each option in the order
    cells = [(0, place % len(labels)) for place in places]
    encoding = EncodingRequest(field=field, inputs=(text,), labels=labels, raw=True)
    return HeadRead(encoding, score, cells, text_start=len(text) - len(state), ignored=ignored)


def read_choices(_: Model, state: str, field: str, question: Question, __: Order) -> HeadRead:
    """The text with the question, and each option after it."""
    text = "\n\n".join(filter(None, (state, question.instructions)))

    def score(table: Table) -> Scored:
        return compare(table[:, 0])

    pairs = [(text, option.text) for option in question.options]
    return read_pairs(field, pairs, score, [(index, 0) for index in range(len(pairs))])


def read_pairs(
    field: str, pairs: Sequence[tuple[str, str]], score: Callable[[Table], Scored], cells: Sequence[Cell]
) -> HeadRead:
    """Pairs of which the head's raw scores are compared."""
    return HeadRead(EncodingRequest(field=field, inputs=tuple(pairs), raw=True), score, cells)


def compare(logits: Table) -> Scored:
    """The probabilities of options from their logits; such a head has no other answers."""
    return softmax(logits), 1.0


def with_zero(logit: Table) -> Table:
    """The logits of yes and no of a head that scores yes alone: their softmax is the sigmoid."""
    return np.array([logit[0], 0.0])


def require_instructions(question: Question) -> str:
    if not question.instructions:
        message = "has neither instructions nor criteria, so there is nothing to ask"
        raise BadRequest(f"{question.field}: {message}", param=question.field)
    return question.instructions


def read_classifier(model: Model, state: str, field: str, question: Question, order: Order) -> HeadRead:
    entails = model.entailment_label
    return (read_own_labels if entails is None else read_entailment)(model, state, field, question, order)


HEAD_READS: Mapping[Task, Callable[[Model, str, str, Question, Order], HeadRead]] = {
    "classify": read_classifier,
    "rank": read_relevance,
    "choose": read_choices,
    "label_texts": read_given_labels,
}
DECISION_TASKS: tuple[Task, ...] = ("generate", "decide", *HEAD_READS)

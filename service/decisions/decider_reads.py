"""Questions to models that were made for them, in their own prompts (service.text.decision_prompts)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from polyhead.models.core.decision_prompt import LabelSchemaPrompt

from ..core.model import Model
from ..core.request import Encode, Terms
from ..resources.request_memory import BYTES_PER_SHARED_TOKEN, BYTES_PER_TEXT, BYTES_PER_TOKEN
from ..text.answer_delta import NO_USAGE, Usage
from ..text.decision_prompts import EncodedDecision, QuestionedText, QuestionText, count_characters, read_decision
from ..text.zero_shot import softmax
from .option_orders import Order, choose_orders
from .question import DecisionRequest, OptionScores, Question

FALSE, TRUE = "false", "true"


@dataclass(frozen=True, slots=True)
class DeciderRead:
    """The requests for some questions of a call, each with its options in one order. `indices` are their places among
    the questions, and `asked` is what the model reads for them.
    """

    indices: tuple[int, ...]
    asked: QuestionedText
    encoded: EncodedDecision

    @property
    def requests(self) -> tuple[Encode, ...]:
        return self.encoded.requests

    def score_options(
        self, questions: Sequence[Question], outputs: Sequence[Sequence[float]], usages: Sequence[Usage]
    ) -> dict[int, OptionScores]:
        """The probabilities of the options of each question. What a request costs is counted for its first question."""
        found, counted = dict[int, OptionScores](), set[int]()
        logits = self.encoded.read_logits(outputs)
        for index, place, row in zip(self.indices, self.encoded.scores, logits, strict=True):
            shares = softmax(np.asarray(row, np.float64)).tolist()
            usage = NO_USAGE if place.request in counted else usages[place.request]
            counted.add(place.request)
            options = (find_model_option(questions[index], option) for option in range(len(shares)))
            found[index] = OptionScores(tuple(shares[option] for option in options), usage=usage)
        return found

    def find_cell(self, index: int, question: Question, option: int) -> tuple[Encode, int]:
        """The request that the score of an option of a question comes from, and the column of its output."""
        place = self.encoded.scores[self.indices.index(index)]
        return self.requests[place.request], place.first + place.order.index(find_model_option(question, option))


def read_deciders(
    model: Model, request: DecisionRequest, call: str, terms: Terms, claim: Callable[[int], None]
) -> list[DeciderRead]:
    """The reads of all questions, then those of the questions that have a second order of their options, and so on.

    `claim` is called with the bytes of each turn's requests before they are made, and with 0 between slices of the
    texts; it stops the work by raising. Raises BadRequest, EmptyInput, TooLong or TooMany.
    """
    text = "\n\n".join(filter(None, (request.instructions, request.state)))
    orders = [choose_orders(len(question.options), question.permutations) for question in request.questions]
    reads = list[DeciderRead]()
    for turn in range(max(map(len, orders))):
        indices = tuple(index for index, some in enumerate(orders) if turn < len(some))
        asked = tuple(write_question(request.questions[index], orders[index][turn]) for index in indices)
        wanted = QuestionedText(request.field, text, asked, request.is_joint)
        claim(request_bytes(model, wanted))
        encoded = read_decision(model, wanted, f"{call}-{turn}", terms, partial(claim, 0))
        reads.append(DeciderRead(indices, wanted, encoded))
    return reads


def request_bytes(model: Model, asked: QuestionedText) -> int:
    """Bytes of the requests for questions, with a token for each character. Each has the text, unless all are read in
    one sequence."""
    sizes = [count_characters(question) for question in asked.questions]
    is_joint = asked.is_joint and isinstance(model.decision_prompt, LabelSchemaPrompt)
    sizes = [sum(sizes)] if is_joint else sizes
    own = sum(min(size, model.max_tokens) for size in sizes)
    slots = sum(min(len(asked.text) + size, model.max_tokens) for size in sizes)
    return BYTES_PER_TEXT * len(sizes) + BYTES_PER_SHARED_TOKEN * slots + BYTES_PER_TOKEN * own


def find_model_option(question: Question, option: int) -> int:
    """The index of an option as these models know it: theirs of a predicate are false and true."""
    return len(question.options) - 1 - option if question.kind == "predicate" else option


def write_question(question: Question, order: Order) -> QuestionText:
    """The question as these models know it: a predicate is answered by false or true, in this order."""
    if question.kind != "predicate":
        options = tuple((option.name, option.description) for option in question.options)
        return QuestionText(question.field, question.kind, question.instructions, options, order)
    yes, no = question.options
    options = (FALSE, no.description), (TRUE, yes.description)
    turned = tuple(len(order) - 1 - option for option in order[::-1])
    return QuestionText(question.field, "noul", question.instructions, options, turned)

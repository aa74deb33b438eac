"""What every dialect reads a decision into: a text, typed questions about it, and their answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..explain.explain_request import ExplainParameters
from ..text.answer_delta import NO_USAGE, Usage

QuestionKind = Literal["predicate", "choice", "score"]
PROMPT_VERSION = 1  # of the texts that models read for a question: a calibration holds for one version
MAX_QUESTIONS = 400  # of one call
MAX_OPTIONS = 255  # of one question
MAX_PERMUTATIONS = 24  # orders of the options of one question
CHARACTERS_PER_OPTION = 16  # cost of each option beside its characters, in characters that are tokenised
COPIED_CHARACTERS = 16  # characters of a text whose tokens are copied at the cost of one that is tokenised


@dataclass(frozen=True, slots=True)
class Option:
    """A possible answer as the model reads it, with what it means; an empty description says nothing."""

    name: str
    description: str = ""

    @property
    def text(self) -> str:
        return f"{self.name} - {self.description}" if self.description else self.name


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a text. `field` is its path in the request, `name` what the client calls it.

    Options of a predicate are yes and no, in this order; those of a score are its levels, the lowest first. The
    probabilities are averaged over `permutations` orders in which the model reads the options. With `explain` the
    chosen option is explained. `options_field` is the name of the field with the options and their descriptions.
    """

    field: str
    name: str
    kind: QuestionKind
    instructions: str
    options: tuple[Option, ...]
    permutations: int = 1
    explain: ExplainParameters | None = None
    options_field: str = "criteria"

    @property
    def is_statement(self) -> bool:
        """Whether it is a yes or no of which neither is described: its instructions alone are asked."""
        return self.kind == "predicate" and not self.has_descriptions

    @property
    def has_descriptions(self) -> bool:
        return any(option.description for option in self.options)


@dataclass(frozen=True, slots=True)
class DecisionRequest:
    """Questions about `state`, which is `field` in the request. `instructions` are read before it. Only requests with
    the same `salt` share cached prefixes. Answers of less than `min_confidence` are refused. With `is_joint` all
    questions are read in one sequence, so that the answer to one may depend on the others.
    """

    field: str
    state: str
    questions: tuple[Question, ...]
    instructions: str = ""
    salt: str = ""
    min_confidence: float = 0.0
    is_joint: bool = False


@dataclass(frozen=True, slots=True)
class OptionScores:
    """The probabilities of a question's options, which sum to 1.

    `label_mass` is the probability of all options together among everything that the model may answer, and
    `is_label_likeliest` whether its likeliest answer is one of them; of a head that only scores options 1 and true.
    `calibration` names the calibration that was applied; empty: none was. `explanation` is the object that explains the
    chosen option, where it was asked for.
    """

    probabilities: tuple[float, ...]
    label_mass: float = 1.0
    is_label_likeliest: bool = True
    usage: Usage = NO_USAGE
    calibration: str = ""
    explanation: Mapping[str, Any] | None = None

    @property
    def chosen(self) -> int:
        """The index of the likeliest option, the first of equal ones."""
        return self.probabilities.index(max(self.probabilities))

    @property
    def confidence(self) -> float:
        """The probability of the chosen option; without calibration among everything that the model may answer."""
        share = 1.0 if self.calibration else self.label_mass
        return self.probabilities[self.chosen] * share

    @property
    def mean_level(self) -> float:
        """The expected level of a score, from 0."""
        return sum(level * probability for level, probability in enumerate(self.probabilities))


def count_reading(question: Question, orders: int, state: int) -> int:
    """The cost of writing a question in so many orders after a text of `state` characters, in characters."""
    options = sum(CHARACTERS_PER_OPTION + len(option.name) + len(option.description) for option in question.options)
    return orders * (len(question.instructions) + options + state // COPIED_CHARACTERS)


def average_orders(orders: Sequence[OptionScores]) -> OptionScores:
    """The mean of the scores of one question over several orders of its options."""
    if len(orders) == 1:
        return orders[0]
    count = len(orders)
    columns = zip(*(each.probabilities for each in orders), strict=True)
    return OptionScores(
        tuple(sum(column) / count for column in columns),
        sum(each.label_mass for each in orders) / count,
        all(each.is_label_likeliest for each in orders),
        sum((each.usage for each in orders), NO_USAGE),
    )

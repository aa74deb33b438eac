"""How a model reads questions about a text: Laya (package laya) and GLiNER2 (Zaratiana et al. 2025, arXiv:2507.18546).

A question of the kind "choice" has options of which one holds, "score" has levels in ascending order, and "noul" is
answered by false or true, in this order.
"""

from dataclasses import dataclass
from typing import Literal, get_args

PromptKind = Literal["choice", "score", "noul"]
PROMPT_KINDS: tuple[PromptKind, ...] = get_args(PromptKind)  # in the order of the vectors that a head has of them
MARKED_OPTION_TOKENS = 48  # of an option after a mark, which the package laya does not read beyond
OPTION_COUNTS: tuple[tuple[str, int], ...] = (("2", 2), ("3-5", 5), ("6-10", 10))  # named groups, each with the largest
MANY_OPTIONS = "11+"
COUNT_NAMES = (*(name for name, _ in OPTION_COUNTS), MANY_OPTIONS)

TASK_MARK, LABEL_MARK, DESCRIPTION_MARK = "[P]", "[L]", "[DESCRIPTION]"
SCHEMA_BORDER, TEXT_BORDER = "[SEP_STRUCT]", "[SEP_TEXT]"
SCHEMA_TOKENS = (
    *(SCHEMA_BORDER, TEXT_BORDER, TASK_MARK, "[C]", "[E]", "[R]", LABEL_MARK),
    *("[EXAMPLE]", "[OUTPUT]", DESCRIPTION_MARK),
)  # of the vocabulary; no text of a question may have one


def name_count(count: int) -> str:
    """The name of the group of questions with so many options."""
    return next((name for name, largest in OPTION_COUNTS if count <= largest), MANY_OPTIONS)


@dataclass(frozen=True)
class OptionMarkPrompt:
    """Each question is read on its own: `[CLS] kind question: instructions [SEP] [MASK] option [MASK] option [SEP] text
    [SEP]`, where `opening`, `separator` and `mark` are the ids of these tokens.

    Instructions and options have `question_tokens` at most. Scores are divided by a temperature: that of
    `count_temperatures` for the question's kind and number of options, if it has one, else that of `temperatures` for
    its kind, in the order of PROMPT_KINDS.
    """

    opening: int
    separator: int
    mark: int
    question_tokens: int
    temperatures: tuple[float, ...] = (1.0, 1.0, 1.0)
    count_temperatures: tuple[tuple[str, str, float], ...] = ()  # kind, COUNT_NAMES, temperature

    def find_temperature(self, kind: PromptKind, count: int) -> float:
        """The temperature of a question with `count` options."""
        name = name_count(count)
        for its_kind, its_count, temperature in self.count_temperatures:
            if (its_kind, its_count) == (kind, name):
                return temperature
        return self.temperatures[PROMPT_KINDS.index(kind)]


@dataclass(frozen=True)
class LabelSchemaPrompt:
    """Questions are read before the text's words, one or several in a sequence: `( [P] instructions ( [L] option [L]
    option ) ) [SEP_STRUCT] ( [P] ... ) ) [SEP_TEXT] word word`. Descriptions of options follow the instructions. Scores
    are divided by `temperature`, whatever the kind.
    """

    temperature: float = 1.0


DecisionPrompt = OptionMarkPrompt | LabelSchemaPrompt

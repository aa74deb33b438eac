"""The summary of `polyhead decide`: what was answered, for each question."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LOW_LABEL_MASS = 0.5  # below it, the model would rather have answered something else
MAX_SHOWN_CHOICES = 12


@dataclass
class QuestionSummary:
    """The answers to one question."""

    choices: Counter[str] = field(default_factory=Counter)
    confidence: float = 0.0
    score: float = 0.0
    low_mass: int = 0

    def add(self, answer: Mapping[str, Any], diagnostics: Mapping[str, Any]) -> None:
        self.choices[chosen_option(answer)] += 1
        self.confidence += answer["confidence"]
        self.score += answer.get("score", 0.0)
        self.low_mass += diagnostics.get("label_mass", 1.0) < LOW_LABEL_MASS

    def describe(self, name: str) -> str:
        count = self.choices.total()
        shown = [f"{option} {times}" for option, times in self.choices.most_common(MAX_SHOWN_CHOICES)]
        more = len(self.choices) - len(shown)
        parts = [", ".join(shown) + (f" and {more} more" if more else "")]
        parts.append(f"mean confidence {self.confidence / count:.3f}")
        parts += [f"mean score {self.score / count:.3f}"] if self.score else []
        parts += [f"label mass below {LOW_LABEL_MASS} in {self.low_mass}"] if self.low_mass else []
        return f"{name}: {'; '.join(parts)}"


def chosen_option(answer: Mapping[str, Any]) -> str:
    """The likeliest option of an answer: yes or no, a choice, or a level."""
    shares = answer["probabilities"]
    return str(max(shares, key=shares.__getitem__))


@dataclass
class DecisionSummary:
    """The answers to all questions, and the rows that failed."""

    rows: int = 0
    failed: int = 0
    questions: dict[str, QuestionSummary] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count one line of the output."""
        self.rows += 1
        self.failed += "error" in line
        for name, answer in line.get("answers", {}).items():
            diagnostics = line.get("diagnostics", {}).get(name, {})
            self.questions.setdefault(name, QuestionSummary()).add(answer, diagnostics)

    def describe(self, seconds: float, asked: int) -> Iterator[str]:
        """Lines for people. `asked` rows were asked in `seconds`; those before were there already."""
        before = f", {self.rows - asked} of them before" if asked < self.rows else ""
        yield f"{self.rows} rows{before}, {self.failed} failed, {asked / max(seconds, 1e-9):.1f} rows/s"
        for name, question in self.questions.items():
            yield question.describe(name)

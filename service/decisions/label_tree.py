"""Labels of options, and the tree of their tokens.

A generator answers a question with a label. The probability of a label is that of its tokens, each given those before
it; so one read of the next token's probabilities is needed for each inner node of the tree of all labels' tokens. Of
labels that are one token each this is a single read, after the prompt.
"""

import math
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .question import QuestionKind

Spellings = tuple[str, ...]  # texts that count as the same label
Path = tuple[int, ...]  # tokens from the end of the prompt to a node
YES_OR_NO: tuple[Spellings, ...] = (("Yes", "yes"), ("No", "no"))
LETTERS = string.ascii_uppercase


def choose_labels(kind: QuestionKind, count: int) -> tuple[Spellings, ...]:
    """The labels of `count` options: Yes and No, the numbers of levels, letters, or two letters where one is too few.
    None is the beginning of another.
    """
    if kind == "predicate":
        return YES_OR_NO
    if kind == "score" and count <= len(string.digits):
        return tuple((digit,) for digit in string.digits[:count])
    if count <= len(LETTERS):
        return tuple((letter,) for letter in LETTERS[:count])
    return tuple((LETTERS[index // len(LETTERS)] + LETTERS[index % len(LETTERS)],) for index in range(count))


@dataclass(frozen=True, slots=True)
class LabelTree:
    """The tokens of labels: of each the paths of its spellings. `reads` are the paths to the inner nodes, the prompt's
    end first, with the tokens that may follow there.
    """

    labels: tuple[tuple[Path, ...], ...]
    reads: Mapping[Path, tuple[int, ...]]

    @classmethod
    def build(cls, labels: Sequence[Sequence[Path]]) -> "LabelTree":
        """The tree of `labels`. ValueError if one of them is the beginning of another, or equal to it."""
        reads: dict[Path, dict[int, None]] = {(): {}}
        leaves = [path for paths in labels for path in dict.fromkeys(paths)]
        for path in leaves:
            for length, token in enumerate(path):
                reads.setdefault(path[:length], {})[token] = None
        if len(set(leaves)) < len(leaves) or not reads.keys().isdisjoint(leaves):
            raise ValueError("the tokens of a label are those of another, or begin those of another")
        return cls(
            tuple(tuple(dict.fromkeys(paths)) for paths in labels),
            {path: tuple(tokens) for path, tokens in reads.items()},
        )

    def label_logprobs(self, logprobs: Mapping[Path, Mapping[int, float]]) -> list[float]:
        """The log-probability of each label, from those of the tokens of `reads`."""
        return [log_sum(path_logprob(path, logprobs) for path in paths) for paths in self.labels]

    def is_first_token(self, token: int) -> bool:
        """Whether a label begins with this token."""
        return token in self.reads[()]


def path_logprob(path: Path, logprobs: Mapping[Path, Mapping[int, float]]) -> float:
    return sum(logprobs[path[:length]][token] for length, token in enumerate(path))


def log_sum(terms: Iterable[float]) -> float:
    """The logarithm of the sum of the exponentials of `terms`."""
    values = list(terms)
    most = max(values)
    return most if most == -math.inf else most + math.log(sum(math.exp(value - most) for value in values))

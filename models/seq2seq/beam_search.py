"""The rules of beam search: which continuations are kept, which answers are kept, and when the search ends.

The most likely tokens after all beams continue; a finished answer is kept if its length-normalised score is among the
best. The rules and their order are those of transformers' `generate(num_beams=...)`.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IMPOSSIBLE = float("-inf")
MAX_STOP_PLACES = 7  # stop tokens that are counted when the candidates of a step are: a request may have a thousand
MAX_LOG_POWER = 600.0  # natural logarithm of the largest divisor of a score


@dataclass(frozen=True, slots=True)
class Continuation:
    """A candidate continuation: its beam and its token."""

    score: float
    beam: int
    token: int


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The result of a step: the continuations that are `continued`, and those that `ended`, the best first."""

    continued: list[Continuation]
    ended: list[Continuation]


@dataclass(frozen=True)
class BeamRules:
    """`beams` beams for answers of at most `max_tokens` tokens, which `stop_tokens` end.

    A score is divided by length ** `length_penalty`. The search ends as soon as there are `beams` answers if
    `early_stopping`. Otherwise it ends when no beam can be better than the worst of them: at its present length, or at
    the greatest possible length if `never_stop_early`.
    """

    beams: int
    stop_tokens: Collection[int]
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    never_stop_early: bool = False

    def advance(self, logprobs: Tensor, scores: Sequence[float], length: int, full: bool) -> BeamStep:
        """The step for [K, V] log-probabilities of the token at place `length` of K beams with `scores`. If there are
        enough answers already (`full`), none may end early any more."""
        before = torch.tensor(scores, dtype=logprobs.dtype, device=logprobs.device)
        totals, is_last = logprobs + before[:, None], length == self.max_tokens
        count = min(max(2, 1 + min(len(self.stop_tokens), MAX_STOP_PLACES)) * self.beams, totals.numel())
        choices = find_best(totals, count)
        ended = [choice for choice in choices[: self.beams] if is_last or choice.token in self.stop_tokens]
        going = [choice for choice in choices if not is_last and choice.token not in self.stop_tokens]
        if not is_last and len(going) < self.beams and len(choices) == count < totals.numel():
            # More stop tokens than were counted are likelier than the other tokens.
            stops = torch.tensor([*self.stop_tokens], device=totals.device)
            going = find_best(totals.index_fill(1, stops, IMPOSSIBLE), self.beams)
        return BeamStep(going[: self.beams], [] if self.early_stopping and full else ended)

    def normalize_score(self, score: float, length: int) -> float:
        """The score divided by `length` ** `length_penalty`, by which answers are compared.

        If that power exceeds the range of floats, the result is the `root`-th root of the quotient, which has the same
        sign and order.
        """
        root = max(1.0, abs(self.length_penalty) * math.log(self.max_tokens) / MAX_LOG_POWER)
        if root == 1.0:
            return float(score / length**self.length_penalty)
        return math.copysign(abs(score) ** (1 / root) / length ** (self.length_penalty / root), score)

    def is_finished(self, going: Sequence[Continuation], length: int, kept: Sequence[float]) -> bool:
        """Whether no better answer is expected than those with the normalised scores `kept`, the best first."""
        if not going:
            return True
        if len(kept) < self.beams:
            return False
        expected = self.max_tokens if self.never_stop_early and self.length_penalty > 0 else length
        return self.early_stopping or self.normalize_score(going[0].score, expected) <= kept[-1]


def find_best(totals: Tensor, count: int) -> list[Continuation]:
    """The `count` best continuations of K beams, the best first, by their scores [K, V]; fewer if others are
    impossible.
    """
    best, places = totals.flatten().topk(count)
    found, vocab_size = zip(best.tolist(), places.tolist(), strict=True), totals.size(1)
    return [
        Continuation(value, place // vocab_size, place % vocab_size) for value, place in found if value > IMPOSSIBLE
    ]

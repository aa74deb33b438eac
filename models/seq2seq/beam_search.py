"""The rule of a beam search: which continuations go on, which answers are kept, and when it is over.

Knows no networks and no requests, only log-probabilities.  The one idea: of all tokens after all beams, the likeliest
go on; an answer that ends is kept if it is among the best so far by its length-normalised score.  In every rule, and in
the order of the rules, as transformers' `generate(num_beams=...)` does it.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

IMPOSSIBLE = float("-inf")
MAX_LOG_POWER = 600.0  # natural logarithm of the largest power that a score is divided by


@dataclass(frozen=True, slots=True)
class Continuation:
    """One of the likeliest continuations: of which beam, by which token."""

    score: float
    beam: int
    token: int


@dataclass(frozen=True, slots=True)
class BeamStep:
    """What becomes of the likeliest continuations of a step: `going` on, and `ended` just now, the best first."""

    continued: list[Continuation]
    ended: list[Continuation]


@dataclass(frozen=True)
class BeamRules:
    """`width` beams, of answers of `most` tokens at most, which `stops` end.

    A score is divided by length ** `length_penalty`.  It is over as soon as there are `width` answers if `early`; else
    once no beam could be better than the worst of them: if it went on as it is, or as far as it may where it is
    `patient`.
    """

    beams: int
    stop_tokens: Collection[int]
    max_tokens: int
    length_penalty: float = 1.0
    early_stopping: bool = False
    never_stop_early: bool = False

    def advance(self, shaped: Tensor, scores: Sequence[float], length: int, full: bool) -> BeamStep:
        """Of [K, V] log-probabilities of the token at the `length`-th place of K beams with `scores`.  Where there are
        as many answers as are asked for already (`full`), none may end early any more."""
        choices = self._best_continuations(shaped, scores)
        ends = [length == self.max_tokens or choice.token in self.stop_tokens for choice in choices]
        going = [choice for choice, over in zip(choices, ends, strict=True) if not over][: self.beams]
        ended = [choice for choice, over in list(zip(choices, ends, strict=True))[: self.beams] if over]
        return BeamStep(going, [] if self.early_stopping and full else ended)

    def normalize_score(self, score: float, length: int) -> float:
        """What answers are compared by: the score divided by `length` ** `length_penalty`.

        Where that power would leave the range of floats, it is the `root`-th root of the quotient: it has the same sign
        and the same order.
        """
        root = max(1.0, abs(self.length_penalty) * math.log(self.max_tokens) / MAX_LOG_POWER)
        if root == 1.0:
            return float(score / length**self.length_penalty)
        return math.copysign(abs(score) ** (1 / root) / length ** (self.length_penalty / root), score)

    def is_finished(self, going: Sequence[Continuation], length: int, kept: Sequence[float]) -> bool:
        """Whether nothing better is expected than the answers with normalised scores `kept`, the best first."""
        if not going:
            return True
        if len(kept) < self.beams:
            return False
        expected = self.max_tokens if self.never_stop_early and self.length_penalty > 0 else length
        return self.early_stopping or self.normalize_score(going[0].score, expected) <= kept[-1]

    def _best_continuations(self, shaped: Tensor, scores: Sequence[float]) -> list[Continuation]:
        before = torch.tensor(scores, dtype=shaped.dtype, device=shaped.device)
        flat, words = (shaped + before[:, None]).flatten(), shaped.size(1)
        best, places = flat.topk(min(max(2, 1 + len(self.stop_tokens)) * self.beams, len(flat)))
        found = zip(best.tolist(), places.tolist(), strict=True)
        return [Continuation(value, place // words, place % words) for value, place in found if value > IMPOSSIBLE]

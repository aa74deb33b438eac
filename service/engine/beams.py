"""Looking for the likeliest answers, several at a time (beam search).

Knows log-probabilities and sequences; nothing of blocks or tickets.  The one idea: of all tokens after all beams, the
likeliest go on; an answer that ends is kept if it is among the best so far by its length-normalised score.  In every
rule, and in the order of the rules, as transformers' `generate(num_beams=...)` does it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from service.engine.sampler import Scored, score
from service.engine.scheduler import Sequence
from service.request import Done, Event, Generate, Token

WORST = float("-inf")


@dataclass(eq=False, slots=True)
class Beam:
    """An answer under way, its log-probability, and what comes next, once that is computed."""

    sequence: Sequence
    score: float = 0.0
    scored: tuple[Scored, ...] = ()
    logits: Tensor | None = None  # [V]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer; `stop` is the token that ended it, or -1 where its length did."""

    score: float
    tokens: tuple[int, ...]
    scored: tuple[Scored, ...]
    stop: int


@dataclass(frozen=True, slots=True)
class Choice:
    """One of the likeliest continuations: of which beam, by which token."""

    score: float
    beam: int
    token: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step made of a search: how its beams go on, if it does, and the best answers so far."""

    going: tuple[tuple[Choice, tuple[Scored, ...]], ...]
    answers: tuple[Answer, ...]


class Search:
    """The search for one request's best answers.  Begins with one beam, `sequence`."""

    def __init__(self, request: Generate, sequence: Sequence) -> None:
        assert request.beams is not None
        self.request, self.how = request, request.beams
        self.beams = [Beam(sequence)]
        self.answers: tuple[Answer, ...] = ()
        self._most = max(2, 1 + len(request.stop_tokens)) * self.how.width

    @property
    def said(self) -> list[tuple[int, ...]]:
        """What each beam has come to so far."""
        return [tuple(beam.sequence.tokens[len(self.request.tokens) :]) for beam in self.beams]

    def turn(self, logits: Tensor, shaped: Tensor) -> Turn:
        """After the `logits` [K, V] of all beams, and their log-probabilities, `shaped` as the request has it."""
        choices = self._likeliest(shaped)
        length = len(self.said[0]) + 1
        ends = [length == self.request.max_tokens or choice.token in self.request.stop_tokens for choice in choices]
        going = [choice for choice, over in zip(choices, ends, strict=True) if not over][: self.how.width]
        answers = list(self.answers)
        if not (self.how.early and len(answers) >= self.how.width):
            first = list(zip(choices, ends, strict=True))[: self.how.width]
            answers += [self._finished(choice, length, logits) for choice, over in first if over]
        answers.sort(key=lambda answer: answer.score, reverse=True)
        del answers[self.how.width :]
        if not going or self._over(going[0].score / length**self.how.length_penalty, answers):
            return Turn((), tuple(answers))
        return Turn(tuple((choice, self._scored(choice, logits)) for choice in going), tuple(answers))

    def events(self, place: int) -> list[Event]:
        """The answer that came out at `place`; none if there are not so many."""
        if place >= len(self.answers):
            return []
        answer, cached = self.answers[place], self.beams[0].sequence.cached
        scored = answer.scored or (((0.0, ()),) * len(answer.tokens))
        said = [Token(token, *one, cached) for token, one in zip(answer.tokens, scored, strict=True)]
        reason: Literal["stop", "length"] = "length" if answer.stop < 0 else "stop"
        count = len(answer.tokens) + (answer.stop >= 0)
        return [*said, Done(reason, self.request.prompt_tokens, count, cached, answer.stop)]

    def _likeliest(self, shaped: Tensor) -> list[Choice]:
        scores = torch.tensor([beam.score for beam in self.beams], dtype=shaped.dtype, device=shaped.device)
        flat, words = (shaped + scores[:, None]).flatten(), shaped.size(1)
        best, places = flat.topk(min(self._most, len(flat)))
        found = zip(best.tolist(), places.tolist(), strict=True)
        return [Choice(value, place // words, place % words) for value, place in found if value > WORST]

    def _scored(self, choice: Choice, logits: Tensor) -> tuple[Scored, ...]:
        """The scores of an answer's tokens, where they are asked for, with one more."""
        if self.request.logprobs < 0:
            return ()
        row = logits[choice.beam : choice.beam + 1]
        return (*self.beams[choice.beam].scored, *score(row, [choice.token], [self.request.logprobs]))

    def _finished(self, choice: Choice, length: int, logits: Tensor) -> Answer:
        tokens, normalised = self.said[choice.beam], choice.score / length**self.how.length_penalty
        if choice.token in self.request.stop_tokens:
            return Answer(normalised, tokens, self.beams[choice.beam].scored, choice.token)
        return Answer(normalised, (*tokens, choice.token), self._scored(choice, logits), -1)

    def _over(self, best: float, answers: list[Answer]) -> bool:
        if len(answers) < self.how.width:
            return False
        return self.how.early or best <= answers[-1].score

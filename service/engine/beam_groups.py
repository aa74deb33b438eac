"""Looking for the likeliest answers, several at a time (beam search).

Knows log-probabilities and sequences; nothing of blocks or tickets.  The rule by which beams go on and answers are kept
is models.seq2seq.beam_search.Rule; here is what a request wants besides: how likely each token of an answer was.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from polyhead.models.seq2seq.beam_search import WORST, Choice, Rule

from ..core.request import Done, Event, Generate, Token
from .logits_processors import Shape
from .sampler import Scored, score
from .scheduler import Sequence


@dataclass(eq=False, slots=True)
class Beam:
    """An answer under way, its log-probability, and what comes next, once that is computed.

    `shape` holds what the request asks of the next token after this beam's own history.
    """

    sequence: Sequence
    score: float = 0.0
    scored: tuple[Scored, ...] = ()
    logits: Tensor | None = None  # [V]
    shape: Shape | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished answer; `stop` is the token that ended it, or -1 where its length did."""

    score: float
    tokens: tuple[int, ...]
    scored: tuple[Scored, ...]
    stop: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a step made of a search: how its beams go on, if it does, and the best answers so far."""

    going: tuple[tuple[Choice, tuple[Scored, ...]], ...]
    answers: tuple[Answer, ...]


class Search:
    """The search for one request's best answers.  Begins with one beam, `sequence`, whose logits `shape` changes."""

    def __init__(self, request: Generate, sequence: Sequence, shape: Shape | None = None) -> None:
        assert request.beams is not None
        self.request, self.how = request, request.beams
        self.beams = [Beam(sequence, shape=shape)]
        self.answers: tuple[Answer, ...] = ()
        stops, how = request.stop_tokens, self.how
        most = request.max_tokens + how.given
        self._rule = Rule(how.width, stops, most, how.length_penalty, how.early, how.patient)

    def said(self, beam: Beam) -> tuple[int, ...]:
        """The tokens that `beam` has added to the prompt."""
        return tuple(beam.sequence.tokens[len(self.request.tokens) :])

    def turn(self, logits: Tensor, shaped: Tensor) -> Turn:
        """After the `logits` [K, V] of all beams, and their log-probabilities, `shaped` as the request has it."""
        length, rule = self.how.given + len(self.said(self.beams[0])) + 1, self._rule
        if self.how.closing and length == rule.most:
            shaped = torch.full_like(shaped, WORST).index_fill_(1, torch.tensor(self.how.closing), 0.0)
        if self.how.odds:
            shaped = shaped.log_softmax(dim=-1)
        turn = rule.turn(shaped, [beam.score for beam in self.beams], length, len(self.answers) >= rule.width)
        answers = [*self.answers, *(self._finished(choice, length, logits) for choice in turn.ended)]
        answers.sort(key=lambda answer: answer.score, reverse=True)
        del answers[rule.width :]
        if rule.over(turn.going, length, [answer.score for answer in answers]):
            return Turn((), tuple(answers))
        return Turn(tuple((choice, self._scored(choice, logits)) for choice in turn.going), tuple(answers))

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

    def _scored(self, choice: Choice, logits: Tensor) -> tuple[Scored, ...]:
        """The scores of an answer's tokens, where they are asked for, with one more."""
        if self.request.logprobs < 0:
            return ()
        row = logits[choice.beam : choice.beam + 1]
        return (*self.beams[choice.beam].scored, *score(row, [choice.token], [self.request.logprobs]))

    def _finished(self, choice: Choice, length: int, logits: Tensor) -> Answer:
        tokens, normalised = self.said(self.beams[choice.beam]), self._rule.normal(choice.score, length)
        if choice.token in self.request.stop_tokens:
            return Answer(normalised, tokens, self.beams[choice.beam].scored, choice.token)
        return Answer(normalised, (*tokens, choice.token), self._scored(choice, logits), -1)

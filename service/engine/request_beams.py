"""Beam search for one request: its beams, its finished answers, and the scores of their tokens.

The rules by which beams continue and answers are kept are in models.seq2seq.beam_search.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhead.models.seq2seq.beam_search import IMPOSSIBLE, BeamRules, Continuation

from ..core.request import AnswerEnd, Done, Event, Generate, GeneratedToken
from .logits_processors import LogitsProcessor
from .sampler import TokenScore, score_tokens
from .scheduler import TokenSequence


@dataclass(eq=False, slots=True)
class Beam:
    """An unfinished answer, its log-probability, and the logits [V] after it once they are computed.

    `processor` changes these logits by the request's options and this beam's own tokens.
    """

    sequence: TokenSequence
    score: float = 0.0
    token_scores: tuple[TokenScore, ...] = ()
    logits: Tensor | None = None  # [V]
    processor: LogitsProcessor | None = None


@dataclass(frozen=True, slots=True)
class BeamAnswer:
    """A finished answer; `stop_token` is the token that ended it, or -1 where it reached the maximal length."""

    score: float
    tokens: tuple[int, ...]
    token_scores: tuple[TokenScore, ...]
    stop_token: int


@dataclass(frozen=True, slots=True)
class SearchStep:
    """The result of one step of a search: the beams that continue, empty where it is finished, and the best answers so
    far.
    """

    continuations: tuple[tuple[Continuation, tuple[TokenScore, ...]], ...]
    answers: tuple[BeamAnswer, ...]


class BeamSearch:
    """The search for one request's best answers.  Starts with one beam."""

    def __init__(self, request: Generate, sequence: TokenSequence) -> None:
        assert request.beams is not None
        self.request, self.options = request, request.beams
        self.beams = [Beam(sequence)]
        self.answers: tuple[BeamAnswer, ...] = ()
        stops, options = request.stop_tokens, self.options
        max_length = request.max_tokens + options.prefix_length
        self._rule = BeamRules(
            options.width, stops, max_length, options.length_penalty, options.early_stopping, options.never_stop_early
        )

    def generated_tokens(self, beam: Beam) -> tuple[int, ...]:
        """The tokens that `beam` has added to the prompt."""
        return tuple(beam.sequence.tokens[len(self.request.tokens) :])

    def advance(self, logits: Tensor, logprobs: Tensor) -> SearchStep:
        """One step of the search.

        `logits` [K, V] are those after all beams, `logprobs` [K, V] the log-probabilities after the logits processors.
        """
        length, rule = self.options.prefix_length + len(self.generated_tokens(self.beams[0])) + 1, self._rule
        if self.options.forced_end_tokens and length == rule.max_tokens:
            logprobs = torch.full_like(logprobs, IMPOSSIBLE).index_fill_(
                1, torch.tensor(self.options.forced_end_tokens), 0.0
            )
        if self.options.renormalize:
            logprobs = logprobs.log_softmax(dim=-1)
        result = rule.advance(logprobs, [beam.score for beam in self.beams], length, len(self.answers) >= rule.beams)
        answers = [*self.answers, *(self._finish_answer(choice, length, logits) for choice in result.ended)]
        answers.sort(key=lambda answer: answer.score, reverse=True)
        del answers[rule.beams :]
        if rule.is_finished(result.continued, length, [answer.score for answer in answers]):
            return SearchStep((), tuple(answers))
        return SearchStep(
            tuple((choice, self._extend_scores(choice, logits)) for choice in result.continued), tuple(answers)
        )

    def answer_events(self, rank: int) -> list[Event]:
        """The events of the answer with this `rank`, the best has 0; empty if there are not so many answers."""
        if rank >= len(self.answers):
            return []
        answer, cached_tokens = self.answers[rank], self.beams[0].sequence.cached_tokens
        token_scores = answer.token_scores or (((0.0, ()),) * len(answer.tokens))
        events = [
            GeneratedToken(token, *one, cached_tokens) for token, one in zip(answer.tokens, token_scores, strict=True)
        ]
        reason: AnswerEnd = "length" if answer.stop_token < 0 else "stop"
        count = len(answer.tokens) + (answer.stop_token >= 0)
        return [*events, Done(reason, self.request.prompt_tokens, count, cached_tokens, answer.stop_token)]

    def _extend_scores(self, choice: Continuation, logits: Tensor) -> tuple[TokenScore, ...]:
        """The scores of the tokens of a beam and of the token of `choice`; empty where the request asks for no
        logprobs.
        """
        if self.request.logprobs < 0:
            return ()
        row = logits[choice.beam : choice.beam + 1]
        return (*self.beams[choice.beam].token_scores, *score_tokens(row, [choice.token], [self.request.logprobs]))

    def _finish_answer(self, choice: Continuation, length: int, logits: Tensor) -> BeamAnswer:
        tokens, normalised = (
            self.generated_tokens(self.beams[choice.beam]),
            self._rule.normalize_score(choice.score, length),
        )
        if choice.token in self.request.stop_tokens:
            return BeamAnswer(normalised, tokens, self.beams[choice.beam].token_scores, choice.token)
        return BeamAnswer(normalised, (*tokens, choice.token), self._extend_scores(choice, logits), -1)

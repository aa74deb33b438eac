"""Generation with any models.seq2seq.protocol.Seq2Seq, for N sources at once: greedy, beam search or sampling.

Which tokens are allowed depends only on the generated tokens and the DecodingConfig. The rules and their order are
those of transformers' `generate`, so the output is the same, token for token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..network.ragged import RaggedBatch
from .beam_search import BeamRules, Continuation
from .protocol import Seq2Seq

ChooseTokens = Callable[[Tensor], Tensor]  # [N, V] log-probabilities to [N] tokens


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """The rules of generation. Lengths count tokens after the start token, the stop token included.

    `forced_first` are the allowed first tokens, `forced_last` those at the last place; they get log-probability 0.
    `banned_tokens` are never generated. `beams` and the next three fields are for beam search; see
    models.seq2seq.beam_search.BeamRules. `sample`: tokens are sampled at that `temperature`, from the `top_k` most
    likely (0: all) and from those that make up `top_p` of the probability.
    """

    stop_tokens: frozenset[int]
    max_tokens: int
    min_tokens: int = 0
    forced_first: tuple[int, ...] = ()
    forced_last: tuple[int, ...] = ()
    banned_tokens: tuple[int, ...] = ()
    no_repeat_ngram: int = 0  # length of n-grams that must not repeat; 0: they may
    renormalize: bool = False
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool = False
    never_stop_early: bool = False
    sample: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """A generated sequence; `stop_token` is the token that ended it, -1 if the length did. `score` is the sum of its
    log-probabilities, for beam search normalised by length."""

    tokens: tuple[int, ...]
    stop_token: int
    score: float


def generate(
    network: Seq2Seq, sources: RaggedBatch, config: DecodingConfig, random_generator: torch.Generator | None = None
) -> list[GeneratedSequence]:
    """A generated sequence for each source; with beam search the best."""
    if config.beams > 1:
        return [found[0] for found in search_beams(network, sources, config)]
    if config.sample:
        return generate_stepwise(
            network, sources, config, lambda logprobs: sample_tokens(logprobs, config, random_generator)
        )
    return generate_stepwise(network, sources, config, lambda logprobs: logprobs.argmax(dim=-1))


@dataclass(slots=True)
class Hypothesis:
    """An unfinished sequence."""

    tokens: list[int] = field(default_factory=list)
    score: float = 0.0


@torch.no_grad()
def generate_stepwise(
    network: Seq2Seq, sources: RaggedBatch, config: DecodingConfig, choose: ChooseTokens
) -> list[GeneratedSequence]:
    """Generate token by token, with tokens chosen by `choose`."""
    hypotheses = [Hypothesis() for _ in sources.lengths]
    answers: dict[int, GeneratedSequence] = {}
    active, state = list(range(len(hypotheses))), network.initial_state(sources)
    tokens = sources.tokens.new_full((len(hypotheses),), network.start_token)
    while active:
        logits, state = network.step(tokens, state)
        logprobs = mask_logprobs(
            logits.float().log_softmax(dim=-1), [hypotheses[n].tokens for n in active], config, network.start_token
        )
        tokens = choose(logprobs)
        scores = logprobs.gather(1, tokens[:, None])[:, 0].tolist()
        for n, token, score in zip(active, tokens.tolist(), scores, strict=True):
            hypothesis = hypotheses[n]
            hypothesis.tokens.append(token)
            hypothesis.score += score
            if token in config.stop_tokens:
                answers[n] = GeneratedSequence(tuple(hypothesis.tokens[:-1]), token, hypothesis.score)
            elif len(hypothesis.tokens) == config.max_tokens:
                answers[n] = GeneratedSequence(tuple(hypothesis.tokens), -1, hypothesis.score)
        on = torch.tensor([row for row, n in enumerate(active) if n not in answers], device=tokens.device)
        active = [n for n in active if n not in answers]
        if active and len(active) < len(tokens):
            state, tokens = network.select_rows(state, on), tokens[on]
    return [answers[n] for n in range(len(hypotheses))]


class BeamSearch:
    """The beam search for one source."""

    def __init__(self, config: DecodingConfig) -> None:
        self.rule = BeamRules(
            config.beams,
            config.stop_tokens,
            config.max_tokens,
            config.length_penalty,
            config.early_stopping,
            config.never_stop_early,
        )
        self.beams, self.answers = [Hypothesis()], list[GeneratedSequence]()

    def advance(self, logprobs: Tensor) -> list[Continuation]:
        """Process the log-probabilities [K, V] of all beams. Returns the continuations; none if the search is over."""
        length, rule = len(self.beams[0].tokens) + 1, self.rule
        turn = rule.advance(logprobs, [beam.score for beam in self.beams], length, len(self.answers) >= rule.beams)
        self.answers += [self._answer(choice, rule.normalize_score(choice.score, length)) for choice in turn.ended]
        self.answers.sort(key=lambda answer: answer.score, reverse=True)
        del self.answers[rule.beams :]
        over = rule.is_finished(turn.continued, length, [answer.score for answer in self.answers])
        active = [] if over else turn.continued
        self.beams = [Hypothesis([*self.beams[choice.beam].tokens, choice.token], choice.score) for choice in active]
        return active

    def _answer(self, choice: Continuation, score: float) -> GeneratedSequence:
        generated = self.beams[choice.beam].tokens
        if choice.token in self.rule.stop_tokens:
            return GeneratedSequence(tuple(generated), choice.token, score)
        return GeneratedSequence((*generated, choice.token), -1, score)


@torch.no_grad()
def search_beams(network: Seq2Seq, sources: RaggedBatch, config: DecodingConfig) -> list[list[GeneratedSequence]]:
    """The best sequences for each source, at most `config.beams`, the best first."""
    searches = [BeamSearch(config) for _ in sources.lengths]
    active, state = searches, network.initial_state(sources)
    tokens = sources.tokens.new_full((len(active),), network.start_token)
    while active:
        logits, state = network.step(tokens, state)
        generated = [beam.tokens for each in active for beam in each.beams]
        logprobs = mask_logprobs(logits.float().log_softmax(dim=-1), generated, config, network.start_token)
        rows, chosen, first = list[int](), list[int](), 0
        for each in active:
            count = len(each.beams)
            for choice in each.advance(logprobs[first : first + count]):
                rows.append(first + choice.beam)
                chosen.append(choice.token)
            first += count
        active = [each for each in active if each.beams]
        if active:
            state = network.select_rows(state, torch.tensor(rows, device=tokens.device))
            tokens = torch.tensor(chosen, device=tokens.device)
    return [each.answers for each in searches]


def mask_logprobs(logprobs: Tensor, generated: Sequence[Sequence[int]], config: DecodingConfig, start: int) -> Tensor:
    """[N, V] log-probabilities of the next token after the tokens `generated`, with -inf for forbidden ones."""
    length, stops = len(generated[0]) + 1, sorted(config.stop_tokens)
    if config.no_repeat_ngram:
        for row, tokens in enumerate(generated):
            logprobs[row, repeated_ngram_tokens([start, *tokens], config.no_repeat_ngram)] = float("-inf")
    logprobs[:, list(config.banned_tokens)] = float("-inf")
    if length <= config.min_tokens:
        logprobs[:, stops] = float("-inf")
    only = config.forced_first if length == 1 else ()
    if length == config.max_tokens and config.forced_last:  # also of one token, as in transformers
        only = config.forced_last
    if only:
        logprobs = torch.full_like(logprobs, float("-inf"))
        logprobs[:, list(only)] = 0.0
    return logprobs.log_softmax(dim=-1) if config.renormalize else logprobs


def repeated_ngram_tokens(tokens: Sequence[int] | NDArray[np.int64], size: int) -> list[int]:
    """The tokens that would repeat an n-gram of length `size`."""
    generated, before = np.asarray(tokens, np.int64), size - 1
    count = len(generated) - before  # places where an n-gram could have ended
    if count <= 0:
        return []
    alike = np.ones(count, np.bool_)
    for place in range(before):
        alike &= generated[place : place + count] == generated[len(generated) - before + place]
    found: list[int] = np.unique(generated[before:][alike]).tolist()
    return found


def sample_tokens(logprobs: Tensor, config: DecodingConfig, random_generator: torch.Generator | None) -> Tensor:
    """[N] sampled tokens."""
    scores = logprobs / config.temperature
    if config.top_k:
        least = scores.topk(min(config.top_k, scores.size(1))).values[:, -1:]
        scores = scores.masked_fill(scores < least, float("-inf"))
    if config.top_p < 1.0:
        rising, places = scores.sort(dim=-1)
        rare = rising.softmax(dim=-1).cumsum(dim=-1) <= 1 - config.top_p
        rare[:, -1] = False
        scores = scores.masked_fill(rare.scatter(1, places, rare), float("-inf"))
    return torch.multinomial(scores.softmax(dim=-1), 1, generator=random_generator)[:, 0]

"""Decoding with any model of next-token probabilities: limits, banned and forced tokens, beam search and sampling."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.seq2seq import beam_search
from polyhead.models.seq2seq.beam_search import MAX_STOP_PLACES, BeamRules, Continuation
from polyhead.models.seq2seq.decoding import DecodingConfig, GeneratedSequence, generate, search_beams

START, END, WORDS = 0, 1, 6
PLAIN = DecodingConfig(stop_tokens=frozenset((END,)), max_tokens=8)


class Chain:
    """A Seq2Seq without a network: log-probabilities by the token before and by the first token of the source."""

    start_token = START

    def __init__(self, seed: int = 0) -> None:
        odds = torch.randn(WORDS, WORDS, WORDS, generator=torch.Generator().manual_seed(seed)) * 2
        self.odds, self.steps = odds.log_softmax(dim=-1), 0  # [source, before, token]

    def __call__(self, sources: RaggedBatch, targets: RaggedBatch) -> Tensor:
        raise NotImplementedError

    def initial_state(self, sources: RaggedBatch) -> Tensor:
        return sources.tokens[torch.tensor(sources.starts[:-1])]

    def step(self, tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        return self.odds[state, tokens], state

    def select_rows(self, state: Tensor, rows: Tensor) -> Tensor:
        return state[rows]

    def join_states(self, states: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(states))

    def attention_weights(self, state: Tensor) -> list[Tensor]:
        return []

    def score(self, source: int, tokens: Sequence[int]) -> float:
        return sum(float(self.odds[source, a, b]) for a, b in itertools.pairwise([START, *tokens]))


SOURCES = RaggedBatch.of([[2, 9], [3], [4, 9, 9], [5]])
FIRST = [2, 3, 4, 5]


def with_stop_token(answer: GeneratedSequence) -> list[int]:
    return [*answer.tokens, *([answer.stop_token] if answer.stop_token >= 0 else [])]


def test_greedy_decoding_takes_the_most_likely_token_until_the_end() -> None:
    chain = Chain()
    for source, answer in zip(FIRST, generate(chain, SOURCES, PLAIN), strict=True):
        before, expected = START, list[int]()
        while len(expected) < PLAIN.max_tokens and before != END:
            before = int(chain.odds[source, before].argmax())
            expected.append(before)
        assert with_stop_token(answer) == expected
        assert answer.score == pytest.approx(chain.score(source, expected), abs=1e-4)


@pytest.mark.parametrize("beams", [1, 3])
def test_limits_forced_and_banned_tokens(beams: int) -> None:
    chain, plain = Chain(), replace(PLAIN, beams=beams)
    ending = Chain()
    ending.odds[:, :, END] = 5.0
    for answer in generate(ending, SOURCES, replace(plain, min_tokens=5)):
        assert (len(answer.tokens), answer.stop_token) == (5, END)
        assert END not in answer.tokens
    for answer in generate(
        chain, SOURCES, replace(plain, forced_first=(4,), max_tokens=3, forced_last=(END,), min_tokens=2)
    ):
        assert (with_stop_token(answer)[0], answer.stop_token, len(answer.tokens)) == (4, END, 2)
    for first in ((), (4,)):  # the only token is the last one
        one = replace(plain, forced_first=first, max_tokens=1, forced_last=(END,))
        assert [with_stop_token(answer) for answer in generate(chain, SOURCES, one)] == [[END]] * 4
    for answer in generate(chain, SOURCES, replace(plain, banned_tokens=(2, 3))):
        assert not {2, 3} & set(answer.tokens)
    for answer in generate(chain, SOURCES, replace(plain, no_repeat_ngram=1, min_tokens=4, max_tokens=5)):
        assert len({START, *answer.tokens}) == len(answer.tokens) + 1
    assert [len(with_stop_token(answer)) for answer in generate(chain, SOURCES, replace(plain, max_tokens=1))] == [
        1
    ] * 4


@pytest.mark.parametrize("seed", range(4))
def test_beams_for_every_prefix_find_the_best_answer(seed: int) -> None:
    """Without length penalty and early stopping, a search over all prefixes finds the best answer."""
    chain, config = Chain(seed), replace(PLAIN, max_tokens=4, beams=WORDS**3, length_penalty=0.0, never_stop_early=True)
    others = [word for word in range(WORDS) if word != END]
    every = [(*tokens, END) for length in range(4) for tokens in itertools.product(others, repeat=length)]
    every += list(itertools.product(others, repeat=4))
    for source, found in zip(FIRST, search_beams(chain, SOURCES, config), strict=True):
        best = sorted((chain.score(source, tokens) for tokens in every), reverse=True)
        assert [answer.score for answer in found[:5]] == pytest.approx(best[:5], abs=1e-4)


def test_beam_search_gives_the_same_answers_alone_and_in_a_batch() -> None:
    chain, config = Chain(), replace(PLAIN, beams=3, length_penalty=1.5)
    alone = [search_beams(chain, RaggedBatch.of([[source]]), config)[0] for source in FIRST]
    assert search_beams(chain, SOURCES, config) == alone


def test_a_finished_search_takes_no_more_steps() -> None:
    chain = Chain()
    chain.odds[:, :, END] = 5.0
    generate(chain, SOURCES, replace(PLAIN, beams=2, max_tokens=50))
    assert chain.steps <= 3


def test_the_condition_for_a_finished_search() -> None:
    rule = BeamRules(beams=2, stop_tokens=(END,), max_tokens=10, length_penalty=1.0)
    going = rule.advance(torch.tensor([[-1.0, -9.0, -2.0, -3.0, -9.0, -9.0]]), [-4.0], 3, full=False).continued
    assert [(choice.token, choice.score) for choice in going] == [(0, -5.0), (2, -6.0)]
    assert rule.is_finished([], 3, [])
    assert not rule.is_finished(going, 3, [-1.0])
    assert rule.is_finished(going, 3, [-1.0, -1.5])
    assert not rule.is_finished(going, 3, [-1.0, -2.0])
    assert replace(rule, early_stopping=True).is_finished(going, 3, [-1.0, -2.0])
    assert not replace(rule, never_stop_early=True).is_finished(
        going, 3, [-0.3, -0.6]
    )  # -5 / 10 may still become better


def test_a_finished_answer_outside_of_the_best_candidates_is_dropped() -> None:
    step = BeamRules(beams=2, stop_tokens=(END,), max_tokens=10).advance(
        torch.tensor([[-1.0, -3.0, -2.0, -4.0]]), [0.0], 1, full=False
    )
    assert ([choice.token for choice in step.continued], step.ended) == ([0, 2], [])
    step = BeamRules(beams=2, stop_tokens=(END,), max_tokens=10).advance(
        torch.tensor([[-1.0, -1.5, -2.0, -4.0]]), [0.0], 1, full=False
    )
    assert ([choice.token for choice in step.continued], [choice.token for choice in step.ended]) == ([0, 2], [END])


@pytest.mark.parametrize("stops_are_likely", [False, True])
@pytest.mark.parametrize("count", [0, 2, 20, 59])
def test_a_step_takes_the_best_continuations_however_many_stop_tokens_there_are(
    count: int, stops_are_likely: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of candidates that are looked at does not grow with the stop tokens."""
    logits = torch.randn(4, 60, generator=torch.Generator().manual_seed(count))
    logits[:, :count] += 9.0 * stops_are_likely
    logprobs, scores, made = logits.log_softmax(dim=-1), [-1.0, -1.5, -2.0, -2.5], list[Continuation]()

    def make(score: float, beam: int, token: int) -> Continuation:
        made.append(Continuation(score, beam, token))
        return made[-1]

    monkeypatch.setattr(beam_search, "Continuation", make)
    rule = BeamRules(beams=4, stop_tokens=frozenset(range(count)), max_tokens=10)
    step = rule.advance(logprobs, scores, 3, full=False)
    totals = (logprobs + torch.tensor(scores)[:, None]).tolist()
    cells = [(score, beam, token) for beam, row in enumerate(totals) for token, score in enumerate(row)]
    best = [Continuation(*cell) for cell in sorted(cells, reverse=True)]
    assert step.continued == [choice for choice in best if choice.token >= count][:4]
    assert step.ended == [choice for choice in best[:4] if choice.token < count]
    assert len(made) <= (1 + MAX_STOP_PLACES) * 4 + 4
    last = rule.advance(logprobs, scores, 10, full=False)
    assert (last.continued, last.ended) == ([], best[:4])


def test_sampling_follows_the_probabilities_and_the_seed() -> None:
    chain, config = Chain(), replace(PLAIN, sample=True, max_tokens=1)
    many = RaggedBatch.of([[2]] * 4000)
    first = [with_stop_token(answer)[0] for answer in generate(chain, many, config, torch.Generator().manual_seed(1))]
    again = [with_stop_token(answer)[0] for answer in generate(chain, many, config, torch.Generator().manual_seed(1))]
    assert first == again
    shares = torch.bincount(torch.tensor(first), minlength=WORDS) / len(first)
    assert float((shares - chain.odds[2, START].exp()).abs().max()) < 0.05
    likely = chain.odds[2, START].argsort(descending=True).tolist()
    top = {
        with_stop_token(answer)[0]
        for answer in generate(chain, many, replace(config, top_k=2), torch.Generator().manual_seed(1))
    }
    assert top == set(likely[:2])
    odds = chain.odds[2, START].exp()
    share = float(odds[likely[0]]) + float(odds[likely[1]]) / 2
    top = {
        with_stop_token(answer)[0]
        for answer in generate(chain, many, replace(config, top_p=share), torch.Generator().manual_seed(1))
    }
    assert top == set(likely[:2])
    cold = generate(chain, SOURCES, replace(PLAIN, sample=True, temperature=1e-3), torch.Generator().manual_seed(1))
    assert [with_stop_token(answer) for answer in cold] == [
        with_stop_token(answer) for answer in generate(chain, SOURCES, PLAIN)
    ]


def test_probabilities_are_renormalised_if_configured() -> None:
    chain, config = Chain(), replace(PLAIN, max_tokens=1, banned_tokens=(2, 3, 4))
    plain, renormalized = (
        generate(chain, SOURCES, replace(config, renormalize=renormalised)) for renormalised in (False, True)
    )
    for source, some, other in zip(FIRST, plain, renormalized, strict=True):
        left = chain.odds[source, START, [0, 1, 5]].logsumexp(dim=0)
        assert other.score == pytest.approx(some.score - float(left), abs=1e-4)
        assert math.isfinite(other.score)


@pytest.mark.parametrize("penalty", [100.0, -100.0, 60.0, 1e6, -1e6, 1e308])
def test_every_length_penalty_orders_answers(penalty: float) -> None:
    """Powers of lengths outside of the range of floats raise nothing, and the order is that of the exact quotients."""
    rule = BeamRules(beams=2, stop_tokens=(END,), max_tokens=3000, length_penalty=penalty)
    for score in (-2000.0, -0.5, 0.0, 700.0):
        assert all(math.isfinite(rule.normalize_score(score, length)) for length in (1, 2, 1499, 3000))
    if abs(penalty) <= 100:
        cases = [(-1.0, 2999), (-1.5, 2999), (-1.0, 3000), (-30.0, 3000), (0.5, 3000), (0.5, 10), (0.0, 7)]
        with localcontext(prec=30):
            exact = {case: Decimal(case[0]) / Decimal(case[1]) ** int(penalty) for case in cases}
        assert sorted(cases, key=lambda case: rule.normalize_score(*case)) == sorted(cases, key=exact.__getitem__)


@pytest.mark.parametrize("penalty", [-2.0, -0.3, 0.0, 0.7, 1.0, 2.5, 10.0])
def test_usual_length_penalties_divide_as_transformers_do(penalty: float) -> None:
    rule = BeamRules(beams=2, stop_tokens=(END,), max_tokens=3000, length_penalty=penalty)
    assert [rule.normalize_score(-7.3, length) for length in (1, 30, 3000)] == [
        -7.3 / n**penalty for n in (1, 30, 3000)
    ]

"""Logits processors equal those of transformers; each row depends on its own history, whatever is in the batch."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from polyhead.models.native.library import runnable_targets
from polyhead.models.seq2seq.decoding import repeated_ngram_tokens
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.request import Generate, Sampling
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.logits_processors import (
    LogitsProcessor,
    RepeatedNgrams,
    SharedRules,
    TokenRules,
    apply_masks,
    needs_processing,
    process_logits,
)
from polyhead.service.engine.native_sampling import CompiledSampler
from polyhead.service.engine.sampler import SampleRow
from tests.support.engine_fakes import FakeGenerator, RecordingTicket, ask, finish, generate

WORDS = 50
tokens = st.integers(0, WORDS - 1)
samplings = st.builds(
    Sampling,
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.1]),
    presence_penalty=st.sampled_from([0.0, 0.4, -2.0]),
    bias=st.dictionaries(tokens, st.floats(-100, 100, width=32), max_size=8).map(lambda bias: tuple(bias.items())),
    allowed=st.one_of(st.just(()), st.lists(tokens, min_size=1, max_size=30, unique=True).map(tuple)),
    banned=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=12).map(tuple),
    min_tokens=st.integers(0, 6),
    no_repeat_ngram_size=st.sampled_from([0, 0, 1, 2, 3]),
)
histories = st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.lists(st.integers(0, 9), max_size=9))
stops = st.frozensets(tokens, max_size=3)


def asked(sampling: Sampling, prompt: list[int], stop: frozenset[int] = frozenset()) -> Generate:
    return Generate("a", tuple(prompt), 100, stop, sampling)


def fresh(request: Generate) -> LogitsProcessor:
    return LogitsProcessor(request, TokenRules(request))


def after(request: Generate, answer: list[int]) -> LogitsProcessor:
    one = fresh(request)
    for token in answer:
        one.push(token)
    return one


def reference(logits: Tensor, request: Generate, answer: list[int]) -> Tensor:
    """[V], by transformers, in the order of its `_get_logits_processor`; processors that it lacks by their
    definition."""
    sampling, stop = request.sampling, sorted(request.stop_tokens)
    first, last = LogitsProcessorList(), LogitsProcessorList()
    if sampling.bias:
        first.append(SequenceBiasLogitsProcessor({(token,): float(value) for token, value in sampling.bias}))
    if sampling.repetition_penalty != 1:
        first.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.no_repeat_ngram_size:
        last.append(NoRepeatNGramLogitsProcessor(sampling.no_repeat_ngram_size))
    if sampling.banned and (len(stop) == 0 or any(list(row) != [one] for row in sampling.banned for one in stop)):
        rows = [list(row) for row in sampling.banned if len(row) > 1 or row[0] not in stop]
        if rows:
            last.append(NoBadWordsLogitsProcessor(rows, stop or None))
    if sampling.min_tokens and stop:
        last.append(MinNewTokensLengthLogitsProcessor(len(request.tokens), sampling.min_tokens, stop))
    if sampling.allowed:
        last.append(PrefixConstrainedLogitsProcessor(lambda batch, ids: list(sampling.allowed), 1))
    ids = torch.tensor([[*request.tokens, *answer]])
    scores = first(ids, logits[None].clone())
    for token, count in Counter(answer).items():
        scores[0, token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    processed: Tensor = last(ids, scores)[0]
    return processed


def random_logits(rows: int, words: int = WORDS) -> Tensor:
    return torch.randn(rows, words, generator=torch.Generator().manual_seed(rows)) * 4


@settings(max_examples=300, deadline=None)
@given(samplings, histories, stops)
def test_processed_rows_equal_those_of_transformers(
    sampling: Sampling, history: tuple[list[int], list[int]], stop: frozenset[int]
) -> None:
    prompt, answer = history
    request, logits = asked(sampling, prompt, stop), random_logits(1)
    found = process_logits(logits, [after(request, answer).after_drafts(())])[0]
    if found.isneginf().all():  # transformers would allow a token that is forbidden
        free = replace(request, sampling=replace(sampling, allowed=()))
        assert reference(logits[0], free, answer)[list(sampling.allowed)].isneginf().all()
    else:
        torch.testing.assert_close(found, reference(logits[0], request, answer), rtol=1e-5, atol=1e-5)
    if not needs_processing(sampling):
        assert torch.equal(found, logits[0])


@settings(max_examples=100, deadline=None)
@given(samplings, histories, stops, st.integers(0, 9))
def test_draft_tokens_count_like_generated_tokens(
    sampling: Sampling, history: tuple[list[int], list[int]], stop: frozenset[int], cut: int
) -> None:
    prompt, answer = history
    request, logits = asked(sampling, prompt, stop), random_logits(1)
    pushed = process_logits(logits, [after(request, answer).after_drafts(())])
    waiting = after(request, answer[:cut])
    assert torch.equal(process_logits(logits, [waiting.after_drafts(tuple(answer[cut:]))]), pushed)
    for token in answer[cut:]:
        waiting.push(token)
    assert torch.equal(process_logits(logits, [waiting.after_drafts(())]), pushed), "a draft left a change"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(samplings, histories, stops, st.booleans()), min_size=2, max_size=9))
def test_a_row_does_not_depend_on_the_other_rows(
    rows: list[tuple[Sampling, tuple[list[int], list[int]], frozenset[int], bool]],
) -> None:
    logits = random_logits(len(rows))
    before = logits.clone()
    shapes = [after(asked(s, prompt, stop), answer) if some else None for s, (prompt, answer), stop, some in rows]
    together = process_logits(logits, [one and one.after_drafts(()) for one in shapes])
    assert torch.equal(logits, before), "they are read again"
    for row, one in enumerate(shapes):
        assert torch.equal(together[row], process_logits(logits[row : row + 1], [one and one.after_drafts(())])[0])
        assert one is not None or torch.equal(together[row], before[row])


def test_rows_without_options_are_not_copied() -> None:
    logits = random_logits(3)
    assert process_logits(logits, [None] * 3) is logits
    assert apply_masks(logits, {}) is logits


def test_a_large_vocabulary_and_long_lists() -> None:
    words, choice = 49_152, random.Random(0)
    ways = [
        Sampling(bias=tuple((token, choice.uniform(-100, 100)) for token in choice.sample(range(words), 4096))),
        Sampling(allowed=tuple(choice.sample(range(words), 20_000))),
        Sampling(allowed=(7,), repetition_penalty=1.2),
        Sampling(frequency_penalty=0.5, banned=tuple((token,) for token in choice.sample(range(words), 1024))),
    ]
    prompt, answer = choice.choices(range(words), k=1000), choice.choices(range(words), k=1000)
    logits = random_logits(len(ways), words)
    requests = [asked(way, prompt, frozenset([2])) for way in ways]
    found = process_logits(logits, [after(request, answer).after_drafts(()) for request in requests])
    for row, request in enumerate(requests):
        torch.testing.assert_close(found[row], reference(logits[row], request, answer), rtol=1e-5, atol=1e-5)


def test_tokens_that_the_model_does_not_have_change_nothing() -> None:
    logits = random_logits(2)
    way = Sampling(
        bias=((WORDS, 3.0), (1, 1.0)), banned=((WORDS + 1,), (3, WORDS)), allowed=(*range(9), 99), min_tokens=5
    )
    found = process_logits(logits, [fresh(asked(way, [3], frozenset([WORDS + 2]))).after_drafts(()), None])
    assert torch.equal(found[1], logits[1])
    assert torch.equal(found[0, :9], logits[0, :9] + torch.eye(9)[1])


def test_a_row_without_allowed_tokens_is_reported_alone() -> None:
    logits = random_logits(2)
    one = fresh(asked(Sampling(allowed=(3,), banned=((3,),)), [1]))
    found = process_logits(logits, [one.after_drafts(()), None])
    assert found[0].isneginf().all()
    assert torch.equal(found[1], logits[1])


def test_a_mask_restricts_only_its_own_row() -> None:
    for words in (31, 32, 50, 49_152):
        logits = random_logits(4, words)
        before, chosen = logits.clone(), torch.rand(2, words) < 0.3
        bits = np.zeros((2, -(-words // 32) * 32), np.bool_)
        bits[:, :words] = chosen.numpy()
        bits[:, words:] = True  # of no word
        packed = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        found = apply_masks(logits, {2: packed[0], 0: packed[1]})
        assert torch.equal(logits, before)
        assert torch.equal(found[[1, 3]], logits[[1, 3]])
        assert torch.equal(found[[2, 0]], logits[[2, 0]].masked_fill(~chosen, float("-inf")))


def test_a_buffer_is_used_again() -> None:
    logits, room = random_logits(2), torch.empty(2, WORDS)
    before, one = logits.clone(), fresh(asked(Sampling(bias=((1, 2.0),)), [1]))
    found = apply_masks(
        process_logits(logits, [one.after_drafts(()), None], room), {1: np.array([1, 0], np.int32)}, room
    )
    assert found.data_ptr() == room.data_ptr()
    assert torch.equal(logits, before)
    assert torch.equal(found[0], process_logits(logits, [one.after_drafts(()), None])[0])
    assert found[1].isneginf().sum() == WORDS - 1


def test_a_fork_has_its_own_history() -> None:
    logits = random_logits(1)
    request = asked(Sampling(repetition_penalty=1.5, frequency_penalty=1.0, banned=((1, 2),)), [5])
    one = after(request, [1, 2])
    other = one.fork()
    other.push(9)
    assert torch.equal(
        process_logits(logits, [one.after_drafts(())]),
        process_logits(logits, [after(request, [1, 2]).after_drafts(())]),
    )
    assert torch.equal(
        process_logits(logits, [other.after_drafts(())]),
        process_logits(logits, [after(request, [1, 2, 9]).after_drafts(())]),
    )


@settings(max_examples=100, deadline=None)
@given(samplings, histories, stops, st.integers(0, 2**WORDS - 1), st.sampled_from(runnable_targets()))
def test_compiled_processors_equal_those_of_torch(
    sampling: Sampling, history: tuple[list[int], list[int]], stop: frozenset[int], chosen: int, means: str
) -> None:
    """The processed row is observed through sampling: each word comes as often as its probability."""
    prompt, answer = history
    one = after(asked(sampling, prompt, stop), answer).after_drafts(())
    logits = torch.randn(1, WORDS, generator=torch.Generator().manual_seed(chosen)) * 4
    words = np.array([chosen % 2**32, chosen >> 32], np.uint32).view(np.int32)
    for guide in (None, words):
        wanted = apply_masks(process_logits(logits, [one]), {} if guide is None else {0: guide})[0]
        way = replace(sampling, temperature=2.0)
        asks = [SampleRow(0, way, (number + 0.5) / 400, one, guide) for number in range(400)]
        tokens = [token for token, _ in compiled(means).sample(logits, asks)]
        if wanted.isneginf().all():
            assert set(tokens) == {-1}
            continue
        shares = torch.bincount(torch.tensor(tokens), minlength=WORDS) / 400
        assert float((shares - (wanted / 2).softmax(dim=0)).abs().max()) <= 2 / 400
        greedy = SampleRow(0, replace(sampling, temperature=0.0), 0.5, one, guide)
        token = compiled(means).sample(logits, [greedy])[0][0]
        assert float(wanted[token]) == pytest.approx(float(wanted.max()), rel=1e-6)


@cache
def compiled(means: str) -> CompiledSampler:
    return CompiledSampler(means, 1)


def test_unchanged_tables_are_made_once() -> None:
    """No step copies the table of banned tokens again, and no copy makes the row of allowed words again."""
    one = after(asked(Sampling(no_repeat_ngram_size=1, allowed=(3, 4, 70)), [5, 6]), [7])
    assert one.after_drafts(()) is one
    assert one.fork().after_drafts((8,)).allowed_words(WORDS) is one.allowed_words(WORDS)
    assert len(one.allowed_words(100)) == 4


@pytest.mark.parametrize("stops", [{5}, {7}, {5, 9}])
def test_a_stop_token_that_came_stays_banned_once_answers_may_end(stops: set[int]) -> None:
    request = asked(Sampling(no_repeat_ngram_size=1, min_tokens=2, frequency_penalty=0.5), [5, 6], frozenset(stops))
    logits = random_logits(1)
    found = process_logits(logits, [after(request, [7, 8]).after_drafts(())])[0]
    assert found.isneginf().nonzero().flatten().tolist() == [5, 6, 7, 8]


@pytest.mark.parametrize("means", runnable_targets())
@pytest.mark.parametrize("way", [Sampling(top_p=0.9), Sampling(typical_p=0.9), Sampling(typical_p=0.9, top_p=0.5)])
@pytest.mark.parametrize("largest", [3e38, -3e38, 1.0])
def test_penalties_make_no_logit_infinite(means: str, way: Sampling, largest: float) -> None:
    """Differences of infinite logits are NaN: no token would have a probability."""
    request = asked(replace(way, repetition_penalty=0.01), [3, 5, 9])
    logits = torch.full((1, WORDS), -1.0)
    logits[0, [3, 5, 9]] = largest
    rows = [SampleRow(0, request.sampling, u / 20, after(request, []).after_drafts(())) for u in range(20)]
    found = {token for token, _ in compiled(means).sample(logits, rows)}
    assert found <= {3, 5, 9} if largest > 0 else found <= set(range(WORDS)) - {3, 5, 9}


class CountedTokens(tuple[int, ...]):
    """Tokens that count how often they are read."""

    reads = 0

    def __iter__(self) -> Iterator[int]:
        CountedTokens.reads += 1
        return super().__iter__()


def test_the_options_of_a_call_are_read_once_for_all_its_answers() -> None:
    """Neither the check of a request, on the event loop, nor the engine reads them again for each answer."""
    sampling = Sampling(temperature=0, allowed=CountedTokens(range(20)))
    one = generate([1, 2], 3, sampling=sampling)
    requests = [replace(one, sampling=replace(sampling, seed=seed)) for seed in range(100)]
    worker = GeneratorWorker(FakeGenerator(400), model="talker")
    CountedTokens.reads = 0
    for request in requests:
        worker.validate(request)
    assert not CountedTokens.reads
    tickets = ask(worker, *requests)
    finish(worker)
    assert CountedTokens.reads <= 2
    assert len({tuple(ticket.tokens) for ticket in tickets}) == 1


@pytest.mark.parametrize(
    "sampling", [Sampling(bias=((-1, 2.0),)), Sampling(allowed=(3, -1)), Sampling(banned=((1, -1),))]
)
def test_a_token_below_zero_is_refused(sampling: Sampling) -> None:
    worker = GeneratorWorker(FakeGenerator(), model="talker")
    with pytest.raises(BadRequest, match="numbers of tokens begin at 0"):
        worker.submit(RecordingTicket(generate([1, 2], 3, sampling=sampling)))
    assert not worker.has_work


def test_requests_with_the_same_options_share_their_rules_while_one_is_open() -> None:
    shared, bias = SharedRules(), ((3, 1.5), (4, -2.0))
    request = asked(Sampling(bias=bias, seed=1), [1])
    rules = shared.find(request)
    assert shared.find(replace(request, sampling=Sampling(bias=bias, seed=2))) is rules
    assert shared.find(asked(Sampling(bias=((3, 1.5),)), [1])) is not rules
    table = rules.table
    one, other = (LogitsProcessor(request, rules) for _ in range(2))
    assert one.changes[1] is other.changes[1] is table.changes[1]


class ComparedToken(int):
    """A token that counts how often it is compared or looked up."""

    comparisons = 0

    def __eq__(self, other: object) -> bool:
        ComparedToken.comparisons += 1
        return int(self) == other

    def __hash__(self) -> int:
        ComparedToken.comparisons += 1
        return hash(int(self))


def test_a_token_does_not_cost_a_comparison_of_all_banned_sequences() -> None:
    """Each of 200 sequences agrees with the 100 last tokens but for its first one: one after the other they would be
    20,000 comparisons.
    """
    rows = tuple((ComparedToken(20 + number % 9), *[ComparedToken(1)] * 100, number % 9) for number in range(200))
    request = asked(Sampling(banned=(*rows, (1, 1, 40))), [1] * 300)
    one, logits = fresh(request), random_logits(1)
    found = process_logits(logits, [one.after_drafts(())])[0]
    assert found.isneginf().nonzero().flatten().tolist() == [40]
    for _ in range(3):
        one.push(1)
        ComparedToken.comparisons = 0
        one.after_drafts(())
        assert ComparedToken.comparisons <= 110


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=30),
    st.lists(st.integers(0, 3), max_size=40),
    st.sampled_from([2, 3, 5, 64]),
)
def test_repeated_ngrams_are_those_of_all_tokens(prompt: list[int], answer: list[int], size: int) -> None:
    """They are kept up to date with each token, and found in one pass, as if all tokens were compared."""
    ngrams = RepeatedNgrams(prompt, size)
    tokens = list(prompt)
    assert ngrams.next_tokens.tolist() == repeated_ngram_tokens(tokens, size)
    for token in answer:
        fork = ngrams.fork()
        ngrams.push(token)
        assert fork.next_tokens.tolist() == repeated_ngram_tokens(tokens, size), "the fork has its own tokens"
        tokens.append(token)
        assert ngrams.next_tokens.tolist() == repeated_ngram_tokens(tokens, size)


def test_repeated_ngrams_may_be_longer_than_a_byte_counts() -> None:
    """generation_config.json may ask for any size."""
    ngrams, tokens = RepeatedNgrams([1] * 298, 300), [1] * 298
    for _ in range(4):
        assert ngrams.next_tokens.tolist() == repeated_ngram_tokens(tokens, 300)
        ngrams.push(1)
        tokens.append(1)
    assert ngrams.next_tokens.tolist() == RepeatedNgrams(tokens, 300).next_tokens.tolist() == [1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(repetition_penalty=1.2),
        Sampling(no_repeat_ngram_size=1),
        Sampling(repetition_penalty=0.5, bias=((3, 1.0),)),
    ],
)
def test_a_prompt_is_read_once_for_all_its_answers(sampling: Sampling) -> None:
    """As many answers as there are places begin in one step, and forks of an answer share the prompt, too."""
    request = replace(asked(sampling, [1]), tokens=CountedTokens(range(40)))
    rules, logits = TokenRules(request), random_logits(1)
    CountedTokens.reads = 0
    answers = [LogitsProcessor(replace(request, sampling=replace(sampling, seed=n)), rules) for n in range(100)]
    assert CountedTokens.reads == 1
    assert len({id(one.fork().steps[1][0].base) for one in answers}) == 1
    other = LogitsProcessor(replace(request, sampling=replace(sampling, repetition_penalty=1.7)), rules)
    expected = reference(logits[0], replace(request, sampling=replace(sampling, repetition_penalty=1.7)), [])
    torch.testing.assert_close(process_logits(logits, [other])[0], expected)

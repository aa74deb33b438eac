"""Speculative decoding: prompt lookup finds what a slow search finds, a draft is that of the draft model, and no
answer changes."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from polyhead.models.executors.contract import StepInput
from polyhead.service.core.request import Done, Event, Generate, GeneratedToken, Sampling
from polyhead.service.engine import draft_model as drafting
from polyhead.service.engine.block_allocator import BlockAllocator, child_key
from polyhead.service.engine.draft_model import DraftCacheState, DraftModel, DraftQuery
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.engine.prompt_lookup import NGRAM_LENGTHS, PromptLookup
from polyhead.service.engine.speculation import DraftRequest, Speculation
from polyhead.service.engine.speculation_stats import HitRates, StepCosts
from tests.support.engine_fakes import WORDS, FakeGenerator, ask, finish, generate, greedy

MOST = 8
texts = st.lists(st.integers(0, 4), max_size=60)


# Prompt lookup


def places(tokens: Sequence[int]) -> list[int]:
    """The places of earlier occurrences of the longest n-gram at the end, the latest last."""
    end = len(tokens)
    for length in NGRAM_LENGTHS:
        before = range(length, end) if end >= length else ()
        if found := [at for at in before if tokens[at - length : at] == tokens[end - length :]]:
            return found
    return []


def agreement(tokens: Sequence[int], place: int) -> int:
    length = 0
    while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
        length += 1
    return length


@pytest.fixture(autouse=True, scope="module")
def room() -> Iterator[None]:
    """A slot for every n-gram, so that none is overwritten."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyhead.service.engine.prompt_lookup.MIN_TABLE_BITS", 16)
        yield


@pytest.fixture
def breaks() -> Iterator[None]:
    """End an agreement for good."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("polyhead.service.engine.prompt_lookup.LONG_RUN", 1_000)
        yield


@pytest.mark.usefixtures("breaks")
@given(texts, texts)
def test_the_latest_earlier_place_is_found_first(prompt: list[int], answer: list[int]) -> None:
    tokens = list(prompt)
    lookup = PromptLookup(tokens)
    place = places(tokens)[-1] if places(tokens) else 0
    for token in answer:
        expected = tokens[place] if place else -1
        tokens.append(token)
        assert lookup.unread_count == 1
        assert lookup.read_token() == (expected == token)
        if expected == token:
            place += 1  # it continues where it was right
        else:
            place = places(tokens)[-1] if places(tokens) else 0
        assert bool(lookup.run) == bool(place)
        if place:
            assert min(lookup.run, 16) <= agreement(tokens, place)
            long = tokens[place:] * 9
            assert lookup.propose(9) == long[:9]
    assert bool(lookup.propose(3)) == bool(place)


@pytest.mark.usefixtures("breaks")
@given(texts, texts)
def test_tokens_added_at_once_are_found_like_tokens_added_one_by_one(prompt: list[int], answer: list[int]) -> None:
    tokens = list(prompt)
    slow = PromptLookup(tokens)
    for token in answer:
        tokens.append(token)
        slow.read_token()
    fast = PromptLookup(list(tokens))
    if not places(tokens) or slow.run == 0:
        assert fast.run == slow.run == 0
    else:
        assert fast.propose(5) == (tokens[places(tokens)[-1] :] * 5)[:5]


@pytest.mark.parametrize(
    ("answers", "next_ones"),
    [
        ([1, 2, 3, 4, 5, 99], [7, 8, 9]),  # another token
        ([1, 2, 3, 4, 5, 99, 7], [8, 9, 10]),
        ([1, 2, 3, 4, 5, 99, 6], [7, 8, 9]),  # an inserted token
        ([1, 2, 3, 4, 5, 99, 98, 97, 8], [9, 10, 11]),  # three tokens for two
        ([1, 2, 3, 4, 5, 8], [9, 10, 11]),  # two tokens left out
        ([1, 2, 3, 4, 5, 99, 98, 97, 96, 7], []),  # too late
        ([1, 2, 3, 99], []),  # it was not long
    ],
)
def test_after_a_mismatch_the_lookup_resumes_nearby(answers: list[int], next_ones: list[int]) -> None:
    tokens = [*range(1, 21), 50]
    lookup = PromptLookup(tokens)
    for token in answers:
        tokens.append(token)
        lookup.read_token()
    assert lookup.propose(3) == next_ones


def test_a_long_text_shares_a_limited_table() -> None:
    choice = random.Random(0)
    tokens = [choice.randrange(1 << 18) for _ in range(200_000)]
    tokens += tokens[199_000:199_003]
    lookup = PromptLookup(tokens)
    assert len(lookup._table) == 1 << 16
    assert lookup.propose(6) == tokens[199_003:199_009]


# When to speculate


@dataclass
class SimulatedDecoding:
    """Known answers, served step by step in simulated seconds."""

    cost: Callable[[int], float]  # of a step of so many rows
    drafter: DraftModel | None = None
    limit: int = 64
    seconds: float = 0.0
    tried: int = 0
    came: int = 0
    clock: list[float] = field(default_factory=lambda: [0.0])

    def __post_init__(self) -> None:
        self.speculation = Speculation(MOST, self.limit, self.drafter)
        self.speculation.record_step(256, self.cost(256))

    def serve(self, pairs: Sequence[tuple[list[int], list[int]]]) -> float:
        """The speed relative to decoding token by token."""
        talks = [(list(prompt), len(prompt) + len(answer), [*prompt, *answer]) for prompt, answer in pairs]
        trails = [self.speculation.track(tokens) for tokens, _, _ in talks]
        taken = 0.0
        while going := [number for number, (tokens, end, _) in enumerate(talks) if len(tokens) < end]:
            before = self.clock[0]
            draft_requests = [
                DraftRequest(trails[number], MOST, range(1000 * number, 1000 * number + 1000)) for number in going
            ]
            drafts = self.speculation.draft(draft_requests, len(going))
            rows = len(going) + sum(map(len, drafts))
            assert rows <= max(self.limit, len(going))
            self.speculation.record_step(rows, self.cost(rows))
            taken += self.cost(rows) + self.clock[0] - before
            for number, draft in zip(going, drafts, strict=True):
                assert len(draft) <= MOST
                tokens, end, whole = talks[number]
                truth = whole[len(tokens) : len(tokens) + len(draft)]
                right = sum(accumulate((a == b for a, b in zip(draft, truth, strict=False)), min))
                self.tried, self.came = self.tried + len(draft), self.came + right
                tokens += whole[len(tokens) : min(len(tokens) + right + 1, end)]
        longest = max(len(answer) for _, answer in pairs)
        plain = sum(self.cost(sum(len(answer) > step for _, answer in pairs)) for step in range(longest))
        return plain / taken


def memory_bound(rows: int) -> float:
    """Bound by memory up to some rows, by arithmetic from there on."""
    return 0.010 + 0.0004 * min(rows, 16) + 0.0010 * max(rows - 16, 0)


def linear(rows: int) -> float:
    """Every row costs as much as the first."""
    return 0.001 * rows


def words(choice: random.Random, count: int, different: int = 40_000) -> list[int]:
    return [choice.randrange(different) for _ in range(count)]


def copied_answer(choice: random.Random, every: int = 12) -> tuple[list[int], list[int]]:
    """An answer that repeats its prompt, with another token now and then."""
    prompt = words(choice, 300)
    return prompt, [choice.randrange(40_000) if at % every == every - 1 else token for at, token in enumerate(prompt)]


def random_answer(choice: random.Random) -> tuple[list[int], list[int]]:
    """An answer of few different tokens: a lookup always finds a place, and is right only by chance."""
    return words(choice, 300, 30), words(choice, 300, 30)


@pytest.mark.parametrize(("batch", "least"), [(1, 3.5), (4, 2.0)])
def test_answers_that_copy_are_faster(batch: int, least: float) -> None:
    choice = random.Random(batch)
    play = SimulatedDecoding(memory_bound)
    assert play.serve([copied_answer(choice) for _ in range(batch)]) > least
    assert play.came > 0.5 * play.tried


@pytest.mark.parametrize("batch", [1, 4, 16, 100])
@pytest.mark.parametrize("kind", [random_answer, copied_answer])
@pytest.mark.parametrize("cost", [memory_bound, linear])
def test_speculation_never_costs_much(
    batch: int, kind: Callable[[random.Random], tuple[list[int], list[int]]], cost: Callable[[int], float]
) -> None:
    choice = random.Random(batch)
    play = SimulatedDecoding(cost)
    for _ in range(3):
        assert play.serve([kind(choice) for _ in range(batch)]) > 0.97
    if cost is linear or batch == 100:
        assert play.tried < 0.02 * 300 * batch * 3


def test_speculation_resumes_when_it_is_faster() -> None:
    choice = random.Random(5)
    play = SimulatedDecoding(memory_bound)
    for _ in range(6):
        play.serve([random_answer(choice)])
    assert play.serve([copied_answer(choice)]) > 2.5


def test_only_sequences_with_a_high_hit_rate_get_drafts() -> None:
    choice = random.Random(6)
    play = SimulatedDecoding(memory_bound)
    play.serve([random_answer(choice) for _ in range(8)])
    (prompt, answer), (other, _) = copied_answer(choice), random_answer(choice)
    first, second = [*prompt, *answer[:5]], other
    trails = [play.speculation.track(first), play.speculation.track(second)]
    comparable = play.speculation.draft([DraftRequest(trail, MOST, ()) for trail in trails], 2)
    assert comparable[0] == prompt[5 : 5 + len(comparable[0])]
    assert len(comparable[0]) > 3
    assert len(comparable[1]) <= 1


def test_drafts_are_limited_by_the_request_and_the_step() -> None:
    tokens = [1, 2, 3, 4, 5, 6] * 4
    speculation = Speculation(MOST, 6)
    assert speculation.draft([DraftRequest(speculation.track(tokens), 3, ())], 1) == [[]], (
        "before the first measurement"
    )
    speculation.record_step(1, 0.010)
    assert speculation.draft([DraftRequest(speculation.track(tokens), 3, ())], 1) == [[1, 2, 3]]
    assert speculation.draft([DraftRequest(speculation.track(tokens), 0, ())], 1) == [[]]
    draft_requests = [DraftRequest(speculation.track(tokens), MOST, ()) for _ in range(4)]
    assert sum(map(len, speculation.draft(draft_requests, 4))) == 2
    assert Speculation(0, 64).draft([DraftRequest(speculation.track(tokens), 3, ())], 1) == [[]]


def test_costs_are_interpolated_and_old_measurements_fade() -> None:
    costs = StepCosts()
    assert costs.estimate(1, 1) == [0.0, 0.0]
    costs.record(1, 0.010)
    costs.record(5, 0.014)
    assert costs.estimate(1, 6) == pytest.approx([0.010, 0.011, 0.012, 0.013, 0.014, 0.015, 0.016])
    costs.record(5, 0.9)
    assert costs.estimate(5, 0) == pytest.approx([0.014 * 9 / 8]), "a disturbed measurement counts for little"
    for _ in range(600):
        costs.record(1, 0.010)
    assert costs.estimate(1, 4)[4] == pytest.approx(0.9 * 0.014 * 9 / 8)
    for _ in range(6000):
        costs.record(1, 0.010)
    assert costs.estimate(1, 4) == pytest.approx([0.010] * 5), "an estimate is never below a certain measurement"


def test_the_hit_rate_of_a_sequence_begins_with_the_overall_rate() -> None:
    everyone = HitRates((0.5,))
    for _ in range(200):
        everyone.record(0, True)
    one = everyone.child()
    assert one.rate() == everyone.rate() > 0.95
    for _ in range(20):
        one.record(0, False)
    assert one.rate() < 0.2
    assert everyone.rate() > one.rate()


# A draft model


def test_a_draft_is_that_of_the_draft_model_whichever_sequence_had_the_blocks_before() -> None:
    """Sequences come, grow by draft tokens or by others, share prefixes, lose their blocks."""
    choice = random.Random(1)
    executor = FakeGenerator(64, 4)
    drafter = DraftModel(executor, budget=24, longest=60, words=WORDS)
    blocks = BlockAllocator(64, 4)
    drafted_at_all = right = 0
    going: list[tuple[DraftCacheState, list[int], list[int]]] = []
    stems = [[choice.randrange(WORDS) for _ in range(12)] for _ in range(2)]
    for _ in range(600):
        if len(going) < 4 and choice.random() < 0.3:
            rest = [choice.randrange(WORDS) for _ in range(choice.randint(1, 9))]
            going.append((DraftCacheState(), [*choice.choice(stems), *rest], []))
        for depth, tokens, held in list(going):
            if len(tokens) > 55 or choice.random() < 0.03:
                blocks.release(held)
                going.remove((depth, tokens, held))
            elif choice.random() < 0.05:
                blocks.release(held)  # preempted
            else:
                if not held:
                    blocks.share_cached(held, keys_of(tokens), 0)
                assert blocks.allocate(held, len(tokens) + choice.choice([0, 3]))
                for index, key in enumerate(keys_of(tokens)):
                    blocks.publish(held[index], key)
        asked = [DraftQuery(depth, tokens, held, choice.randint(1, 6)) for depth, tokens, held in going if held]
        for each, comparable in zip(asked, drafter.propose(asked), strict=True):
            assert comparable == greedy(each.tokens, len(comparable)), "keys of another sequence"
            assert len(comparable) <= each.max_tokens
            drafted_at_all += len(comparable)
        for depth, tokens, _ in going:
            right += len(depth.stored_draft)
            tokens += [*depth.stored_draft[: choice.randint(0, 3)], choice.randrange(WORDS)][: 58 - len(tokens)]
    assert drafted_at_all > 300
    assert right > 100
    computed = sum(len(rows.tokens) for rows in executor.seen)
    assert computed < 6 * drafted_at_all, "cached tokens were computed again"


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    for start in range(0, (len(tokens) - 1) // 4 * 4, 4):
        keys.append(child_key(keys[-1] if keys else b"", tokens[start : start + 4]))
    return keys


def test_a_failed_draft_model_is_not_used_again(caplog: pytest.LogCaptureFixture) -> None:
    executor = FakeGenerator(40, 4)
    drafter = DraftModel(executor, budget=24, longest=60, words=WORDS)
    executor.raises = lambda rows: True
    asked = DraftQuery(DraftCacheState(), [1, 2, 3], [0, 1], 3)
    assert drafter.propose([asked]) == [[]]
    assert drafter.uncomputed_tokens(asked) == 0
    assert "the draft model failed" in caplog.text


class SimulatedDraftModel(FakeGenerator):
    """Takes simulated seconds, and generates given tokens."""

    def __init__(self, clock: list[float], seconds: float, says: Callable[[list[int]], int]) -> None:
        super().__init__(4000, 16)
        self.clock, self.seconds, self.says = clock, seconds, says

    def step(self, rows: StepInput) -> Tensor:
        self.clock[0] += self.seconds * (1 + len(rows.tokens) / 100)
        return super().step(rows)

    def answer(self, table: list[int], length: int) -> list[float]:
        tokens = [self.cache[self.slot(table, position)][1] for position in range(length)]
        logits = [0.0] * WORDS
        logits[self.says(tokens)] = 1.0
        return logits


def counting(tokens: Sequence[int]) -> int:
    return (tokens[-1] * 5 + len(tokens) ** 2) % WORDS


@pytest.mark.parametrize(("is_right", "least", "most"), [(True, 2.0, 9.0), (False, 0.96, 1.01)])
def test_a_draft_model_is_used_where_it_is_faster(
    is_right: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(drafting, "perf_counter", lambda: clock[0])
    executor = SimulatedDraftModel(clock, 0.001, counting if is_right else lambda tokens: 0)
    drafter = DraftModel(executor, budget=256, longest=4000, words=WORDS)
    play = SimulatedDecoding(memory_bound, drafter, clock=clock)
    choice, speed = random.Random(2), 0.0
    for turn in range(3):
        prompt, answer = [turn], list[int]()
        while len(answer) < 400:
            answer.append(counting([*prompt, *answer]) if is_right else choice.randrange(1, WORDS))
        speed = play.serve([(prompt, answer)])
    assert least < speed < most
    assert executor.seen


# In the step


def workers(block_count: int, drafted: bool, **budgets: int) -> Iterator[GeneratorWorker]:
    """One without speculation, and one that always speculates."""
    for speculating in (False, True):
        executor = FakeGenerator(block_count, 4)
        worker = GeneratorWorker(executor, model="talker", **budgets)
        if speculating:
            drafter = (
                DraftModel(FakeGenerator(block_count, 4), budget=32, longest=200, words=WORDS) if drafted else None
            )
            worker.speculation = AlwaysSpeculating(5, 64, drafter)
        yield worker


class AlwaysSpeculating(Speculation):
    """Speculates as if drafts cost nothing."""

    def record_step(self, rows: int, seconds: float) -> None:
        super().record_step(rows, 1.0)


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_no_answer_is_changed(drafted: bool, seed: int) -> None:
    """With any drafts and any sampling, in a cache too small for all: the events are the same, one by one."""
    choice = random.Random(seed)
    requests = [a_request(choice, number) for number in range(24)]
    answers, drafts = [], 0
    for worker in workers(40, drafted, token_budget=24, sequence_budget=8, prefill_chunk=7):
        tickets = ask(worker, *requests)
        for number, ticket in enumerate(tickets):
            if number % 11 == 10:
                worker.abort(ticket)
        reports = finish(worker)
        answers.append([ticket.events for ticket in tickets])
        drafts = sum(report.accepted for report in reports)
        assert drafts <= sum(report.drafted for report in reports)
        worker.check_invariants()
    assert drafts > 5
    for plain, speculated in zip(*answers, strict=True):
        assert comparable(plain) == comparable(speculated)


def comparable(events: Sequence[Event]) -> list[Event]:
    """All events without the number of cached tokens, which depends on earlier requests."""
    return [replace(each, cached_tokens=0) for each in events if isinstance(each, GeneratedToken | Done)]


def a_request(choice: random.Random, number: int) -> Generate:
    stem = [choice.randrange(WORDS) for _ in range(choice.randint(2, 6))]
    words = {word: choice.uniform(4, 9) for word in stem}  # which come again and again
    sampling = Sampling(
        temperature=choice.choice([0.0, 0.0, 0.7, 1.3]),
        top_p=choice.choice([1.0, 0.9]),
        seed=number,
        repetition_penalty=choice.choice([1.0, 1.0, 1.2]),
        frequency_penalty=choice.choice([0.0, 0.3]),
        bias=tuple(words.items()) if choice.random() < 0.8 else (),
    )
    return generate(
        stem * choice.randint(1, 4),
        choice.randint(1, 40),
        sampling=sampling,
        logprobs=choice.choice([-1, -1, 0, 2]),
        stop_tokens=frozenset([choice.randrange(WORDS)]) if choice.random() < 0.3 else frozenset(),
    )

"""Groups of answers to one prompt, beam searches, guides and scored prompts: with a fake network that makes every
mistake visible, and beam searches compared with transformers."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast
from weakref import WeakSet

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from polyhead.models.checkpoint import load
from polyhead.models.executors.contract import Executor
from polyhead.models.executors.torch_executor import TorchExecutor
from polyhead.models.native.library import runnable_targets
from polyhead.models.native.native_executor import NativeExecutor
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.guide import GuideFinished
from polyhead.service.core.request import (
    BeamSearchOptions,
    Done,
    Event,
    Failed,
    Generate,
    GeneratedToken,
    PromptScores,
    Sampling,
    Terms,
)
from polyhead.service.engine.generator_worker import FORCED_TURN_S, GeneratorWorker
from polyhead.service.engine.logits_processors import LogitsProcessor, TokenRules
from polyhead.service.engine.scheduler import StepPlan
from tests.support.engine_fakes import (
    GREEDY,
    WORDS,
    FakeGenerator,
    FakeRecurrentGenerator,
    RecordingTicket,
    ask,
    finish,
    generate,
    logits_after,
    turn,
)

FAKES = (FakeGenerator, FakeRecurrentGenerator)


def generator(executor: FakeGenerator, **budgets: int) -> GeneratorWorker:
    return GeneratorWorker(executor, model="talker", **budgets)


def answers(executor: FakeGenerator, *requests: Generate, **budgets: int) -> list[list[Event]]:
    worker = generator(executor, **budgets)
    tickets = ask(worker, *requests)
    finish(worker)
    return [ticket.events for ticket in tickets]


def token_ids(events: Sequence[Event]) -> list[int]:
    return [event.id for event in events if isinstance(event, GeneratedToken)]


def group(prompt: Sequence[int], count: int, **options: object) -> list[Generate]:
    one = generate(prompt, **({"sampling": Sampling(temperature=2)} | options))  # type: ignore[arg-type]
    seeded = [replace(one, sampling=replace(one.sampling, seed=seed)) for seed in range(count)]
    return [replace(each, group="g" + repr(prompt)) for each in seeded]


# Groups


def test_the_prompt_of_a_group_is_computed_once() -> None:
    executor, requests = FakeGenerator(), group(range(1, 11), 4)
    together = answers(executor, *requests)
    rows = sum(len(rows.tokens) for rows in executor.seen)
    assert rows == 10 + 4 * 7, "the prompt, and every generated token except the last"
    alone = [answers(FakeGenerator(), replace(request, group=""))[0] for request in requests]
    assert [token_ids(events) for events in together] == [token_ids(events) for events in alone]
    assert len({tuple(token_ids(events)) for events in together}) > 1


def test_the_first_request_of_a_group_may_be_aborted() -> None:
    for leaves in range(4):
        for after in range(4):
            worker = generator(FakeGenerator(), prefill_chunk=3)
            tickets = ask(worker, *group(range(1, 11), 4))
            for _ in range(after):
                turn(worker)
            worker.abort(tickets[leaves])
            kept = [ticket for ticket in tickets if ticket is not tickets[leaves]]
            finish(worker)
            for ticket in kept:
                (alone,) = answers(FakeGenerator(), replace(ticket.request, group=""))
                assert ticket.tokens == token_ids(alone)


@pytest.mark.parametrize("seed", range(60))
def test_groups_and_other_requests_in_a_small_cache(seed: int) -> None:
    """Preempted, aborted, in chunks: each answer equals that of a single request."""
    choice = random.Random(seed)
    requests: list[Generate] = []
    for number in range(choice.randint(1, 4)):
        prompt = [choice.randint(0, 3) for _ in range(choice.randint(1, 12))]
        many = group([*prompt, number], choice.randint(1, 4), max_tokens=choice.randint(1, 9))
        requests += many
    executor = choice.choice(FAKES)(block_count=choice.choice([6, 9, 30]), block_size=4)
    worker = generator(executor, sequence_budget=choice.choice([2, 4, 64]), prefill_chunk=choice.choice([2, 64]))
    tickets = ask(worker, *requests)
    gone: set[RecordingTicket] = set()
    while worker.has_work:
        if choice.random() < 0.1:
            ticket = choice.choice(tickets)
            if not ticket.ended:
                worker.abort(ticket)
                gone.add(ticket)
        if worker.has_work:
            turn(worker)
    worker.check_invariants()
    for ticket in tickets:
        if ticket not in gone:
            (alone,) = answers(FakeGenerator(), replace(ticket.request, group=""))
            assert ticket.tokens == token_ids(alone)


@pytest.mark.parametrize("seed", range(20))
def test_a_group_of_more_answers_than_places(seed: int) -> None:
    """As many as there are places start from the prompt, the others after them; some requests are aborted."""
    choice = random.Random(seed)
    places, count = choice.choice([1, 2, 5]), choice.randint(8, 20)
    requests = [*group(range(1, 11), count), generate([7, 7], 12), *group([3, 4, 5], count, max_tokens=3)]
    worker = generator(choice.choice(FAKES)(block_count=choice.choice([8, 60])), sequence_budget=places)
    tickets = ask(worker, *requests)
    gone: set[RecordingTicket] = set()
    while worker.has_work:
        if choice.random() < 0.2:
            worker.abort(left := choice.choice(tickets))
            gone |= {left} if not left.ended else set()
        if worker.has_work:
            turn(worker)
        worker.check_invariants()
    for ticket in tickets:
        if ticket not in gone:
            (alone,) = answers(FakeGenerator(), replace(ticket.request, group=""))
            assert ticket.tokens == token_ids(alone)
            assert isinstance(ticket.events[-1], Done)


def test_an_answer_that_waits_has_no_tables_and_no_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thousands of answers of a call, those that run have them; and no step samples more tokens than run."""
    places, sampled = 8, list[int]()
    created, create = WeakSet[LogitsProcessor](), LogitsProcessor.__init__
    rides, ride = WeakSet[ForcedState](), ForcedGuide.new_state

    def noted(shape: LogitsProcessor, *given: Any) -> None:
        create(shape, *given)
        created.add(shape)

    def ridden(rails: ForcedGuide, owner: str) -> ForcedState:
        rides.add(one := ride(rails, owner))
        return one

    monkeypatch.setattr(LogitsProcessor, "__init__", noted)
    monkeypatch.setattr(ForcedGuide, "new_state", ridden)
    sampling = Sampling(temperature=2, bias=tuple((token, 0.5) for token in range(12)), frequency_penalty=0.5)
    worker = generator(FakeGenerator(400), sequence_budget=places)
    sample = worker.sampler.sample
    monkeypatch.setattr(
        worker.sampler, "sample", lambda logits, rows: sampled.append(len(rows)) or sample(logits, rows)
    )
    requests = [
        one
        for number in range(12)
        for one in group([number % 5, number], 16, max_tokens=4, sampling=sampling, guide=ForcedGuide(PLACES))
    ]
    tickets = ask(worker, *requests)
    assert not created
    assert not rides
    while worker.has_work:
        turn(worker)
        assert len(created) <= places
        assert len(rides) <= places
    assert max(sampled) == places
    assert all(isinstance(ticket.events[-1], Done) for ticket in tickets)


def test_a_guide_that_cannot_begin_fails_alone() -> None:
    class Broken(ForcedGuide):
        def new_state(self, owner: str = "") -> ForcedState:
            raise BadRequest("no room for its grammar")

    requests = [generate([5, 6], 20, guide=Broken(PLACES)), generate([5, 6], 6)]
    failed, other = answers(FakeGenerator(), *requests)
    assert isinstance(failed[-1], Failed)
    assert failed[-1].error.message == "no room for its grammar"
    assert token_ids(other) == token_ids(answers(FakeGenerator(), requests[1])[0])


def test_another_cache_salt_finds_no_cached_blocks() -> None:
    worker = generator(FakeGenerator())
    cached = []
    for salt in ("", "", "a", "a", "b", ""):
        (ticket,) = ask(worker, generate(range(1, 12), 2, salt=salt))
        finish(worker)
        done = ticket.events[-1]
        assert isinstance(done, Done)
        cached.append(done.cached_tokens)
    assert cached == [0, 8, 0, 8, 0, 8]


# Prompts that are scored


def scores_of(prompt: Sequence[int]) -> list[float]:
    logits = torch.tensor([logits_after(prompt[:end]) for end in range(1, len(prompt))])
    return logits.log_softmax(dim=-1)[range(len(prompt) - 1), list(prompt[1:])].tolist()


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_prompt_is_scored_whatever_is_cached(chunk: int) -> None:
    prompt = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    worker = generator(FakeGenerator(), prefill_chunk=chunk)
    first, second, third = (ask(worker, generate(prompt, most, logprobs=0, prompt_logprobs=2))[0] for most in (3, 3, 0))
    finish(worker)
    for ticket in (first, second, third):
        prompted = ticket.events[0]
        assert isinstance(prompted, PromptScores)
        assert [score for score, _ in prompted.scores] == pytest.approx(scores_of(prompt), abs=1e-5)
        assert all(len(top) == 2 for _, top in prompted.scores)
    assert third.events[1:] == [Done("length", 9, 0, 0)]
    assert first.tokens == second.tokens


def test_a_prompt_of_one_token_scores_nothing() -> None:
    (events,) = answers(FakeGenerator(), generate([3], 0, prompt_logprobs=0))
    assert events == [PromptScores(()), Done("length", 1, 0, 0)]


def test_the_scores_of_a_search_go_to_the_request_that_asks_for_them() -> None:
    """A router closes the connection of a replica that sends scores that were not asked for."""
    one, *others = beam_search_of([3, 1, 4], 3, BeamSearchOptions(3), max_tokens=2)
    first, *rest = answers(FakeGenerator(), replace(one, prompt_logprobs=0), *others)
    assert isinstance(first[0], PromptScores)
    assert not any(isinstance(event, PromptScores) for events in rest for event in events)


# Guides


@dataclass
class ForcedGuide:
    """A guide that allows certain tokens at each place; a single allowed token is forced."""

    places: list[set[int]]
    fails_at: int = -1

    def new_state(self, owner: str = "") -> "ForcedState":
        return ForcedState(self)


@dataclass(eq=False)
class ForcedState:
    rails: ForcedGuide
    come: list[int] = field(default_factory=list)

    @property
    def is_finished(self) -> bool:
        return len(self.come) == len(self.rails.places)

    def fill_mask(self, words: NDArray[np.int32]) -> bool:
        if len(self.come) == self.rails.fails_at:
            raise BadRequest("too complex")
        for token in self.rails.places[len(self.come)]:
            words[token // 32] |= 1 << token % 32
        return True

    def advance(self, token: int) -> None:
        assert token in self.rails.places[len(self.come)]
        self.come.append(token)

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        rest = self.rails.places[len(self.come) :]
        free = next((index for index, allowed in enumerate(rest) if len(allowed) > 1), len(rest))
        return [min(allowed) for allowed in rest[:free]]


PLACES = [{1, 2, 3}, {7}, {8}, {4, 5}, {9}, {10}, {11}]


def test_a_guide_restricts_tokens_and_forced_tokens_share_a_step() -> None:
    executor = FakeGenerator()
    (events,) = answers(executor, generate([5, 6], 20, guide=ForcedGuide(PLACES)))
    assert all(token in allowed for token, allowed in zip(token_ids(events), PLACES, strict=True))
    assert events[-1] == Done("stop", 2, 7, 0)
    assert len(executor.seen) == 2, "one step for each choice"
    (scored,) = answers(FakeGenerator(), generate([5, 6], 20, guide=ForcedGuide(PLACES), logprobs=0))
    assert token_ids(scored) == token_ids(events)
    assert all(event.logprob < 0 for event in scored if isinstance(event, GeneratedToken))


@dataclass
class OwnedGuide(ForcedGuide):
    owner: str = ""

    def new_state(self, owner: str = "") -> ForcedState:
        self.owner = owner
        return ForcedState(self)


def test_a_guide_knows_whose_answer_it_is() -> None:
    guide = OwnedGuide(PLACES)
    answers(FakeGenerator(), generate([5, 6], 20, guide=guide, terms=Terms("mail")))
    assert guide.owner == "mail"


@dataclass
class CostlyGuide(ForcedGuide):
    """A guide whose forced tokens take a simulated time, unless a mask is to compute them.  `computed`: when it was."""

    now: list[float] = field(default_factory=lambda: [0.0])
    computed: list[float] = field(default_factory=list)

    def new_state(self, owner: str = "") -> "CostlyState":
        return CostlyState(self)


@dataclass(eq=False)
class CostlyState(ForcedState):
    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        assert isinstance(self.rails, CostlyGuide)
        if not computes:
            return []
        self.rails.computed.append(self.rails.now[0])
        self.rails.now[0] += 0.7 * FORCED_TURN_S
        return super().forced_tokens()


def test_a_step_computes_the_forced_tokens_of_a_few_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = CostlyGuide(PLACES)
    monkeypatch.setattr("polyhead.service.engine.generator_worker.perf_counter", lambda: guide.now[0])
    worker = GeneratorWorker(FakeGenerator(), model="talker")
    tickets = ask(worker, *(generate([5, index], 20, guide=guide) for index in range(8)))
    steps = 0
    while worker.has_work:
        before = len(guide.computed)
        turn(worker)
        steps += 1
        assert len(guide.computed) - before <= 2, "the second one has used up the time for it"
    assert steps > 2
    for ticket in tickets:
        assert all(token in allowed for token, allowed in zip(ticket.tokens, PLACES, strict=True))


def test_guided_and_free_requests_share_steps() -> None:
    requests = [
        generate([5, 6], 20, guide=ForcedGuide(PLACES), sampling=Sampling(temperature=1.5, seed=4)),
        generate([5, 6], 20, sampling=Sampling(temperature=1.5, seed=4)),
        generate([5, 6, 7], 5, guide=ForcedGuide(PLACES)),
        *(replace(each, guide=ForcedGuide(PLACES)) for each in group([1, 2, 3, 4, 5], 3)),
    ]
    together = answers(FakeGenerator(), *requests)
    alone = [answers(FakeGenerator(), replace(request, group=""))[0] for request in requests]
    assert [token_ids(events) for events in together] == [token_ids(events) for events in alone]
    assert isinstance(together[2][-1], Done)
    assert (together[2][-1].reason, len(token_ids(together[2]))) == ("length", 5)


@pytest.mark.parametrize("place", [0, 3])
def test_a_guide_that_fails_fails_alone(place: int) -> None:
    requests = [generate([5, 6], 20, guide=ForcedGuide(PLACES, place)), generate([5, 6], 6)]
    failed, other = answers(FakeGenerator(), *requests)
    assert isinstance(failed[-1], Failed)
    assert failed[-1].error.message == "too complex"
    assert token_ids(other) == token_ids(answers(FakeGenerator(), requests[1])[0])


# Searches


class LateEnd:
    """A guide whose answers are complete after two tokens, which only its mask finds out."""

    def new_state(self, owner: str = "") -> "LateEndState":
        return LateEndState()


class LateEndState:
    is_finished = False

    def __init__(self) -> None:
        self.count = 0

    def fill_mask(self, mask: Any) -> bool:
        if self.count == 2:
            raise GuideFinished
        return False

    def advance(self, token: int) -> None:
        self.count += 1

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        return []


def test_an_answer_whose_end_is_found_late_has_the_same_usage() -> None:
    requests: Any = [generate([5, 6], 20, guide=LateEnd()), generate([5, 6], 6)]  # type: ignore[arg-type]
    complete, other = answers(FakeGenerator(), *requests)
    assert token_ids(complete) == token_ids(other)[:2]
    assert complete[-1] == Done("stop", 2, 2)
    assert len(token_ids(other)) == 6


def beam_search_of(prompt: Sequence[int], count: int, how: BeamSearchOptions, **options: object) -> list[Generate]:
    return [generate(prompt, group="search", beams=how, **options)] * count  # type: ignore[arg-type]


def test_a_search_of_one_is_greedy() -> None:
    (events,) = answers(FakeGenerator(), *beam_search_of([1, 2, 3], 1, BeamSearchOptions(1)))
    assert token_ids(events) == token_ids(answers(FakeGenerator(), generate([1, 2, 3]))[0])


def test_a_beam_search_finds_the_answer_of_an_exhaustive_search() -> None:
    """The beams are as many as the answers, so it finds the best."""
    found = answers(
        FakeGenerator(), *beam_search_of([1, 2], 5, BeamSearchOptions(WORDS), max_tokens=2), sequence_budget=64
    )
    every = {}
    for first, one in enumerate(torch.tensor(logits_after([1, 2])).log_softmax(0).tolist()):
        for second, two in enumerate(torch.tensor(logits_after([1, 2, first])).log_softmax(0).tolist()):
            every[first, second] = one + two
    best = sorted(every, key=lambda answer: every[answer], reverse=True)[:5]
    assert [tuple(token_ids(events)) for events in found] == best


@pytest.mark.parametrize("seed", range(12))
def test_beam_searches_in_a_small_cache_find_the_same(seed: int) -> None:
    choice = random.Random(seed)
    prompt = [choice.randint(0, 5) for _ in range(choice.randint(1, 9))]
    how = BeamSearchOptions(choice.randint(2, 4), choice.choice([0.5, 1.0, 2.0]), choice.random() < 0.5)
    stops = frozenset({choice.randint(0, 22), choice.randint(0, 22)})
    requests = beam_search_of(prompt, how.width, how, max_tokens=6, stop_tokens=stops, logprobs=1)
    roomy = answers(FakeGenerator(200), *requests)
    executor = choice.choice(FAKES)(block_count=24, block_size=3)
    others = [generate([index, 7], 12) for index in range(6)]
    crowded = answers(executor, *others, *requests, prefill_chunk=2, token_budget=5)
    assert crowded[6:] == roomy
    assert crowded[0][:-1] == answers(FakeGenerator(), others[0])[0][:-1]


def several(count: int, how: BeamSearchOptions, **options: object) -> list[Generate]:
    """Searches with prompts of their own, as those of one call."""
    searches = [beam_search_of([1, 2, number % 20, number], 1, how, **options)[0] for number in range(count)]
    return [replace(search, group=f"search-{number}") for number, search in enumerate(searches)]


@pytest.mark.parametrize(("count", "width"), [(2, 64), (100, 2), (5, 40)])
@pytest.mark.parametrize("blocks", [1000, 140])
def test_searches_that_need_more_places_than_there_are_all_answer(count: int, width: int, blocks: int) -> None:
    requests = several(count, BeamSearchOptions(width), max_tokens=6)
    worker = generator(FakeGenerator(blocks, 16))
    tickets = ask(worker, *requests)
    computed = sum(report.tokens for report in finish(worker))
    alone, enough = [], 0
    for request in requests:
        one = generator(FakeGenerator(1000, 16))
        alone += ask(one, request)
        enough += sum(report.tokens for report in finish(one))
    assert [ticket.events for ticket in tickets] == [ticket.events for ticket in alone]
    assert computed <= enough if blocks == 1000 else computed < 3 * enough, "hardly a token is computed twice"


def test_a_search_that_loses_a_place_to_another_owner_goes_on() -> None:
    worker = generator(FakeGenerator(1000), sequence_budget=4)
    (search,) = ask(worker, *beam_search_of([1, 2, 3], 1, BeamSearchOptions(4), max_tokens=30, terms=Terms("a")))
    for _ in range(3):
        turn(worker)
    (one,) = ask(worker, generate([4, 5], 200, terms=Terms("b")))
    while not search.ended:
        turn(worker)
    assert not one.ended
    assert search.tokens == token_ids(answers(FakeGenerator(1000), cast(Generate, search.request))[0])
    finish(worker)
    assert one.tokens == token_ids(answers(FakeGenerator(1000), cast(Generate, one.request))[0])


def test_an_urgent_search_begins_beside_one_of_its_owner() -> None:
    worker = generator(FakeGenerator(1000), sequence_budget=4)
    calm, urgent = several(2, BeamSearchOptions(4), max_tokens=30)
    (first,) = ask(worker, calm)
    for _ in range(3):
        turn(worker)
    (second,) = ask(worker, replace(urgent, terms=Terms(priority=1)))
    while not second.ended:
        turn(worker)
    assert not first.ended
    finish(worker)
    assert [first.tokens, second.tokens] == [token_ids(answers(FakeGenerator(), one)[0]) for one in (calm, urgent)]


@st.composite
def crowds(draw: st.DrawFn) -> tuple[dict[str, int], tuple[int, int], list[tuple[int, Generate]]]:
    """Budgets, a cache of few blocks, and requests that all fit into it, each with the step before which it comes."""
    places, size = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    widths = draw(st.lists(st.integers(0, places), min_size=1, max_size=7))
    requests = []
    for number, width in enumerate(widths):
        prompt = draw(st.lists(st.integers(0, 2), min_size=1, max_size=6))
        terms = Terms(draw(st.sampled_from(["", "", "a"])), draw(st.sampled_from([0, 0, 0, 1])))
        one = generate(prompt, draw(st.integers(1, 5)), terms=terms)
        if width:
            one = replace(one, group=f"search-{number}", beams=BeamSearchOptions(width))
        requests.append((draw(st.integers(0, 12)), one))
    need = max((one.beams.width if one.beams else 1) * (len(one.tokens) + one.max_tokens) for _, one in requests)
    blocks = -(-need // size) + draw(st.sampled_from([0, 0, 1, 5, 40]))
    budgets = {
        "sequence_budget": places,
        "token_budget": draw(st.sampled_from([1, 3, 64])),
        "prefill_chunk": draw(st.sampled_from([1, 3, 64])),
    }
    return budgets, (blocks, size), requests


@settings(max_examples=400, deadline=None)
@given(crowds(), st.randoms(use_true_random=False))
def test_no_step_is_empty_while_there_is_work(
    crowd: tuple[dict[str, int], tuple[int, int], list[tuple[int, Generate]]], choice: random.Random
) -> None:
    budgets, cache, requests = crowd
    worker = generator(choice.choice(FAKES)(*cache), **budgets)
    tickets: list[RecordingTicket] = []
    gone: set[RecordingTicket] = set()
    turns = 0
    while worker.has_work or len(tickets) < len(requests):
        tickets += ask(worker, *[one for at, one in requests if at == turns])
        if tickets and choice.random() < 0.02:
            gone.add(left := choice.choice(tickets))
            worker.abort(left)
        if worker.has_work:
            assert turn(worker).tokens
            worker.check_invariants()
        turns += 1
        assert turns < 3000, "no progress"
    for ticket in tickets:
        if ticket not in gone:
            alone = answers(FakeGenerator(400), cast(Generate, ticket.request))[0]
            assert ticket.tokens == token_ids(alone)
            assert isinstance(ticket.events[-1], Done)


def test_an_empty_plan_ends_the_last_in_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = generator(FakeGenerator())
    first, second, last = ask(worker, *[generate([number, 3]) for number in range(3)])
    turn(worker)
    with monkeypatch.context() as broken:
        broken.setattr(worker._groups.scheduler, "schedule", lambda: StepPlan([], 0, 0, []))
        with pytest.raises(AssertionError, match="no chunk"):
            worker.step()
    for ticket, event in worker.blame_failed_step():
        ticket.receive(event)
    assert isinstance(last.events[-1], Failed)
    finish(worker)
    assert [first.tokens, second.tokens] == [token_ids(answers(FakeGenerator(), generate([n, 3]))[0]) for n in range(2)]


PENALISED = Sampling(
    temperature=0.0,
    repetition_penalty=1.4,
    frequency_penalty=0.6,
    presence_penalty=0.2,
    banned=((3, 4), (5,)),
    min_tokens=4,
    no_repeat_ngram_size=3,
)


def test_each_beam_has_the_logits_processors_of_its_own_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every step its logits processors equal newly made ones, and no beam's history is read again."""
    pushed, push = list[int](), LogitsProcessor.push

    def counted(shape: LogitsProcessor, token: int) -> None:
        pushed.append(token)
        push(shape, token)

    width, most = 4, 24
    worker = generator(FakeGenerator(200), sequence_budget=64)
    request = beam_search_of(
        [1, 2, 3], width, BeamSearchOptions(width), max_tokens=most, sampling=PENALISED, stop_tokens=frozenset({9})
    )
    tickets = ask(worker, *request)
    monkeypatch.setattr(LogitsProcessor, "push", counted)
    compared = 0
    while worker.has_work:
        turn(worker)
        for talk in set(worker._groups.states.values()):
            assert talk.search is not None
            for beam in talk.search.beams:
                fresh = LogitsProcessor(talk.request, TokenRules(talk.request))
                for token in talk.search.generated_tokens(beam):
                    push(fresh, token)
                assert beam.processor is not None
                assert changed(beam.processor) == changed(fresh)
                compared += 1
    assert len(tickets[0].tokens) > 8
    assert compared > 3 * width
    assert len(pushed) <= width * most


def changed(shape: LogitsProcessor) -> dict[int, tuple[float, ...]]:
    """The change of each logit."""
    words, values = shape.after_drafts(()).changes
    return {int(word): tuple(values[:, place].tolist()) for place, word in enumerate(words)}


def test_a_beam_search_continues_until_all_its_requests_are_aborted() -> None:
    requests = beam_search_of([1, 2, 3], 3, BeamSearchOptions(3))
    expected = answers(FakeGenerator(), *requests)
    worker = generator(FakeGenerator())
    tickets = ask(worker, *requests)
    turn(worker)
    worker.abort(tickets[0])
    turn(worker)
    worker.abort(tickets[2])
    finish(worker)
    assert tickets[1].events == expected[1]
    tickets = ask(worker, *requests)
    turn(worker)
    for ticket in tickets:
        worker.abort(ticket)
    assert not worker.has_work
    worker.check_invariants()


def test_a_search_that_can_never_fit_is_refused() -> None:
    worker = generator(FakeGenerator(block_count=10, block_size=4), sequence_budget=4)
    with pytest.raises(BadRequest, match="make 3 times 20, more than the 40"):
        worker.validate(beam_search_of([1] * 10, 1, BeamSearchOptions(3), max_tokens=10)[0])
    with pytest.raises(BadRequest, match="searches at most 4 wide, got 5"):
        worker.validate(beam_search_of([1], 1, BeamSearchOptions(5), max_tokens=2)[0])


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("early", [False, True])
def test_searches_equal_those_of_transformers(tiny_generator: Path, penalty: float, early: bool) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = load(str(tiny_generator))
    executor = TorchExecutor(checkpoint.network, cast(Any, checkpoint.head), block_count=200, block_size=4)
    reference = AutoModelForCausalLM.from_pretrained(tiny_generator).eval()
    words = reference.config.vocab_size
    choice = random.Random(7)
    for width in (2, 3, 5):
        prompt = [choice.randrange(words) for _ in range(7)]
        stops = frozenset(choice.randrange(words) for _ in range(40))
        worker = GeneratorWorker(executor, model="talker")
        how = BeamSearchOptions(width, penalty, early)
        tickets = ask(worker, *beam_search_of(prompt, width, how, max_tokens=9, stop_tokens=stops, sampling=GREEDY))
        finish(worker)
        expected = reference.generate(
            torch.tensor([prompt]),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=9,
            length_penalty=penalty,
            early_stopping=early,
            eos_token_id=sorted(stops),
            pad_token_id=0,
            do_sample=False,
        )
        for ticket, row in zip(tickets, expected[:, 7:].tolist(), strict=True):
            done = ticket.events[-1]
            assert isinstance(done, Done)
            whole = [*ticket.tokens, *([done.token] if done.token >= 0 else [])]
            assert row[: len(whole)] == whole
            assert set(row[len(whole) :]) <= {min(stops)}, "filled up"


@pytest.mark.parametrize(
    "native", [False, pytest.param(True, marks=pytest.mark.skipif(not runnable_targets(), reason="none"))]
)
def test_blocks_are_copied_on_real_executors(tiny_generator: Path, native: bool) -> None:
    checkpoint = load(str(tiny_generator))
    words, head = checkpoint.config.vocab_size, cast(Any, checkpoint.head)
    choice = random.Random(3)
    requests = group([choice.randrange(words) for _ in range(21)], 3, max_tokens=20)

    def together(*asked: Generate) -> list[list[int]]:
        executor: Executor
        if native:
            executor = NativeExecutor(
                checkpoint.network, cast(Any, checkpoint.head), block_count=40, precision="float32"
            )
        else:
            executor = TorchExecutor(checkpoint.network, head, block_count=40, block_size=16)
        worker = GeneratorWorker(executor, model="talker")
        tickets = ask(worker, *asked)
        finish(worker)
        return [ticket.tokens for ticket in tickets]

    assert together(*requests) == [together(replace(request, group=""))[0] for request in requests]


def test_a_request_that_forbids_all_tokens_fails_alone() -> None:
    nothing = Sampling(temperature=0, allowed=(3,), banned=((3,),))
    requests = [
        generate([5, 6], 6, sampling=nothing),
        generate([5, 6], 6),
        *beam_search_of([5, 6], 2, BeamSearchOptions(2), sampling=nothing),
    ]
    events = answers(FakeGenerator(), *requests)
    for failed in (events[0], events[2], events[3]):
        assert isinstance(failed[-1], Failed)
        assert isinstance(failed[-1].error, BadRequest)
    assert token_ids(events[1]) == token_ids(answers(FakeGenerator(), requests[1])[0])

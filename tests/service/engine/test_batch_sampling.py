"""Masks that take long: the step goes on without their answers, which stay the same."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event, Semaphore
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from polyhead.models.tokenizer import Tokenizer
from polyhead.models.tokenizer.vocabulary import Vocabulary
from polyhead.service.core.errors import Unavailable
from polyhead.service.core.grammar import Grammar, Thinking
from polyhead.service.core.guide import GuideBusy, GuideSpec
from polyhead.service.core.request import DEFAULT_TERMS, Generate, Sampling, Terms
from polyhead.service.engine import generator_worker
from polyhead.service.engine.batch_sampling import MaskBuilder
from polyhead.service.engine.generator_worker import GeneratorWorker
from polyhead.service.structured import compiled_guide
from polyhead.service.structured.compiled_guide import CompiledGuide
from polyhead.service.structured.guide_compiler import GuideCompiler
from tests.support.engine_fakes import (
    WORDS,
    FakeGenerator,
    FakeRecurrentGenerator,
    RecordingTicket,
    ask,
    finish,
    generate,
    turn,
)
from tests.support.scripted import model
from tests.support.threads import no_new_threads
from tests.support.waits import WaitGuard

PATIENCE_S = 60.0


class SlowGuide:
    """A guide that allows all tokens but one at each place.  A mask waits for a permit."""

    spec = GuideSpec(None, None)

    def __init__(self, length: int, permits: Semaphore | None = None) -> None:
        self.length, self.permits = length, permits
        self.begun = 0  # masks

    def new_state(self, owner: str = "") -> "SlowState":
        return SlowState(self)


class SlowState:
    def __init__(self, guide: SlowGuide) -> None:
        self.guide, self.count = guide, 0

    @property
    def is_finished(self) -> bool:
        return self.count == self.guide.length

    def fill_mask(self, mask: NDArray[np.int32]) -> bool:
        self.guide.begun += 1
        if self.guide.permits is not None:
            assert self.guide.permits.acquire(timeout=PATIENCE_S)
        for token in range(1, WORDS):
            if token != 1 + self.count % (WORDS - 1):
                mask[token // 32] |= 1 << token % 32
        return True

    def advance(self, token: int) -> None:
        assert token != 1 + self.count % (WORDS - 1)
        self.count += 1

    def forced_tokens(self, *, computes: bool = True) -> list[int]:
        return []


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generator_worker, "MASK_WAIT_S", 0.001)


@pytest.fixture(params=[FakeGenerator, FakeRecurrentGenerator])
def worker(request: pytest.FixtureRequest) -> GeneratorWorker:
    return GeneratorWorker(request.param(), model="talker")


def guided(guide: SlowGuide, seed: int, **options: Any) -> Generate:
    return generate([5, 6, 7], 20, guide=guide, sampling=Sampling(temperature=2, seed=seed), **options)


def steps_until(worker: GeneratorWorker, ticket: RecordingTicket) -> Iterator[None]:
    """Steps until the request has ended."""
    while not ticket.ended:
        turn(worker)
        worker.check_invariants()
        yield


def test_a_step_does_not_wait_for_slow_masks(worker: GeneratorWorker) -> None:
    """Another request is answered whole while no mask is filled, and the answers are those of a quick guide."""
    permits = Semaphore(0)
    slow = ask(worker, *(guided(SlowGuide(6, permits), seed) for seed in range(5)))
    (free,) = ask(worker, generate([8, 9], 12))
    for _ in steps_until(worker, free):
        pass
    assert not any(ticket.tokens for ticket in slow)
    assert len(free.tokens) == 12
    permits.release(10_000)
    finish(worker)
    quick = GeneratorWorker(FakeGenerator(), model="talker")
    wanted = ask(quick, *(guided(SlowGuide(6), seed) for seed in range(5)))
    finish(quick)
    assert [ticket.tokens for ticket in slow] == [ticket.tokens for ticket in wanted]
    assert [ticket.events[-1] for ticket in slow] == [ticket.events[-1] for ticket in wanted]


def test_answers_of_one_prompt_wait_for_all_their_masks(worker: GeneratorWorker) -> None:
    permits = Semaphore(0)
    group = [replace(guided(SlowGuide(4, permits), seed), group="g") for seed in range(4)]
    tickets = ask(worker, *group)
    for _ in range(6):
        turn(worker)
        permits.release()
    permits.release(1_000)
    finish(worker)
    quick = GeneratorWorker(FakeGenerator(), model="talker")
    wanted = ask(quick, *(replace(guided(SlowGuide(4), seed), group="g") for seed in range(4)))
    finish(quick)
    assert [len(ticket.tokens) for ticket in tickets] == [4] * 4
    assert [ticket.tokens for ticket in tickets] == [ticket.tokens for ticket in wanted]


def test_a_late_sequence_is_computed_twice_at_most(worker: GeneratorWorker) -> None:
    executor = worker._executor
    assert isinstance(executor, FakeGenerator)
    permits = Semaphore(0)
    ask(worker, guided(SlowGuide(1, permits), 1))
    for _ in range(20):
        turn(worker)
    assert len(executor.seen) == 1
    permits.release(100)
    finish(worker)
    assert len(executor.seen) == 2


def test_owners_take_turns(worker: GeneratorWorker) -> None:
    """One mask of another owner is filled before the tenth of the first."""
    permits = Semaphore(0)
    many = SlowGuide(3, permits)
    others = SlowGuide(3, permits)
    ask(worker, *(guided(many, seed, terms=Terms(owner="a")) for seed in range(10)))
    (other,) = ask(worker, guided(others, 1, terms=Terms(owner="b")))
    for _ in steps_until(worker, other):
        permits.release()
    assert many.begun < 20
    permits.release(10_000)
    finish(worker)


def test_an_aborted_request_has_no_mask(worker: GeneratorWorker) -> None:
    permits = Semaphore(0)
    first, second = SlowGuide(3, permits), SlowGuide(3, permits)
    ask(worker, guided(first, 1))
    (ticket,) = ask(worker, guided(second, 2))
    turn(worker)
    worker.abort(ticket)
    turn(worker)
    assert len(worker._mask_builder._jobs) == 1
    permits.release(10_000)
    finish(worker)
    assert not second.begun
    assert not worker._mask_builder._jobs


def test_a_prompt_whose_mask_is_late_is_charged_although_its_client_leaves(worker: GeneratorWorker) -> None:
    permits = Semaphore(0)
    [gone] = ask(worker, guided(SlowGuide(4, permits), 1, terms=Terms("a")))
    turn(worker)
    assert not gone.tokens
    worker.abort(gone)
    ask(worker, *(generate([8, 9] * 3, terms=Terms(owner)) for owner in "ab"))
    assert worker._groups.scheduler.waiting.next_owner("ab") == "b"
    permits.release(1_000)
    finish(worker)


def test_a_busy_guide_is_asked_again_when_it_is_ready(worker: GeneratorWorker) -> None:
    ready: Future[None] = Future()
    asked = Event()

    class BusyState(SlowState):
        def fill_mask(self, mask: NDArray[np.int32]) -> bool:
            if not ready.done():
                asked.set()
                raise GuideBusy(ready)
            return super().fill_mask(mask)

    class BusyGuide(SlowGuide):
        def new_state(self, owner: str = "") -> SlowState:
            return BusyState(self)

    (ticket,) = ask(worker, guided(BusyGuide(3), 1))
    (other,) = ask(worker, guided(SlowGuide(3), 1))
    for _ in steps_until(worker, other):
        pass
    assert asked.is_set()
    assert not ticket.events
    ready.set_result(None)
    finish(worker)
    assert ticket.tokens == other.tokens


@pytest.mark.parametrize("is_full", [True, False], ids=["the lexer is full", "the lexer is in use"])
@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", 2)], ids=["an answer", "a thought first"])
def test_a_step_does_not_wait_for_a_grammar_that_others_use(
    worker: GeneratorWorker,
    tiny_generator: Path,
    monkeypatch: pytest.MonkeyPatch,
    thinking: Thinking | None,
    *,
    is_full: bool,
) -> None:
    """Found as an attack.  Between a mask and its token, another answer uses the lexer or fills it; the grammar is not
    compiled again before a request without a guide is answered.
    """
    guard, may_compile = WaitGuard(monkeypatch, compiled_guide), Event()
    words = ["<unk>", "</s>", "<", "think>", "</think>", *map(chr, range(ord("a"), ord("a") + WORDS - 5))]
    backend = Backend(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    known = {"tokenizer": Tokenizer(Vocabulary(backend)), "vocab_size": WORDS, "stop_tokens": frozenset({1})}
    talker, guides = model(tiny_generator, "talker", "generate", **known), GuideCompiler()
    grammar = Grammar("regex", "[a-z<>]*", "guided_regex")
    guide, answer = guides.compile(talker, grammar, thinking), guides.compile(talker, grammar, None)
    assert guide is not None
    assert isinstance(answer, CompiledGuide)
    sample, compile_matcher = generator_worker.sample_tokens, compiled_guide.compile_matcher
    disturbed, others_use = list[bool](), ExitStack()

    def compile_later(*given: Any) -> Any:
        assert may_compile.wait(PATIENCE_S)
        return compile_matcher(*given)

    def disturb(logits: Any, pending: Any, argmax: Any, masks: Any, sampler: Any) -> Any:
        if masks.row_of and not disturbed:
            disturbed.append(True)
            if is_full:
                answer.lexer.error = "too many states"
            else:
                others_use.enter_context(answer.lexer.lock.unwatched)  # type: ignore[attr-defined]
        return sample(logits, pending, argmax, masks, sampler)

    def asked(seed: int) -> Generate:
        return generate([5, 6, 7], 12, guide=guide, stop_tokens=frozenset({1}), sampling=Sampling(2, seed=seed))

    wanted = ask(worker, *map(asked, range(4)))
    finish(worker)  # which starts the thread for masks
    monkeypatch.setattr(compiled_guide, "compile_matcher", compile_later)
    monkeypatch.setattr(generator_worker, "sample_tokens", disturb)
    tickets = ask(worker, *map(asked, range(4)))
    (free,) = ask(worker, generate([8, 9], 12))
    while not (free.ended and disturbed):
        with guard.watched():
            turn(worker)
        others_use.close()
        worker.check_invariants()
    may_compile.set()
    finish(worker)
    assert [ticket.tokens for ticket in tickets] == [ticket.tokens for ticket in wanted]
    assert {len(ticket.tokens) > 1 for ticket in wanted} == {True}
    guides.close()


class Guided:
    """The state of a request whose form allows every token."""

    guide_state = SimpleNamespace(fill_mask=lambda _: True)
    request = SimpleNamespace(terms=DEFAULT_TERMS)


def states_that_allow_all(count: int) -> list[Any]:
    return [Guided() for _ in range(count)]


def test_masks_are_filled_again_after_no_thread_could_be_started() -> None:
    """The builder took the thread for started: each later answer with a form waited for ever."""

    builder, refused, served = MaskBuilder(), states_that_allow_all(2), states_that_allow_all(1)
    with no_new_threads():
        builder.start(refused, 40)
        failed = builder.wait(refused, PATIENCE_S).failed
    assert {type(failed[state]) for state in refused} == {Unavailable}
    builder.forget(refused)
    builder.start(served, 40)
    assert list(builder.wait(served, PATIENCE_S).row_of) == served

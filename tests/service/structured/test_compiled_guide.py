"""Lexers grow with the answers that use them: their memory is reserved first, and answers do not fail for others."""

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from polyhead.service.core.errors import Overloaded, PolyheadError, TooComplex, Unavailable
from polyhead.service.core.grammar import Grammar
from polyhead.service.core.guide import Guide, GuideBusy, GuideFinished, GuideState
from polyhead.service.core.model import Model
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, Headroom
from polyhead.service.structured import compiled_guide as module
from polyhead.service.structured.compiled_guide import (
    BYTES_PER_STATE,
    TURNS,
    CompiledGuide,
    LexerJob,
    LexerMemory,
    read_lexer_cost,
    wait_for_mask,
)
from polyhead.service.structured.guide_compiler import UNLIMITED_MEMORY, GuideCompiler
from tests.support.scripted import model
from tests.support.threads import no_new_threads

COUNTER = Grammar("regex", r"(.|\n)*[0-9](.|\n){60}", "guided_regex")  # its states grow with every answer
ROOMS = (128, 256, 512)
TOKENS = 40
PATIENCE_S = 60.0


def costly(number: int) -> Grammar:
    """A grammar whose answers need many states, each of them many regular expressions."""
    term = rf"T: /(.*[a-g].{{12}})*/ & /(.*[b-x].{{13}})*/ & /(.*[c-z].{{{number}}})*/"
    return Grammar("lark", f"start: T\n{term}\n", "guided_grammar")


@pytest.fixture(scope="module")
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


class CountedMemory(Headroom):
    """Memory for requests, with the most that was reserved at a time."""

    def __init__(self, size: int) -> None:
        super().__init__(size + ALLOCATOR_BYTES)
        self.most = 0

    def reserve(self, size: int, what: str, before: int = 0, owner: str = "") -> None:
        super().reserve(size, what, before, owner)
        self.most = max(self.most, self._reserved)


@pytest.fixture
def memory() -> CountedMemory:
    return CountedMemory(1 << 30)


@pytest.fixture
def guides(memory: CountedMemory) -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(memory)
    yield compiler
    compiler.close()


def compiled(guides: GuideCompiler, talker: Model, grammar: Grammar) -> CompiledGuide:
    guide = guides.compile(talker, grammar, None)
    assert isinstance(guide, CompiledGuide)
    return guide


def answer_all(talker: Model, guide: Guide, seeds: range, most: int = TOKENS) -> list[tuple[list[int], str]]:
    """The tokens of answers that are drawn at random, a token of each in turn, and the error of each."""
    states = {seed: guide.new_state() for seed in seeds}
    draws = {seed: Random(seed) for seed in seeds}
    answers: dict[int, list[int]] = {seed: [] for seed in seeds}
    errors: dict[int, str] = {}
    for _ in range(most):
        for seed in list(states):
            try:
                token = draws[seed].choice(allowed(talker, states[seed]))
                answers[seed].append(token)
                if token in talker.stop_tokens:
                    del states[seed]
                else:
                    states[seed].advance(token)
            except PolyheadError as error:
                errors[seed] = error.message
                del states[seed]
    return [(answers[seed], errors.get(seed, "")) for seed in seeds]


def allowed(talker: Model, state: GuideState) -> list[int]:
    mask = np.zeros(-(-talker.vocab_size // 32), np.int32)
    assert wait_for_mask(state, mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def test_answers_that_fill_a_lexer_do_not_fail_the_next(
    guides: GuideCompiler, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEXER_ROOMS", ROOMS)
    guide = compiled(guides, talker, COUNTER)
    first, used = guide.lexer, set()
    for begin in range(0, 60, 6):
        for tokens, error in answer_all(talker, guide, range(begin, begin + 6), 20):
            assert not error
            assert tokens
        used.add(guide.lexer)
    assert first.error  # it was filled
    assert len(used) > len(ROOMS)  # and so were those after it
    [(tokens, error)] = answer_all(talker, compiled(guides, talker, COUNTER), range(1000, 1001))
    assert (len(tokens), error) == (TOKENS, "")


def test_an_answer_that_a_lexer_can_take_alone_does_not_fail_beside_others(
    talker: Model, guides: GuideCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:  # one lexer, of the largest size
        patched.setattr(module, "LEXER_ROOMS", (100,))
        patched.setattr(module, "MAX_SHARED_LEXERS", 1)
        alone = []
        for seed in range(12):
            single = GuideCompiler()
            alone += answer_all(talker, compiled(single, talker, COUNTER), range(seed, seed + 1))
            single.close()
    assert {bool(error) for _, error in alone} == {False, True}
    monkeypatch.setattr(module, "LEXER_ROOMS", (64, 100))
    together = answer_all(talker, compiled(guides, talker, COUNTER), range(12))
    assert all(beside == answer for beside, answer in zip(together, alone, strict=True) if not answer[1])
    assert all("too complex" in error for _, error in together if error)


def test_a_mask_that_derives_too_much_fails_its_answer_alone(guides: GuideCompiler, talker: Model) -> None:
    """Found as an attack: the error stayed in the lexer, and failed all later answers."""
    grammar = Grammar("lark", "start: T\nT: /(?s:.*)/ & ~/(?s:.*)a.{16}b(?s:.*)/", "guided_grammar")
    guide = compiled(guides, talker, grammar)
    first = guide.lexer
    answers = answer_all(talker, guide, range(1), 4000)
    assert "too complex" in answers[0][1]
    assert first.error
    state = guide.new_state()
    for _ in range(3):
        state.advance(max(allowed(talker, state)))
    assert not guide.lexer.error


def test_the_states_of_a_lexer_are_reserved_before_it_has_them(
    guides: GuideCompiler, memory: CountedMemory, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEXER_ROOMS", ROOMS)
    guide = compiled(guides, talker, COUNTER)
    assert memory._reserved == guide.lexer.claim.size == ROOMS[0] * guide.bytes_per_state
    assert guide.bytes_per_state >= BYTES_PER_STATE
    answer_all(talker, guide, range(6))
    assert memory._reserved >= guide.lexer.room * BYTES_PER_STATE
    assert memory.most > ROOMS[0] * guide.bytes_per_state


def test_cached_lexers_have_little_memory_together(
    guides: GuideCompiler, memory: CountedMemory, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found as an attack: 44 requests left 4 GB in the cache."""
    most = 20 << 20
    monkeypatch.setattr(module, "MAX_CACHED_BYTES", most)
    for number in range(11, 14):
        guide = compiled(guides, talker, costly(number))
        answer_all(talker, guide, range(4), 25)
        assert guide.lexer.room > module.LEXER_ROOMS[0]
        del guide
        gc.collect()
        assert 0 <= memory._reserved <= most
    assert memory.most <= 2 * most


def test_a_model_that_is_gone_has_reserved_nothing(
    guides: GuideCompiler, memory: CountedMemory, tiny_generator: Path
) -> None:
    gone = model(tiny_generator, "gone", "generate")
    answer_all(gone, compiled(guides, gone, COUNTER), range(3))
    assert memory._reserved > 0
    del gone
    gc.collect()
    assert memory._reserved == 0


def test_what_a_lexer_derives_is_measured_and_reserved(
    guides: GuideCompiler, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short the answer ends, and its lexer is given up."""
    monkeypatch.setattr(module, "MEASURE_S", 0.0)
    monkeypatch.setattr(module, "COST_CLAIM_BYTES", 0)
    guide = compiled(guides, talker, costly(11))
    state = guide.new_state()
    for _ in range(4):
        state.advance(max(allowed(talker, state)))
    cost = read_lexer_cost(state._matcher)
    assert cost > 10_000
    assert guide.lexer.claim.size == guide.lexer.room * guide.bytes_per_state + cost * module.BYTES_PER_COST

    def refuse(*_: object) -> None:
        raise Overloaded("no memory is left")

    lexer = guide.lexer
    monkeypatch.setattr(module, "BYTES_PER_COST", 1 << 20)
    monkeypatch.setattr(guide.memory, "reserve", refuse)
    with pytest.raises(Overloaded, match="no memory is left"):
        allowed(talker, state)
    assert lexer.error
    monkeypatch.undo()
    assert allowed(talker, guide.new_state())
    assert guide.lexer is not lexer


def test_idle_guides_make_room_and_what_never_fits_is_too_complex(
    memory: CountedMemory, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = CountedMemory(0)  # MIN_REQUEST_BYTES
    guides = GuideCompiler(small)
    compiled(guides, talker, COUNTER)
    assert small._reserved > 0
    small.reserve(int(small.total) - small._reserved - (1 << 20), "a body")
    compiled(guides, talker, costly(12))
    assert guides.find_cached(talker, COUNTER, None) is None
    monkeypatch.setattr(module, "LEXER_ROOMS", (1 << 20,))
    with pytest.raises(
        PolyheadError, match=r"guided_grammar: the answer's form takes about .* MiB, and the server has"
    ):
        compiled(guides, talker, costly(13))
    guides.close()


def test_a_grammar_is_compiled_again_while_others_go_on(
    guides: GuideCompiler, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEXER_ROOMS", ROOMS)
    guide, may_compile, real = compiled(guides, talker, COUNTER), Event(), module.compile_matcher

    def compile_later(*given: Any) -> Any:
        assert may_compile.wait(PATIENCE_S)
        return real(*given)

    monkeypatch.setattr(module, "compile_matcher", compile_later)
    mask, draws, state = np.zeros(-(-talker.vocab_size // 32), np.int32), Random(1), guide.new_state("mail")
    first = guide.lexer

    def follow() -> None:
        while True:
            state.fill_mask(mask)
            state.advance(draws.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()))

    with pytest.raises(GuideBusy) as busy:
        follow()
    assert first.lacks_room
    assert not busy.value.ready.done()
    assert not state.is_finished
    assert state.forced_tokens() == []
    with pytest.raises(GuideBusy):
        state.fill_mask(mask)
    may_compile.set()
    assert allowed(talker, state)
    assert guide.lexer.room == ROOMS[1]
    assert [*guide.memory._shares.parties()] == ["mail"], "in the turn of the key whose answer it is"


def test_an_answer_that_is_too_complex_for_the_largest_lexer_says_so(
    guides: GuideCompiler, talker: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEXER_ROOMS", (64, 128))
    [(_, error)] = answer_all(talker, compiled(guides, talker, COUNTER), range(2, 3), 400)
    assert error.startswith("the answer's form has become too complex: lexer error: too many states: 12")


def test_an_answer_does_not_wait_while_another_uses_its_lexer(guides: GuideCompiler, talker: Model) -> None:
    """What it could not do meanwhile, its next mask does: end and forced tokens are those of an answer alone."""
    guide = compiled(guides, talker, Grammar("regex", "The fox jumps", "guided_regex"))
    alone, beside = guide.new_state(), guide.new_state()
    forced = alone.forced_tokens()
    assert talker.tokenizer.decode(forced) == "The fox jumps"
    with guide.lexer.lock:
        assert beside.forced_tokens() == []
    assert allowed(talker, beside) == forced[:1]
    for token in forced:
        alone.advance(token)
        with guide.lexer.lock:
            beside.advance(token)
            assert not beside.is_finished
    assert alone.is_finished
    with pytest.raises(GuideFinished):
        allowed(talker, beside)


@pytest.fixture
def mask_seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The processor time that each mask takes from now on, by the clock that the module reads."""
    seconds, now = [0.0], [0.0]

    def thread_time() -> float:
        now[0] += seconds[0]
        return now[0]

    monkeypatch.setattr(module, "thread_time", thread_time)
    return seconds


@pytest.mark.parametrize("seconds", [2 * module.SLOW_MASK_S, 2 * module.MAX_MASK_S])
def test_an_answer_whose_masks_take_long_is_refused(
    guides: GuideCompiler, talker: Model, mask_seconds: list[float], seconds: float
) -> None:
    guide = compiled(guides, talker, Grammar("lark", 'start: s\ns: s s s | s s | "a"', "guided_grammar"))
    state, other = guide.new_state(), guide.new_state()
    mask_seconds[0] = seconds
    for _ in range(module.MAX_SLOW_MASKS if seconds < module.MAX_MASK_S else 0):
        state.advance(allowed(talker, state)[-1])
    with pytest.raises(TooComplex, match="ambiguous"):
        allowed(talker, state)
    mask_seconds[0] = module.SLOW_MASK_S / 2
    assert allowed(talker, other), "other answers in the same grammar go on"


def test_after_a_mask_that_took_long_the_next_token_is_read_with_the_next_mask(
    guides: GuideCompiler, talker: Model, mask_seconds: list[float]
) -> None:
    """The engine's thread, which advances, is not held up."""
    state = compiled(guides, talker, Grammar("regex", "[ab]+c", "guided_regex")).new_state()
    assert isinstance(state, module.GrammarState)
    state.advance(allowed(talker, state)[0])
    assert state._has_read_all
    mask_seconds[0] = 2 * module.QUICK_MASK_S
    state.advance(allowed(talker, state)[0])
    assert not state._has_read_all
    mask_seconds[0] = 0.0
    allowed(talker, state)
    assert state._has_read_all


def test_a_grammar_of_a_client_forces_no_tokens(guides: GuideCompiler, talker: Model) -> None:
    """What follows is computed in one call, which takes seconds where the rules are ambiguous."""
    rules = 'start: "aaaaaaaa"'
    forced = [
        compiled(guides, talker, Grammar(kind, rules, "tools")).new_state().forced_tokens()
        for kind in ("calls", "lark")
    ]
    assert forced[0]
    assert not forced[1]


def test_a_guide_is_compiled_again_after_no_thread_could_be_started(guides: GuideCompiler, talker: Model) -> None:
    guide = compiled(guides, talker, COUNTER)
    with no_new_threads():
        for _ in range(2):
            with pytest.raises(Unavailable, match="no thread can be started"):
                guide.replace(guide.lexer, "")
    first = guide.lexer
    try:
        found = guide.replace(first, "")
    except GuideBusy as busy:  # unless the thread has compiled it already
        busy.ready.result(PATIENCE_S)
        found = guide.replace(first, "")
    assert found is guide.lexer is not first
    assert not any(guide.memory._queues.values())


@dataclass
class Compilations:
    """Grammars that are compiled again by a fake clock.  The first one waits until `may_begin` is set."""

    memory: LexerMemory
    seconds: dict[str, float] = field(default_factory=dict)  # by grammar
    ended: dict[str, float] = field(default_factory=dict)  # when it was compiled, by grammar
    now: float = 0.0
    may_begin: Event = field(default_factory=Event)

    def compile(self, guide: Any, _room: int) -> None:
        assert self.may_begin.wait(PATIENCE_S)
        self.now += self.seconds[guide.source]
        self.ended[guide.source] = self.now

    def ask(self, source: str, seconds: float, owner: str) -> LexerJob:
        self.seconds[source] = seconds
        guide: Any = SimpleNamespace(source=source)
        return self.memory.compile_aside(guide, module.LEXER_ROOMS[0], owner)


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilations]:
    memory = LexerMemory(UNLIMITED_MEMORY, lambda _: None)
    simulated = Compilations(memory)
    memory.clock = lambda: simulated.now
    monkeypatch.setattr(module, "Lexer", simulated.compile)
    yield simulated
    simulated.may_begin.set()
    memory.close()


def test_keys_take_turns_by_the_seconds_of_their_grammars(compilations: Compilations) -> None:
    """One key has forty grammars of a second each, others fewer that are shorter or longer."""
    jobs = [compilations.ask(f"many {number}", 1.0, "many") for number in range(40)]
    jobs += [compilations.ask(f"short {number}", 0.1, "short") for number in range(12)]
    jobs += [compilations.ask(f"long {number}", 3.0, "long") for number in range(4)]
    jobs += [compilations.ask("one", 0.5, "one")]
    compilations.may_begin.set()
    for job in jobs:
        job.lexer.result(PATIENCE_S)
    ended = compilations.ended
    assert ended["one"] <= 1.0 + 1.0 + 0.1 + 3.0 + 0.5, "after the one that runs and a turn of each other key"
    assert max(ended[f"short {number}"] for number in range(12)) <= 10, "beside two keys with more"
    assert max(ended[f"long {number}"] for number in range(4)) <= 2 * 12 + 3, "beside one key that always waits"
    assert sorted(ended[f"many {number}"] for number in range(40))[19] <= 20 + 12 + 2.0, "as many seconds as the others"


def test_grammars_of_one_key_take_turns(compilations: Compilations) -> None:
    """Without keys, an answer does not wait for all that another grammar's answers need."""
    jobs = [compilations.ask("busy", 1.0, "") for _ in range(20)]
    other = next(name for name in map(str, count()) if hash(name) % TURNS != hash("busy") % TURNS)
    jobs += [compilations.ask(other, 1.0, "")]
    compilations.may_begin.set()
    for job in jobs:
        job.lexer.result(PATIENCE_S)
    assert compilations.ended[other] <= 3.0


def test_a_lexer_that_two_keys_need_is_compiled_once_in_the_earlier_turn(compilations: Compilations) -> None:
    jobs = [compilations.ask(f"many {number}", 1.0, "many") for number in range(40)]
    compilations.memory.join(jobs[39], "one")
    compilations.memory.join(jobs[39], "one")
    compilations.may_begin.set()
    for job in jobs:
        job.lexer.result(PATIENCE_S)
    assert compilations.ended["many 39"] <= 3.0
    assert compilations.now == 40
    compilations.memory.join(jobs[39], "one")
    assert not any(compilations.memory._queues.values()), "what is compiled does not wait again"

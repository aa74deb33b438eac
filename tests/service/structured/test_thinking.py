"""Thoughts before guided answers, whose grammar other answers use at the same time."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import numpy as np
import pytest

from polyhead.service.core.grammar import Grammar, Thinking
from polyhead.service.core.guide import Guide, GuideBusy, GuideState
from polyhead.service.core.model import Model
from polyhead.service.structured import compiled_guide
from polyhead.service.structured.compiled_guide import CompiledGuide, wait_for_mask
from polyhead.service.structured.guide_compiler import GuideCompiler
from polyhead.service.structured.thinking import BLANK_LINES
from tests.support.scripted import model
from tests.support.waits import WaitGuard

THINKING = Thinking("<think>", "</think>", 3)
ANSWERS = Grammar("regex", "(<[a-z]{3}|[a-z<>/]{4})*!", "guided_regex")  # may begin as a thought does
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> WaitGuard:
    return WaitGuard(monkeypatch, compiled_guide)


@pytest.fixture
def guides(guard: WaitGuard) -> Iterator[GuideCompiler]:
    compiler = GuideCompiler()
    yield compiler
    compiler.close()


@pytest.fixture
def may_compile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Grammars are compiled again only once it is set."""
    allowed, real = Event(), compiled_guide.compile_matcher
    allowed.set()

    def compile_later(*given: Any) -> Any:
        assert allowed.wait(PATIENCE_S)
        return real(*given)

    monkeypatch.setattr(compiled_guide, "compile_matcher", compile_later)
    yield allowed
    allowed.set()


def both_guides(guides: GuideCompiler, talker: Model, grammar: Grammar) -> tuple[Guide, CompiledGuide]:
    """The guide of an answer with a thought, and that of the answer alone, which share a lexer."""
    thinking, answer = guides.compile(talker, grammar, THINKING), guides.compile(talker, grammar, None)
    assert thinking is not None
    assert isinstance(answer, CompiledGuide)
    return thinking, answer


def allowed(talker: Model, state: GuideState) -> list[int]:
    mask = np.zeros(-(-talker.vocab_size // 32), np.int32)
    assert wait_for_mask(state, mask)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("text", ["<", "<a", "a", "<think", "<think>"])
def test_a_token_does_not_wait_for_a_grammar_that_is_compiled_again(
    guides: GuideCompiler, guard: WaitGuard, talker: Model, may_compile: Event, text: str
) -> None:
    """Found as an attack: an answer filled the lexer between another's mask and first token, and the engine's thread
    waited for the grammar, seconds behind others.
    """
    thinking, answer = both_guides(guides, talker, ANSWERS)
    alone, beside = thinking.new_state(), thinking.new_state()
    for token in talker.tokenizer.encode(text, special=False).ids:
        assert token in allowed(talker, alone)
        alone.advance(token)
        assert token in allowed(talker, beside)
        may_compile.clear()
        answer.lexer.error = "too many states"  # as another answer leaves it
        with guard.watched():
            beside.advance(token)
            assert not beside.is_finished
            assert not beside.forced_tokens()
        if text != "<think>":
            with pytest.raises(GuideBusy):
                beside.fill_mask(np.zeros(-(-talker.vocab_size // 32), np.int32))
        may_compile.set()
        assert allowed(talker, beside) == allowed(talker, alone)


@pytest.mark.parametrize("text", ["a", "<think>"])
def test_the_grammar_of_the_answer_knows_whose_answer_it_is(
    guides: GuideCompiler, talker: Model, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    thinking, answer = both_guides(guides, talker, ANSWERS)
    owners, new_state = list[str](), answer.new_state

    def record_owner(owner: str) -> GuideState:
        owners.append(owner)
        return new_state(owner)

    monkeypatch.setattr(answer, "new_state", record_owner)
    state = thinking.new_state("mail")
    for token in talker.tokenizer.encode(f"{text}</think>", special=False).ids:
        if token not in allowed(talker, state):
            break
        state.advance(token)
    assert owners == ["mail"] * (1 + (text == "<think>"))


@pytest.mark.parametrize("text", ["<", "<a", "a", "<think", "<think>"])
def test_a_token_does_not_wait_while_another_answer_uses_the_lexer(
    guides: GuideCompiler, guard: WaitGuard, talker: Model, text: str
) -> None:
    thinking, answer = both_guides(guides, talker, ANSWERS)
    alone, beside = thinking.new_state(), thinking.new_state()
    for token in talker.tokenizer.encode(text, special=False).ids:
        assert token in allowed(talker, beside)
        allowed(talker, alone)
        alone.advance(token)
        with answer.lexer.lock, guard.watched():
            beside.advance(token)
            assert not beside.is_finished
            assert not beside.forced_tokens()
        assert allowed(talker, beside) == allowed(talker, alone)


@pytest.mark.parametrize("seed", range(12))
def test_an_answer_that_others_disturb_is_that_of_an_answer_alone(
    guides: GuideCompiler, guard: WaitGuard, talker: Model, seed: int
) -> None:
    thinking, answer = both_guides(guides, talker, ANSWERS)

    def follow(*, is_disturbed: bool) -> list[int]:
        state, draws, tokens = thinking.new_state(), Random(seed), list[int]()
        while len(tokens) < 30:
            tokens.append(draws.choice(allowed(talker, state)))
            if tokens[-1] in talker.stop_tokens:
                break
            if is_disturbed and len(tokens) < compiled_guide.MAX_SHARED_LEXERS:
                answer.lexer.error = "too many states"
            with guard.watched():
                state.advance(tokens[-1])
                if state.is_finished:
                    break
        return tokens

    assert follow(is_disturbed=True) == follow(is_disturbed=False)


def test_an_answer_may_be_complete_where_a_thought_may_still_begin(guides: GuideCompiler, talker: Model) -> None:
    thinking, _ = both_guides(guides, talker, Grammar("choice", '["<"]', "guided_choice"))
    state = thinking.new_state()
    tag = talker.tokenizer.encode("<think>", special=False).ids
    assert talker.tokenizer.decode(tag[:1]) == "<"
    state.advance(next(token for token in allowed(talker, state) if token == tag[0]))
    assert {tag[1], *talker.stop_tokens} <= set(allowed(talker, state))
    state.advance(tag[1])
    assert talker.stop_tokens.isdisjoint(allowed(talker, state))


def test_what_is_searched_in_all_tokens_is_prepared_before_an_answer(guides: GuideCompiler, talker: Model) -> None:
    """Not on the engine's thread, where a thought ends."""
    _, answer = both_guides(guides, talker, ANSWERS)
    assert {THINKING.begin, THINKING.end, BLANK_LINES} <= answer.vocabulary._tags.keys()

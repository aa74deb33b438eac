"""Which replica a request goes to: what the policies know, and what they make of it."""

from random import Random

import pytest

from polyhead.service.engine.block_allocator import chain, root
from polyhead.service.fleet.routing import POLICIES, Affine, Answers, Ask, Candidate, Rotation, TwoChoices, holding


def keys_of(tokens: range, block: int = 16) -> tuple[bytes, ...]:
    keys, parent = [], root(0)
    for first in range(0, len(tokens) - block + 1, block):
        parent = chain(parent, tokens[first : first + block])
        keys.append(parent)
    return tuple(keys)


def asked(tokens: int, answer: int = 0) -> Ask:
    return Ask(tokens, answer, keys_of(range(tokens)))


def test_a_replica_has_queued_what_is_not_computed_of_what_was_sent_there() -> None:
    one = Candidate("one", kept=100)
    one.take("a", asked(40, answer=10))
    one.take("b", Ask(7))
    assert (one.queued, one.open) == (57, 2)
    one.said("a")
    assert one.queued == 7 + 9, "its prompt is computed, and a token of its answer"
    for _ in range(20):
        one.said("a")
    assert one.queued == 7 + 1, "what goes on is never done"
    one.elsewhere = 100
    one.end("a")
    one.end("a")
    assert (one.queued, one.open) == (107, 1)
    one.said("a")
    assert one.queued == 107


def test_what_was_sent_there_is_stored_there_as_far_as_its_cache_reaches() -> None:
    one = Candidate("one", kept=4)
    one.take("a", asked(64))
    assert one.stored(keys_of(range(64))) == 4
    assert one.stored(keys_of(range(40))) == 2
    assert one.stored(keys_of(range(1, 65))) == 0
    one.take("b", Ask(16, keys=keys_of(range(100, 116))))
    assert one.stored(keys_of(range(64))) == 3, "of what makes room the end goes first"


def test_a_stored_prompt_is_not_queued() -> None:
    one = Candidate("one", kept=10)
    one.take("a", asked(33))
    one.take("b", asked(33))
    assert one.queued == 33 + 1


def test_affinity_decides_where_it_saves_more_than_is_queued() -> None:
    candidates = [Candidate(str(number), kept=100) for number in range(8)]
    holder, policy = candidates[5], Affine(Random(1))
    holder.take("before", asked(64))
    holder.end("before")
    assert policy.choose(asked(80), candidates) == (holder, "affinity")
    holder.take("long", Ask(63))
    assert policy.choose(asked(80), candidates) == (holder, "affinity")
    holder.take("more", Ask(2))
    chosen, why = policy.choose(asked(80), candidates)
    assert chosen is not holder
    assert why == "load"


def test_of_those_who_have_as_much_stored_the_least_busy_is_asked() -> None:
    candidates = [Candidate(str(number), kept=100) for number in range(9)]
    for number in (2, 4, 7):
        candidates[number].take("before", asked(64))
        candidates[number].end("before")
        candidates[number].take("now", Ask(30 - number))
    candidates[0].take("begins alike", asked(32))
    candidates[0].end("begins alike")
    assert holding(asked(80).keys, candidates) == [candidates[number] for number in (2, 4, 7)]
    assert holding(keys_of(range(500, 580)), candidates) == ()
    chosen = {Affine(Random(seed)).choose(asked(96), candidates)[0].name for seed in range(20)}
    assert chosen == {"7"}


def test_two_choices_take_the_one_with_less_and_rotation_takes_turns() -> None:
    candidates = [Candidate(str(number)) for number in range(2)]
    candidates[0].take("a", Ask(5))
    assert {TwoChoices(Random(seed)).choose(Ask(1), candidates)[0].name for seed in range(9)} == {"1"}
    rotation = Rotation(Random(1))
    assert len({rotation.choose(Ask(1), candidates)[0].name for _ in range(2)}) == 2


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_has_an_answer_where_there_is_one_replica(name: str) -> None:
    [alone] = candidates = [Candidate("alone", kept=9)]
    assert POLICIES[name](Random(1)).choose(asked(40), candidates)[0] is alone


def test_answers_are_expected_as_long_as_they_were_of_late() -> None:
    answers = Answers(64)
    assert (answers.expected(1000), answers.expected(5)) == (64, 5)
    for _ in range(64):
        answers.heard(0)
    assert answers.expected(1000) == 32

"""Routing of requests to replicas: the state that policies have, and their choices."""

from random import Random

import pytest

from polyhead.service.engine.block_allocator import child_key, root_key
from polyhead.service.fleet.routing import (
    POLICIES,
    AnswerLengths,
    Candidate,
    PrefixAffinity,
    RoundRobin,
    RoutingRequest,
    TwoChoices,
    prefix_holders,
)


def keys_of(tokens: range, block: int = 16) -> tuple[bytes, ...]:
    keys, parent = [], root_key(0)
    for first in range(0, len(tokens) - block + 1, block):
        parent = child_key(parent, tokens[first : first + block])
        keys.append(parent)
    return tuple(keys)


def asked(tokens: int, answer: int = 0) -> RoutingRequest:
    return RoutingRequest(tokens, answer, keys_of(range(tokens)))


def test_queued_tokens_are_those_sent_but_not_computed() -> None:
    one = Candidate("one", cache_blocks=100)
    one.add_request("a", asked(40, answer=10))
    one.add_request("b", RoutingRequest(7))
    assert (one.queued_tokens, one.open_requests) == (57, 2)
    one.count_token("a")
    assert one.queued_tokens == 7 + 9, "its prompt is computed, and one token of its answer"
    for _ in range(20):
        one.count_token("a")
    assert one.queued_tokens == 7 + 1, "an answer that goes on has remaining tokens"
    one.queued_by_others = 100
    one.remove_request("a")
    one.remove_request("a")
    assert (one.queued_tokens, one.open_requests) == (107, 1)
    one.count_token("a")
    assert one.queued_tokens == 107


def test_sent_prompts_count_as_cached_up_to_the_size_of_the_cache() -> None:
    one = Candidate("one", cache_blocks=4)
    one.add_request("a", asked(64))
    assert one.stored_blocks(keys_of(range(64))) == 4
    assert one.stored_blocks(keys_of(range(40))) == 2
    assert one.stored_blocks(keys_of(range(1, 65))) == 0
    one.add_request("b", RoutingRequest(16, block_keys=keys_of(range(100, 116))))
    assert one.stored_blocks(keys_of(range(64))) == 3, "the end of a prefix is evicted first"


def test_a_cached_prompt_is_not_queued() -> None:
    one = Candidate("one", cache_blocks=10)
    one.add_request("a", asked(33))
    one.add_request("b", asked(33))
    assert one.queued_tokens == 33 + 1


def test_prefix_affinity_wins_if_it_saves_more_than_is_queued() -> None:
    candidates = [Candidate(str(number), cache_blocks=100) for number in range(8)]
    holder, policy = candidates[5], PrefixAffinity(Random(1))
    holder.add_request("before", asked(64))
    holder.remove_request("before")
    assert policy.choose(asked(80), candidates) == (holder, "affinity")
    holder.add_request("long", RoutingRequest(63))
    assert policy.choose(asked(80), candidates) == (holder, "affinity")
    holder.add_request("more", RoutingRequest(2))
    chosen, why = policy.choose(asked(80), candidates)
    assert chosen is not holder
    assert why == "load"


def test_of_replicas_with_equal_prefixes_the_least_busy_is_chosen() -> None:
    candidates = [Candidate(str(number), cache_blocks=100) for number in range(9)]
    for number in (2, 4, 7):
        candidates[number].add_request("before", asked(64))
        candidates[number].remove_request("before")
        candidates[number].add_request("now", RoutingRequest(30 - number))
    candidates[0].add_request("begins alike", asked(32))
    candidates[0].remove_request("begins alike")
    assert prefix_holders(asked(80).block_keys, candidates) == [candidates[number] for number in (2, 4, 7)]
    assert prefix_holders(keys_of(range(500, 580)), candidates) == ()
    chosen = {PrefixAffinity(Random(seed)).choose(asked(96), candidates)[0].name for seed in range(20)}
    assert chosen == {"7"}


def test_two_choices_and_round_robin() -> None:
    candidates = [Candidate(str(number)) for number in range(2)]
    candidates[0].add_request("a", RoutingRequest(5))
    assert {TwoChoices(Random(seed)).choose(RoutingRequest(1), candidates)[0].name for seed in range(9)} == {"1"}
    rotation = RoundRobin(Random(1))
    assert len({rotation.choose(RoutingRequest(1), candidates)[0].name for _ in range(2)}) == 2


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_chooses_the_only_replica(name: str) -> None:
    [alone] = candidates = [Candidate("alone", cache_blocks=9)]
    assert POLICIES[name](Random(1)).choose(asked(40), candidates)[0] is alone


def test_expected_answer_lengths_follow_recent_answers() -> None:
    answers = AnswerLengths(64)
    assert (answers.expected_tokens(1000), answers.expected_tokens(5)) == (64, 5)
    for _ in range(64):
        answers.add(0)
    assert answers.expected_tokens(1000) == 32

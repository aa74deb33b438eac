"""Shorter forms of a conversation: what may be left out, in which order, and what stays in every form."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from polyhead.service.text.chat_truncation import cut_messages, list_cuts

SYSTEM, USER, SAID = {"role": "system"}, {"role": "user"}, {"role": "assistant"}


def call(*names: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": name} for name in names]}


def result(name: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name}


def forms(messages: Sequence[dict[str, Any]]) -> list[list[int]]:
    """The messages that each shorter form has, by their places in the whole."""
    places = {id(message): place for place, message in enumerate(messages)}
    return [[places[id(message)] for message in cut_messages(messages, place)] for place in list_cuts(messages)]


def numbered(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**message, "number": number} for number, message in enumerate(messages)]


def test_the_oldest_turns_go_first_and_whole() -> None:
    talk = numbered(SYSTEM, USER, SAID, USER, call("a"), result("a"), SAID, USER)
    assert forms(talk) == [[0, 3, 4, 5, 6, 7], [0, 7]]


def test_then_calls_after_the_last_message_of_the_user_go() -> None:
    talk = numbered(SYSTEM, USER, SAID, USER, call("a", "b"), result("b"), result("a"), call("c"), result("c"))
    assert forms(talk) == [[0, 3, 4, 5, 6, 7, 8], [0, 3, 7, 8]]


def test_a_result_stays_with_its_call() -> None:
    talk = numbered(USER, call("a"), USER, result("a"), USER)
    assert forms(talk) == [[4]]


def test_messages_of_the_system_stay_wherever_they_are() -> None:
    assert forms(numbered(SYSTEM, USER, SYSTEM, SAID, USER)) == [[0, 2, 4]]


def test_of_a_single_message_nothing_may_be_left_out() -> None:
    for talk in ([], [USER], [SYSTEM, USER], [SYSTEM, USER, call("a"), result("a")], [SYSTEM, SYSTEM]):
        assert list_cuts(talk) == []


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Messages in any order; each result has a call before it."""
    messages: list[dict[str, Any]] = []
    open_calls: list[str] = []
    for number in range(draw(st.integers(1, 24))):
        kinds = [SYSTEM, USER, SAID, call(str(number))] + [result(name) for name in open_calls]
        messages.append(draw(st.sampled_from(kinds)))
        open_calls += [each["id"] for each in messages[-1].get("tool_calls", ())]
    return numbered(*messages)


@given(conversations())
def test_every_form_is_a_conversation_and_shorter_than_the_one_before(talk: list[dict[str, Any]]) -> None:
    found = forms(talk)
    users = [place for place, message in enumerate(talk) if message["role"] == "user"]
    always = {place for place, message in enumerate(talk) if message["role"] == "system"} | set(users[-1:])
    lengths = [len(talk), *map(len, found)]
    assert all(more > fewer > 0 for more, fewer in pairwise(lengths))
    for form in found:
        assert form == sorted(form)
        assert always <= set(form)
        assert form[-1] == len(talk) - 1
        known = {each["id"] for place in form for each in talk[place].get("tool_calls", ())}
        assert {talk[place]["tool_call_id"] for place in form if talk[place]["role"] == "tool"} <= known

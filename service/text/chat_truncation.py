"""Shorter forms of a conversation that is too long: the oldest messages are left out.

Messages of the system stay, and so do the last one of the user and the results of tools after the last call, which are
what the answer is about. A result never stays without its call.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ..core.model import Model
from .generation_request import GenerationRequest

ANSWER_PART = 4  # a conversation without a limit of its answer is cut so that this part of the context is left for it

Message = Mapping[str, Any]


def list_cuts(messages: Sequence[Message]) -> list[int]:
    """Return the places at which messages may be cut: those before a place are left out. The first place leaves out the
    fewest.

    Whole turns are left out, each from a message of the user to the next. If nothing older is left, calls and results
    after the last message of the user are.
    """
    last_user, needed = find_last_user(messages), find_calls(messages)
    first_needed = [*accumulate(reversed(needed), min)][::-1]  # by the messages from each place on
    dropped, places = 0, []
    for place, message in enumerate(messages):
        begins = "user" if place <= last_user else "assistant"
        if dropped and message["role"] == begins and first_needed[place] >= place:
            places.append(place)
            dropped = 0
        dropped += not is_kept(messages, place, last_user)
    return places


def cut_messages(messages: Sequence[Message], place: int) -> tuple[Message, ...]:
    """Return the messages from `place` on, after those that are never left out."""
    last_user = find_last_user(messages)
    kept = (message for index, message in enumerate(messages[:place]) if is_kept(messages, index, last_user))
    return (*kept, *messages[place:])


def is_kept(messages: Sequence[Message], index: int, last_user: int) -> bool:
    """Whether a message is in every shorter form of the conversation."""
    return messages[index]["role"] == "system" or index == last_user


def find_last_user(messages: Sequence[Message]) -> int:
    """Return the index of the user's last message; -1 if there is none."""
    return max((index for index, message in enumerate(messages) if message["role"] == "user"), default=-1)


def find_calls(messages: Sequence[Message]) -> list[int]:
    """Return for each message the index of the message that it cannot be without: of a result that of its call."""
    calls: dict[str, int] = {}
    found = []
    for index, message in enumerate(messages):
        calls |= {call["id"]: index for call in message.get("tool_calls", ())}
        found.append(calls.get(message.get("tool_call_id", ""), index))
    return found


def answer_room(model: Model, request: GenerationRequest) -> int:
    """Return how many tokens a cut conversation leaves for the answer: as many as the request asks for, else the
    default, but at most a part of the context.
    """
    part = max(1, model.max_tokens // ANSWER_PART)
    return request.max_tokens or min(request.default_max_tokens or part, part)

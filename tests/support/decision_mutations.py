"""Mutations of valid bodies of both dialects of decisions, always the same ones."""

import copy
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.odd_values import VALUES, Place, places, replaced

MUTATIONS, SEED = 1000, 27
SYSTEMONE: Mapping[str, Any] = {
    "model": "talker",
    "instructions": "Be strict.",
    "state": {"subject": "a", "lines": ["b", {"c": 1}]},
    "questions": {
        "urgent": {"type": "noul", "instructions": "Is it?", "criteria": {"true": "now", "false": "later"}},
        "team": {"type": "choice", "instructions": "Whose?", "criteria": {"a": "b", "c": None}, "permutations": 2},
        "level": {"type": "score", "instructions": {"how": "much"}, "criteria": ["low", "middle", "high"]},
    },
    "cache_salt": "x",
    "priority": 1,
}
DECISIONS: Mapping[str, Any] = {
    "model": "talker",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_json", "data": {"b": 1}}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "c"},
    ],
    "questions": [
        {"type": "predicate", "name": "urgent", "instructions": "Is it?"},
        {"type": "choice", "name": "team", "instructions": "Whose?", "choices": [{"value": "a"}, {"value": True}]},
        {"type": "score", "name": "level", "instructions": "How?", "levels": [{"label": "low"}, {"label": "high"}]},
    ],
    "min_confidence": 0.1,
}
BODIES = {"/v1/systemone": SYSTEMONE, "/v1/decisions": DECISIONS}
MORE_VALUES = ({"true": 1}, [""], ["a"] * 300, {str(number): None for number in range(300)}, "\ud800", "\x00", [None])


@dataclass(frozen=True)
class Mutation:
    """A body with one to three changes; `place` is that of the first."""

    path: str
    place: Place
    changes: int
    body: Any

    @property
    def field(self) -> str:
        """The field or the question in which the first change is, as errors name it."""
        first, *rest = self.place
        if first != "questions" or not rest:
            return str(first)
        return f"questions[{rest[0]}]" if isinstance(rest[0], int) else f"questions.{rest[0]}"


def mutate(draw: random.Random) -> Mutation:
    path, changes = draw.choice(sorted(BODIES)), draw.choice((1, 1, 1, 2, 3))
    body: Any = copy.deepcopy(dict(BODIES[path]))
    first: Place = ()
    for number in range(changes):
        if found := sorted(places(body), key=repr):
            place = draw.choice(found)
            first = first if number else place
            body = change(draw, body, place)
    return Mutation(path, first, changes, body)


def change(draw: random.Random, body: Any, place: Place) -> Any:
    *parents, last = place
    parent = body = copy.deepcopy(body)
    for each in parents:
        parent = parent[each]
    match draw.randrange(6):
        case 0:
            del parent[last]
        case 1 if isinstance(parent, dict):
            parent[str(last) + draw.choice(("x", "", " ", "\n", "é"))] = parent.pop(last)
        case 2 if isinstance(parent, list):
            parent += [copy.deepcopy(parent[last])] * draw.choice((1, 500))
        case 3:
            parent[last] = copy.deepcopy(draw.choice([parent, body]))
        case _:
            return replaced(body, place, draw.choice((*VALUES, *MORE_VALUES)))
    return body


def mutations() -> Iterator[Mutation]:
    draw = random.Random(SEED)
    for _ in range(MUTATIONS):
        yield mutate(draw)


def written(body: Any) -> bytes:
    return json.dumps(body).encode()

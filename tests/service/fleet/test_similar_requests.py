"""Random requests arrive as they were sent, field by field, whichever of their fields are those of the one before."""

from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from polyhead.service.core.grammar import Grammar
from polyhead.service.core.guide import GuideSpec
from polyhead.service.core.request import (
    BeamSearchOptions,
    Encode,
    ExplainTextRequest,
    Generate,
    Request,
    Sampling,
    Terms,
)
from polyhead.service.fleet.fleet_engine import request_rows
from polyhead.service.fleet.frames import SimilarRequest, pack, unpack_message
from polyhead.service.fleet.similar_requests import OWN_FIELDS, complete_request

GUIDES: Any = [None, GuideSpec(Grammar("regex", "a+", "guided_regex"), None)]
VALUES: dict[str, list[Any]] = {  # of each field, by its name or its type
    "tokens": [(3,), (4, 5), (1 << 20, 0)],
    "guide": GUIDES,
    "beams": [None, BeamSearchOptions(2)],
    "sampling": [Sampling(seed=number, bias=((5, 1.0),) * (number % 2)) for number in range(4)],
    "terms": [Terms(), Terms("owner", 1)],
    "method": ["attention", "occlusion"],
    "form": ["", "tokens"],
    "more_forms": [(), ("words",)],
    "question": ["choice", "score"],
    "goals": [(), (((1, 2),),)],
    "str": ["", "one", "other"],
    "int": [0, 1, 7],
    "bool": [False, True],
    "tuple[int, ...]": [(), (1,), (2, 3)],
    "frozenset[int]": [frozenset(), frozenset((1, 2))],
}


def values_of(field: Any) -> list[Any]:
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", "")
    return VALUES.get(field.name) or VALUES.get(str(field.type)) or VALUES[kind]


def draw_requests(kind: type, random: Random) -> list[Request]:
    """Requests, each of which differs from the one before it in some fields."""
    drawn = [kind(**{field.name: random.choice(values_of(field)) for field in fields(kind)})]
    for _ in range(30):
        changed = random.sample(fields(kind), random.choice([0, 1, 1, 2]))
        drawn.append(replace(drawn[-1], **{field.name: random.choice(values_of(field)) for field in changed}))
    return drawn


def rows_of(requests: Sequence[Request]) -> Sequence[Any]:
    sent: Any = [
        SimpleNamespace(number=number, uncached_tokens=1, stream=SimpleNamespace(request=request))
        for number, request in enumerate(requests)
    ]
    return request_rows(sent)


@pytest.mark.parametrize("kind", [Generate, Encode, ExplainTextRequest])
def test_requests_arrive_as_they_were_sent(kind: type) -> None:
    random, similar = Random(1), 0
    for _ in range(30):
        requests = draw_requests(kind, random)
        received = dict[int, Request]()
        for number, _, row in unpack_message(pack(rows_of(requests))):
            similar += isinstance(row, SimilarRequest)
            received[number] = complete_request(row, received) if isinstance(row, SimilarRequest) else row
        assert list(received.values()) == requests
    assert bool(similar) == (kind in OWN_FIELDS)


@pytest.mark.parametrize("kind", OWN_FIELDS)
def test_a_request_whose_options_differ_is_sent_whole(kind: type) -> None:
    first = draw_requests(kind, Random(2))[0]
    for field in fields(kind):
        if field.name != "sampling":  # the seed may differ
            other = next(value for value in values_of(field) if value != getattr(first, field.name))
            _, (*_, row) = rows_of([first, replace(first, **{field.name: other})])
            assert isinstance(row, SimilarRequest) == (field.name in OWN_FIELDS[kind]), field.name

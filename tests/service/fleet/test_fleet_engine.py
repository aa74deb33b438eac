"""Which events an ingress takes from a replica: those that a correct one sends, with as many values."""

import math
import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    Done,
    Encode,
    ExplainTextRequest,
    ExplanationProgress,
    Generate,
    GeneratedToken,
    HeadOutput,
    TokenCandidates,
    TokenOutputs,
)
from polyhead.service.engine.event_stream import Stream
from polyhead.service.fleet.fleet_engine import RoutedRequest
from polyhead.service.fleet.routing import RoutingRequest

TOKENS = (1, 2, 3, 4)
ENCODE = Encode("asked", TOKENS)
REPORTED = ExplainTextRequest("asked", TOKENS, "occlusion", reports_progress=True)


def table(rows: int, columns: int) -> TokenOutputs:
    return TokenOutputs(
        memoryview(struct.pack(f"{rows * columns}f", *[0.0] * (rows * columns))).cast("f", (rows, columns))
    )


def routed(task: str, request: Any) -> RoutedRequest:
    model = SimpleNamespace(task=task, labels=("a", "b", "c"), width=8, vocab_size=100)
    stream = SimpleNamespace(request=request, tokens=0)
    return RoutedRequest(cast(Model, model), cast(Stream, stream), 1, cast(RoutingRequest, None))


def words(*tokens: int) -> TokenCandidates:
    return TokenCandidates((tuple((token, 0.5) for token in tokens),))


RIGHT: list[tuple[str, Any, list[Any]]] = [
    ("classify", ENCODE, [HeadOutput([0.5] * 3), Done("encoded", 4)]),
    ("rank", ENCODE, [HeadOutput([0.5])]),
    ("choose", ENCODE, [HeadOutput([0.5])]),
    ("embed", ENCODE, [HeadOutput([0.5] * 8)]),
    ("embed", Encode("asked", TOKENS, dimensions=2), [HeadOutput([0.5] * 2)]),
    ("embed", Encode("asked", TOKENS, form="tokens"), [table(4, 8)]),
    (
        "embed",
        Encode("asked", TOKENS, more_forms=("words", "tokens")),
        [HeadOutput([0.5] * 8), words(5), table(4, 8), Done("encoded", 4)],
    ),
    ("label_texts", Encode("asked", TOKENS, label_rows=(1, 2)), [HeadOutput([0.5] * 2)]),
    ("decide", Encode("asked", TOKENS, label_rows=(1, 2)), [HeadOutput([0.5] * 2)]),
    ("tag", ENCODE, [table(4, 3)]),
    ("span", ENCODE, [table(4, 2)]),
    ("label_spans", ENCODE, [table(2, 9)]),
    ("fill", ENCODE, [TokenCandidates((((5, 0.5),),) * 4)]),
    ("generate", Generate("asked", TOKENS, 2), [GeneratedToken(99), Done("stop", 4, 3, 4)]),
    ("classify", ExplainTextRequest("asked", TOKENS, "occlusion"), [Done("explained", 4)]),
    ("classify", REPORTED, [ExplanationProgress(0.25), ExplanationProgress(1.0), Done("explained", 4)]),
]
WRONG: list[tuple[str, Any, list[Any]]] = [
    ("classify", ENCODE, [HeadOutput([])]),
    ("classify", ENCODE, [HeadOutput([0.5])]),
    ("classify", ENCODE, [HeadOutput([0.5] * 9)]),
    ("classify", ENCODE, [words(1)]),
    ("classify", ENCODE, [HeadOutput([0.5] * 3), HeadOutput([0.5] * 3)]),
    ("rank", ENCODE, [HeadOutput([])]),
    ("embed", ENCODE, [HeadOutput([0.5] * 100_000)]),
    ("embed", Encode("asked", TOKENS, dimensions=2), [HeadOutput([0.5] * 8)]),
    ("embed", Encode("asked", TOKENS, form="words"), [HeadOutput([0.5] * 8)]),
    ("embed", Encode("asked", TOKENS, form="words"), [words(100)]),
    ("decide", Encode("asked", TOKENS, label_rows=(1, 2)), [HeadOutput([0.5])]),
    ("tag", ENCODE, [table(4, 2)]),
    ("tag", ENCODE, [table(5, 3)]),
    ("tag", ENCODE, [TokenOutputs(memoryview(b"").cast("f"))]),
    ("fill", ENCODE, [TokenCandidates((((5, 0.5),),) * 5)]),
    ("fill", ENCODE, [words(-1)]),
    ("fill", ENCODE, [table(4, 3)]),
    ("classify", ENCODE, [Done("encoded", 5)]),
    ("classify", ENCODE, [Done("encoded", 4, 1)]),
    ("generate", Generate("asked", TOKENS, 2), [Done("stop", 1 << 62)]),
    ("generate", Generate("asked", TOKENS, 2), [Done("stop", 4, 4)]),
    ("generate", Generate("asked", TOKENS, 2), [Done("stop", 4, 2, 1 << 62)]),
    ("generate", Generate("asked", TOKENS, 2), [GeneratedToken(5, cached_tokens=1 << 62)]),
    ("generate", Generate("asked", TOKENS, 2), [HeadOutput([0.5])]),
    ("classify", ExplainTextRequest("asked", TOKENS, "occlusion"), [ExplanationProgress(0.5)]),
    ("classify", ENCODE, [ExplanationProgress(0.5)]),
    *(
        ("classify", REPORTED, [ExplanationProgress(0.5), ExplanationProgress(share)])
        for share in (0.5, 0.4, 1.1, math.nan)
    ),
]


@pytest.mark.parametrize("number", range(len(RIGHT)))
def test_what_a_correct_replica_sends_is_taken(number: int) -> None:
    task, request, events = RIGHT[number]
    sent = routed(task, request)
    assert all(map(sent.accepts, events))


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_other_events_and_other_numbers_of_values_are_refused(number: int) -> None:
    task, request, events = WRONG[number]
    sent = routed(task, request)
    *before, last = events
    assert all(map(sent.accepts, before))
    assert not sent.accepts(last)

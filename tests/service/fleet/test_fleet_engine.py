"""Which events an ingress takes from a replica: those that a correct one sends, with as many values."""

import math
import struct
from types import SimpleNamespace
from typing import Any, cast

import pytest

from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    AttentionWeights,
    Attribution,
    Done,
    Encode,
    ExplainTextRequest,
    ExplanationProgress,
    ExplanationResult,
    Generate,
    GeneratedToken,
    HeadOutput,
    PromptScores,
    TokenCandidates,
    TokenOutputs,
)
from polyhead.service.engine.event_stream import Stream
from polyhead.service.fleet.event_sizes import MAX_TOKEN_COLUMNS
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
    prompt = SimpleNamespace(columns=3)
    model = SimpleNamespace(task=task, labels=("a", "b", "c"), width=8, vocab_size=100, label_prompt=prompt)
    stream = SimpleNamespace(request=request, tokens=0)
    sent = RoutedRequest(cast(Model, model), cast(Stream, stream), 1, cast(RoutingRequest, None))
    sent.layout = {"self": (2, 2), "cross": (2, 2)}
    return sent


def words(*tokens: int) -> TokenCandidates:
    return TokenCandidates((tuple((token, 0.5) for token in tokens),))


def floats(*shape: int) -> "memoryview[float]":
    return memoryview(bytes(4 * math.prod(shape))).cast("f", shape)


def attention(layers: int, heads: int, rows: int, columns: int, kind: Any = "self") -> AttentionWeights:
    return AttentionWeights(kind, tuple(range(layers)), tuple(range(heads)), floats(layers, heads, rows, columns))


def explained(*parts: AttentionWeights | Attribution, head_rows: int = 1) -> ExplanationResult:
    weights = tuple(each for each in parts if isinstance(each, AttentionWeights))
    attributions = tuple(each for each in parts if isinstance(each, Attribution))
    return ExplanationResult(weights, attributions, tuple(range(head_rows)))


TOP = ((5, -1.0), (6, -2.0))
SCORED = Generate("asked", TOKENS, 2, logprobs=2, prompt_logprobs=1)
TARGETS = Generate("asked", TOKENS, 2, targets=(5, 6))
PROMPT = PromptScores(((-1.0, TOP[:1]),) * 3)
LABELLED = Encode("asked", TOKENS, label_rows=(1, 2, 3), text_rows=(1, 2))
MASKS = Encode("asked", TOKENS, rows=(1, 2), top_k=2)
ATTENTION = ExplainTextRequest("asked", TOKENS, "attention", layers=(1,))
ALL_ATTENTION = ExplainTextRequest("asked", TOKENS, "attention")
ROLLOUT = ExplainTextRequest("asked", TOKENS, "attention_rollout")
OCCLUSION = ExplainTextRequest("asked", TOKENS, "occlusion", goals=(((0, 0),), ((0, 1),)))
SHARE = Attribution(floats(4), 0.5, 0.0)
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
    ("label_spans", LABELLED, [table(2, 9)]),
    ("fill", MASKS, [TokenCandidates((TOP, TOP))]),
    ("generate", SCORED, [PROMPT, GeneratedToken(5, -1.0, TOP), GeneratedToken(5, -1.0)]),
    ("generate", TARGETS, [GeneratedToken(5, -1.0, TOP)]),
    ("generate", Generate("asked", (1,), 0, prompt_logprobs=0), [PromptScores(()), Done("length", 1)]),
    ("classify", ATTENTION, [explained(attention(1, 2, 4, 4), attention(1, 1, 4, 4, "cross"), head_rows=4)]),
    ("classify", ALL_ATTENTION, [explained(attention(2, 2, 4, 4))]),
    ("classify", ROLLOUT, [explained(attention(1, 1, 4, 4, "rollout"))]),
    ("classify", OCCLUSION, [explained(SHARE, SHARE), Done("explained", 4)]),
    ("embed", REPORTED, [ExplanationProgress(1.0), explained(SHARE)]),
    ("fill", ENCODE, [TokenCandidates((((5, 0.5),),) * 4)]),
    ("generate", Generate("asked", TOKENS, 2), [GeneratedToken(99), Done("stop", 4, 3, 4)]),
    ("classify", ExplainTextRequest("asked", TOKENS, "occlusion"), [Done("explained", 4)]),
    ("classify", REPORTED, [ExplanationProgress(0.25), ExplanationProgress(1.0), Done("explained", 4)]),
]
WRONG: list[tuple[str, Any, list[Any]]] = [
    ("label_spans", LABELLED, [table(3, 9)]),
    ("label_spans", LABELLED, [table(2, 10)]),
    ("span", ENCODE, [table(4, 3)]),
    ("tag", MASKS, [table(3, 3)]),
    ("embed", Encode("asked", TOKENS, form="tokens"), [table(4, MAX_TOKEN_COLUMNS + 1)]),
    ("embed", Encode("asked", TOKENS, form="words"), [TokenCandidates((TOP, TOP))]),
    ("embed", Encode("asked", TOKENS, form="words"), [words(*(5,) * 101)]),
    ("fill", MASKS, [TokenCandidates((TOP,) * 3)]),
    ("fill", MASKS, [TokenCandidates((TOP + TOP[:1],))]),
    ("fill", Encode("asked", TOKENS, targets=(5,)), [TokenCandidates((TOP,))]),
    ("generate", Generate("asked", TOKENS, 2), [PROMPT]),
    ("generate", Generate("asked", TOKENS, 2), [GeneratedToken(5, -1.0, TOP)]),
    ("generate", SCORED, [GeneratedToken(5, -1.0, TOP + TOP[:1])]),
    ("generate", SCORED, [GeneratedToken(5, -1.0, ((100, -1.0),))]),
    ("generate", TARGETS, [GeneratedToken(5, -1.0, TOP + TOP[:1])]),
    ("generate", SCORED, [PromptScores(PROMPT.scores * 2)]),
    ("generate", SCORED, [PromptScores(PROMPT.scores[:2])]),
    ("generate", SCORED, [PromptScores(((-1.0, TOP),) * 3)]),
    ("generate", SCORED, [PROMPT, PROMPT]),
    ("generate", SCORED, [explained(SHARE)]),
    ("classify", ATTENTION, [explained(attention(2, 2, 4, 4))]),
    ("classify", ATTENTION, [explained(attention(1, 3, 4, 4))]),
    ("classify", ATTENTION, [explained(attention(1, 2, 5, 4))]),
    ("classify", ATTENTION, [explained(attention(1, 2, 4, 5))]),
    ("classify", ATTENTION, [explained(attention(1, 2, 4, 4, "encoder"))]),
    ("classify", ATTENTION, [explained(*[attention(1, 2, 4, 4)] * 2)]),
    ("classify", ATTENTION, [explained(AttentionWeights("self", (0,), (0,), floats(1, 2, 4, 4)))]),
    ("classify", ATTENTION, [explained(AttentionWeights("self", (0,), (0,), memoryview(b"").cast("f")))]),
    ("classify", ATTENTION, [explained(SHARE)]),
    ("classify", ATTENTION, [explained(head_rows=5)]),
    ("classify", ALL_ATTENTION, [explained(attention(3, 2, 4, 4))]),
    ("classify", ROLLOUT, [explained(attention(2, 1, 4, 4, "rollout"))]),
    ("classify", OCCLUSION, [explained(SHARE, SHARE, SHARE)]),
    ("classify", OCCLUSION, [explained(Attribution(floats(5), 0.5, 0.0))]),
    ("classify", OCCLUSION, [explained(Attribution(floats(2, 2), 0.5, 0.0))]),
    ("classify", OCCLUSION, [explained(attention(1, 1, 1, 1))]),
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


def test_what_is_refused_is_not_counted_as_answered() -> None:
    """Another replica may compute it."""
    sent = routed("generate", SCORED)
    assert not sent.accepts(PromptScores(PROMPT.scores * 2))
    assert sent.accepts(PROMPT)
    assert not sent.accepts(PROMPT)

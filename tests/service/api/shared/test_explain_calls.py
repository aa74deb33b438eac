"""The cost of an explanation: the threads on which its text is tokenised, and the memory that is claimed."""

import asyncio
import base64
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.api.shared import streaming
from polyhead.service.api.shared.streaming import SEND_BYTES
from polyhead.service.core.errors import AnswerTooLarge
from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    AttentionWeights,
    Attribution,
    Done,
    Event,
    ExplainTextRequest,
    ExplanationProgress,
    ExplanationResult,
    Failed,
    Generate,
    GeneratedToken,
    HeadOutput,
    Request,
)
from polyhead.service.explain import explain_response
from polyhead.service.resources.request_memory import ALLOCATOR_BYTES, UNBOUNDED_HEADROOM, Headroom
from tests.support import scripted

LAYERS, HEADS = 2, 3
PROMPTS: list[tuple[str, Any]] = [
    ("/v1/explain", {"model": "talker", "input": "the quick brown fox", "method": "occlusion"}),
    ("/v1/explain", {"model": "talker", "input": "the quick brown fox", "target": {"text": "a film"}}),
    (
        "/v1/explain",
        {"model": "talker", "input": [{"role": "user", "content": "the quick brown fox"}], "method": "occlusion"},
    ),
    (
        "/v1/completions",
        {"model": "talker", "prompt": "the quick brown fox", "max_tokens": 2, "explain": {"method": "occlusion"}},
    ),
]


class Registry(scripted.Registry):
    """A registry whose models can be explained."""

    async def load_explainer(self, model: Model) -> Mapping[str, tuple[int, int]]:
        return {"self": (LAYERS, HEADS)}


def script(model: Model, request: Request) -> Iterable[Event]:
    if isinstance(request, Generate):
        yield from (GeneratedToken(7), GeneratedToken(8))
        yield Done("stop", len(request.tokens), 2)
        return
    assert isinstance(request, ExplainTextRequest)
    rows = len(request.tokens)
    layers, heads = (LAYERS, HEADS) if request.method == "attention" else (1, 1)
    seen = np.full((layers, heads, rows, rows), 1 / 3, np.float32)
    weights = AttentionWeights("self", tuple(range(layers)), tuple(range(heads)), memoryview(seen))
    each = Attribution(memoryview(np.ones(rows, np.float32)), 0.5, 0.25)
    yield ExplanationResult((weights,) if request.method != "occlusion" else (), (each,) * len(request.goals), (0,))
    yield Done("explained", rows)


def ask(registry: Registry, path: str, body: Any, headroom: Headroom = UNBOUNDED_HEADROOM) -> httpx.Response:
    [answer] = scripted.ask(scripted.application(registry, headroom), (path, body))
    return answer


@pytest.mark.parametrize(("path", "body"), PROMPTS)
def test_no_text_is_tokenised_on_the_event_loop(
    tiny_generator: Path, path: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = set[str]()

    def record(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any, **others: Any) -> Any:
            names.add(threading.current_thread().name)
            return original(*given, **others)

        return recorded

    for method in ("encode_batch", "encode_quoted", "decode"):
        monkeypatch.setattr(Tokenizer, method, record(getattr(Tokenizer, method)))
    registry = Registry([scripted.model(tiny_generator, "talker", "generate")], script)
    names.clear()
    answer = ask(registry, path, body)
    assert answer.status_code == 200, answer.text
    assert any(name.startswith("text") for name in names), names
    assert threading.main_thread().name not in names


@pytest.mark.parametrize(
    "asked", [{"top_k": 2}, {"encoding": "base64"}, {"encoding": "base64", "dtype": "float16"}, {}]
)
def test_an_explanation_is_made_and_written_on_a_thread_in_parts(
    tiny_classifier: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are chosen, encoded and written a bounded number at a time."""
    aside, encoded, written = list[bool](), list[int](), list[int]()

    def record(original: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*given: Any, **others: Any) -> Any:
            aside.append(threading.current_thread() is not threading.main_thread())
            return original(*given, **others)

        return recorded

    for name in ("explanation_object", "weights_object", "largest_weights"):
        monkeypatch.setattr(explain_response, name, record(getattr(explain_response, name)))

    def b64encode(data: Any) -> bytes:
        encoded.append(len(data))
        return base64.b64encode(data)

    def dumps(value: Any, **options: Any) -> bytes:
        written.append(len(content := orjson.dumps(value, **options)))
        return content

    monkeypatch.setattr(explain_response, "base64", SimpleNamespace(b64encode=b64encode))
    monkeypatch.setattr(streaming, "orjson", SimpleNamespace(dumps=dumps))
    judge = scripted.model(tiny_classifier, "judge", "classify", max_tokens=512, labels=("0", "1"))
    answer = ask(
        Registry([judge], script), "/v1/explain", {"model": "judge", "input": "a " * 150, "method": "attention"} | asked
    )
    assert answer.status_code == 200, answer.text
    rows = len(answer.json()["tokens"])
    assert all(aside)
    assert len(aside) == 2 + ("top_k" in asked) * LAYERS * HEADS * rows
    if "encoding" in asked:
        given = base64.b64decode(answer.json()["attention"][0]["values"]["data"])
        width = np.dtype(asked.get("dtype", "float32")).itemsize
        assert len(given) == sum(encoded) == LAYERS * HEADS * rows * rows * width
        assert max(encoded) <= explain_response.BASE64_BYTES
    assert max(written) <= 24 * streaming.MAX_NUMBERS


@pytest.mark.parametrize(
    "asked",
    [
        {"method": "attention"},
        {"method": "attention", "top_k": 2},
        {"method": "attention", "encoding": "base64"},
        {"method": "attention_rollout"},
        {"method": "occlusion"},
    ],
)
def test_memory_is_claimed_before_an_explanation_is_computed(tiny_classifier: Path, asked: dict[str, Any]) -> None:
    def answering(model: Model, request: Request) -> Iterable[Any]:
        return script(model, request) if isinstance(request, ExplainTextRequest) else scripted.echo(model, request)

    judge = scripted.model(tiny_classifier, "judge", "classify", max_tokens=512, labels=("0", "1"))
    registry, headroom = Registry([judge], answering), Headroom(ALLOCATOR_BYTES + (64 << 20))
    body = {"model": "judge", "input": "a " * 200} | asked
    others = int(headroom.total) - (128 << 10)  # the rest is enough for the body and the text
    headroom.reserve(others, "what others ask")
    refused = ask(registry, "/v1/explain", body, headroom)
    assert refused.status_code == 429, refused.text
    assert "the answer takes about" in refused.json()["error"]["message"]
    assert not any(isinstance(request, ExplainTextRequest) for request in registry.requests)
    headroom.release(others)
    answer = ask(registry, "/v1/explain", body, headroom)
    assert answer.status_code == 200, answer.text
    assert headroom.shortfall(int(headroom.total)) == 0


def test_a_long_explanation_is_sent_in_parts(tiny_generator: Path) -> None:
    registry = Registry([scripted.model(tiny_generator, "talker", "generate", max_tokens=512)], script)
    for path, body in (
        ("/v1/explain", {"model": "talker", "input": "a " * 200}),
        ("/v1/completions", {"model": "talker", "prompt": "a " * 200, "max_tokens": 2, "explain": {}}),
    ):
        connection = scripted.Connection(path, orjson.dumps(body))
        asyncio.run(connection.run(scripted.application(registry)))
        pieces = [len(message["body"]) for message in connection.sent if message["type"] == "http.response.body"]
        assert sum(pieces) > 4 * SEND_BYTES
        assert max(pieces) <= SEND_BYTES


def test_a_method_that_takes_too_much_work_is_replaced_unless_it_was_asked_for(tiny_classifier: Path) -> None:
    def limited(model: Model, request: Request) -> Iterable[Event]:
        if isinstance(request, ExplainTextRequest) and request.method == "integrated_gradients":
            yield Failed(AnswerTooLarge("steps: too much work", param="steps"))
        elif isinstance(request, ExplainTextRequest):
            yield from script(model, request)
        else:
            yield HeadOutput([0.25, 0.75])
            yield Done("encoded", len(request.tokens))

    judge = scripted.model(tiny_classifier, "judge", "classify", labels=("0", "1"))
    registry, body = Registry([judge], limited), {"model": "judge", "input": "a film"}
    for asked in ({}, {"method": "auto"}, {"steps": 9}):
        answer = ask(registry, "/v1/explain", body | asked)
        assert (answer.status_code, answer.json()["method"]) == (200, "gradient_x_input"), answer.text
    refused = ask(registry, "/v1/explain", body | {"method": "integrated_gradients"})
    assert (refused.status_code, "too much work" in refused.text) == (413, True), refused.text


# Progress


def script_progress(model: Model, request: Request) -> Iterable[Event]:
    if isinstance(request, ExplainTextRequest) and request.reports_progress:
        yield from (ExplanationProgress(0.25), ExplanationProgress(0.5))
    yield from script(model, request)


def explain_as_events(body: Any) -> scripted.Connection:
    connection = scripted.Connection("/v1/explain", orjson.dumps(body))
    connection.scope["headers"].append((b"accept", b"text/event-stream"))  # type: ignore[attr-defined]
    return connection


def read_events(body: bytes) -> list[Any]:
    return [orjson.loads(line.removeprefix(b"data: ")) for line in body.split(b"\n\n") if line]


def test_events_say_how_much_is_done_and_end_with_the_explanation(tiny_generator: Path) -> None:
    registry = Registry([scripted.model(tiny_generator, "talker", "generate", max_tokens=512)], script_progress)
    body = {"model": "talker", "input": "a " * 200}
    connection = explain_as_events(body)
    asyncio.run(connection.run(scripted.application(registry)))
    first, second, explanation = read_events(connection.body)
    assert (first, second) == ({"progress": 0.25}, {"progress": 0.5})
    whole = ask(registry, "/v1/explain", body).json()
    assert explanation | {"id": ""} == whole | {"id": ""}
    assert max(len(message.get("body", b"")) for message in connection.sent) <= SEND_BYTES


def test_an_error_before_the_first_event_has_its_status_and_a_later_one_ends_the_events(tiny_generator: Path) -> None:
    def failing(model: Model, request: Request) -> Iterable[Event]:
        if isinstance(request, ExplainTextRequest):
            yield from [ExplanationProgress(0.25)] * (len(request.tokens) > 4)
            yield Failed(AnswerTooLarge("too much work"))
        else:
            yield from script(model, request)

    registry = Registry([scripted.model(tiny_generator, "talker", "generate")], failing)
    app = scripted.application(registry)
    early, late = (explain_as_events({"model": "talker", "input": text}) for text in ("a", "a a a a a"))
    asyncio.run(early.run(app))
    asyncio.run(late.run(app))
    assert early.sent[0]["status"] == 413
    assert late.sent[0]["status"] == 200
    progress, error = read_events(late.body)
    assert (progress, error["error"]["message"]) == ({"progress": 0.25}, "too much work")


@pytest.mark.parametrize("as_events", [True, False])
def test_the_work_for_a_client_that_has_left_is_aborted_and_not_counted_as_done(
    tiny_generator: Path, as_events: bool
) -> None:
    def endless(model: Model, request: Request) -> Iterable[Any]:
        if isinstance(request, ExplainTextRequest):
            yield from (ExplanationProgress(0.25), scripted.WAIT)
        else:
            yield from script(model, request)

    registry = Registry([scripted.model(tiny_generator, "talker", "generate")], endless)

    async def leave() -> None:
        body = {"model": "talker", "input": "a film"}
        connection = explain_as_events(body)
        if not as_events:
            connection.scope["headers"].pop()  # type: ignore[attr-defined]
        serving = asyncio.create_task(connection.run(scripted.application(registry)))
        await scripted.until(lambda: bool(registry.sources) and registry.sources[-1].given == 1)
        connection.drop()
        await serving

    asyncio.run(leave())
    assert isinstance(registry.requests[-1], ExplainTextRequest)
    assert registry.sources[-1].aborted


def test_a_generation_that_is_to_be_explained_is_aborted_with_its_client(tiny_generator: Path) -> None:
    registry = Registry(
        [scripted.model(tiny_generator, "talker", "generate")],
        lambda model, request: (GeneratedToken(7), scripted.WAIT),
    )

    async def leave() -> None:
        connection = explain_as_events({"model": "talker", "input": "a film"})
        serving = asyncio.create_task(connection.run(scripted.application(registry)))
        await scripted.until(lambda: bool(registry.sources) and registry.sources[-1].given == 1)
        connection.drop()
        await serving

    asyncio.run(leave())
    assert registry.sources[-1].aborted

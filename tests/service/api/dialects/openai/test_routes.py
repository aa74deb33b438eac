"""The OpenAI dialect with scripted models: reading, writing, streams, errors."""

import asyncio
import base64
import itertools
import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from polyhead.service.api.dialects.openai import routes
from polyhead.service.api.dialects.openai.chat_messages import UNSUPPORTED_IN_MESSAGES
from polyhead.service.api.dialects.openai.wire import (
    UNSUPPORTED_CHAT,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    read_chat,
    read_completion,
    read_embedding,
)
from polyhead.service.api.dialects.openai.write import CompletionInfo, write_models
from polyhead.service.api.shared.dialect import describe_body
from polyhead.service.api.shared.openai_errors import write_openai_error
from polyhead.service.core.errors import (
    BadRequest,
    NotFound,
    Overloaded,
    PolyheadError,
    StepFailed,
    TooLong,
    Unavailable,
)
from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    Done,
    Encode,
    Failed,
    Generate,
    GeneratedToken,
    PromptScores,
    Request,
    Sampling,
)
from polyhead.service.resources.request_memory import MIN_REQUEST_BYTES, UNBOUNDED_HEADROOM
from tests.support.scripted import (
    WAIT,
    Connection,
    Registry,
    application,
    ask,
    echo,
    model,
    numbers,
    token_events,
    until,
)

TALK = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
GO_ON = {"model": "talker", "prompt": "The fox"}
EMBED = {"model": "vectors", "input": "a good film"}
PATHS = {"/v1/completions": GO_ON, "/v1/chat/completions": TALK, "/v1/embeddings": EMBED}


@pytest.fixture(scope="module")
def models(tiny_generator: Path, tiny_embedder: Path, tiny_classifier: Path) -> list[Model]:
    return [
        model(tiny_generator, "talker", "generate"),
        model(tiny_embedder, "vectors", "embed"),
        model(tiny_classifier, "judge", "classify", labels=("bad", "good")),
    ]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def scripting(models: list[Model], *events: Any) -> tuple[FastAPI, Registry]:
    """An application whose generators all answer with `events`."""
    registry = Registry(models, lambda model, request: events)
    return application(registry), registry


def sse(response: httpx.Response) -> list[Any]:
    """The data of every event; [DONE] is kept as it is."""
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    lines = [event.removeprefix("data: ") for event in response.text.removesuffix("\n\n").split("\n\n")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# Reading requests


def test_every_field_of_a_completion_is_read() -> None:
    wire = CompletionRequest.read(
        GO_ON
        | {"prompt": [[1, 2], [3]], "max_tokens": 5, "temperature": 0, "top_p": 0.5, "top_k": -1, "min_p": 0.1}
        | {"seed": -1, "stop": "x", "stop_token_ids": [7], "ignore_eos": True, "logprobs": 3, "user": "me"}
    )
    asked = read_completion(wire)
    assert asked.prompts == ((1, 2), (3,))
    assert asked.sampling == Sampling(0, 0, 0.5, 0.1, (1 << 63) - 1)
    assert (asked.has_seed, asked.max_tokens, asked.stops, asked.stop_tokens) == (True, 5, ("x",), {7})
    assert (asked.ignore_eos, asked.logprobs) == (True, 3)


def test_missing_and_null_fields_have_the_defaults_of_openai() -> None:
    nothing = dict.fromkeys(CompletionRequest.model_fields.keys() | CompletionRequest.unsupported.keys(), None) | GO_ON
    for wire in (GO_ON, nothing):
        asked = read_completion(CompletionRequest.read(wire))
        assert asked.sampling == Sampling()
        assert (asked.has_seed, asked.max_tokens, asked.stops, asked.logprobs) == (False, 0, (), -1)


def test_messages_become_messages_of_templates() -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    wire = ChatRequest.read(TALK | {"messages": messages, "max_completion_tokens": 9, "logprobs": True})
    asked = read_chat(wire)
    assert [dict(message) for message in asked.prompts[0].messages] == [  # type: ignore[union-attr]
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": "c"},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    ]
    assert (asked.max_tokens, asked.logprobs, asked.field) == (9, 0, "messages")


@pytest.mark.parametrize(
    ("given", "inputs"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [0]], ((1,), (0,))), ([], ())],
)
def test_one_or_several_texts_or_lists_of_ids(given: Any, inputs: Any) -> None:
    assert read_embedding(EmbeddingRequest.read(EMBED | {"input": given})).inputs == inputs
    assert read_completion(CompletionRequest.read(GO_ON | {"prompt": given})).prompts == inputs


@pytest.mark.parametrize(
    ("kind", "valid", "change", "sentence"),
    [
        (CompletionRequest, GO_ON, {"temperature": 7}, "temperature: must be between 0 and 2, got 7"),
        (CompletionRequest, GO_ON, {"temperature": True}, "temperature: must be a number, got true"),
        (CompletionRequest, GO_ON, {"temperature": float("nan")}, "temperature: must be a finite number"),
        (CompletionRequest, GO_ON, {"max_tokens": -1}, "max_tokens: must be between 0 and 2147483647, got -1"),
        (CompletionRequest, GO_ON, {"max_tokens": 1.0}, "max_tokens: must be a whole number, got 1.0"),
        (CompletionRequest, GO_ON, {"stream": "yes"}, 'stream: must be true or false, got "yes"'),
        (CompletionRequest, GO_ON, {"max_token": 1}, "max_token: is not a known field; did you mean max_tokens?"),
        (CompletionRequest, GO_ON, {"zzz": None}, "zzz: is not a known field"),
        (CompletionRequest, GO_ON, {"prompt": None}, "prompt: is required"),
        (CompletionRequest, GO_ON, {"prompt": [1, "a", [2.5]]}, "prompt: must be a string, a list of strings, a list"),
        (CompletionRequest, GO_ON, {"prompt": [True]}, "prompt: must be a string, a list of strings, a list"),
        (CompletionRequest, GO_ON, {"n": 0}, "n: must be between 1 and 128, got 0"),
        (CompletionRequest, GO_ON, {"best_of": True}, "best_of: must be a whole number, got true"),
        (CompletionRequest, GO_ON, {"logit_bias": {"a": 1}}, "logit_bias: must be an object from token ids to numbers"),
        (
            CompletionRequest,
            GO_ON,
            {"logit_bias": {"00": 1, "0": 2}},
            "logit_bias: must be an object from token ids to",
        ),
        (
            CompletionRequest,
            GO_ON,
            {"logit_bias": {"07": 1}},
            "logit_bias: must be an object from token ids to numbers; '07' is",
        ),
        (CompletionRequest, GO_ON, {"logit_bias": {"5": 101}}, "logit_bias[5]: must be between -100 and 100, got 101"),
        (CompletionRequest, GO_ON, {"stop": [""]}, "stop: must be a string or a list of at most 16 strings"),
        (CompletionRequest, GO_ON, {"stop": ["a"] * 17}, "stop: must be a string or a list of at most 16 strings"),
        (CompletionRequest, GO_ON, {"logprobs": True}, "logprobs: must be a whole number, got true"),
        (CompletionRequest, GO_ON, {"logprobs": 21}, "logprobs: must be between 0 and 20, got 21"),
        (ChatRequest, TALK, {"messages": []}, "messages: must have at least 1 item(s), got []"),
        (ChatRequest, TALK, {"functions": [{}]}, "functions: [{}] is not supported by this server"),
        (ChatRequest, TALK, {"response_format": {"type": "json"}}, "response_format.type: must be 'text', "),
        (ChatRequest, TALK, {"stream_options": {"a": 1}}, "stream_options.a: is not a known field"),
        (EmbeddingRequest, EMBED, {"dimensions": 0}, "dimensions: must be between 1 and"),
        (EmbeddingRequest, EMBED, {"encoding_format": "hex"}, "encoding_format: must be 'float' or 'base64', got"),
    ],
)
def test_errors_name_the_field_and_the_valid_values(kind: Any, valid: Any, change: Any, sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        kind.read(valid | change)
    assert error.value.message.startswith(sentence)
    assert error.value.param == sentence.partition(":")[0]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user"}, "messages[0].content: is required"),
        ({"role": "user", "content": 7}, "messages[0].content: must be a string or a list of text parts, got 7"),
        ({"role": "boss", "content": "a"}, "messages[0].role: must be 'system', 'developer', 'user', 'assistant'"),
        ({"role": "user", "content": [{"type": "image_url"}]}, 'messages[0].content[0].type: "image_url" is not'),
        ({"role": "user", "content": "a", "tool_calls": [1]}, "messages[0].tool_calls[0]: must be an object, got 1"),
        ("a", 'messages[0]: must be an object, got "a"'),
    ],
)
def test_errors_of_messages(message: Any, sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_chat(ChatRequest.read(TALK | {"messages": [message]}))
    assert error.value.message.startswith(sentence)


@pytest.mark.parametrize(
    ("kind", "valid", "table"),
    [(CompletionRequest, GO_ON, CompletionRequest.unsupported), (ChatRequest, TALK, UNSUPPORTED_CHAT)],
)
def test_unsupported_fields_are_accepted_with_values_without_effect(kind: Any, valid: Any, table: Any) -> None:
    assert not table.keys() & kind.model_fields.keys()
    for name, neutral in table.items():
        for value in (None, *neutral):
            assert kind.read(valid | {name: value}) == kind.read(valid)
        with pytest.raises(BadRequest, match=f"{name}: .* is not supported"):
            kind.read(valid | {name: {"something": "else"}})


def test_combinations_without_effect_are_rejected() -> None:
    with pytest.raises(BadRequest, match="top_logprobs: only together with logprobs"):
        read_chat(ChatRequest.read(TALK | {"top_logprobs": 2}))
    with pytest.raises(BadRequest, match=r"max_tokens: .*the two differ"):
        read_chat(ChatRequest.read(TALK | {"max_tokens": 2, "max_completion_tokens": 3}))
    with pytest.raises(BadRequest, match="stream_options: only together with stream"):
        read_chat(ChatRequest.read(TALK | {"stream_options": {}}))


def test_the_description_has_no_unresolved_references() -> None:
    for kind in (CompletionRequest, ChatRequest, EmbeddingRequest):
        schema = describe_body(kind)["requestBody"]["content"]["application/json"]["schema"]
        assert schema["properties"].keys() == kind.model_fields.keys()
        assert "$ref" not in json.dumps(schema)
    assert UNSUPPORTED_IN_MESSAGES.keys().isdisjoint({"content", "role"})


# Writing answers


def test_a_completion(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    (response,) = ask(app, ("/v1/completions", GO_ON | {"prompt": ["The fox", "A dog"], "stop": "og"}))
    written = response.json()
    assert response.status_code == 200
    assert written["id"].startswith("cmpl-")
    assert (written["object"], written["model"]) == ("text_completion", "talker")
    assert [choice["text"] for choice in written["choices"]] == ["The fox", "A d"]
    assert [choice["index"] for choice in written["choices"]] == [0, 1]
    assert {choice["finish_reason"] for choice in written["choices"]} == {"stop"}
    assert {choice["logprobs"] for choice in written["choices"]} == {None}
    prompt = sum(len(request.tokens) for request in registry.requests)
    completion = sum(source.given for source in registry.sources) - 1  # one of them was Done
    assert written["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


def test_a_chat(app: FastAPI, models: list[Model]) -> None:
    (response,) = ask(app, ("/v1/chat/completions", TALK | {"max_tokens": 3}))
    written = response.json()
    ids = models[0].tokenizer.encode("<user>Hi<assistant>", special=False).ids
    (choice,) = written["choices"]
    assert written["object"] == "chat.completion"
    assert choice["message"] == {"role": "assistant", "content": models[0].tokenizer.decode(ids[:3]), "refusal": None}
    assert choice["finish_reason"] == "length"
    assert written["usage"]["completion_tokens"] == 3


def test_logprobs_in_both_shapes(app: FastAPI, models: list[Model]) -> None:
    older, chat = ask(
        app,
        ("/v1/completions", GO_ON | {"prompt": "ab é", "logprobs": 2}),
        ("/v1/chat/completions", TALK | {"logprobs": True, "top_logprobs": 2}),
    )
    logprobs = older.json()["choices"][0]["logprobs"]
    tokens = models[0].tokenizer.encode("ab é").ids
    assert len(logprobs["tokens"]) == len(tokens)
    assert logprobs["token_logprobs"] == [-0.5] * len(tokens)
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"][0] == 0
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])
    content = chat.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(token["bytes"]) for token in content).decode() == "<user>Hi<assistant>"
    assert [len(token["top_logprobs"]) for token in content] == [2] * len(content)
    assert content[0]["top_logprobs"][0] == {key: content[0][key] for key in ("token", "logprob", "bytes")}


def test_an_answer_without_a_token_has_empty_logprobs_where_they_are_requested(models: list[Model]) -> None:
    app, _ = scripting(models, Done("stop", 1, 0))
    asked = GO_ON | {"logprobs": 2}
    older, chat, streamed, without = ask(
        app,
        ("/v1/completions", asked),
        ("/v1/chat/completions", TALK | {"logprobs": True}),
        ("/v1/completions", asked | {"stream": True}),
        ("/v1/completions", GO_ON),
    )
    empty: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    assert older.json()["choices"][0]["logprobs"] == sse(streamed)[0]["choices"][0]["logprobs"] == empty
    assert chat.json()["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert without.json()["choices"][0]["logprobs"] is None


def test_tokens_with_incomplete_characters_are_returned_as_bytes(models: list[Model]) -> None:
    halves = [GeneratedToken(event.id, -1.0) for event in token_events("🙂", models[0].tokenizer)]
    app, _ = scripting(models, *halves, Done("stop", 1, len(halves)))
    (response,) = ask(app, ("/v1/completions", GO_ON | {"logprobs": 0}))
    (choice,) = response.json()["choices"]
    assert choice["text"] == "🙂"
    assert "".join(choice["logprobs"]["tokens"]).replace("bytes:", "") == r"\xf0\x9f\x99\x82"


def test_a_streamed_completion_equals_a_whole_one(app: FastAPI) -> None:
    wire = GO_ON | {"prompt": ["The fox", "Ein Fuchs läuft"], "logprobs": 1}
    whole, streamed = ask(app, ("/v1/completions", wire), ("/v1/completions", wire | {"stream": True}))
    *chunks, done = sse(streamed)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in chunks[0]
    for choice in whole.json()["choices"]:
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [part["finish_reason"] for part in own] == [None] * (len(own) - 1) + [choice["finish_reason"]]
        for key, values in choice["logprobs"].items():
            assert list(itertools.chain(*(part["logprobs"][key] for part in own if part["logprobs"]))) == values


def test_a_streamed_chat(app: FastAPI) -> None:
    (response,) = ask(app, ("/v1/chat/completions", TALK | {"stream": True, "stream_options": {"include_usage": True}}))
    first, *middle, last, usage, done = sse(response)
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "<user>Hi<assistant>"
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert {chunk["usage"] for chunk in (first, *middle, last)} == {None}
    assert (usage["choices"], usage["usage"]["prompt_tokens"]) == ([], usage["usage"]["completion_tokens"])
    assert done == "[DONE]"
    assert response.headers["cache-control"] == "no-cache"


def test_embeddings_as_numbers_and_base64(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    wire = EMBED | {"input": ["a good film", "bad"], "dimensions": 3}
    plain, packed = ask(app, ("/v1/embeddings", wire), ("/v1/embeddings", wire | {"encoding_format": "base64"}))
    vectors = [entry["embedding"] for entry in plain.json()["data"]]
    asked = [request for request in registry.requests if isinstance(request, Encode)]
    assert vectors == [numbers(models[1], request) for request in asked[:2]]
    assert [len(vector) for vector in vectors] == [3, 3]
    for entry, vector in zip(packed.json()["data"], vectors, strict=True):
        assert struct.unpack("<3f", base64.b64decode(entry["embedding"])) == pytest.approx(vector)
    tokens = sum(len(request.tokens) for request in asked[:2])
    assert plain.json()["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert [entry["index"] for entry in plain.json()["data"]] == [0, 1]


def test_models(app: FastAPI, models: list[Model]) -> None:
    everything, one, none = ask(app, ("/v1/models", None), ("/v1/models/judge", None), ("/v1/models/or/g:x", None))
    assert everything.json() == json.loads(json.dumps(write_models(models, explained=True)))
    assert one.json() == everything.json()["data"][2]
    assert one.json()["id"] == "judge"
    assert none.status_code == 404
    assert none.json()["error"]["code"] == "model_not_found"
    assert "or/g:x" in none.json()["error"]["message"]


# Errors


@pytest.mark.parametrize(
    ("error", "kind", "code"),
    [
        (BadRequest("no", param="n"), "invalid_request_error", "invalid_request"),
        (TooLong("no"), "invalid_request_error", "context_length_exceeded"),
        (NotFound("no", param="model"), "invalid_request_error", "model_not_found"),
        (NotFound("no"), "invalid_request_error", "not_found"),
        (Overloaded("no"), "rate_limit_error", "overloaded"),
        (StepFailed("no"), "server_error", "step_failed"),
        (Unavailable("no"), "server_error", "unavailable"),
    ],
)
def test_errors_in_the_shape_of_the_real_api(error: PolyheadError, kind: str, code: str) -> None:
    written = write_openai_error(error)["error"]
    assert written == {"message": "no", "type": kind, "param": error.param or None, "code": code}


@pytest.mark.parametrize(
    ("path", "wire", "status", "said"),
    [
        ("/v1/completions", GO_ON | {"model": "other"}, 404, "no model is called 'other'; there are: talker, vectors"),
        ("/v1/completions", GO_ON | {"model": "judge"}, 400, "judge cannot do that"),
        ("/v1/completions", GO_ON | {"prompt": "fox " * 99}, 400, "tokens. This model's maximum context length is 64"),
        (
            "/v1/completions",
            GO_ON | {"max_tokens": 64},
            400,
            "64 more are asked for. This model's maximum context length is 64",
        ),
        ("/v1/completions", GO_ON | {"prompt": ""}, 400, "prompt: is empty"),
        ("/v1/completions", GO_ON | {"prompt": []}, 400, "prompt: must not be empty"),
        ("/v1/completions", GO_ON | {"prompt": ["a"] * 9}, 400, "prompt: at most 8 a call, got 9"),
        ("/v1/completions", b'{"model": "talker", "prompt": "\\ud800"}', 400, "not valid JSON"),
        ("/v1/completions", b'{"model": "talker", "prompt": "a", "temperature": NaN}', 400, "not valid JSON"),
        ("/v1/completions", b'{"model": "talker", "prompt": "a", "top_p": Infinity}', 400, "not valid JSON"),
        ("/v1/completions", b"[" * 100_000, 400, "not valid JSON"),
        ("/v1/completions", b"\xff", 400, "not valid JSON"),
        ("/v1/completions", b"", 400, "not valid JSON"),
        ("/v1/completions", b"[]", 400, "the body: must be an object, got []"),
        ("/v1/embeddings", EMBED | {"input": ""}, 400, "input: is empty"),
        ("/v1/embeddings", EMBED | {"dimensions": 5}, 400, "dimensions: vectors has 4, got 5"),
        ("/v1/embeddings", EMBED | {"input": [10**6]}, 400, "outside the vocabulary"),
        ("/v1/chat/completions", TALK | {"model": "vectors"}, 400, "vectors cannot do that"),
    ],
)
def test_bad_requests_are_answered_in_the_shape_of_the_dialect(
    registry: Registry, path: str, wire: Any, status: int, said: str
) -> None:
    (response,) = ask(application(registry, max_batch_texts=8), (path, wire))
    assert response.status_code == status
    assert said in response.json()["error"]["message"]
    assert response.json()["error"].keys() == {"message", "type", "param", "code"}
    assert not registry.requests


NUMBERS = (-(1 << 63), -1, 0, 1, 1 << 31, 1 << 63, 1e308, 0.5, "1", None, True, [], {})


def numeric_fields() -> Iterator[tuple[str, str]]:
    wires: dict[str, tuple[Any, Any]] = {
        "/v1/completions": (CompletionRequest, CompletionRequest.unsupported),
        "/v1/chat/completions": (ChatRequest, UNSUPPORTED_CHAT),
        "/v1/embeddings": (EmbeddingRequest, {}),
    }
    for path, (kind, table) in wires.items():
        for name in (*kind.model_fields, *table):
            yield path, name


def test_no_value_of_a_numeric_field_causes_a_server_error(app: FastAPI) -> None:
    calls = [(path, PATHS[path] | {name: value}) for path, name in numeric_fields() for value in NUMBERS]
    for call, response in zip(calls, ask(app, *calls), strict=True):
        assert response.status_code == 200 or 400 <= response.status_code < 500, call
        if response.status_code != 200:
            assert response.json()["error"]["message"], call


# Streams and connections


def test_an_error_before_the_first_byte_has_its_status(models: list[Model]) -> None:
    app, _ = scripting(models, Failed(StepFailed("the step failed")))
    for path in ("/v1/completions", "/v1/chat/completions"):
        plain, streamed = ask(app, (path, PATHS[path]), (path, PATHS[path] | {"stream": True}))
        assert (plain.status_code, streamed.status_code) == (500, 500)
        assert streamed.json()["error"]["message"] == "the step failed"


def test_an_error_after_the_first_byte_ends_the_stream(models: list[Model]) -> None:
    app, _ = scripting(models, *token_events("some text", models[0].tokenizer), Failed(StepFailed("the step failed")))
    (response,) = ask(app, ("/v1/completions", GO_ON | {"stream": True}))
    *chunks, last = sse(response)
    assert response.status_code == 200
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "some text"
    assert last == write_openai_error(StepFailed("the step failed"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("words", ["", "some text"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_disconnects_aborts_its_request(models: list[Model], path: str, words: str, stream: bool) -> None:
    """Also while the request is queued and there is nothing to send yet."""
    events = [*token_events(words, models[0].tokenizer), WAIT]
    app, registry = scripting(models, *events)

    async def leave() -> None:
        connection = Connection(path, json.dumps(PATHS[path] | {"stream": stream}).encode())
        serving = asyncio.create_task(connection.run(app))
        await until(lambda: bool(registry.sources) and registry.sources[0].given == len(events) - 1)
        await asyncio.sleep(0.01)
        assert not serving.done()
        connection.drop()
        await asyncio.wait_for(serving, 120)
        assert [source.aborted for source in registry.sources] == [True]

    asyncio.run(leave())


def test_a_slow_client_that_disconnects_aborts_its_request(models: list[Model]) -> None:
    app, registry = scripting(models, *token_events("a long story", models[0].tokenizer), WAIT)

    async def leave() -> None:
        connection = Connection("/v1/completions", json.dumps(GO_ON | {"stream": True}).encode())
        gate = asyncio.Semaphore(2)
        connection.sending = lambda: gate.acquire()  # type: ignore[assignment,return-value]
        serving = asyncio.create_task(connection.run(app))
        await until(lambda: len(connection.sent) == 2)
        connection.drop()
        await asyncio.wait_for(serving, 120)
        assert [source.aborted for source in registry.sources] == [True]

    asyncio.run(leave())


def test_a_batch_is_aborted_as_a_whole(models: list[Model]) -> None:
    def script(model: Model, request: Request) -> Iterable[Any]:
        return [Failed(StepFailed("broke"))] if request.id.endswith("-1") else [WAIT]

    registry = Registry(models, script)
    (response,) = ask(application(registry), ("/v1/completions", GO_ON | {"prompt": ["a", "b", "c"]}))
    assert response.status_code == 500
    assert [source.aborted for source in registry.sources] == [True, False, True]


def test_a_slow_client_is_waited_for(models: list[Model]) -> None:
    """The next event is fetched only after the last one was sent."""
    app, registry = scripting(models, *token_events("a long story", models[0].tokenizer), Done("stop", 1, 1))

    async def read_slowly() -> None:
        connection = Connection("/v1/completions", json.dumps(GO_ON | {"stream": True}).encode())
        gate = asyncio.Semaphore(2)  # headers and the first event are sent, then nothing
        connection.sending = lambda: gate.acquire()  # type: ignore[assignment,return-value]
        serving = asyncio.create_task(connection.run(app))
        await until(lambda: len(connection.sent) == 2)
        await asyncio.sleep(0.02)
        assert registry.sources[0].given <= 3
        for _ in range(99):
            gate.release()
        await asyncio.wait_for(serving, 120)
        assert connection.body.endswith(b"data: [DONE]\n\n")

    asyncio.run(read_slowly())


def test_ids_of_requests_are_those_of_the_answer(app: FastAPI, registry: Registry) -> None:
    (response,) = ask(app, ("/v1/completions", GO_ON | {"prompt": ["a", "b"]}))
    name = response.json()["id"]
    assert [request.id for request in registry.requests] == [f"{name}-0", f"{name}-1"]
    assert all(isinstance(request, Generate) for request in registry.requests)
    assert CompletionInfo(name, "talker", 0).include_usage is False


@pytest.mark.parametrize("field", ["user", "prompt", "tools", "zzz", "metadata"])
def test_deep_nesting_is_an_ordinary_error(field: str) -> None:
    deep: list[Any] = []
    for _ in range(500):
        deep = [deep]
    with pytest.raises(BadRequest, match=field):
        CompletionRequest.read({"model": "chat", "prompt": "a", field: deep})


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (CompletionRequest, {"prompt": [[1]] * 100_001}, "prompt: must have at most 100000 items"),
        (CompletionRequest, {"prompt": [1] * ((1 << 18) + 1)}, "prompt: must have at most 262144 items"),
        (
            CompletionRequest,
            {"prompt": "a", "metadata": {str(i): "" for i in range(17)}},
            "metadata: must have at most 16",
        ),
        (ChatRequest, {"messages": [{}] * 4097}, "messages: must have at most 4096 items"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * 257}]}, "must have at most 256 items"),
        (CompletionRequest, {"prompt": "a"} | {f"x{i}": 1 for i in range(1000)}, "is not a known field"),
    ],
)
def test_long_lists_are_counted_before_they_are_read(kind: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        kind.read({"model": "chat", **changes})


@pytest.mark.parametrize(("sharing", "salts"), [("all", ("", "")), ("key", ("one\n", "two\n"))])
def test_keys_may_have_separate_prompt_caches(models: list[Model], sharing: str, salts: tuple[str, str]) -> None:
    registry = Registry(models, echo)
    app = application(registry, prefix_sharing=sharing, api_keys={"one": "a" * 20, "two": "b" * 20})

    async def both() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            for key in ("a", "b"):
                headers = {"authorization": f"Bearer {key * 20}"}
                answer = await client.post("/v1/completions", json=GO_ON | {"max_tokens": 2}, headers=headers)
                assert answer.status_code == 200, answer.text

    asyncio.run(both())
    assert tuple(request.salt for request in registry.requests if isinstance(request, Generate)) == salts


def test_the_echo_of_each_answer_claims_memory(models: list[Model], monkeypatch: pytest.MonkeyPatch) -> None:
    app = application(Registry(models, echo))
    body = GO_ON | {"prompt": "The fox", "echo": True, "max_tokens": 1}
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_free_bytes", 0)
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_reserved", 0)  # guides of other tests may be kept in caches
    monkeypatch.setattr(routes, "BYTES_PER_WRITTEN_BYTE", MIN_REQUEST_BYTES // 10)
    one, two = ask(app, ("/v1/completions", body), ("/v1/completions", body | {"n": 2}))
    assert one.status_code == 200, one.text
    assert two.status_code == 413
    assert "the prompts that each answer repeats takes about" in two.text


def test_the_prompt_is_echoed_with_its_scores(models: list[Model]) -> None:
    scores = tuple((-float(place), ((5, -0.5),)) for place in range(1, 40))

    def script(model: Model, request: Request) -> Iterable[Any]:
        assert isinstance(request, Generate)
        if request.prompt_logprobs >= 0:
            yield PromptScores(scores[: len(request.tokens) - 1])
        if request.max_tokens:
            yield GeneratedToken(7, -1.0)
        yield Done("length", len(request.tokens), 1)

    app = application(Registry(models, script))
    ids = [40, 41, 42]
    wires = [
        GO_ON | {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0},
        GO_ON | {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "n": 2},
        GO_ON | {"prompt": "The fox", "echo": True, "max_tokens": 1},
        GO_ON | {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 1},
        GO_ON | {"prompt": ids, "prompt_logprobs": 1, "max_tokens": 1, "echo": True},
    ]
    alone, twice, text, apart, aside = (
        answer.json()["choices"] for answer in ask(app, *(("/v1/completions", wire) for wire in wires))
    )
    spelled = models[0].tokenizer.decode(ids, skip_special=False)
    assert alone[0]["text"] == spelled
    assert alone[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert alone[0]["logprobs"]["top_logprobs"][0] is None
    for choice in twice:
        assert choice["text"].startswith(spelled)
        assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -1.0]
        assert choice["logprobs"]["text_offset"][-1] == len(spelled)
    assert text[0]["text"].startswith("The fox")
    assert text[0]["logprobs"] is None
    first, second, _ = apart[0]["prompt_logprobs"]
    assert first is None
    assert second[str(ids[1])]["logprob"] == -1.0
    assert second["5"]["logprob"] == -0.5
    assert aside[0]["prompt_logprobs"] == apart[0]["prompt_logprobs"]
    assert (aside[0]["logprobs"], aside[0]["text"]) == (None, spelled + apart[0]["text"])


def test_beam_search_with_a_grammar_is_rejected(app: FastAPI) -> None:
    (answer,) = ask(app, ("/v1/completions", GO_ON | {"use_beam_search": True, "structured_outputs": {"regex": "a+"}}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs.regex"

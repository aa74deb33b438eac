"""The Anthropic dialect with scripted models: reading, writing, streams, errors."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from polyhead.models.chat import ChatTemplate
from polyhead.service.api.dialects.anthropic.read import read_count, read_messages
from polyhead.service.api.dialects.anthropic.wire import CountRequest, MessagesRequest
from polyhead.service.api.dialects.anthropic.write import write_anthropic_error
from polyhead.service.api.shared import streaming as stream
from polyhead.service.core.errors import (
    BadRequest,
    BodyTooLarge,
    Expired,
    NotFound,
    Overloaded,
    PolyheadError,
    StepFailed,
    Unauthorized,
    Unavailable,
)
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Failed, Generate, Sampling
from polyhead.service.text.generation_request import ChatMessages, GenerationRequest
from tests.support.scripted import (
    TEMPLATE,
    WAIT,
    Connection,
    Registry,
    application,
    ask,
    echo,
    model,
    token_events,
    until,
)

TALK: dict[str, Any] = {"model": "talker", "max_tokens": 8, "messages": [{"role": "user", "content": "Hi"}]}
TOOL = {"name": "find", "description": "d", "input_schema": {"type": "object", "properties": {"q": {"type": "string"}}}}
CALL = '{"name": "find", "arguments": {"q": "größer"}}'
USE = {"type": "tool_use", "id": "t1", "name": "find", "input": {"q": "x"}}
RESULT = {"type": "tool_result", "tool_use_id": "t1", "content": "y"}
THINKING = "{% if false %}<think></think>{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", max_tokens=2000)


@pytest.fixture(scope="module")
def reasoning_generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", max_tokens=2000, chat=ChatTemplate(THINKING))


@pytest.fixture
def app(generator: Model) -> FastAPI:
    return application(Registry([generator], echo))


def application_with_answer(model: Model, text: str, *ends: Any) -> tuple[FastAPI, Registry]:
    """An application whose model generates `text` and ends with its own stop token, or otherwise."""
    tokens = token_events(text, model.tokenizer)
    registry = Registry([model], lambda model, request: [*tokens, *(ends or [Done("stop", 9, len(tokens), 4)])])
    return application(registry), registry


def read(**changes: Any) -> GenerationRequest:
    return read_messages(MessagesRequest.read(TALK | changes))


def messages_of(talk: GenerationRequest) -> list[dict[str, Any]]:
    [chat] = talk.prompts
    assert isinstance(chat, ChatMessages)
    return [dict(message) for message in chat.messages]


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of every event; the line above it has its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    return events


# Reading requests


def test_every_field_of_a_request_is_read() -> None:
    talk = read(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x", "y"], system=[{"type": "text", "text": "s"}])
    asked = talk
    assert asked.sampling == Sampling(0.5, 3, 0.9)
    assert (asked.max_tokens, asked.fits_context, asked.stops, asked.field) == (8, True, ("x", "y"), "messages")
    assert (asked.has_seed, asked.logprobs, asked.grammar) == (False, -1, None)
    assert messages_of(talk) == [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}]


def test_missing_and_null_fields_have_no_effect() -> None:
    names = MessagesRequest.model_fields.keys() | MessagesRequest.unsupported.keys()
    assert read_messages(MessagesRequest.read(dict.fromkeys(names, None) | TALK)) == read()


def test_turns_become_messages_of_templates() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "s"}
    talk = read(
        system="s",
        messages=[
            {"role": "user", "content": "a"},
            {"role": "user", "content": [{"type": "text", "text": "b", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "c"}, USE]},
            {"role": "user", "content": [RESULT, {"type": "text", "text": "d"}]},
            {"role": "system", "content": "e"},
            {"role": "user", "content": [RESULT | {"content": [{"type": "text", "text": "z"}], "is_error": True}]},
        ],
    )
    call = {"id": "t1", "type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
    returned = {"role": "tool", "tool_call_id": "t1", "name": "find"}
    assert messages_of(talk) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        returned | {"content": "y"},
        {"role": "user", "content": "d"},
        {"role": "system", "content": "e"},
        returned | {"content": "Error: z"},
    ]


def test_a_template_gets_one_system_message_first() -> None:
    begun = [{"role": "system", "content": "t"}, {"role": "user", "content": "a"}]
    assert messages_of(read(system="s", messages=begun))[0] == {"role": "system", "content": "s\nt"}
    assert messages_of(read(system="")) == messages_of(read())


def test_a_last_message_of_the_assistant_is_continued() -> None:
    [chat] = read(messages=[*TALK["messages"], {"role": "assistant", "content": "The"}]).prompts
    assert isinstance(chat, ChatMessages)
    assert (chat.continues_last, chat.messages[-1]["content"]) == (True, "The")


@pytest.mark.parametrize(
    ("choice", "kind", "only", "parallel"),
    [
        ({"type": "auto"}, "auto", set(), True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", set(), False),
        ({"type": "tool", "name": "find"}, "required", {"find"}, True),
        ({"type": "none"}, "none", set(), True),
    ],
)
def test_tools_and_which_are_called(choice: Any, kind: str, only: set[str], parallel: bool) -> None:
    tools = read(tools=[TOOL], tool_choice=choice).tools
    assert (tools.choice, tools.only, tools.parallel) == (kind, only, parallel)
    [tool] = tools.offered
    assert (tool.name, tool.description, tool.parameters) == ("find", "d", TOOL["input_schema"])


@pytest.mark.parametrize(
    ("change", "mode", "budget", "effort"),
    [
        ({}, "", -1, ""),
        ({"thinking": {"type": "adaptive"}}, "", -1, ""),
        ({"thinking": {"type": "enabled", "budget_tokens": 7}}, "on", 7, ""),
        ({"thinking": {"type": "disabled"}}, "off", -1, ""),
        ({"output_config": {"effort": "high"}}, "", -1, ""),
        ({"output_config": {"effort": "low"}}, "on", 1024, "low"),
        ({"output_config": {"effort": "low"}, "thinking": {"type": "enabled", "budget_tokens": 7}}, "on", 7, "low"),
    ],
)
def test_thinking(change: Any, mode: str, budget: int, effort: str) -> None:
    reasoning = read(**change).reasoning
    assert (reasoning.mode, reasoning.budget, reasoning.effort) == (mode, budget, effort)


@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_that_the_template_does_not_know_is_ignored_and_named_in_a_header(
    generator: Model, streamed: bool
) -> None:
    asked = TALK | {"thinking": {"type": "enabled", "budget_tokens": 3}}
    count = {name: asked[name] for name in ("model", "messages", "thinking")}
    app = application(Registry([generator], echo))
    answers = ask(app, ("/v1/messages", asked | {"stream": streamed}), ("/v1/messages/count_tokens", count))
    for response in (*answers, *ask(app, ("/v1/messages", asked | {"output_config": {"effort": "low"}}))):
        assert response.status_code == 200
        assert response.headers["X-Polyhead-Ignored"] == "thinking"
    [plain] = ask(app, ("/v1/messages", TALK | {"stream": streamed}))
    assert "X-Polyhead-Ignored" not in plain.headers


def test_a_schema_becomes_a_grammar() -> None:
    grammar = read(output_config={"format": {"type": "json_schema", "schema": {"type": "null"}}}).grammar
    assert grammar is not None
    assert (grammar.kind, grammar.source, grammar.field) == (
        "schema",
        '{"type":"null"}',
        "output_config.format.schema",
    )


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"max_tokens": 0}, "max_tokens: must be between 1 and 2147483647, got 0"),
        ({"messages": []}, "messages: must have at least 1 item(s), got []"),
        ({"temperature": 1.5}, "temperature: must be between 0 and 1, got 1.5"),
        ({"stop_sequences": "x"}, 'stop_sequences: must be a list, got "x"'),
        ({"stop_sequences": [""]}, "stop_sequences[0]: must have at least 1 character(s)"),
        ({"max_token": 3}, "max_token: is not a known field; did you mean max_tokens?"),
        ({"container": "c"}, 'container: "c" is not supported by this server'),
        ({"mcp_servers": [{}]}, "mcp_servers: [{}] is not supported by this server"),
        ({"speed": "fast"}, 'speed: "fast" is not supported by this server'),
        ({"inference_geo": "us"}, 'inference_geo: "us" is not supported by this server'),
        ({"service_tier": "x"}, "service_tier: must be 'auto' or 'standard_only'"),
        ({"cache_control": {"type": "ephemeral", "ttl": "1d"}}, "cache_control.ttl: must be '5m' or '1h'"),
        ({"system": 7}, "system: must be a string or a list of blocks, got 7"),
        ({"system": [{"type": "image"}]}, 'system[0].type: "image" is not supported by this server'),
        ({"messages": [{"role": "boss", "content": "a"}]}, "messages[0].role: must be 'user', 'assistant' or 'sys"),
        (user({"type": "image", "source": {}}), 'messages[0].content[0].type: "image" is not supported by this'),
        (user({"type": "document"}), 'messages[0].content[0].type: "document" is not supported by this'),
        (user({"text": "a"}), "messages[0].content[0]: must be an object of the type 'text' or 'tool_use'"),
        (user(), "messages[0].content: must have at least 1 item(s), got []"),
        (user("a"), "messages[0].content[0]: must be an object of the type 'text' or 'tool_use'"),
        (user({"type": "text", "text": 1}), "messages[0].content[0].text: must be a string, got 1"),
        (user({"type": "text", "text": "a", "citations": [1]}), "messages[0].content[0].citations: [1] is not"),
        (user(RESULT), "messages[0].content[0].tool_use_id: no tool_use before it has the id 't1'"),
        (user(USE), "messages[0].content[0].type: no 'tool_use' is in a turn of the user"),
        (
            user(RESULT | {"content": [{"type": "image"}]}),
            'messages[0].content[0].content[0].type: "image" is not supported',
        ),
        (
            {"messages": [{"role": "assistant", "content": [USE]}]},
            "messages: the last turn calls tools, and their results",
        ),
        (
            {"messages": [{"role": "assistant", "content": [USE]}, {"role": "assistant", "content": "so"}]},
            "messages: the last turn calls tools, and their results",
        ),
        ({"tools": [{"type": "bash_20250124"}]}, 'tools[0].type: "bash_20250124" is not supported by this server'),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name: "),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: 'find' is the name of another tool, too"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading: true is not supported by this server"),
        ({"tools": [TOOL | {"input_schema": {"type": "string"}}]}, 'tools[0].input_schema.type: must be "object"'),
        ({"tool_choice": {"type": "any"}}, "tool_choice: only together with tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name: no tool is called 'x'"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, 'tool_choice.name: is required with type: "tool"'),
        ({"tools": [TOOL], "tool_choice": {"type": "any", "name": "find"}}, "tool_choice.name: only together with"),
        ({"thinking": {"type": "between_tools"}}, 'thinking.type: "between_tools" is not supported by this server'),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens: is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 8}}, "thinking.budget_tokens: must be less than max_tokens"),
        ({"thinking": {"type": "adaptive", "display": "omitted"}}, "thinking.display: must be 'summarized', got"),
        ({"output_config": {"effort": "some"}}, "output_config.effort: must be"),
        (
            {"output_config": {"effort": "low"}, "thinking": {"type": "disabled"}},
            "output_config.effort: not where thinking is disabled",
        ),
        (
            {
                "thinking": {"type": "enabled", "budget_tokens": 3},
                "messages": [{"role": "assistant", "content": "a"}],
            },
            "thinking: not where the last message begins the answer",
        ),
    ],
)
def test_errors_name_the_field_and_the_valid_values(change: Any, sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        read(**change)
    assert error.value.message.startswith(sentence)
    assert error.value.param == sentence.partition(":")[0]


@pytest.mark.parametrize("field", ["max_tokens", "temperature", "top_p", "top_k", "budget"])
@pytest.mark.parametrize("value", [-(1 << 63), -1, 1 << 31, 1 << 63, 1e308, float("nan"), "1", True])
def test_invalid_numbers_are_rejected(field: str, value: Any) -> None:
    change = {"thinking": {"type": "enabled", "budget_tokens": value}} if field == "budget" else {field: value}
    named = "thinking.budget_tokens" if field == "budget" else field
    with pytest.raises(BadRequest, match=rf"^{named}: ") as error:
        read(**change)
    assert error.value.param == named


# Writing answers


def test_a_message(generator: Model) -> None:
    app, registry = application_with_answer(generator, "A fox.")
    [response] = ask(app, ("/v1/messages", TALK | {"system": "Be brief."}))
    said = response.json()
    [request] = registry.requests
    assert isinstance(request, Generate)
    assert generator.tokenizer.decode(request.tokens) == "<system>Be brief.<user>Hi<assistant>"
    assert said.pop("id").startswith("msg_")
    assert said.pop("usage") == {
        "input_tokens": len(request.tokens) - 4,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(token_events("A fox.", generator.tokenizer)),
        "output_tokens_details": {"thinking_tokens": 0},
        "service_tier": "standard",
    }
    assert said == {
        "type": "message",
        "role": "assistant",
        "model": "talker",
        "content": [{"type": "text", "text": "A fox."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


@pytest.mark.parametrize(
    ("change", "end", "reason", "sequence"),
    [
        ({}, Done("length", 9, 8), "max_tokens", None),
        ({}, Done("length", 9, 7), "model_context_window_exceeded", None),
        ({"stop_sequences": ["x", "fo"]}, Done("stop", 9, 7), "stop_sequence", "fo"),
        ({"tools": [TOOL]}, Done("stop", 9, 7), "end_turn", None),
    ],
)
def test_why_a_message_ends(generator: Model, change: Any, end: Done, reason: str, sequence: str | None) -> None:
    app, _ = application_with_answer(generator, "A fox.", end)
    for streamed in (False, True):
        [response] = ask(app, ("/v1/messages", TALK | change | {"stream": streamed}))
        said = sse(response)[-2]["delta"] if streamed else response.json()
        assert (said["stop_reason"], said["stop_sequence"]) == (reason, sequence)


def test_more_is_asked_for_than_the_context_leaves(generator: Model) -> None:
    app, registry = application_with_answer(generator, "A")
    [response] = ask(app, ("/v1/messages", TALK | {"max_tokens": 100_000}))
    assert response.status_code == 200
    [request] = registry.requests
    assert isinstance(request, Generate)
    assert request.max_tokens == 2000 - len(request.tokens)


def accumulated(events: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The blocks that the events describe, and their end; every block begins and ends once, one after the other."""
    start, ping, *middle, delta, stop = events
    assert (start["type"], ping["type"], delta["type"], stop["type"]) == (
        *("message_start", "ping"),
        *("message_delta", "message_stop"),
    )
    assert start["message"]["content"] == []
    blocks: list[dict[str, Any]] = []
    open_block = False
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not open_block
                blocks.append(event["content_block"] | {"partial_json": ""})
                open_block = True
            case "content_block_delta":
                for key, value in event["delta"].items():
                    if key != "type":
                        blocks[-1][key] += value
            case "content_block_stop":
                open_block = False
        assert event["index"] == len(blocks) - 1
    assert not open_block
    for block in blocks:
        written = block.pop("partial_json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(written)
    return blocks, delta


@pytest.mark.parametrize("text", ["A fox.", CALL, f"[{CALL}, {CALL}]", f"<think>\nSo,\n</think>\n\n{CALL}", ""])
def test_a_streamed_message_equals_a_whole_one(reasoning_generator: Model, text: str) -> None:
    app, registry = application_with_answer(reasoning_generator, text)
    asked = TALK | {"tools": [TOOL]}
    whole, streamed = ask(app, ("/v1/messages", asked), ("/v1/messages", asked | {"stream": True}))
    assert sse(streamed)[0]["message"]["usage"]["input_tokens"] == len(registry.requests[1].tokens)
    expected, (blocks, end) = whole.json(), accumulated(sse(streamed))
    for block in (*blocks, *expected["content"]):
        block.pop("id", None)
    assert blocks == expected["content"]
    assert end["delta"] == {key: expected[key] for key in ("stop_reason", "stop_sequence")}
    assert end["usage"] == {key: value for key, value in expected["usage"].items() if key != "service_tier"}
    kinds = [block["type"] for block in blocks]
    assert kinds == ["thinking"] * ("<think>" in text) + ["tool_use"] * text.count("name") + ["text"] * ("A" in text)
    if CALL in text:
        assert (blocks[-1]["name"], blocks[-1]["input"]) == ("find", {"q": "größer"})
        assert end["delta"]["stop_reason"] == "tool_use"
    if "think" in text:
        assert (blocks[0]["thinking"], blocks[0]["signature"]) == ("So,", "")
        assert end["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_truncated_arguments_are_returned(generator: Model) -> None:
    app, _ = application_with_answer(generator, CALL[:-4], Done("length", 9, 8))
    [response] = ask(app, ("/v1/messages", TALK | {"tools": [TOOL]}))
    [block] = response.json()["content"]
    assert block["input"] in ({}, {"q": "größ"})
    assert response.json()["stop_reason"] == "max_tokens"


def test_a_silent_stream_sends_pings(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.02)
    app = application(Registry([generator], lambda model, request: [*token_events("A", model.tokenizer), WAIT]))

    async def listened() -> bytes:
        connection = Connection("/v1/messages", json.dumps(TALK | {"stream": True}).encode())
        answering = asyncio.create_task(connection.run(app))
        await until(lambda: connection.body.count(b"event: ping") > 3)
        connection.drop()
        await answering
        return connection.body

    text = asyncio.run(listened()).decode()
    types = [line.removeprefix("event: ") for line in text.split("\n") if line.startswith("event: ")]
    assert types[:4] == ["message_start", "ping", "content_block_start", "content_block_delta"]
    assert set(types[4:]) == {"ping"}
    assert text.endswith('event: ping\ndata: {"type":"ping"}\n\n')


def test_counting(generator: Model) -> None:
    app, registry = application_with_answer(generator, "A")
    counted = {"model": "talker", "messages": TALK["messages"], "system": "Be brief.", "tools": [TOOL]}
    first, second, wrong = ask(
        app,
        ("/v1/messages/count_tokens", counted),
        ("/v1/messages", counted | {"max_tokens": 8}),
        ("/v1/messages/count_tokens", counted | {"max_tokens": 8}),
    )
    [request] = registry.requests
    assert first.json() == {"input_tokens": len(request.tokens)}
    assert second.status_code == 200
    assert wrong.json()["error"]["message"] == "max_tokens: is not a known field"
    assert read_count(CountRequest.read(counted)).only_scores


# Errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("m"), "invalid_request_error"),
        (Unauthorized("m"), "authentication_error"),
        (NotFound("m"), "not_found_error"),
        (BodyTooLarge("m"), "request_too_large"),
        (Overloaded("m"), "rate_limit_error"),
        (StepFailed("m"), "api_error"),
        (Unavailable("m"), "overloaded_error"),
        (Expired("m"), "timeout_error"),
    ],
)
def test_errors(error: PolyheadError, kind: str) -> None:
    assert write_anthropic_error(error) == {"type": "error", "error": {"type": kind, "message": "m"}}


def test_errors_have_the_shape_of_the_dialect(app: FastAPI) -> None:
    path = "/v1/messages"
    answers = ask(
        app, (path, TALK | {"model": "nobody"}), (path, b"{"), (path, None), (f"{path}/nothing", TALK), (path, {})
    )
    assert [answer.status_code for answer in answers] == [404, 400, 405, 404, 400]
    for answer in answers:
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert answer.json().keys() == {"type", "error"}
        assert answer.json()["error"].keys() == {"type", "message"}


def test_an_error_in_a_stream_ends_it(generator: Model) -> None:
    app, _ = application_with_answer(generator, "A fox.", Failed(StepFailed("it broke")))
    [response] = ask(app, ("/v1/messages", TALK | {"stream": True}))
    assert response.status_code == 200
    assert sse(response)[-1] == {"type": "error", "error": {"type": "api_error", "message": "it broke"}}


def test_an_error_before_the_first_event_keeps_its_status(generator: Model) -> None:
    app = application(Registry([generator], lambda model, request: [Failed(Overloaded("full", retry_after=3))]))
    [response] = ask(app, ("/v1/messages", TALK | {"stream": True}))
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/messages", {"x-api-key": "s3cret"}, 200),
        ("/v1/messages/count_tokens", {"x-api-key": "s3cret"}, 200),
        ("/v1/messages", {"authorization": "Bearer s3cret"}, 200),
        ("/v1/messages", {"x-api-key": "wrong"}, 401),
        ("/v1/messages", {"x-api-key": ""}, 401),
        ("/v1/messages", {}, 401),
        ("/v1/messages", {"x-api-key": "s3cret", "authorization": "Bearer wrong"}, 401),
        ("/v1/models", {"x-api-key": "s3cret"}, 200),
        ("/v1/chat/completions", {"x-api-key": "s3cret"}, 401),
    ],
)
def test_the_key_may_stand_in_the_header_of_its_clients(
    generator: Model, path: str, headers: dict[str, str], status: int
) -> None:
    app = application(Registry([generator], echo), api_key="s3cret")
    body = {key: value for key, value in TALK.items() if key != "max_tokens" or "count" not in path}
    method = "GET" if path == "/v1/models" else "POST"

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            every = headers | {"anthropic-version": "2023-06-01"}
            return await client.request(method, path, headers=every, json=body)

    assert asyncio.run(call()).status_code == status

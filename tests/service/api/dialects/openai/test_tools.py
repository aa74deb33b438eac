"""Tools, reasoning and answer prefixes in OpenAI's chat: reading and writing."""

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polyhead.models.chat import ChatTemplate
from polyhead.service.api.dialects.openai.wire import ChatRequest, read_chat
from polyhead.service.api.shared import response_formats
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Event, Generate, GeneratedToken, Request
from polyhead.service.resources import request_memory
from polyhead.service.resources.request_memory import Headroom
from polyhead.service.structured.grammar_child import Place
from tests.support.dialogue_templates import LLAMA31, QWEN3, R1, SMOLLM2
from tests.support.scripted import Registry, application, ask, echo, model, token_events

PATH = "/v1/chat/completions"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = {"required": ["a"], "additionalProperties": False}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
TALK = {"model": "talker", "messages": [{"role": "user", "content": "Hi"}]}
WITH = TALK | {"tools": [WEATHER, NOW]}
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
ANSWER = f"<think>\nHm.\n</think>\n\nI look. \n<tool_call>\n{PARIS}\n</tool_call>\n<tool_call>\n" + (
    '{"name": "now", "arguments": {}}\n</tool_call>'
)

Answering = Callable[..., tuple[Registry, list[httpx.Response]]]


@pytest.fixture
def answer_with(tiny_generator: Path) -> Answering:
    """Sends requests to a model whose answers and template the test gives."""

    def ask_model(said: str, *wires: Any, template: str = QWEN3) -> tuple[Registry, list[httpx.Response]]:
        chat = ChatTemplate(template, bos_token="", eos_token="")

        def script(model: Model, request: Request) -> Iterable[Event]:
            assert isinstance(request, Generate)
            tokens = [event.id for event in token_events(said, model.tokenizer) if isinstance(event, GeneratedToken)]
            yield from (GeneratedToken(id, -0.5) for id in tokens)
            yield Done("stop", len(request.tokens), len(tokens))

        registry = Registry([model(tiny_generator, "talker", "generate", chat=chat, max_tokens=4096)], script)
        return registry, ask(application(registry), *((PATH, wire) for wire in wires))

    return ask_model


def prompt(registry: Registry, index: int = -1) -> str:
    request = registry.requests[index]
    assert isinstance(request, Generate)
    return registry.served["talker"].tokenizer.decode(request.tokens, skip_special=False)


def chunks(response: httpx.Response) -> list[Any]:
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def assembled(response: httpx.Response, index: int) -> dict[str, Any]:
    """The message that a client assembles from the deltas."""
    said: dict[str, Any] = {}
    calls: list[dict[str, Any]] = []
    for chunk in chunks(response):
        for choice in (choice for choice in chunk["choices"] if choice["index"] == index):
            for key, value in choice["delta"].items():
                if key != "tool_calls":
                    said[key] = said.get(key, "") + value
                elif "id" in value[0]:
                    assert value[0]["index"] == len(calls)
                    calls.append({key: part for key, part in value[0].items() if key != "index"})
                else:
                    calls[value[0]["index"]]["function"]["arguments"] += value[0]["function"]["arguments"]
            said["finish"] = choice["finish_reason"]
    return said | {"tool_calls": calls}


# Writing answers


def test_an_answer_with_reasoning_text_and_calls(answer_with: Answering) -> None:
    _, [response] = answer_with(ANSWER, WITH)
    [choice] = response.json()["choices"]
    first, second = choice["message"].pop("tool_calls")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {
        "role": "assistant",
        "content": "I look.",
        "refusal": None,
        "reasoning_content": "Hm.",
    }
    assert first["id"] != second["id"]
    assert first.pop("id").startswith("call_")
    assert first == {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
    assert second["function"] == {"name": "now", "arguments": "{}"}
    usage = response.json()["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_deltas_equal_the_whole_answer(answer_with: Answering) -> None:
    _, [whole, streamed] = answer_with(ANSWER, WITH | {"n": 2}, WITH | {"n": 2, "stream": True})
    for index, choice in enumerate(whole.json()["choices"]):
        said = assembled(streamed, index)
        message = choice["message"]
        assert [said[key] for key in ("role", "content", "reasoning_content", "finish")] == [
            message["role"],
            message["content"],
            message["reasoning_content"],
            choice["finish_reason"],
        ]
        assert [call["function"] for call in said["tool_calls"]] == [call["function"] for call in message["tool_calls"]]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(streamed) if chunk["choices"][0]["index"] == 0]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert sum("tool_calls" in delta for delta in deltas) > 4  # arguments in more than one delta


def test_a_call_alone_has_no_content(answer_with: Answering) -> None:
    _, [response] = answer_with(f"<tool_call>\n{PARIS}\n</tool_call>", WITH)
    assert response.json()["choices"][0]["message"]["content"] is None


def test_an_object_that_names_no_tool_is_content(answer_with: Answering) -> None:
    for template in (SMOLLM2, LLAMA31):
        for said in ('{"name": "Ada", "age": 36}', '{"answer": 42}', '[{"name": "weather"', '{"name": "weather"}'):
            _, [whole, streamed] = answer_with(said, WITH, WITH | {"stream": True}, template=template)
            [choice] = whole.json()["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == (said, "stop")
            assert "tool_calls" not in choice["message"]
            assert assembled(streamed, 0)["content"] == said


def test_without_tools_calls_are_text_and_reasoning_is_separate(answer_with: Answering) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        _, [response] = answer_with(ANSWER, TALK | more)
        [choice] = response.json()["choices"]
        assert choice["message"]["content"] == ANSWER.partition("</think>\n\n")[2]
        assert choice["message"]["reasoning_content"] == "Hm."
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


def test_hidden_reasoning_is_counted(answer_with: Answering) -> None:
    silent = WITH | {"include_reasoning": False}
    _, [response, streamed, counted] = answer_with(
        ANSWER, silent, silent | {"stream": True, "stream_options": {"include_usage": True}}, WITH
    )
    assert "reasoning_content" not in response.json()["choices"][0]["message"]
    assert "reasoning_content" not in streamed.text
    details = counted.json()["usage"]["completion_tokens_details"]
    assert response.json()["usage"]["completion_tokens_details"] == details
    assert chunks(streamed)[-1]["usage"]["completion_tokens_details"] == details


def test_logprobs_of_an_answer_are_those_of_all_its_tokens(answer_with: Answering) -> None:
    wire = WITH | {"logprobs": True}
    _, [whole, streamed] = answer_with(ANSWER, wire, wire | {"stream": True})
    content = whole.json()["choices"][0]["logprobs"]["content"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks(streamed)]
    assert "".join(token["token"] for token in content) == ANSWER
    assert [token for part in parts if part for token in part["content"]] == content


def test_the_best_of_several_answers_are_parsed_too(answer_with: Answering) -> None:
    _, [response, alone] = answer_with(ANSWER, WITH | {"best_of": 3, "n": 2}, WITH)
    one, two = response.json()["choices"]
    assert [one["finish_reason"], two["finish_reason"]] == ["tool_calls"] * 2
    details = alone.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert response.json()["usage"]["completion_tokens_details"]["reasoning_tokens"] == 2 * details


# Prompts


def test_tools_and_earlier_calls_are_in_the_prompt(answer_with: Answering) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        TALK["messages"][0],
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "I wonder."},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    registry, _ = answer_with("x", WITH | {"messages": messages}, TALK | {"messages": messages})
    for index, has_tools in enumerate((True, False)):
        written = prompt(registry, index)
        assert ("# Tools" in written) == ("Tells it." in written) == has_tools
        assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in written
        assert "<think>\nI wonder.\n</think>" in written
        assert "<tool_response>\nsunny\n</tool_response>" in written
    registry, _ = answer_with("x", WITH | {"messages": messages}, template=SMOLLM2)
    assert "You can call these functions" in prompt(registry)
    assert "<|im_start|>user\nweather returned:\nsunny<|im_end|>" in prompt(registry)


def test_a_prefix_of_the_answer_is_continued(answer_with: Answering) -> None:
    begun = TALK | {"messages": [*TALK["messages"], {"role": "assistant", "content": "Sure, "}]}
    registry, [response] = answer_with(" I <think>", begun | {"continue_final_message": True})
    assert prompt(registry).endswith("<|im_start|>assistant\nSure, ")
    assert response.json()["choices"][0]["message"]["content"] == " I <think>"
    registry, _ = answer_with("x", begun, begun | {"add_generation_prompt": False})
    assert prompt(registry, 0).endswith("Sure, <|im_end|>\n<|im_start|>assistant\n")
    assert prompt(registry, 1).endswith("Sure, <|im_end|>\n")
    thinking = TALK | {"messages": [*TALK["messages"], {"role": "assistant", "content": "<think>\nI"}]}
    _, [response] = answer_with(" see.</think>Yes.", thinking | {"continue_final_message": True})
    assert response.json()["choices"][0]["message"]["reasoning_content"] == "see."


def test_the_prompt_shows_whether_the_answer_begins_with_reasoning(answer_with: Answering) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for wire in (TALK | off, TALK | {"reasoning_effort": "none"}):
        registry, [response] = answer_with("<think>x", wire)
        assert prompt(registry).endswith("<think>\n\n</think>\n\n")
        assert response.json()["choices"][0]["message"]["content"] == "<think>x"
    _, [response] = answer_with("Hm.</think>Yes.", TALK, template=R1)
    message = response.json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")


# Errors


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name: 'weather' is the name of another tool, too"),
        (
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            "tools[0].function.name: must be 1 to 64 lett",
        ),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].custom: {} is not supported by this server"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: is required"),
        ({"tools": [WEATHER] * 129}, "tools: must have at most 128 items"),
        (
            {"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}]},
            'tools[0].function.parameters.type: must be "object", got "array"',
        ),
        ({"tool_choice": "required"}, "tool_choice: only together with tools"),
        (
            {"tools": [NOW], "tool_choice": "any"},
            'tool_choice: must be "none", "auto", "required", an object that names',
        ),
        (
            {"tools": [NOW], "tool_choice": {"type": "function", "function": {"name": "then"}}},
            "tool_choice.function.name: no tool is called 'then'",
        ),
        ({"functions": [{"name": "a"}]}, 'functions: [{"name":"a"}] is not supported by this server'),
        ({"chat_template": "{{ 1 }}"}, 'chat_template: "{{ 1 }}" is not supported by this server'),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: must be an object without the names"),
        ({"continue_final_message": True}, "continue_final_message: only where the last message is text of the assist"),
        ({"thinking_budget": -1}, "thinking_budget: must be between 0 and 2147483647, got -1"),
        ({"reasoning_effort": "much"}, "reasoning_effort: must be '', 'none', 'minimal'"),
        ({"separate_reasoning": False}, "separate_reasoning: false is not supported by this server"),
    ],
)
def test_errors_name_the_place(change: Any, sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_chat(ChatRequest.read(TALK | change))
    assert error.value.message.startswith(sentence)
    assert error.value.param == sentence.partition(":")[0]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            {"role": "user", "content": "a", "tool_calls": [{"function": {"name": "a"}}]},
            "messages[0].tool_calls: only in",
        ),
        (
            {"role": "user", "content": "a", "reasoning_content": "b"},
            "messages[0].reasoning_content: only in messages of",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "[1]"}}]},
            "messages[0].tool_calls[0].function.arguments: must be a JSON object as text",
        ),
        ({"role": "assistant", "content": None}, "messages[0].content: is required"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, 'messages[0].content[0].type: "input_audio" is not'),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "messages[0].content[0]: must be an object with a type and text",
        ),
        ({"role": "function", "content": "a"}, "messages[0].role: must be 'system', 'developer'"),
    ],
)
def test_errors_of_messages(message: Any, sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_chat(ChatRequest.read(TALK | {"messages": [message]}))
    assert error.value.message.startswith(sentence)


@pytest.mark.parametrize(("effort", "is_named"), [("high", True), ("none", False)])
def test_reasoning_that_the_template_does_not_know_is_ignored_and_named_in_a_header(
    answer_with: Answering, effort: str, is_named: bool
) -> None:
    _, [response] = answer_with("x", TALK | {"reasoning_effort": effort}, template=SMOLLM2)
    assert response.status_code == 200
    assert response.headers.get("X-Polyhead-Ignored") == ("reasoning_effort" if is_named else None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_schemas_that_are_too_large_together_are_not_looked_through(
    tiny_generator: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema that is called strict is searched for objects that are open, all of it in one turn of the event loop."""
    searched, walk = list[dict[str, Any]](), response_formats.walk_schemas

    def count(schema: dict[str, Any]) -> Iterator[tuple[Place | None, dict[str, Any]]]:
        searched.append(schema)
        return walk(schema)

    monkeypatch.setattr(response_formats, "walk_schemas", count)
    asked: dict[str, Any] = {"model": "talker", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    if path == "/v1/responses":
        asked = {"model": "talker", "input": "a"}

    def tools(size: int) -> list[dict[str, Any]]:
        schema = {"type": "object", "properties": {"a": {"enum": ["a" * size]}}} | STRICT
        found: list[dict[str, Any]] = [{"name": name, "strict": True} for name in "ab"]
        if path == "/v1/messages":
            return [each | {"input_schema": schema} for each in found]
        named = [each | {"parameters": schema} for each in found]
        return [{"type": "function"} | (each if "responses" in path else {"function": each}) for each in named]

    app = application(Registry([model(tiny_generator, "talker", "generate", max_tokens=4000)], echo))
    [large] = ask(app, (path, asked | {"tools": tools(1 << 17)}))
    assert large.status_code == 400
    assert large.json()["error"]["message"] == "tools: may have at most 262,144 characters"
    assert searched == []
    ask(app, (path, asked | {"tools": tools(10)}))
    assert len(searched) == 2


def test_requests_that_the_template_does_not_support_are_rejected(answer_with: Answering) -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"a": deep}
    nested = {"type": "function", "function": {"name": "a", "parameters": {"properties": deep}}}
    large = {"type": "function", "function": {"name": "a", "description": "a" * (1 << 18)}}
    _, responses = answer_with(
        "x",
        TALK | {"documents": [{"text": "a"}]},
        TALK | {"tools": [large]},
        TALK | {"tools": [nested]},
        TALK | {"chat_template_kwargs": {"a": deep}},
        template=SMOLLM2,
    )
    for response, sentence in zip(
        responses,
        (
            "documents: the chat template of talker reads none",
            "tools: may have at most 262,144 characters",
        ),
        strict=False,
    ):
        assert response.status_code == 400
        assert response.json()["error"]["message"] == sentence
    assert {response.status_code for response in responses[2:]} <= {200, 400}


def test_memory_is_claimed_for_lists_and_objects_in_the_arguments_of_calls(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a text in the body, in which they are not counted."""
    monkeypatch.setattr(request_memory, "MAX_CONTAINERS", 1000)
    served = [model(tiny_generator, "talker", "generate", max_tokens=4096)]
    app = application(Registry(served, echo), Headroom(request_memory.ALLOCATOR_BYTES + (64 << 20)))

    def asked(lists: int) -> tuple[str, Any]:
        function = {"name": "f", "arguments": json.dumps({"a": [[]] * lists})}
        called = {"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}
        return PATH, TALK | {"messages": [*TALK["messages"], called, {"role": "tool", "content": "b"}]}

    few, many = ask(app, asked(100), asked(1000))
    assert few.status_code == 200
    assert many.status_code == 413
    assert many.json()["error"]["message"].startswith(
        "the arguments of tool calls takes about 65 MiB with the rest of its request, and the server has 64 for"
    )

"""OpenAI's responses API with scripted models: reading, writing, streams, errors."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from polyhead.models.chat import ChatTemplate
from polyhead.service.api.dialects.responses import read as responses_read
from polyhead.service.api.dialects.responses.read import read_response
from polyhead.service.api.dialects.responses.wire import ResponseRequest
from polyhead.service.api.shared import generation_calls, response_formats
from polyhead.service.core.errors import BadRequest, Overloaded, StepFailed
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Failed, Generate, Sampling
from polyhead.service.text import chat_truncation, tokenization
from polyhead.service.text.generation_request import ChatMessages, GenerationRequest
from tests.support.dialogue_templates import QWEN3
from tests.support.scripted import TEMPLATE, Registry, application, ask, echo, model, token_events

ASK: dict[str, Any] = {"model": "talker", "input": "Hi"}
FREE = {"type": "object", "properties": {}, "additionalProperties": False}
TOOL = {"type": "function", "name": "find", "description": "d", "parameters": FREE, "strict": True}
CALL = '{"name": "find", "arguments": {"q": "größer"}}'
CALLED = {"type": "function_call", "call_id": "c1", "name": "find", "arguments": '{"q": "x"}'}
RETURNED = {"type": "function_call_output", "call_id": "c1", "output": "y"}
THINKING = "{% if false %}<think></think>{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture(scope="module")
def reasoning_generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", max_tokens=2000, chat=ChatTemplate(THINKING))


def application_with_answer(model: Model, text: str, *ends: Any) -> tuple[FastAPI, Registry]:
    """An application whose model generates `text` and ends with its own stop token, or otherwise."""
    tokens = token_events(text, model.tokenizer)
    registry = Registry([model], lambda model, request: [*tokens, *(ends or [Done("stop", 9, len(tokens), 4)])])
    return application(registry), registry


def read(**changes: Any) -> GenerationRequest:
    return read_response(ResponseRequest.read(ASK | changes))


def messages_of(talk: GenerationRequest) -> list[dict[str, Any]]:
    [chat] = talk.prompts
    assert isinstance(chat, ChatMessages)
    assert not chat.continues_last
    return [dict(message) for message in chat.messages]


def sse(response: httpx.Response) -> list[dict[str, Any]]:
    """The data of every event, numbered from 0; the line above it has its type."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == "event: " + events[-1]["type"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# Reading requests


def test_every_field_of_a_request_is_read() -> None:
    talk = read(
        temperature=0.5,
        top_p=0.9,
        max_output_tokens=7,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        text={"format": {"type": "json_object"}},
        tools=[TOOL],
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
    )
    asked = talk
    assert asked.sampling == Sampling(temperature=0.5, top_p=0.9)
    assert (asked.max_tokens, asked.limit_field, asked.field, asked.logprobs) == (7, "max_output_tokens", "input", 2)
    assert asked.grammar is not None
    assert (asked.grammar.kind, asked.grammar.field) == ("object", "text.format")
    assert (talk.tools.choice, talk.tools.only, talk.tools.parallel) == ("auto", frozenset(), False)
    assert [tool.name for tool in talk.tools.offered] == ["find"]
    assert (talk.reasoning.mode, talk.reasoning.budget, talk.reasoning.effort) == ("on", 1024, "low")


def test_missing_and_null_fields_have_no_effect() -> None:
    names = ResponseRequest.model_fields.keys() | ResponseRequest.unsupported.keys()
    nothing = read_response(ResponseRequest.read(dict.fromkeys(names, None) | ASK))
    assert nothing == read()
    assert (nothing.max_tokens, nothing.logprobs, nothing.grammar) == (0, -1, None)
    assert (nothing.reasoning.mode, nothing.reasoning.budget) == ("", -1)


def test_items_become_messages_of_templates() -> None:
    said = {"type": "message", "role": "assistant", "id": "m", "status": "completed"}
    thought = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    talk = read(
        instructions="s",
        input=[
            {"role": "developer", "content": "t"},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            thought,
            said | {"content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}]},
            CALLED,
            RETURNED,
            {"type": "message", "role": "user", "content": "d"},
            {"role": "assistant", "content": "e"},
        ],
    )
    call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": {"q": "x"}}}
    assert messages_of(talk) == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "y", "tool_call_id": "c1", "name": "find"},
        {"role": "user", "content": "d"},
        {"role": "assistant", "content": "e"},
    ]


def test_a_template_gets_one_system_message_first() -> None:
    begun = [{"role": role, "content": role[0]} for role in ("developer", "system", "user")]
    assert messages_of(read(instructions="i", input=begun)) == [
        {"role": "system", "content": "i\nd\ns"},
        {"role": "user", "content": "u"},
    ]


class CountedText(str):
    """A text that counts how often it is appended to another one."""

    __slots__ = ()
    appended = 0

    def __radd__(self, other: str) -> str:
        CountedText.appended += 1
        return "".join((other, self))


def test_system_messages_are_joined_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Appended one after another, they are copied as often as there are messages."""
    monkeypatch.setattr(CountedText, "appended", 0)
    join_text = responses_read.join_text
    monkeypatch.setattr(responses_read, "join_text", lambda parts: CountedText(join_text(parts)))
    begun = [{"role": "developer", "content": "d"}] * 100
    [system, _] = messages_of(read(input=[*begun, {"role": "user", "content": "u"}]))
    assert system["content"] == "\n".join("d" * 100)
    assert CountedText.appended == 0


@pytest.mark.parametrize(
    ("choice", "kind", "only"),
    [
        ("none", "none", set()),
        ("required", "required", set()),
        ({"type": "function", "name": "find"}, "required", {"find"}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "find"}]},
            *("auto", {"find"}),
        ),
    ],
)
def test_which_tools_are_called(choice: Any, kind: str, only: set[str]) -> None:
    tools = read(tools=[TOOL, TOOL | {"name": "other"}], tool_choice=choice).tools
    assert (tools.choice, tools.only) == (kind, only)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"input": None}, "input: is required"),
        ({"input": []}, "input: must have at least 1 item(s), got []"),
        ({"input": 7}, "input: must be a string or a list of items, got 7"),
        ({"input": ["a"]}, "input[0]: must be an object of the type 'message' or 'function_call'"),
        ({"input": [{"content": "a"}]}, "input[0].role: is required"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 'input[0].type: "item_reference" is not supported'),
        ({"input": [{"type": "web_search_call"}]}, 'input[0].type: "web_search_call" is not supported'),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            'input[0].content[0].type: "input_image" is not supported',
        ),
        ({"input": [RETURNED]}, "input[0].call_id: no function_call before it has the id 'c1'"),
        ({"input": [RETURNED, CALLED]}, "input[0].call_id: no function_call before it has the id 'c1'"),
        ({"input": [CALLED]}, "input: the last items call tools, and their results are missing"),
        ({"input": [CALLED | {"arguments": "["}]}, "input[0].arguments: must be a JSON object as text, got '['"),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            'input[0].encrypted_content: "x" is not supported by this server',
        ),
        ({"model": None}, "model: is required"),
        ({"background": True}, "background: true is not supported by this server"),
        ({"conversation": "c"}, 'conversation: "c" is not supported by this server'),
        ({"prompt": {"id": "p"}}, 'prompt: {"id":"p"} is not supported by this server'),
        ({"truncation": "left"}, "truncation: must be 'disabled' or 'auto', got \"left\""),
        ({"text": {"verbosity": "low"}}, 'text.verbosity: "low" is not supported by this server'),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema: is required where the type"),
        ({"reasoning": {"summary": "detailed"}}, 'reasoning.summary: "detailed" is not supported by this server'),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort: must be"),
        ({"tools": [{"type": "web_search"}]}, 'tools[0].type: "web_search" is not supported by this server'),
        ({"tools": [TOOL | {"async": True}]}, "tools[0].async: true is not supported by this server"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name: 'find' is the name of another tool, too"),
        ({"tool_choice": "any"}, 'tool_choice.type: "any" is not supported by this server'),
        ({"tool_choice": {"type": "mcp"}}, 'tool_choice.type: "mcp" is not supported by this server'),
        ({"tool_choice": "required"}, "tool_choice: only together with tools"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice.name: no tool is called 'x'"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]}},
            "tool_choice.tools: no tool is called 'x'",
        ),
        ({"include": ["x"]}, "include[0]: must be"),
        ({"top_logprobs": 2}, "top_logprobs: only together with include"),
        ({"stream_options": {}}, "stream_options: only together with stream: true"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm: true is not supported"),
        ({"max_tokens": 7}, "max_tokens: is not a known field"),
        ({"metadata": {"a": 1}}, "metadata.a: must be a string, got 1"),
    ],
)
def test_errors_name_the_field_and_the_valid_values(change: Any, sentence: str) -> None:
    with pytest.raises(BadRequest) as error:
        read(**change)
    assert error.value.message.startswith(sentence)
    assert error.value.param == sentence.partition(":")[0]


@pytest.mark.parametrize("field", ["max_output_tokens", "temperature", "top_p", "top_logprobs", "max_tool_calls"])
@pytest.mark.parametrize("value", [-(1 << 63), -1, 1 << 31, 1 << 63, 1e308, float("nan"), "1", True])
def test_invalid_numbers_are_rejected(field: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=rf"^{field}: ") as error:
        read(**{field: value})
    assert error.value.param == field


# Writing answers


def test_a_response(generator: Model) -> None:
    app, registry = application_with_answer(generator, "A fox.")
    [response] = ask(
        app, ("/v1/responses", ASK | {"instructions": "Be brief.", "metadata": {"a": "b"}, "prompt_cache_key": "k"})
    )
    said = response.json()
    number = said.pop("id").removeprefix("resp_")
    assert said.pop("created_at") > 1_700_000_000
    [request] = registry.requests
    assert isinstance(request, Generate)
    assert generator.tokenizer.decode(request.tokens) == "<system>Be brief.<user>Hi<assistant>"
    count = len(token_events("A fox.", generator.tokenizer))
    part = {"type": "output_text", "text": "A fox.", "annotations": [], "logprobs": []}
    assert said.pop("output") == [
        {
            "type": "message",
            "id": f"msg_{number}_0",
            "status": "completed",
            "role": "assistant",
            "content": [part],
        }
    ]
    assert said.pop("usage") == {
        "input_tokens": len(request.tokens),
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": count,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": len(request.tokens) + count,
    }
    assert said == {
        "object": "response",
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": "talker",
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "max_tool_calls": None,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_logprobs": 0,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "background": False,
        "store": False,
        "previous_response_id": None,
        "service_tier": "default",
        "metadata": {"a": "b"},
        "prompt_cache_key": "k",
        "safety_identifier": None,
        "user": None,
    }


def test_fields_of_the_request_are_repeated_in_the_response(generator: Model) -> None:
    form = {"type": "json_schema", "name": "x", "schema": {"type": "null"}, "strict": True}
    asked = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "find"}, "text": {"format": form}}
    app, _ = application_with_answer(generator, "null")
    [response] = ask(app, ("/v1/responses", ASK | asked | {"tool_choice": "none"}))
    said = response.json()
    assert (said["tools"], said["tool_choice"], said["text"]["format"]) == ([TOOL], "none", form)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"tools": [TOOL | {"parameters": {"x": ["a" * (1 << 18)]}}]}, "tools: may have at most 262,144 characters"),
        ({"tools": [TOOL | {"description": "a" * (1 << 18)}]}, "tools: may have at most 262,144 characters"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"x": "a" * (1 << 16)}, "strict": True}}},
            "text.format.schema: must have at most 65536 characters, has 65544",
        ),
    ],
)
def test_what_is_too_large_is_refused_before_it_is_repeated_or_looked_through(
    generator: Model, change: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take as long as the body is large, on the event loop."""

    def refused(*_: Any) -> None:
        pytest.fail("it is read")

    monkeypatch.setattr(responses_read, "dump_set_fields", refused)
    monkeypatch.setattr(response_formats, "subschemas", refused if "text" in change else response_formats.subschemas)
    app, _ = application_with_answer(generator, "x")
    [answer] = ask(app, ("/v1/responses", ASK | change))
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, sentence)


def test_an_answer_that_was_cut_is_incomplete(generator: Model) -> None:
    app, _ = application_with_answer(generator, "A fox", Done("length", 9, 3))
    whole, streamed = ask(app, *(("/v1/responses", ASK | {"stream": stream}) for stream in (False, True)))
    events = sse(streamed)
    assert events[-1]["type"] == "response.incomplete"
    for said in (whole.json(), events[-1]["response"]):
        assert (said["status"], said["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert said["output"][0]["status"] == "incomplete"


@pytest.mark.parametrize("end", [Done("length", 9, 3), Failed(StepFailed("it broke"))])
@pytest.mark.parametrize("text", ["A fox", "["])  # text that may begin a tool call is sent at the end
def test_only_the_last_item_of_a_truncated_answer_is_incomplete(
    reasoning_generator: Model, text: str, end: Any
) -> None:
    app, _ = application_with_answer(reasoning_generator, f"<think>So,</think>{text}", end)
    [response] = ask(app, ("/v1/responses", ASK | {"tools": [TOOL], "stream": True}))
    events = sse(response)
    statuses = [item["status"] for item in events[-1]["response"]["output"]]
    done = [event["item"]["status"] for event in events if event["type"] == "response.output_item.done"]
    if isinstance(end, Done):
        assert statuses == done == ["completed", "incomplete"]
    else:
        assert done == ["completed"] * (len(statuses) - 1)
        assert statuses == [*done, "incomplete"]


@pytest.mark.parametrize(
    "text", ["A fox < B, \n\n\n<think> <t", "<think>So,</think>\n\n< A\n\nfox", "<think></think>\nth"]
)
def test_log_probabilities_belong_to_text_that_was_held_back(tiny_generator: Path, text: str) -> None:
    app, _ = application_with_answer(
        model(tiny_generator, "talker", "generate", max_tokens=2000, chat=ChatTemplate(QWEN3)), text
    )
    asked = ASK | {"include": ["message.output_text.logprobs"], "tools": [TOOL]}
    whole, streamed = ask(app, *(("/v1/responses", asked | {"stream": on}) for on in (False, True)))
    [part] = whole.json()["output"][-1]["content"]
    said = "".join(each["token"] for each in part["logprobs"])
    assert said.lstrip() == part["text"] == text.rpartition("</think>")[2].lstrip()
    deltas = [event for event in sse(streamed) if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == part["logprobs"]


def test_log_probabilities(generator: Model) -> None:
    app = application(Registry([generator], echo))
    asked = ASK | {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "max_output_tokens": 3}
    whole, streamed = ask(app, *(("/v1/responses", asked | {"stream": stream}) for stream in (False, True)))
    [part] = whole.json()["output"][0]["content"]
    assert "".join(each["token"] for each in part["logprobs"]) == part["text"]
    first = part["logprobs"][0]
    assert (first["logprob"], first["bytes"], len(first["top_logprobs"])) == (-0.5, list(first["token"].encode()), 2)
    events = sse(streamed)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [each for event in deltas for each in event["logprobs"]] == part["logprobs"]
    [done] = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]


def accumulated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that the events describe: each is added, grows, is done, one after the other."""
    created, progress, *middle, end = events
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["status"] == "in_progress"
    items: list[dict[str, Any]] = []
    text, done = "", True
    for event in middle:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert done
            items.append(event["item"])
            assert event["item"]["status"] == "in_progress"
            text, done = "", False
        assert event["output_index"] == len(items) - 1
        assert event.get("item_id", items[-1]["id"]) == items[-1]["id"]
        if kind.endswith(".delta"):
            text += event["delta"]
        elif kind.endswith("text.done"):
            assert event["text"] == text
        elif kind == "function_call_arguments.done":
            assert event["arguments"] == text
        elif kind == "content_part.done":
            assert event["part"]["text"] == text
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[-1]["id"]
            items[-1], done = event["item"], True
    assert done
    assert end["type"] == "response.completed"
    assert end["response"]["output"] == items
    assert end["response"]["id"] == created["response"]["id"]
    return items


@pytest.mark.parametrize("text", ["A fox.", CALL, f"[{CALL}, {CALL}]", f"<think>\nSo,\n</think>\n\n{CALL}", ""])
def test_a_streamed_response_equals_a_whole_one(reasoning_generator: Model, text: str) -> None:
    app, _ = application_with_answer(reasoning_generator, text)
    whole, streamed = ask(app, *(("/v1/responses", ASK | {"tools": [TOOL], "stream": on}) for on in (False, True)))
    expected, items = whole.json()["output"], accumulated(sse(streamed))
    assert sse(streamed)[-1]["response"]["usage"] == whole.json()["usage"]
    for item in (*items, *expected):
        item.pop("id")
        item.pop("call_id", None)
    assert items == expected
    kinds = ["reasoning"] * ("<think>" in text) + ["function_call"] * text.count("name") + ["message"] * ("A" in text)
    assert [item["type"] for item in items] == kinds
    if CALL in text:
        assert (items[-1]["name"], json.loads(items[-1]["arguments"])) == ("find", {"q": "größer"})
    if "think" in text:
        assert items[0]["content"] == [{"type": "reasoning_text", "text": "So,"}]
        assert whole.json()["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_output_items_can_be_sent_as_input(reasoning_generator: Model) -> None:
    app, registry = application_with_answer(reasoning_generator, f"<think>So,</think>{CALL}")
    [response] = ask(app, ("/v1/responses", ASK | {"tools": [TOOL]}))
    output = response.json()["output"]
    returned = {"type": "function_call_output", "call_id": output[-1]["call_id"], "output": "42"}
    items = [{"role": "user", "content": "Hi"}, *output, returned]
    [again] = ask(app, ("/v1/responses", ASK | {"tools": [TOOL], "input": items}))
    assert again.status_code == 200
    prompt = reasoning_generator.tokenizer.decode(registry.requests[-1].tokens)
    assert "größer" in prompt
    assert prompt.endswith("42<assistant>")


# Errors


def test_errors_have_the_shape_of_the_api(generator: Model) -> None:
    path = "/v1/responses"
    app, _ = application_with_answer(generator, "A")
    answers = ask(app, (path, ASK | {"model": "nobody"}), (path, b"{"), (path, None), (f"{path}/resp_1", None))
    assert [answer.status_code for answer in answers] == [404, 400, 405, 404]
    assert answers[0].json()["error"]["code"] == "model_not_found"
    for answer in answers:
        assert answer.json()["error"].keys() == {"message", "type", "param", "code"}


def test_an_error_in_a_stream_ends_it(generator: Model) -> None:
    app, _ = application_with_answer(generator, "A fox.", Failed(StepFailed("it broke")))
    [response] = ask(app, ("/v1/responses", ASK | {"stream": True}))
    assert response.status_code == 200
    last = sse(response)[-1]
    assert last["type"] == "response.failed"
    assert (last["response"]["status"], last["response"]["error"]) == (
        "failed",
        {"code": "server_error", "message": "it broke"},
    )
    assert last["response"]["output"][0]["content"][0]["text"]


def test_an_error_before_the_first_event_keeps_its_status(generator: Model) -> None:
    app = application(Registry([generator], lambda model, request: [Failed(Overloaded("full", retry_after=3))]))
    [response] = ask(app, ("/v1/responses", ASK | {"stream": True}))
    assert (response.status_code, response.headers["retry-after"]) == (429, "3")
    assert response.json()["error"]["type"] == "rate_limit_error"


# Truncation


def conversation(count: int, words: str = "A good film") -> list[dict[str, Any]]:
    """A conversation of `count` turns, which ends with a question."""
    turns = [
        [{"role": "user", "content": words}, {"role": "assistant", "content": f"answer {n}"}] for n in range(count)
    ]
    return [*(item for turn in turns for item in turn), {"role": "user", "content": "Hi"}]


def post(app: FastAPI, **changes: Any) -> httpx.Response:
    [response] = ask(app, ("/v1/responses", ASK | {"truncation": "auto"} | changes))
    return response


def prompt_of(registry: Registry) -> str:
    [request] = registry.requests
    assert isinstance(request, Generate)
    return registry.models()[0].tokenizer.decode(list(request.tokens), skip_special=False)


@pytest.mark.parametrize("stream", [False, True])
def test_a_conversation_that_is_too_long_loses_its_oldest_turns(generator: Model, stream: bool) -> None:
    app, registry = application_with_answer(generator, "the answer")
    talk = {"input": conversation(20), "instructions": "Be brief."}
    response = post(app, **talk, stream=stream)
    assert response.status_code == 200, response.text
    answer = sse(response)[-1]["response"] if stream else response.json()
    assert answer["truncation"] == "auto"
    prompt = prompt_of(registry)
    assert prompt.startswith("<system>Be brief.<user>A good film<assistant>answer")
    assert prompt.endswith("<assistant>answer 19<user>Hi<assistant>")
    turns = prompt.count("A good film")
    one_more = [f"A good film<assistant>answer {19 - number}<user>" for number in range(turns + 1)]
    assert [words in prompt for words in one_more] == [True] * turns + [False]
    [request] = registry.requests
    assert isinstance(request, Generate)
    spare = generator.max_tokens * 3 // 4 - len(request.tokens)  # a quarter of the context is left for the answer
    assert 0 <= spare < len(generator.tokenizer.encode(one_more[-1], special=False))
    refused = post(app, **talk, truncation="disabled")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")


def test_a_long_conversation_is_cut_on_a_thread(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are read once for their places and once for each form, which are thousands of objects each time."""
    aside = dict[str, set[bool]]()
    for function in (chat_truncation.list_cuts, chat_truncation.cut_messages):

        def noted(*given: Any, function: Callable[..., Any] = function) -> Any:
            is_main = threading.current_thread() is threading.main_thread()
            aside.setdefault(function.__name__, set()).add(not is_main)
            return function(*given)

        monkeypatch.setattr(generation_calls, function.__name__, noted)
    for turns, is_aside in ((20, False), (1500, True)):
        aside.clear()
        app, registry = application_with_answer(generator, "the answer")
        assert post(app, input=conversation(turns)).status_code == 200
        assert prompt_of(registry).endswith(f"<assistant>answer {turns - 1}<user>Hi<assistant>")
        assert aside == {"list_cuts": {is_aside}, "cut_messages": {is_aside}}


def test_room_is_made_for_the_answer_that_is_asked_for(generator: Model) -> None:
    lengths = []
    for most in (1, 20, 40):
        app, registry = application_with_answer(generator, "the answer")
        assert post(app, input=conversation(20), max_output_tokens=most).status_code == 200
        [request] = registry.requests
        assert isinstance(request, Generate)
        assert request.max_tokens == most
        assert len(request.tokens) + most <= generator.max_tokens
        lengths.append(len(request.tokens))
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths)) == 3


def test_tool_calls_are_left_out_with_their_results_and_the_question_stays(tiny_generator: Path) -> None:
    app, registry = application_with_answer(model(tiny_generator, "talker", "generate", max_tokens=400), "the answer")
    calls = [
        item
        for number in range(9)
        for item in (
            {**CALLED, "call_id": f"c{number}", "arguments": f'{{"q": "number {number}"}}'},
            {**RETURNED, "call_id": f"c{number}", "output": f"result {number}"},
        )
    ]
    assert post(app, input=[{"role": "user", "content": "Hi"}, *calls]).status_code == 200
    prompt = prompt_of(registry)
    assert prompt.startswith("<user>Hi<assistant>")
    assert prompt.endswith("result 8<assistant>")
    assert "number 0" not in prompt
    assert all((f"number {number}" in prompt) == (f"result {number}" in prompt) for number in range(9))


def test_what_fits_is_not_cut_and_what_cannot_be_cut_is_refused(generator: Model) -> None:
    app, registry = application_with_answer(generator, "the answer")
    assert post(app, input=conversation(1)).status_code == 200
    assert "answer 0" in prompt_of(registry)
    changes: list[dict[str, Any]] = [
        {"input": "A good film " * 60},
        {"input": [*conversation(3), {"role": "user", "content": "A good film " * 60}]},
        {"input": conversation(3), "max_output_tokens": 1000},
    ]
    for change in changes:
        response = post(app, **change)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert len(registry.requests) == 1


def test_few_forms_of_a_long_conversation_are_tried(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rendered: list[int] = []
    real = tokenization.render_chat

    def counted(model: Model, prompt: ChatMessages, where: str) -> str:
        rendered.append(len(prompt.messages))
        return real(model, prompt, where)

    monkeypatch.setattr(tokenization, "render_chat", counted)
    app, _ = application_with_answer(generator, "the answer")
    assert post(app, input=conversation(2000)).status_code == 200
    assert len(rendered) <= 11  # of 2,000

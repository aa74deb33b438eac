"""Tools, reasoning and schemas with OpenAI's client against a server: the answers of a random model follow them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.support.dialogue_templates import QWEN3, SMOLLM2
from tests.support.edits import edited
from tests.support.processes import Process

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": CITY}}
NOW = {"type": "function", "function": {"name": "now"}}
ASKED = {"messages": [{"role": "user", "content": "Weather?"}], "tools": [WEATHER, NOW], "max_tokens": 200}
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def server(long_generator: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    tagged = edited(long_generator, tmp_path_factory.mktemp("tagged"))
    (tagged / "chat_template.jinja").write_text(QWEN3)
    plain = edited(long_generator, tmp_path_factory.mktemp("plain"))
    (plain / "chat_template.jinja").write_text(SMOLLM2)
    process = Process(f"tagged={tagged}", f"plain={plain}")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def follows_the_schema(call: Any) -> bool:
    arguments = json.loads(call.function.arguments)
    if call.function.name == "now":
        return bool(arguments == {})
    return (
        arguments.keys() == {"city", "days"}
        and arguments["city"] in ("Paris", "Rome")
        and arguments["days"] in range(1, 10)
    )


@pytest.mark.parametrize("model", ["tagged", "plain"])
def test_a_required_call_follows_its_schema(client: openai.OpenAI, model: str) -> None:
    asked = ASKED | {"model": model, "tool_choice": "required", "parallel_tool_calls": False}
    for seed in range(4):
        whole = client.chat.completions.create(**asked, seed=seed, extra_body=QUIET)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        [call] = choice.message.tool_calls
        assert follows_the_schema(call)
        with client.chat.completions.stream(**asked, seed=seed, extra_body=QUIET) as stream:
            streamed = stream.get_final_completion().choices[0]
        assert streamed.finish_reason == "tool_calls"
        [same] = streamed.message.tool_calls
        assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)


@pytest.mark.parametrize("model", ["tagged", "plain"])
def test_the_named_tool_is_called(client: openai.OpenAI, model: str) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    whole = client.chat.completions.create(**ASKED, model=model, tool_choice=named, n=3, extra_body=QUIET)
    for choice in whole.choices:
        for call in choice.message.tool_calls:
            assert call.function.name == "weather"
            # the last call may be incomplete
            assert choice.finish_reason == "length" or follows_the_schema(call)


def test_reasoning_ends_at_its_budget_and_the_call_follows(client: openai.OpenAI) -> None:
    asked = ASKED | {"model": "tagged", "tool_choice": "required", "parallel_tool_calls": False}
    budget = {"thinking_token_budget": 5, "continue_final_message": True}
    messages = [*ASKED["messages"], {"role": "assistant", "content": "<think>\nHm"}]
    whole = client.chat.completions.create(**asked | {"messages": messages}, seed=1, extra_body=budget)
    [choice] = whole.choices
    assert choice.finish_reason == "tool_calls"
    assert follows_the_schema(choice.message.tool_calls[0])
    assert choice.message.reasoning_content
    assert 5 <= whole.usage.completion_tokens_details.reasoning_tokens <= 5 + len("</think>")


def test_a_free_answer_is_text(client: openai.OpenAI) -> None:
    for model in ("tagged", "plain"):
        whole = client.chat.completions.create(**ASKED, model=model, seed=3)
        assert whole.choices[0].message.content or whole.choices[0].message.tool_calls


def test_a_conversation_continues_with_the_answer_of_the_server(client: openai.OpenAI) -> None:
    asked = ASKED | {"tool_choice": "required", "parallel_tool_calls": False, "extra_body": QUIET}
    for model in ("tagged", "plain"):
        said = client.chat.completions.create(**asked, model=model).choices[0].message
        result = {"role": "tool", "tool_call_id": said.tool_calls[0].id, "content": "sunny"}
        for message in (said, said.model_dump(), said.model_dump(exclude_none=True)):
            messages = [*ASKED["messages"], message, result]
            answer = client.chat.completions.create(
                **asked | {"messages": messages, "tool_choice": "none"}, model=model
            )
            assert not answer.choices[0].message.tool_calls


def test_the_error_for_an_unsupported_schema_names_its_tool(client: openai.OpenAI) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}
    tools = [WEATHER, {"type": "function", "function": {"name": "other", "parameters": wrong}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**ASKED | {"tools": tools}, model="tagged")
    assert caught.value.body["message"].startswith("tools[1].function.parameters")

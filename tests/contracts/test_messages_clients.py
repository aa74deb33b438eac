"""The official clients of Anthropic's messages and of OpenAI's responses against a real server in its own process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.support.processes import Process

TALK: Any = {"model": "chat", "max_tokens": 40, "messages": [{"role": "user", "content": "What is Paris?"}]}
ASK: Any = {"model": "chat", "max_output_tokens": 40, "input": "What is Paris?"}
SCHEMA: Any = {"type": "object", "properties": {"q": {"enum": ["fox", "dog"]}}, "required": ["q"]}
STRICT: Any = SCHEMA | {"additionalProperties": False}
LOOK_UP: Any = {"name": "look_up", "description": "Finds a word.", "input_schema": STRICT}
GREEDY = {"temperature": 0}
LONG: Any = {"max_tokens": 400}  # an untrained model often generates white space


class Animal(BaseModel):
    kind: Literal["fox", "dog"]
    good: bool


@pytest.fixture(scope="module")
def server(long_generator: Path, tiny_embedder: Path) -> Iterator[Process]:
    process = Process(f"chat={long_generator}", f"vectors={tiny_embedder}", "--api-key", "s3cret")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture(scope="module")
def claude(server: Process) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="s3cret", max_retries=0)


@pytest.fixture(scope="module")
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="s3cret", max_retries=0)


# Anthropic's


def test_a_streamed_message_equals_a_whole_one(claude: anthropic.Anthropic) -> None:
    whole = claude.messages.create(**TALK, system="Be brief.", extra_body=GREEDY)
    with claude.messages.stream(**TALK, system="Be brief.", extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert whole.content[0].type == streamed.content[0].type == "text"
    assert text == streamed.content[0].text == whole.content[0].text
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert whole.stop_reason in ("max_tokens", "end_turn")
    before, after = (each.usage.input_tokens + (each.usage.cache_read_input_tokens or 0) for each in (whole, streamed))
    counted = claude.messages.count_tokens(model="chat", system="Be brief.", messages=TALK["messages"])
    assert before == after == counted.input_tokens
    assert whole._request_id
    assert stream.request_id
    assert stream.request_id != whole._request_id


def test_a_message_of_the_assistant_is_continued(claude: anthropic.Anthropic) -> None:
    first = claude.messages.create(**TALK | {"max_tokens": 8}, extra_body=GREEDY).content[0]
    assert first.type == "text"
    begun = [*TALK["messages"], {"role": "assistant", "content": first.text}]
    rest = claude.messages.create(**TALK | {"messages": begun, "max_tokens": 8}, extra_body=GREEDY).content[0]
    whole = claude.messages.create(**TALK | {"max_tokens": 16}, extra_body=GREEDY).content[0]
    assert rest.type == whole.type == "text"
    assert whole.text.startswith(first.text)


def test_a_stop_sequence_is_named(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(**TALK, extra_body=GREEDY).content[0]
    assert answer.type == "text"
    stopped = claude.messages.create(**TALK, stop_sequences=[answer.text[5:8]], extra_body=GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", answer.text[5:8])


def test_tools_of_messages(claude: anthropic.Anthropic) -> None:
    choice = {"type": "tool", "name": "look_up", "disable_parallel_tool_use": True}
    asked: Any = TALK | LONG | {"tools": [LOOK_UP], "tool_choice": choice}
    called = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (called, streamed):
        assert message.stop_reason == "tool_use"
        use = next(block for block in message.content if block.type == "tool_use")
        assert use.name == "look_up"
        assert use.input["q"] in ("fox", "dog")
    use = next(block for block in called.content if block.type == "tool_use")
    result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "an animal"}
    turns: Any = [*TALK["messages"], called.to_param(), {"role": "user", "content": [result]}]
    after = claude.messages.create(model="chat", max_tokens=8, messages=turns, tools=[LOOK_UP])
    assert after.usage.input_tokens + (after.usage.cache_read_input_tokens or 0) > 40


def test_messages_with_a_schema(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.parse(**TALK | LONG, output_format=Animal)
    assert isinstance(answer.parsed_output, Animal)


def test_errors_have_the_client_s_exception_classes(claude: anthropic.Anthropic, server: Process) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there are: chat, vectors"):
        claude.messages.create(**TALK | {"model": "nobody"})
    with pytest.raises(anthropic.BadRequestError, match="vectors can") as caught:
        claude.messages.create(**TALK | {"model": "vectors"})
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id
    image: Any = {"type": "image", "source": {"type": "url", "url": "x"}}
    with pytest.raises(anthropic.BadRequestError, match=r'messages\[0\].content\[0\].type: "image" is not supported'):
        claude.messages.create(**TALK | {"messages": [{"role": "user", "content": [image]}]})
    with pytest.raises(anthropic.BadRequestError, match="maximum context length is 16384"):
        claude.messages.create(**TALK | {"messages": [{"role": "user", "content": "fox " * 10_000}]})
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**TALK)
    older = anthropic.Anthropic(base_url=server.url, default_headers={"x-api-key": "s3cret"})
    assert older.messages.create(**TALK | {"max_tokens": 1}).stop_reason


# OpenAI's


def test_a_streamed_response_equals_a_whole_one(client: openai.OpenAI) -> None:
    asked: Any = ASK | {"instructions": "Be brief.", "temperature": 0}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert (events[0].type, events[1].type) == ("response.created", "response.in_progress")
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last = events[-1]
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    assert (last.response.status, whole.status) == ("incomplete", "incomplete")
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens


def test_log_probabilities_of_a_response(client: openai.OpenAI) -> None:
    answer = client.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2, temperature=0)
    [item] = answer.output
    assert item.type == "message"
    part = item.content[0]
    assert part.type == "output_text"
    assert part.logprobs
    assert all(each.logprob == max(one.logprob for one in each.top_logprobs) for each in part.logprobs)


def test_tools_of_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "look_up", "parameters": STRICT, "strict": True}
    asked: Any = ASK | {
        "max_output_tokens": 400,
        "parallel_tool_calls": False,
        "tools": [tool],
        "tool_choice": "required",
    }
    answer = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for response in (answer, streamed):
        call = response.output[-1]
        assert call.type == "function_call"
        assert call.arguments in ('{"q": "fox"}', '{"q": "dog"}')
    call = answer.output[-1]
    assert call.type == "function_call"
    returned = {"type": "function_call_output", "call_id": call.call_id, "output": "an animal"}
    items: Any = [{"role": "user", "content": ASK["input"]}, *answer.output, returned]
    assert client.responses.create(model="chat", input=items, max_output_tokens=4, tools=[tool]).output


def test_responses_with_a_schema(client: openai.OpenAI) -> None:
    asked: Any = ASK | {"max_output_tokens": 400}
    answer = client.responses.parse(**asked, text_format=Animal)
    assert isinstance(answer.output_parsed, Animal)
    with client.responses.stream(**asked, text_format=Animal) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Animal)


def test_errors_of_responses(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there are: chat, vectors"):
        client.responses.create(model="nobody", input="x")
    with pytest.raises(openai.BadRequestError, match="store: true is not supported") as caught:
        client.responses.create(**ASK, store=True)
    assert caught.value.param == "store"
    with pytest.raises(openai.BadRequestError, match=r"tools\[0\].type: \"web_search\" is not supported"):
        client.responses.create(**ASK, tools=[{"type": "web_search"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 16384"):
        client.responses.create(model="chat", input="fox " * 10_000)

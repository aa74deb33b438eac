"""Structured answers over HTTP: a real server, a model with random weights, the official client."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.processes import Process
from tests.support.schemas import CITY, NAMED_CITY

ENDLESS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23)]}


# Over HTTP


@pytest.fixture(scope="module")
def server(long_generator: Path) -> Iterator[Process]:
    process = Process(f"chat={long_generator}")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def is_city(text: str) -> bool:
    said = json.loads(text)
    return (
        list(said) == ["city", "size", "founded"]
        and len(said["city"]) <= 6
        and said["size"] in ("small", "large")
        and 100 <= said["founded"] <= 2000
    )


def test_answers_of_random_weights_match_the_schema(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="chat",
        messages=[{"role": "user", "content": "Name a city."}],
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}},
        n=8,
        temperature=1,
        seed=3,
    )
    assert len({choice.message.content for choice in answer.choices}) > 1
    for choice in answer.choices:
        assert is_city(choice.message.content or ""), choice.message.content
        assert choice.finish_reason == "stop"


def test_a_stream_and_an_answer_with_logprobs_are_equal(client: openai.OpenAI) -> None:
    """Where log-probabilities are asked for no token is skipped."""
    asked: dict[str, Any] = {
        "model": "chat",
        "messages": [{"role": "user", "content": "Name a city."}],
        "response_format": {"type": "json_schema", "json_schema": NAMED_CITY},
        "temperature": 0,
    }
    whole = client.chat.completions.create(**asked, logprobs=True)
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
    )
    assert is_city(streamed)
    assert whole.choices[0].message.content == streamed
    assert whole.choices[0].logprobs is not None
    result = whole.choices[0].logprobs.content or []
    assert bytes(byte for token in result for byte in token.bytes or []).decode() == streamed


@pytest.mark.parametrize(
    ("extra", "right"),
    [
        ({"guided_regex": "[a-f]{3}-[0-9]{2}"}, re.compile("[a-f]{3}-[0-9]{2}").fullmatch),
        ({"structured_outputs": {"choice": ["tea", "coffee"]}}, ("tea", "coffee").__contains__),
        ({"guided_grammar": 'start: "<" N ">"\nN: /[0-9]{1,3}/'}, re.compile("<[0-9]{1,3}>").fullmatch),
    ],
)
def test_completions_take_other_forms(client: openai.OpenAI, extra: dict[str, Any], right: Any) -> None:
    answer = client.completions.create(model="chat", prompt=["a", "b"], max_tokens=60, extra_body=extra, seed=1)
    for choice in answer.choices:
        assert right(choice.text), choice.text
        assert choice.finish_reason == "stop"


def test_a_truncated_answer_has_finish_reason_length(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="chat", prompt="a", max_tokens=5, extra_body={"guided_regex": "[ab]{500}"})
    assert answer.choices[0].finish_reason == "length"
    assert re.fullmatch("[ab]{1,499}", answer.choices[0].text)


def test_forced_tokens_take_fewer_steps(server: Process, client: openai.OpenAI) -> None:
    def steps() -> float:
        return server.page.total("engine_steps_total")

    spelled, before = {"const": "the quick brown fox jumps over the lazy dog"}, steps()
    asked: dict[str, Any] = {"model": "chat", "prompt": "a", "max_tokens": 100, "extra_body": {"guided_json": spelled}}
    with_forced = client.completions.create(**asked)
    between = steps()
    stepped = client.completions.create(**asked, logprobs=0)
    assert json.loads(with_forced.choices[0].text) == json.loads(stepped.choices[0].text) == spelled["const"]
    assert between - before < (steps() - between) / 3


def test_invalid_schemas_are_rejected_and_do_not_disturb_others(server: Process, client: openai.OpenAI) -> None:
    """One stream runs while others send invalid or slow schemas."""
    asked = {"model": "chat", "prompt": "a", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    alone = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()["choices"][0]["text"]
    refused: list[str] = []

    def refuse(schema: Any) -> None:
        with pytest.raises(openai.BadRequestError) as error:
            client.completions.create(model="chat", prompt="a", extra_body={"guided_json": schema})
        refused.append(error.value.message)

    schemas = [ENDLESS, {"uniqueItems": True}, ENDLESS, {"items": {"pattern": "a(b"}}, {"$ref": "#"}]
    threads = [threading.Thread(target=refuse, args=(schema,)) for schema in schemas]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=asked | {"stream": True}, timeout=60) as answer:
        for thread in threads:
            thread.start()
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: {")]
    for thread in threads:
        thread.join()
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines) == alone
    for place in (": is too complex: it takes", ": keywords that", ".items: character 2: unclosed group", ": there is"):
        assert any(f"guided_json{place}" in sentence for sentence in refused), refused
    assert len(refused) == len(schemas)

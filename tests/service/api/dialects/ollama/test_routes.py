"""The dialect of Ollama with scripted models: reading, writing, streams, errors."""

from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from polyhead.models.chat import ChatTemplate
from polyhead.service.api.dialects.ollama.read import read_chat, read_generate
from polyhead.service.api.dialects.ollama.wire import OllamaChatRequest, OllamaGenerateRequest
from polyhead.service.core.errors import BadRequest, StepFailed
from polyhead.service.core.grammar import Grammar
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Failed, Generate, Sampling
from polyhead.service.text.generation_request import ChatMessages, FillInMiddle, GenerationRequest
from tests.support.scripted import TEMPLATE, Registry, application, ask, echo, model, token_events

HELLO = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {"q": {}}}}}
THINKING = "{% if false %}<think></think>{% endif %}" + TEMPLATE


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", max_tokens=2000, sampling={"temperature": 0.25})


@pytest.fixture(scope="module")
def embedder(tiny_embedder: Path) -> Model:
    return model(tiny_embedder, "vectors", "embed")


@pytest.fixture
def app(generator: Model, embedder: Model) -> FastAPI:
    return application(Registry([generator, embedder], echo))


def chat(**fields: Any) -> GenerationRequest:
    return read_chat(OllamaChatRequest.read({"model": "talker", "messages": HELLO, **fields}))


def lines(text: str) -> list[Any]:
    return [orjson.loads(line) for line in text.splitlines()]


def post(app: FastAPI, path: str, **body: Any) -> Any:
    (answer,) = ask(app, (path, body))
    assert answer.status_code == 200, answer.text
    return answer.json()


# Reading


def test_options_are_read_and_the_rest_is_ollamas() -> None:
    asked = chat(options={"top_k": 3, "repeat_penalty": 1.5, "seed": 7, "num_predict": 9, "stop": ["x"]})
    assert asked.sampling == Sampling(temperature=0.8, top_k=3, top_p=0.9, seed=7, repetition_penalty=1.5)
    assert asked.open_options == {"temperature", "top_p", "min_p"}
    assert (asked.max_tokens, asked.stops, asked.has_seed) == (9, ("x",), True)
    assert chat().max_tokens == chat(options={"num_predict": -2}).max_tokens == 0
    assert chat(options={"repeat_penalty": 1.5, "repeat_last_n": 0}).sampling.repetition_penalty == 1


def test_a_format_and_thoughts_are_read() -> None:
    assert chat(format="json").grammar == Grammar("object", "", "format")
    assert chat(format={"type": "object"}).grammar == Grammar("schema", '{"type":"object"}', "format")
    assert [chat(**fields).reasoning.mode for fields in ({}, {"think": True}, {"think": False})] == ["", "on", "off"]
    assert (chat(think="low").reasoning.mode, chat(think="low").reasoning.budget) == ("on", 1024)


def test_messages_are_those_of_templates() -> None:
    call = {"function": {"name": "find", "arguments": {"q": 1}}}
    asked = chat(
        messages=[
            *HELLO,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_name": "find", "content": "1"},
        ],
        tools=[TOOL],
    )
    (prompt,) = asked.prompts
    assert isinstance(prompt, ChatMessages)
    assert prompt.messages[1]["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": 1}}
    assert prompt.messages[2] == {"role": "tool", "content": "1", "name": "find"}
    assert [tool.name for tool in asked.tools.offered] == ["find"]
    (begun,) = chat(messages=[*HELLO, {"role": "assistant", "content": "Hel"}]).prompts
    assert isinstance(begun, ChatMessages)
    assert begun.continues_last


def test_a_prompt_is_a_message_unless_it_is_raw(generator: Model) -> None:
    def prompt(**fields: Any) -> object:
        wire = OllamaGenerateRequest.read({"model": "talker", "prompt": "a", **fields})
        return read_generate(wire, generator).prompts[0]

    asked = prompt(system="b")
    assert isinstance(asked, ChatMessages)
    assert [message["role"] for message in asked.messages] == ["system", "user"]
    assert prompt(raw=True) == "a"
    assert prompt(suffix="b") == FillInMiddle("a", "b")
    with pytest.raises(BadRequest, match="system: not together with raw"):
        prompt(raw=True, system="b")


# Writing


def test_a_stream_equals_the_whole_answer(app: FastAPI) -> None:
    body = {"model": "talker:latest", "messages": HELLO, "options": {"num_predict": 6}, "logprobs": True}
    streamed, whole = ask(app, ("/api/chat", body), ("/api/chat", body | {"stream": False}))
    assert streamed.headers["content-type"] == "application/x-ndjson"
    parts, one = lines(streamed.text), whole.json()
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["message"]["content"] for part in parts) == one["message"]["content"] != ""
    assert [token for part in parts for token in part.get("logprobs", [])] == one["logprobs"]
    for name in ("done_reason", "prompt_eval_count", "eval_count", "model"):
        assert parts[-1][name] == one[name]
    assert (one["done_reason"], one["eval_count"], one["model"]) == ("length", 6, "talker:latest")
    assert one["total_duration"] >= one["prompt_eval_duration"] + one["eval_duration"] > 0


def test_generate_writes_a_response(app: FastAPI) -> None:
    one = post(app, "/api/generate", model="talker", prompt="Hi", stream=False, options={"num_predict": 4})
    assert one["response"]
    assert "message" not in one
    (streamed,) = ask(app, ("/api/generate", {"model": "talker", "prompt": "Hi", "options": {"num_predict": 4}}))
    assert "".join(part["response"] for part in lines(streamed.text)) == one["response"]


def test_thoughts_and_calls_have_their_fields(tiny_generator: Path) -> None:
    thinker = model(tiny_generator, "talker", "generate", max_tokens=2000, chat=ChatTemplate(THINKING))

    def script(asked: Model, request: Any) -> Any:
        assert isinstance(request, Generate)
        text = '<think>so</think>[{"name": "find", "arguments": {"q": "größer"}}]'
        yield from token_events(text, asked.tokenizer)
        yield Done("stop", len(request.tokens), 9)

    served = application(Registry([thinker], script))
    body = {"model": "talker", "messages": HELLO, "tools": [TOOL]}
    streamed, whole = ask(served, ("/api/chat", body), ("/api/chat", body | {"stream": False}))
    said = whole.json()["message"]
    assert said["thinking"] == "so"
    assert said["tool_calls"][0]["function"] == {"name": "find", "arguments": {"q": "größer"}}
    parts = [part["message"] for part in lines(streamed.text)]
    assert "".join(part.get("thinking", "") for part in parts) == "so"
    (calls,) = [part["tool_calls"] for part in parts if "tool_calls" in part]
    assert calls[0]["function"] == said["tool_calls"][0]["function"]


def test_vectors(app: FastAPI) -> None:
    found = post(app, "/api/embed", model="vectors", input=["a", "The fox"])
    assert [len(row) for row in found["embeddings"]] == [4, 4]
    assert found["prompt_eval_count"] > 2
    one = post(app, "/api/embeddings", model="vectors", prompt="a")
    assert len(one["embedding"]) == 4


def test_a_long_text_is_cut_unless_that_is_refused(app: FastAPI) -> None:
    body = {"model": "vectors", "input": "fox " * 500}
    cut, refused = ask(app, ("/api/embed", body), ("/api/embed", body | {"truncate": False}))
    assert cut.status_code == 200
    assert refused.status_code == 400
    assert refused.json() == {"error": refused.json()["error"]}
    assert "tokens" in refused.json()["error"]


# Models


def test_models_are_listed_and_described(app: FastAPI) -> None:
    tags, running, shown, version = ask(
        app, ("/api/tags", None), ("/api/ps", None), ("/api/show", {"model": "talker"}), ("/api/version", None)
    )
    assert [each["name"] for each in tags.json()["models"]] == ["talker", "vectors"]
    assert running.json()["models"][0]["context_length"] == 2000
    assert shown.json()["capabilities"] == ["completion", "tools"]
    assert shown.json()["parameters"] == "temperature 0.25"
    assert version.json()["version"].count(".") == 2


def test_without_a_prompt_a_model_is_loaded(app: FastAPI) -> None:
    assert post(app, "/api/chat", model="talker")["done_reason"] == "load"
    assert post(app, "/api/generate", model="talker", keep_alive=0)["done"] is True


def test_errors_are_a_sentence(app: FastAPI, generator: Model) -> None:
    missing, wrong = ask(
        app,
        ("/api/chat", {"model": "missing", "messages": HELLO}),
        ("/api/chat", {"model": "talker", "mesages": HELLO}),
    )
    assert (missing.status_code, missing.json().keys()) == (404, {"error"})
    assert (wrong.status_code, wrong.json()["error"]) == (400, "mesages: is not a known field; did you mean messages?")

    def failing(asked: Model, request: Any) -> Any:
        yield from token_events("Hi", asked.tokenizer)
        yield Failed(StepFailed("the step failed"))

    (streamed,) = ask(
        application(Registry([generator], failing)), ("/api/chat", {"model": "talker", "messages": HELLO})
    )
    assert lines(streamed.text)[-1] == {"error": "the step failed"}

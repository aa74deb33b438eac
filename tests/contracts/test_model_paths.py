"""Clients that are given the address of one model, or the server's address and no name, against a real server."""

from collections.abc import Iterator
from pathlib import Path

import anthropic
import huggingface_hub.constants
import openai
import pytest
from huggingface_hub import InferenceClient

from tests.support.processes import Process

TALK = [{"role": "user", "content": "Hello"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def server(tiny_generator: Path, tiny_embedder: Path) -> Iterator[Process]:
    process = Process(f"chat={tiny_generator}", f"vectors={tiny_embedder}")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def test_huggingface_hub_below_a_model_and_without_a_name(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    for address in (f"{server.url}/models/chat", f"{server.url}/models/chat/v1", server.url):
        client = InferenceClient(model=address)
        whole = client.chat_completion(TALK, max_tokens=9, temperature=0)
        assert whole.system_fingerprint.startswith("fp_")
        events = client.chat_completion(TALK, max_tokens=9, temperature=0, stream=True)
        assert "".join(event.choices[0].delta.content or "" for event in events) == whole.choices[0].message.content


def test_a_schema_of_huggingface_hub(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sends a json_schema as a json_object with a value."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
    said = InferenceClient(model=f"{server.url}/models/chat").chat_completion(
        TALK, max_tokens=60, response_format=asked
    )
    assert said.choices[0].message.content.replace(" ", "") in ('{"a":true}', '{"a":false}')


def test_official_clients_below_a_model(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/models/chat/v1", api_key="none", max_retries=0)
    assert client.chat.completions.create(model="chat", messages=TALK, max_tokens=3).model == "chat"
    assert client.completions.create(model="tgi", prompt="The", max_tokens=3).model == "chat"
    assert client.responses.create(model="chat", input="The", max_output_tokens=3).model == "chat"
    assert [model.id for model in client.models.list()] == ["chat"]
    with pytest.raises(openai.BadRequestError, match="model: the address names 'chat'; give that name or none"):
        client.chat.completions.create(model="vectors", messages=TALK, max_tokens=3)
    with pytest.raises(openai.BadRequestError, match="messages: is required") as caught:
        client.post("/chat/completions", body={}, cast_to=object)
    assert caught.value.type == "invalid_request_error"
    vectors = openai.OpenAI(base_url=f"{server.url}/models/vectors/v1", api_key="none", max_retries=0)
    assert len(vectors.embeddings.create(model="default", input="a").data[0].embedding) == 32
    claude = anthropic.Anthropic(base_url=f"{server.url}/models/chat", api_key="none", max_retries=0)
    assert claude.messages.create(model="chat", max_tokens=3, messages=TALK).model == "chat"
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="chat", max_tokens=3, messages=TALK, extra_body={"temperature": 9})


def test_models_are_listed_for_the_clients_of_anthropic(server: Process) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    [chat, vectors] = client.models.list()
    assert (chat.id, chat.type, chat.display_name, vectors.id) == ("chat", "model", "chat", "vectors")
    assert client.models.retrieve("chat").created_at == chat.created_at
    assert chat.created_at.year >= 2024


def test_a_context_that_is_too_long_is_refused_in_words_that_clients_know(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="This model's maximum context length is 256 tokens") as caught:
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "fox " * 400}])
    assert caught.value.code == "context_length_exceeded"

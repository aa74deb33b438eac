"""Ollama's client, and OpenAI's for moderations, against a real server in its own process."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest
from pydantic import BaseModel

from tests.support.processes import Process

HELLO: Any = [{"role": "user", "content": "What is Paris?"}]
OPTIONS = {"temperature": 0, "num_predict": 20}


class Animal(BaseModel):
    good: bool


@pytest.fixture(scope="module")
def server(tiny_generator: Path, tiny_embedder: Path, tiny_classifier: Path) -> Iterator[Process]:
    process = Process(f"chat={tiny_generator}", f"vectors={tiny_embedder}", f"judge={tiny_classifier}")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture(scope="module")
def client(server: Process) -> ollama.Client:
    return ollama.Client(host=server.url)


def test_a_conversation_streamed_and_whole(client: ollama.Client) -> None:
    whole = client.chat("chat", HELLO, options=OPTIONS)
    parts = list(client.chat("chat:latest", HELLO, options=OPTIONS, stream=True))
    assert "".join(part.message.content or "" for part in parts) == whole.message.content
    assert (parts[-1].done_reason, parts[-1].eval_count) == (whole.done_reason, whole.eval_count)


def test_a_prompt_with_logprobs_and_a_format(client: ollama.Client) -> None:
    found = client.generate("chat", "The fox", raw=True, options=OPTIONS, logprobs=True, top_logprobs=2)
    assert found.logprobs is not None
    assert found.logprobs[0].top_logprobs is not None
    assert found.logprobs[0].logprob == max(one.logprob for one in found.logprobs[0].top_logprobs)
    made = client.generate("chat", "The fox", format=Animal.model_json_schema(), options=OPTIONS | {"num_predict": 200})
    assert made.done_reason in ("stop", "length")
    if made.done_reason == "stop":
        Animal.model_validate_json(made.response or "")


def test_vectors_have_the_length_one(client: ollama.Client) -> None:
    rows = np.array(client.embed("vectors", ["a fox", "a dog"]).embeddings)
    assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-5)
    assert len(client.embeddings("vectors", "a fox").embedding) == rows.shape[1]


def test_models_are_listed(client: ollama.Client) -> None:
    assert [each.model for each in client.list().models] == ["chat", "vectors"]
    assert client.show("vectors").capabilities == ["embedding"]
    assert client.ps().models[0].context_length


def test_errors_are_those_of_the_client(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as missing:
        client.chat("missing", HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="mirostat: 1 is not supported"):
        client.chat("chat", HELLO, options={"mirostat": 1})


def test_moderations(server: Process) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.moderations.create(input=["good", "bad"], model="judge")
    assert len(found.results) == 2
    scores = found.results[0].category_scores.model_dump()
    assert sum(score for score in scores.values() if score) == pytest.approx(1, abs=1e-5)

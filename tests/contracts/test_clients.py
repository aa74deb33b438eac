"""Client libraries against a real server in its own process: openai, huggingface_hub, an SSE parser."""

import json
import struct
from base64 import b64decode
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import httpx_sse
import huggingface_hub.constants
import openai
import pytest
import torch
import transformers
from huggingface_hub import InferenceClient

from tests.support.processes import Process

PROMPTS = ["The quick brown", "What is the capital of", "A good film,", "größer und", "日本", "0 1 2 3"] * 3


@pytest.fixture(scope="module")
def server(tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path) -> Iterator[Process]:
    process = Process(
        f"chat={tiny_generator}", f"judge={tiny_classifier}", f"vectors={tiny_embedder}", f"ranker={tiny_ranker}"
    )
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def client(server: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def gauge(server: Process, name: str, model: str, label: str = "") -> float:
    """The sum of a metric's series for a model."""
    lines = [line for line in server.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if f'model="{model}"' in line and label in line)


def reference(folder: Path, prompts: list[str], count: int) -> list[str]:
    """Greedy continuations by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=count, do_sample=False)
        texts.append(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
    return texts


def test_greedy_text_equals_the_reference_alone_and_together(client: openai.OpenAI, tiny_generator: Path) -> None:
    def complete(prompt: str) -> str:
        answer = client.completions.create(model="chat", prompt=prompt, max_tokens=24, temperature=0)
        return answer.choices[0].text

    expected = reference(tiny_generator, PROMPTS, 24)
    assert [complete(prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(complete, PROMPTS)) == expected


def test_a_streamed_chat_has_the_text_of_a_whole_one(client: openai.OpenAI) -> None:
    asked = {
        "model": "chat",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is Paris?"}],
        "max_tokens": 20,
        "temperature": 0.8,
        "seed": 7,
    }
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_deadline_and_priority_are_extra_fields_of_the_client(client: openai.OpenAI) -> None:
    asked = {"model": "chat", "prompt": "The fox", "max_tokens": 3, "extra_body": {"timeout": 30, "priority": 5}}
    assert client.completions.create(**asked).usage
    assert client.completions.create(**asked, extra_headers={"X-Request-Timeout": "30"}, timeout=60).usage
    with pytest.raises(openai.BadRequestError, match="priority: must be between -100 and 100"):
        client.completions.create(model="chat", prompt="x", extra_body={"priority": 1000})
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(model="chat", prompt="The fox", extra_body={"timeout": 0.001, "ignore_eos": True})
    assert (caught.value.status_code, caught.value.code) == (504, "expired")


def test_completions_take_lists_and_token_ids(client: openai.OpenAI) -> None:
    one = client.completions.create(model="chat", prompt="The fox", max_tokens=5, temperature=0)
    two = client.completions.create(model="chat", prompt=["The fox", "The fox"], max_tokens=5, temperature=0)
    assert [choice.text for choice in two.choices] == [one.choices[0].text] * 2
    assert [choice.index for choice in two.choices] == [0, 1]
    scored = client.completions.create(model="chat", prompt=[5, 6, 7], max_tokens=3, temperature=0, logprobs=2)
    assert scored.choices[0].logprobs is not None
    assert len(scored.choices[0].logprobs.token_logprobs or []) == scored.usage.completion_tokens  # type: ignore[union-attr]


def test_the_event_stream_parses(server: Process) -> None:
    asked = {"model": "chat", "prompt": "The fox", "max_tokens": 6, "stream": True, "ignore_eos": True}
    with (
        httpx.Client(timeout=60) as http,
        httpx_sse.connect_sse(http, "POST", f"{server.url}/v1/completions", json=asked) as source,
    ):
        assert source.response.headers["content-type"].startswith("text/event-stream")
        events = [event.data for event in source.iter_sse()]
    assert events[-1] == "[DONE]"
    parsed = [json.loads(event) for event in events[:-1]]
    assert parsed[-1]["choices"][0]["finish_reason"] == "length"
    assert all(one["id"] == parsed[0]["id"] for one in parsed)


def test_embeddings(client: openai.OpenAI, server: Process) -> None:
    texts = ["A good film.", "A bad film, dull and far too long."]
    answer = client.embeddings.create(model="vectors", input=texts)
    vectors = [item.embedding for item in answer.data]  # the client requests base64 and decodes it
    plain = client.embeddings.create(model="vectors", input=texts, encoding_format="float")
    assert torch.allclose(torch.tensor(vectors), torch.tensor([item.embedding for item in plain.data]), atol=1e-6)
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-5 for vector in vectors)
    short = client.embeddings.create(model="vectors", input=texts[0], dimensions=8)
    expected = torch.nn.functional.normalize(torch.tensor(vectors[0][:8]), dim=0)
    assert torch.allclose(torch.tensor(short.data[0].embedding), expected, atol=1e-5)
    body = {"model": "vectors", "input": texts[0], "encoding_format": "base64"}
    coded = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60).json()["data"][0]["embedding"]
    raw = b64decode(coded)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(vectors[0], abs=1e-6)


def test_models_and_errors(client: openai.OpenAI, server: Process) -> None:
    assert {model.id for model in client.models.list()} == {"chat", "judge", "vectors", "ranker"}
    assert client.models.retrieve("judge").id == "judge"
    with pytest.raises(openai.NotFoundError, match="there are: chat, judge, vectors, ranker"):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match="functions"):
        client.chat.completions.create(model="chat", messages=[{"role": "user", "content": "x"}], functions=[{}])  # type: ignore[typeddict-item]
    with pytest.raises(openai.BadRequestError, match="256") as caught:
        client.completions.create(model="chat", prompt="fox " * 400, max_tokens=1)
    assert gauge(server, "polyhead_requests_total", "chat", 'outcome="rejected"') == 1
    assert caught.value.body["type"] == "invalid_request_error"  # type: ignore[index,call-overload]


def test_class_probabilities_equal_the_reference(server: Process, tiny_classifier: Path) -> None:
    texts = ["A good film, well acted.", "bad", "Paris, of course. " * 20]
    answer = httpx.post(f"{server.url}/models/judge/predict", json={"inputs": [[t] for t in texts]}, timeout=60).json()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_classifier)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tiny_classifier).eval()
    for text, scores in zip(texts, answer, strict=True):
        with torch.no_grad():
            expected = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0].tolist()
        got = {score["label"]: score["score"] for score in scores}
        assert [got[model.config.id2label[i]] for i in range(3)] == pytest.approx(expected, abs=1e-4)


def test_huggingface_hub(server: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", False
    )  # without it the client rejects the address of this machine
    chat = InferenceClient(base_url=f"{server.url}/v1", api_key="none")
    said = chat.chat_completion([{"role": "user", "content": "Hello"}], model="chat", max_tokens=5)
    assert said.usage.completion_tokens <= 5
    tasks = InferenceClient()
    vector = tasks.feature_extraction("A good film.", model=f"{server.url}/models/vectors/embed")
    assert vector.shape[0] == 1


def test_rerank(server: Process) -> None:
    body = {"query": "capital of France", "texts": ["Paris", "a dog", "Berlin"], "return_text": True}
    ranked = httpx.post(f"{server.url}/models/ranker/rerank", json=body, timeout=60).json()
    assert [one["score"] for one in ranked] == sorted((one["score"] for one in ranked), reverse=True)
    assert {one["text"] for one in ranked} == set(body["texts"])


def test_a_closed_connection_frees_what_it_held(server: Process) -> None:
    """Running and queued, streamed and whole: soon no request runs, none waits, and no block is in use."""
    url = f"{server.url}/v1/completions"
    body = {"model": "chat", "prompt": ["The fox"] * 64, "max_tokens": 200, "ignore_eos": True}
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=60) as response:
        assert next(response.iter_lines()).startswith("data: ")
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(url, json=body, timeout=httpx.Timeout(60, read=0.1))
    server.until(lambda: gauge(server, "polyhead_requests_total", "chat", 'outcome="aborted"') == 128)
    for name in ("polyhead_requests_running", "polyhead_requests_waiting", "polyhead_kv_blocks_used"):
        server.until(lambda name=name: gauge(server, name, "chat") == 0)

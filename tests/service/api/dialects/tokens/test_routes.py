"""Tokenize and detokenize in vLLM's format, and the prompt that a conversation becomes."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from polyhead.models.chat import ChatTemplate
from polyhead.models.tokenizer.token_text import byte_alphabet
from polyhead.service.api.shared.streaming import dumps_sliced
from polyhead.service.core.model import Model
from polyhead.service.core.request import Generate
from polyhead.service.resources.request_memory import (
    BYTES_PER_WRITTEN_BYTE,
    MIN_REQUEST_BYTES,
    UNBOUNDED_HEADROOM,
    Headroom,
    MemoryClaim,
    json_size,
    max_token_size,
)
from polyhead.service.text import tokenization
from polyhead.service.text.tokenization import Decoding, decode_texts
from tests.support.scripted import TEMPLATE, Registry, application, ask, echo, model

FIXED_BYTES = 1 << 16  # of one part and of counters, however long the text is
TALK = [{"role": "user", "content": "größer 日本"}]
WRITTEN = "<user>größer 日本<assistant>"
OPENED = TEMPLATE.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")


@pytest.fixture(scope="module")
def models(tiny_generator: Path, tiny_embedder: Path) -> list[Model]:
    return [
        model(tiny_generator, "talker", "generate", chat=ChatTemplate(OPENED)),
        model(tiny_embedder, "vectors", "embed"),
    ]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def post_json(app: FastAPI, path: str, **body: Any) -> Any:
    (answer,) = ask(app, (path, body))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_prompt_as_the_tokens_that_would_be_continued(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    answer = post_json(app, "/tokenize", model="talker", prompt="größer 日本", return_token_strs=True)
    post_json(app, "/v1/completions", model="talker", prompt="größer 日本")
    [request] = registry.requests
    assert isinstance(request, Generate)
    assert answer["tokens"] == list(request.tokens)
    assert (answer["count"], answer["max_model_len"]) == (len(request.tokens), 64)
    assert answer["token_strs"] == [models[0].tokenizer.piece(id) for id in request.tokens]
    special, plain = (
        post_json(app, "/tokenize", model="vectors", prompt="a film", add_special_tokens=added)
        for added in (True, False)
    )
    assert special["tokens"][1:-1] == plain["tokens"]
    assert plain["token_strs"] is None
    assert post_json(app, "/models/vectors/tokenize", prompt="a film") == special
    assert post_json(app, "/tokenize", model="talker", prompt="fox " * 99)["count"] > 64, (
        "longer than a prompt that can be continued"
    )


def test_a_conversation_as_the_prompt_that_it_becomes(app: FastAPI, registry: Registry) -> None:
    answer = post_json(app, "/v1/chat/template", model="talker", messages=TALK)
    post_json(app, "/v1/chat/completions", model="talker", messages=TALK)
    [request] = registry.requests
    assert isinstance(request, Generate)
    assert answer["prompt"] == WRITTEN
    assert answer["tokens"] == list(request.tokens)
    counted = post_json(app, "/tokenize", model="talker", messages=TALK)
    assert counted == {name: value for name, value in answer.items() if name != "prompt"}
    assert post_json(app, "/v1/chat/template", model="talker", messages=TALK, temperature=0.5, max_tokens=3) == answer
    closed = post_json(app, "/v1/chat/template", model="talker", messages=TALK, add_generation_prompt=False)
    assert closed["prompt"] == WRITTEN.removesuffix("<assistant>")
    tool = {"type": "function", "function": {"name": "springen"}}
    assert "springen" in post_json(app, "/v1/chat/template", model="talker", messages=TALK, tools=[tool])["prompt"]


def test_tokens_as_a_text(app: FastAPI) -> None:
    tokens = post_json(app, "/tokenize", model="talker", prompt="größer 日本", add_special_tokens=False)["tokens"]
    assert post_json(app, "/detokenize", model="talker", tokens=tokens) == {"prompt": "größer 日本"}
    special = post_json(app, "/tokenize", model="vectors", prompt="a film")["tokens"]
    assert post_json(app, "/detokenize", model="vectors", tokens=special)["prompt"].startswith("[CLS]")
    assert post_json(app, "/detokenize", model="vectors", tokens=[]) == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/detokenize", {"tokens": [5] * 8}, "tokens: the text of the tokens"),
        ("/tokenize", {"prompt": "The fox", "return_token_strs": True}, ": the names of its "),
        ("/v1/chat/template", {"messages": TALK, "return_token_strs": True}, ": the names of its "),
        ("/models/talker/decode", {"ids": [5] * 8}, "ids: the text of the tokens"),
        ("/v1/completions", {"prompt": [5] * 8, "echo": True}, "prompt: the text of the tokens"),
    ],
)
def test_memory_is_claimed_before_texts_of_tokens_are_made(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], sentence: str
) -> None:
    body = body if path.startswith("/models") else body | {"model": "talker"}
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_free_bytes", 0)
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_reserved", 0)  # guides of other tests may be kept in caches
    monkeypatch.setattr(tokenization, "BYTES_PER_WRITTEN_BYTE", MIN_REQUEST_BYTES)
    (refused,) = ask(app, (path, body))
    assert refused.status_code == 413, refused.text
    assert sentence in refused.text
    assert "takes about" in refused.text
    monkeypatch.undo()
    monkeypatch.setattr(tokenization, "MAX_WRITTEN_BYTES", 1)
    (refused,) = ask(app, (path, body))
    assert refused.status_code in (400, 413), refused.text
    assert sentence in refused.text
    assert "at most 1 are written" in refused.text
    monkeypatch.undo()
    (answer,) = ask(app, (path, body))
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("spelled", ["\0", "\x80", '"', "a", "\0😀", "\x80😀", "a😀"])
def test_texts_of_tokens_take_no_more_memory_than_is_claimed(models: list[Model], spelled: str) -> None:
    """U+0080 stands for its byte, which is no text alone: its token becomes a replacement character."""
    tokenizer, claim = models[0].tokenizer, MemoryClaim(Headroom())
    character = {byte: char for char, byte in byte_alphabet().items()}
    ids = [id for code in map(ord, spelled) if code < 256 and (id := tokenizer.token_id(character[code])) is not None]
    rows = [[*(ids * 40_000), *(tokenizer.encode(spelled[1:], special=False).ids if spelled[1:] else ())]]
    assert len(rows[0]) >= 40_000
    decode_texts(models[0], Decoding(rows, "tokens"), MemoryClaim(Headroom()), lambda: None)  # the caches are filled
    tracemalloc.start()
    try:
        [text] = decode_texts(models[0], Decoding(rows, "tokens"), claim, lambda: None)
        written = dumps_sliced({"prompt": text})
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(most - FIXED_BYTES, len(written)) <= claim._size
    assert len(written) >= (6 if spelled[0] == "\0" else 1) * 40_000


def test_a_prompt_that_answers_repeat_is_claimed_as_it_is_written(
    app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, claims = "\0" * 40, list[int]()
    grow = MemoryClaim.grow

    def noted(self: MemoryClaim, size: int, what: str) -> None:
        grow(self, size, what)
        claims.append(size if "repeats" in what else 0)

    monkeypatch.setattr(MemoryClaim, "grow", noted)
    body = {"model": "talker", "prompt": prompt, "n": 3, "echo": True, "max_tokens": 1}
    answer = ask(app, ("/v1/completions", body))[0]
    assert answer.status_code == 200, answer.text
    assert answer.content.count(rb"\u0000") >= 3 * 40
    assert sum(claims) == BYTES_PER_WRITTEN_BYTE * 3 * 40 * len(rb"\u0000")


def test_names_of_tokens_are_claimed_as_they_are_written() -> None:
    assert json_size('a"\0\ufffd') == len(r"""a\"\u0000""") + 3
    assert max_token_size(b"\xe2\x82\x80\x80\0a") == 3 + 3 + 6 + 1
    assert max_token_size(b"\xe2\x82") == 6


def test_the_route_of_text_embeddings_inference_has_its_own_format(app: FastAPI) -> None:
    [[first, *_]] = post_json(app, "/models/vectors/tokenize", inputs="a film")
    assert first["text"] == "[CLS]"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/tokenize", {"model": "talker", "prompt": 5}, 422, "prompt: must be a string, got 5"),
        ("/tokenize", {"model": "talker", "prompt": "a", "inputs": "b"}, 422, "inputs: is not a known field"),
        ("/tokenize", {"model": "nobody", "prompt": "a"}, 404, "no model is called 'nobody'"),
        ("/tokenize", {"model": "vectors", "messages": TALK}, 422, "messages: vectors has no chat template"),
        ("/tokenize", {"model": "talker", "prompt": "a" * 70_000}, 413, "prompt: has 70000 characters"),
        ("/models/vectors/tokenize", {}, 422, "inputs: is required"),
        ("/models/vectors/tokenize", [], 400, "the body: must be an object"),
        ("/detokenize", {"model": "talker", "tokens": [10**6]}, 400, "tokens: token 1000000 is outside"),
        ("/detokenize", {"model": "talker", "tokens": "a"}, 400, "tokens: must be a list"),
        ("/v1/chat/template", {"model": "talker", "messages": []}, 400, "messages: must have at least 1 item"),
        ("/v1/chat/template", {"model": "vectors", "messages": TALK}, 400, "vectors cannot do that"),
    ],
)
def test_bad_requests(app: FastAPI, path: str, body: Any, status: int, message: str) -> None:
    (answer,) = ask(app, (path, body))
    error = answer.json()["error"]
    text = error if path.endswith("tokenize") and path != "/detokenize" else error["message"]
    assert (answer.status_code, text[: len(message)]) == (status, message)

"""The length of an answer where the request has no limit: the setting, or else the default of each dialect."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson
import pytest

from polyhead.service.core.model import GenerationDefaults
from polyhead.service.core.request import BeamSearchOptions, Generate, Sampling
from tests.support.scripted import Registry, application, ask, echo, model

CONTEXT, CUSTOM = 64, 9
OWN = {"translation": CUSTOM, "completions": 16, "completions of tokens": 16}  # the others: what the context leaves
LIMIT_FIELDS = [{"role": "user", "content": "a"}]
TENSORS = [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]
# Each route that generates: its path, its body, and the field with the length of the answer.
CALLS: Mapping[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "completions": ("/v1/completions", {"model": "talker", "prompt": "a"}, ("max_tokens",)),
    "completions of tokens": ("/v1/completions", {"model": "talker", "prompt": [5, 6]}, ("max_tokens",)),
    "chat": ("/v1/chat/completions", {"model": "talker", "messages": LIMIT_FIELDS}, ("max_completion_tokens",)),
    "responses": ("/v1/responses", {"model": "talker", "input": "a"}, ("max_output_tokens",)),
    "generate": ("/models/talker/generate", {"inputs": "a"}, ("parameters", "max_new_tokens")),
    "generate_stream": ("/models/talker/generate_stream", {"inputs": "a"}, ("parameters", "max_new_tokens")),
    "text-generation": ("/models/talker", {"inputs": "a"}, ("parameters", "max_new_tokens")),
    "translation": ("/models/writer", {"inputs": "a"}, ("parameters", "max_new_tokens")),
    "generate of Open Inference": ("/v2/models/talker/generate", {"text_input": "a"}, ("max_tokens",)),
    "infer": ("/v2/models/talker/infer", {"inputs": TENSORS}, ("parameters", "max_tokens")),
}


@pytest.fixture
def registry(tiny_generator: Path) -> Registry:
    customs = GenerationDefaults(
        decoder_prompt=(1,), max_tokens=CUSTOM, sampling=Sampling(temperature=0), beams=BeamSearchOptions(1)
    )
    writer = model(tiny_generator, "writer", "generate", max_tokens=CONTEXT, generation_defaults=customs)
    return Registry([model(tiny_generator, "talker", "generate", max_tokens=CONTEXT), writer], echo)


def lengths(registry: Registry, path: str, body: Mapping[str, Any], **settings: Any) -> tuple[int, int]:
    """The limit of tokens that the engine receives, and how many tokens the context leaves."""
    (answer,) = ask(application(registry, **settings), (path, body))
    assert answer.status_code == 200, answer.text
    [asked] = registry.requests
    assert isinstance(asked, Generate)
    return asked.max_tokens, CONTEXT - len(asked.tokens)


@pytest.mark.parametrize("name", CALLS)
def test_the_setting_is_used_where_a_request_has_no_limit(registry: Registry, name: str) -> None:
    path, body, _ = CALLS[name]
    assert lengths(registry, path, body, max_tokens_default=5)[0] == 5


@pytest.mark.parametrize("name", CALLS)
def test_the_setting_is_bounded_by_the_context(registry: Registry, name: str) -> None:
    path, body, _ = CALLS[name]
    asked, left = lengths(registry, path, body, max_tokens_default=1000)
    assert asked == left


@pytest.mark.parametrize("name", CALLS)
def test_without_the_setting_each_dialect_has_its_default(registry: Registry, name: str) -> None:
    path, body, _ = CALLS[name]
    asked, left = lengths(registry, path, body)
    assert asked == OWN.get(name, left)


def test_a_completion_s_own_length_is_bounded_by_the_context(registry: Registry) -> None:
    asked, left = lengths(registry, "/v1/completions", {"model": "talker", "prompt": [5] * 60})
    assert asked == left == 4


@pytest.mark.parametrize("name", CALLS)
def test_the_limit_of_a_request_overrides_the_setting(registry: Registry, name: str) -> None:
    path, body, (*parents, last) = CALLS[name]
    said: dict[str, Any] = {last: 7}
    for parent in reversed(parents):
        said = {parent: said}
    assert lengths(registry, path, body | said, max_tokens_default=5)[0] == 7


def test_anthropic_messages_require_a_limit(registry: Registry) -> None:
    body = {"model": "talker", "messages": LIMIT_FIELDS}
    assert lengths(registry, "/v1/messages", body | {"max_tokens": 7}, max_tokens_default=5)[0] == 7
    (answer,) = ask(application(registry, max_tokens_default=5), ("/v1/messages", body))
    assert answer.status_code == 400
    assert "max_tokens: is required" in answer.text


def test_a_prompt_that_is_only_scored_has_no_answer(registry: Registry) -> None:
    body = {"model": "talker", "prompt": "a", "max_tokens": 0, "echo": True}
    assert lengths(registry, "/v1/completions", body, max_tokens_default=5)[0] == 0


def test_a_stream_that_the_setting_cuts_ends_as_any_other(registry: Registry) -> None:
    """The event of its last token is the last event."""
    prompt = "The quick brown fox jumps"
    said = ({"inputs": prompt}, {"inputs": prompt, "parameters": {"max_new_tokens": 3}})
    calls = [("/models/talker/generate_stream", body) for body in said]
    first, second = ask(application(registry, max_tokens_default=3), *calls)
    result = [orjson.loads(line.removeprefix("data:")) for line in first.text.split("\n\n") if line]
    assert [event["generated_text"] is None for event in result] == [True, True, False]
    assert first.text == second.text

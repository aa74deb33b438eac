"""The generate extension of the Open Inference Protocol, and its options, with scripted models."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from polyhead.service.api.dialects.oip.wire import OipParameters, TextRequest, read_text_request
from polyhead.service.core.errors import StepFailed
from polyhead.service.core.model import Model
from polyhead.service.core.request import BeamSearchOptions, Failed, Generate, Request
from tests.support.scripted import Registry, application, ask, echo, model, token_events

PROMPT = "The quick fox"
PATH = "/v2/models/org/talker/generate"


@pytest.fixture(scope="module")
def models(tiny_generator: Path, tiny_embedder: Path) -> list[Model]:
    return [model(tiny_generator, "org/talker", "generate"), model(tiny_embedder, "vectors", "embed")]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def streamed(app: FastAPI, **body: Any) -> list[Any]:
    (answer,) = ask(app, (f"{PATH}_stream", {"text_input": PROMPT, **body}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [orjson.loads(line.removeprefix("data:")) for line in answer.text.split("\n\n") if line]


@pytest.mark.parametrize("path", [PATH, "/v2/models/org/talker/versions/1/generate"])
def test_a_text_is_continued(app: FastAPI, path: str) -> None:
    said = {"model_name": "org/talker", "model_version": "1"}
    whole, cut = ask(
        app, (path, {"text_input": PROMPT}), (path, {"text_input": PROMPT, "id": "7", "parameters": {"max_tokens": 1}})
    )
    assert whole.json() == {**said, "text_output": PROMPT, "finish_reason": "stop"}
    assert cut.json()["id"] == "7"
    assert cut.json()["finish_reason"] == "length"


def test_options_stand_beside_the_text_or_among_parameters(app: FastAPI, registry: Registry) -> None:
    options = {"max_tokens": 3, "temperature": 0.5, "seed": 4, "repetition_penalty": 1.5, "bad_words": ["film"]}
    beside, among = ask(
        app, (PATH, {"text_input": PROMPT, **options}), (PATH, {"text_input": PROMPT, "parameters": options})
    )
    assert beside.json() == among.json()
    one, other = (request for request in registry.requests if isinstance(request, Generate))
    assert one.sampling == other.sampling
    assert (one.max_tokens, one.sampling.repetition_penalty, one.sampling.seed) == (3, 1.5, 4)
    assert one.sampling.banned


def test_stop_strings_are_removed_unless_they_are_requested(app: FastAPI) -> None:
    stop = {"text_input": PROMPT, "stop": [" fox"]}
    cut, kept = ask(app, (PATH, stop), (PATH, stop | {"include_stop_str_in_output": True}))
    assert [answer.json()["text_output"] for answer in (cut, kept)] == ["The quick", PROMPT]


def test_details_have_the_finish_reason_and_the_tokens(app: FastAPI, models: list[Model]) -> None:
    asked = {"text_input": PROMPT, "details": True}
    ended, cut, stopped, several = (
        answer.json()["details"]
        for answer in ask(
            app,
            (PATH, asked),
            (PATH, asked | {"max_tokens": 1}),
            (PATH, {"text_input": PROMPT, "parameters": {"details": True, "stop": ["fox"]}}),
            (PATH, asked | {"num_return_sequences": 2, "do_sample": True}),
        )
    )
    reasons = [each["finish_reason"] for each in (ended, cut, stopped)]
    assert reasons == ["eos_token", "length", "stop_sequence"]
    assert [each["id"] for each in ended["logprobs"]] == models[0].tokenizer.encode(PROMPT).ids
    assert "".join(each["text"] for each in ended["logprobs"]) == PROMPT
    assert ended["logprobs"][0].keys() == {"id", "text", "logprob", "special"}
    assert several == [ended, ended]


def test_several_answers_are_a_list(app: FastAPI) -> None:
    (answer,) = ask(app, (PATH, {"text_input": PROMPT, "num_return_sequences": 2, "do_sample": True}))
    assert answer.json()["text_output"] == [PROMPT, PROMPT]
    tensor = {"name": "text", "datatype": "BYTES", "shape": [2], "data": [PROMPT, "a"]}
    several = {"inputs": [tensor], "parameters": {"num_return_sequences": 2, "top_k": 3}}
    (answer,) = ask(app, ("/v2/models/org/talker/infer", several))
    assert answer.json()["outputs"][0]["data"] == [PROMPT, PROMPT, "a", "a"]


def test_a_stream_has_a_last_event(app: FastAPI) -> None:
    events = streamed(app, id="7")
    assert "".join(event["text_output"] for event in events) == PROMPT
    assert [event["done"] for event in events] == [False] * (len(events) - 1) + [True]
    assert [event["finish_reason"] for event in events if "finish_reason" in event] == ["stop"]
    assert {event["id"] for event in events} == {"7"}
    [whole] = streamed(app, parameters={"stream": False})
    assert (whole["text_output"], whole["done"]) == (PROMPT, True)


def test_a_failure_is_the_last_event(models: list[Model]) -> None:
    def broken(model: Model, request: Request) -> Iterator[Any]:
        yield from token_events("fox", model.tokenizer)
        yield Failed(StepFailed("the step failed"))

    assert streamed(application(Registry(models, broken)))[-1] == {"error": "the step failed"}


def test_beam_search_options_are_read() -> None:
    asked = read_text_request(
        TextRequest.read({"text_input": "a", "num_beams": 3, "num_return_sequences": 2}), stream=False
    )
    assert (asked.beams, asked.count) == (BeamSearchOptions(3), 2)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        (PATH, {}, 400, "text_input: is required"),
        (PATH, {"text_input": "a", "foo": 1}, 400, "foo: is not a known field"),
        (PATH, {"text_input": "a", "top_k": 2, "parameters": {"top_p": 0.5}}, 400, "top_k: give all options beside"),
        (PATH, {"text_input": "a", "stream": True}, 400, "stream: one answer here"),
        (PATH, {"text_input": "a", "parameters": {"stream": True}}, 400, "parameters.stream: one answer here"),
        (PATH, {"text_input": "a", "max_tokens": 1, "max_new_tokens": 2}, 400, "max_tokens: is another name of"),
        (PATH, {"text_input": "a", "max_new_tokens": 100}, 400, "max_new_tokens: the prompt has"),
        (PATH, {"text_input": "a", "parameters": {"max_tokens": 100}}, 400, "parameters.max_tokens: the prompt has"),
        (PATH, {"text_input": "a", "binary_data_output": True}, 400, "binary_data_output: is not a known field"),
        (PATH, {"text_input": "a", "sequence_id": 5}, 400, "sequence_id: 5 is not supported"),
        (
            f"{PATH}_stream",
            {"text_input": "a", "num_return_sequences": 2, "top_k": 2},
            400,
            "num_return_sequences: one",
        ),
        ("/v2/models/org/talker/versions/2/generate", {"text_input": "a"}, 404, "org/talker has version 1 only"),
        ("/v2/models/vectors/generate", {"text_input": "a"}, 400, "vectors cannot do that"),
    ],
)
def test_bad_requests(app: FastAPI, path: str, body: Any, status: int, message: str) -> None:
    (answer,) = ask(app, (path, body))
    assert (answer.status_code, answer.json().keys()) == (status, {"error"})
    assert answer.json()["error"].startswith(message)


def test_priorities_are_counted_as_triton_counts_them() -> None:
    """1 goes first, 0 is the default; the engine's go from -100 to 100, the highest first."""
    asked = [OipParameters.read({"priority": given}).engine_request.priority for given in (0, 1, 100, 101, 102, 201)]
    assert asked == [0, 100, 1, 0, -1, -100]
    with_limit = OipParameters.read({"priority": 2, "timeout": 5_000_000}).engine_request
    assert (with_limit.priority, with_limit.timeout) == (99, 5)

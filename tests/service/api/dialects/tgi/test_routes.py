"""The dialect of text-generation-inference with scripted models: reading, writing, errors."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from fastapi import FastAPI

from polyhead.service.api.shared.hf_generation import GenerateParameters, read_hf_parameters
from polyhead.service.core.errors import BadRequest, StepFailed
from polyhead.service.core.grammar import Grammar
from polyhead.service.core.model import Model
from polyhead.service.core.request import (
    BeamSearchOptions,
    Done,
    Failed,
    Generate,
    GeneratedToken,
    PromptScores,
    Request,
    Sampling,
)
from polyhead.service.text.generation_request import GenerationRequest
from tests.support.scripted import Registry, application, ask, echo, model, token_events

PROMPT = "The quick fox"


@pytest.fixture(scope="module")
def models(tiny_generator: Path, tiny_embedder: Path) -> list[Model]:
    return [
        model(tiny_generator, "talker", "generate"),
        model(tiny_generator, "talker:pirate", "generate", adapter=1),
        model(tiny_embedder, "vectors", "embed"),
    ]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def post_json(app: FastAPI, path: str = "/models/talker/generate", **parameters: Any) -> Any:
    (answer,) = ask(app, (path, {"inputs": PROMPT, "parameters": parameters}))
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(app: FastAPI, **parameters: Any) -> list[Any]:
    (answer,) = ask(app, ("/models/talker/generate_stream", {"inputs": PROMPT, "parameters": parameters}))
    assert answer.headers["content-type"].startswith("text/event-stream")
    return [orjson.loads(line.removeprefix("data:")) for line in answer.text.split("\n\n") if line]


def read(stream: bool = False, **parameters: Any) -> GenerationRequest:
    return read_hf_parameters(("a",), GenerateParameters.read(parameters), stream=stream)


# Reading requests


def test_every_parameter_is_read() -> None:
    asked = read(
        temperature=0.5,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        typical_p=0.7,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        logit_bias={"7": 2},
        allowed_token_ids=[9, 8, 9],
        suppress_tokens=[3],
        bad_words_ids=[[4, 5]],
        bad_words=["fox"],
        min_new_tokens=2,
        max_new_tokens=7,
        seed=11,
        stop=["x"],
        stop_sequences="y",
        stop_token_ids=[6],
        ignore_eos=True,
        truncate=5,
        top_n_tokens=3,
        decoder_input_details=True,
        num_return_sequences=2,
        grammar={"type": "regex", "value": "[0-9]+"},
    )
    assert asked.sampling == Sampling(
        temperature=0.5,
        top_k=9,
        top_p=0.8,
        min_p=0.1,
        seed=11,
        typical_p=0.7,
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        presence_penalty=-0.4,
        bias=((7, 2.0),),
        allowed=(8, 9),
        banned=((3,), (4, 5)),
        min_tokens=2,
    )
    assert (asked.has_seed, asked.max_tokens, asked.stops, asked.keep_stop) == (True, 7, ("x", "y"), True)
    assert (asked.stop_tokens, asked.ignore_eos, asked.bad_words) == ({6}, True, ("fox",))
    assert (asked.truncate, asked.logprobs, asked.prompt_logprobs) == (5, 3, 0)
    assert (asked.count, asked.best_of, asked.beams) == (2, 0, None)
    assert asked.grammar == Grammar("regex", "[0-9]+", "parameters.grammar.value")


def test_answers_are_greedy_unless_a_sampling_parameter_is_set() -> None:
    for shaped in ({}, {"do_sample": False, "temperature": 0.7}, {"repetition_penalty": 2}, {"seed": 1}):
        assert read(**shaped).sampling.temperature == 0
    for shaped in ({"do_sample": True}, {"top_k": 5}, {"typical_p": 0.5}, {"min_p": 0.1}, {"temperature": 1}):
        assert read(**shaped).sampling.temperature == 1


def test_best_of() -> None:
    asked = read(num_beams=4, num_return_sequences=3, length_penalty=0.5, early_stopping=True)
    assert (asked.count, asked.beams) == (3, BeamSearchOptions(4, 0.5, early_stopping=True))
    assert (read(best_of=3, do_sample=True).count, read(best_of=3, do_sample=True).logprobs) == (3, 0)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"watermark": True}, "watermark: true is not supported by this server"),
        ({"best_of": 2}, "parameters.best_of: the tries would all be the same"),
        ({"best_of": 2, "num_return_sequences": 2, "do_sample": True}, "parameters.best_of: answers with one of them"),
        ({"num_return_sequences": 2}, "parameters.num_return_sequences: would all be the same"),
        ({"num_return_sequences": 3, "num_beams": 2}, "parameters.num_return_sequences: a search 2 wide"),
        ({"num_beams": 2, "temperature": 0.5}, "parameters.num_beams: a beam search does not sample"),
        ({"length_penalty": 2}, "parameters.length_penalty: only together with num_beams"),
        ({"allowed_token_ids": []}, "parameters.allowed_token_ids: must not be empty"),
        ({"bad_words_ids": [[]]}, "bad_words_ids[0]: must have at least 1 item"),
        ({"top_n_tokens": 21}, "top_n_tokens: must be between 0 and 20, got 21"),
        ({"grammar": {"type": "regex", "value": {}}}, "parameters.grammar.value: must be a string"),
        ({"no_repeat_ngram_size": 65}, "no_repeat_ngram_size: must be between 0 and 64, got 65"),
        ({"penalty_alpha": 0.6}, "penalty_alpha: 0.6 is not supported by this server"),
    ],
)
def test_invalid_parameters_are_rejected_by_name(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read(**parameters)
    assert caught.value.message.startswith(message)


@pytest.mark.parametrize("name", ["best_of", "num_return_sequences", "decoder_input_details"])
def test_parameters_that_a_stream_does_not_support(name: str) -> None:
    with pytest.raises(BadRequest, match=rf"parameters\.{name}: a stream has one answer"):
        read(stream=True, do_sample=True, **{name: 2 if name != "decoder_input_details" else True})


# Writing answers


def test_one_object_for_one_text(app: FastAPI) -> None:
    assert post_json(app) == {"generated_text": PROMPT}
    assert post_json(app, return_full_text=True, stop=["quick"]) == {"generated_text": f"{PROMPT}The quick"}
    (several,) = ask(app, ("/models/talker", {"inputs": PROMPT}))
    assert several.json() == [{"generated_text": PROMPT}]


def test_details_and_top_tokens(app: FastAPI, models: list[Model]) -> None:
    details = post_json(app, details=True, top_n_tokens=2)["details"]
    ids = models[0].tokenizer.encode(PROMPT).ids
    assert [token["id"] for token in details["tokens"]] == ids
    assert "".join(token["text"] for token in details["tokens"]) == PROMPT
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("eos_token", len(ids), None)
    assert [[one["id"] for one in top] for top in details["top_tokens"]] == [[id, id + 1] for id in ids]
    assert details["top_tokens"][0][1].keys() == {"id", "text", "logprob", "special"}
    assert details["prefill"] == []
    assert post_json(app, details=True, seed=5, stop=["quick"])["details"]["seed"] == 5
    assert post_json(app, details=True, stop=["quick"])["details"]["finish_reason"] == "stop_sequence"
    assert post_json(app, details=True, max_new_tokens=1)["details"]["finish_reason"] == "length"


def test_the_prompts_own_tokens(models: list[Model]) -> None:
    def scored(model: Model, request: Request) -> Iterable[Any]:
        assert isinstance(request, Generate)
        assert request.prompt_logprobs == 0
        yield PromptScores(tuple((-float(place), ()) for place in range(1, len(request.tokens))))
        yield from echo(model, request)

    details = post_json(application(Registry(models, scored)), decoder_input_details=True)["details"]
    ids = models[0].tokenizer.encode(PROMPT).ids
    assert [one["id"] for one in details["prefill"]] == ids
    assert [one["logprob"] for one in details["prefill"]] == [None, *(-float(n) for n in range(1, len(ids)))]
    assert "".join(one["text"] for one in details["prefill"]).endswith(PROMPT)


def test_the_best_of_several_comes_first(models: list[Model]) -> None:
    def tries(model: Model, request: Request) -> Iterator[Any]:
        number = int(request.id.rpartition("-")[2])
        yield GeneratedToken(models[0].tokenizer.encode("abc", special=False).ids[number], (-3.0, -1.0, -2.0)[number])
        yield Done("length", 4, 1)

    app = application(Registry(models, tries))
    result = post_json(app, best_of=3, do_sample=True, details=True)
    assert result["generated_text"] == "b"
    others = result["details"].pop("best_of_sequences")
    assert [one["generated_text"] for one in others] == ["c", "a"]
    assert others[0].keys() == result["details"].keys() | {"generated_text"}
    assert post_json(app, best_of=3, do_sample=True) == {"generated_text": "b"}
    (listed,) = ask(app, ("/models/talker", {"inputs": PROMPT, "parameters": {"best_of": 3, "top_k": 2}}))
    assert listed.json() == [{"generated_text": "b"}]
    several = {"inputs": [PROMPT, "a"], "parameters": {"num_return_sequences": 3, "do_sample": True}}
    (listed,) = ask(app, ("/models/talker", several))
    assert [[one["generated_text"] for one in each] for each in listed.json()] == [["a", "b", "c"]] * 2


def test_the_end_of_a_prompt(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    post_json(app, truncate=2)
    long = {"inputs": "fox " * 99, "parameters": {"truncate": 3, "max_new_tokens": 1}}
    (answer,) = ask(app, ("/models/talker/generate", long))
    assert answer.status_code == 200
    encode = models[0].tokenizer.encode
    tokens = [request.tokens for request in registry.requests]
    assert tokens == [tuple(encode(PROMPT).ids[-2:]), tuple(encode("fox " * 99).ids[-3:])]


def test_a_stream_of_tokens(app: FastAPI, models: list[Model]) -> None:
    events = streamed(app, details=True, top_n_tokens=1, seed=3)
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    assert "".join(event["token"]["text"] for event in events) == PROMPT
    assert [len(event["top_tokens"]) for event in events[:-1]] == [1] * (len(events) - 1)
    count = len(models[0].tokenizer.encode(PROMPT).ids)
    assert events[-1]["generated_text"] == PROMPT
    assert events[-1]["details"] == {
        "finish_reason": "eos_token",
        "generated_tokens": count,
        "seed": 3,
        "input_length": count,
    }
    assert all(event["generated_text"] is None and event["details"] is None for event in events[:-1])
    cut = streamed(app, details=True, max_new_tokens=2)
    assert [(event["token"]["id"], event["token"]["special"]) for event in cut] == [
        (id, False) for id in models[0].tokenizer.encode(PROMPT).ids[:2]
    ]
    assert (cut[-1]["details"]["finish_reason"], cut[-1]["details"]["generated_tokens"]) == ("length", 2)
    assert cut[-1]["generated_text"] == "".join(event["token"]["text"] for event in cut)
    assert cut[0]["generated_text"] is None
    kept = streamed(app, stop=["quick"])
    assert (kept[-1]["generated_text"], kept[-1]["details"]) == ("The quick", None)
    assert "".join(event["token"]["text"] for event in kept) == "The quick"


# Model selection and errors


def test_adapters_by_their_names(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    for path, adapter in (
        ("/generate", "pirate"),
        ("/models/talker/generate", "pirate"),
        ("/generate", "talker:pirate"),
    ):
        post_json(app, path, adapter_id=adapter)
    (answer,) = ask(app, ("/models/talker", {"inputs": PROMPT, "parameters": {"adapter_id": "pirate"}}))
    assert answer.status_code == 200
    assert [request.adapter for request in registry.requests if isinstance(request, Generate)] == [1] * 4
    for path, status in (("/generate", 422), ("/models/talker/generate", 404)):
        (answer,) = ask(app, (path, {"inputs": "a", "parameters": {"adapter_id": "parrot"}}))
        assert (answer.status_code, answer.json()["error"].partition(":")[0]) == (status, "parameters.adapter_id")


def test_the_only_generator_needs_no_name(models: list[Model]) -> None:
    app = application(Registry([models[0], models[2]], echo))
    for path in ("/generate", "/generate_stream"):
        (answer,) = ask(app, (path, {"inputs": PROMPT}))
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("status", "path", "body", "message"),
    [
        (422, "/generate", {"inputs": ""}, "inputs: must have at least 1 character"),
        (422, "/generate", {"inputs": ["a"]}, "inputs: must be a string"),
        (422, "/generate", {"inputs": "a", "stream": True}, "stream: is not a known field"),
        (422, "/models/talker/generate", {"inputs": "a", "parameters": {"temperature": -1}}, "parameters.temperature"),
        (422, "/models/talker/generate", {"inputs": "a " * 99}, "inputs: the prompt has"),
        (422, "/models/vectors/generate", {"inputs": "a"}, "vectors cannot do that"),
        (
            422,
            "/models/talker/generate",
            {"inputs": "a", "parameters": {"num_return_sequences": 2, "do_sample": True}},
            "parameters.num_return_sequences: there is one answer here",
        ),
        (404, "/models/nobody/generate_stream", {"inputs": "a"}, "no model is called 'nobody'"),
    ],
)
def test_bad_requests(app: FastAPI, status: int, path: str, body: Any, message: str) -> None:
    (answer,) = ask(app, (path, body))
    assert (answer.status_code, answer.json().get("error_type")) == (status, "validation" if status == 422 else None)
    assert answer.json()["error"].startswith(message)


def test_a_failed_step_is_a_generation_error(models: list[Model]) -> None:
    def broken(model: Model, request: Request) -> Iterator[Any]:
        yield from token_events("fox", model.tokenizer)
        yield Failed(StepFailed("the step failed"))

    app = application(Registry(models, broken))
    (answer,) = ask(app, ("/models/talker/generate", {"inputs": PROMPT}))
    assert (answer.status_code, answer.json()) == (424, {"error": "the step failed", "error_type": "generation"})
    assert streamed(app)[-1] == {"error": "the step failed", "error_type": "generation"}


def test_info_has_the_fields_of_both_servers(app: FastAPI) -> None:
    talker, vectors = (answer.json() for answer in ask(app, ("/models/talker/info", None), ("/info", None)))
    assert (talker["model_pipeline_tag"], talker["max_total_tokens"], talker["max_input_tokens"]) == (
        "text-generation",
        64,
        63,
    )
    assert {"max_best_of", "max_stop_sequences", "validation_workers", "router", "version"} <= talker.keys()
    assert "router" not in vectors

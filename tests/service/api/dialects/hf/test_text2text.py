"""Hugging Face's text2text tasks with scripted models."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from polyhead.service.api.dialects.hf.wire import Text2TextRequest, read_text2text
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.model import GenerationDefaults
from polyhead.service.core.request import BeamSearchOptions, Generate, Sampling
from tests.support.scripted import Registry, application, ask, echo, model

SEARCHES = GenerationDefaults(
    decoder_prompt=(2, 7),
    max_tokens=20,
    sampling=Sampling(temperature=0, banned=((5,),), no_repeat_ngram_size=3),
    beams=BeamSearchOptions(4, 0.6, early_stopping=True),
)
DRAWS = GenerationDefaults(
    decoder_prompt=(2,),
    max_tokens=30,
    sampling=Sampling(temperature=0.7, top_k=50, top_p=0.9, min_tokens=2),
    beams=BeamSearchOptions(1),
)


@pytest.fixture
def registry(tiny_generator: Path) -> Registry:
    return Registry([model(tiny_generator, "writer", "generate", generation_defaults=SEARCHES, chat=None)], echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def read(customs: GenerationDefaults, **parameters: Any) -> tuple[Sampling, BeamSearchOptions | None, int]:
    asked = read_text2text(Text2TextRequest.read({"inputs": "a", "parameters": parameters}), customs)
    return asked.sampling, asked.beams, asked.token_limit


def test_missing_options_have_the_defaults_of_the_checkpoint() -> None:
    sampling, beams, most = read(SEARCHES)
    assert (sampling.temperature, sampling.no_repeat_ngram_size, beams, most) == (
        0,
        3,
        BeamSearchOptions(4, 0.6, early_stopping=True),
        20,
    )
    sampling, beams, most = read(DRAWS)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_tokens) == (0.7, 50, 0.9, 2)
    assert (beams, most) == (None, 30)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize(
    ("parameters", "beams", "temperature"),
    [
        ({"num_beams": 1}, None, 0),
        ({"num_beams": 2}, BeamSearchOptions(2, 0.6, early_stopping=True), 0),
        ({"num_beams": 2, "length_penalty": 2, "early_stopping": False}, BeamSearchOptions(2, 2), 0),
        ({"do_sample": True}, None, 1),
        ({"temperature": 0.3}, None, 0.3),
        ({"do_sample": False}, BeamSearchOptions(4, 0.6, early_stopping=True), 0),
    ],
)
def test_options_of_the_request_override_the_checkpoint(
    inside: bool, parameters: dict[str, Any], beams: BeamSearchOptions | None, temperature: float
) -> None:
    said = {"generate_parameters": parameters} if inside else parameters
    sampling, found, _ = read(SEARCHES, **said)
    assert (found, sampling.temperature) == (beams, temperature)


def test_a_sampling_checkpoint_can_use_beam_search() -> None:
    sampling, beams, _ = read(DRAWS, num_beams=3)
    assert (sampling.temperature, beams) == (0, BeamSearchOptions(3))
    assert read(DRAWS, do_sample=False)[0].temperature == 0


def test_options_are_in_one_place() -> None:
    with pytest.raises(BadRequest, match=r"^parameters.seed: give all options beside generate_parameters"):
        read(SEARCHES, seed=1, generate_parameters={"num_beams": 2})
    with pytest.raises(BadRequest, match=r"^parameters.generate_parameters.num_return_sequences: a search 4 wide"):
        read(SEARCHES, generate_parameters={"num_return_sequences": 5})


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/models/writer", "generated_text"),
        ("/models/writer/pipeline/translation", "translation_text"),
        ("/pipeline/summarization", "summary_text"),
        ("/pipeline/text2text-generation", "generated_text"),
    ],
)
def test_each_task_has_its_answer_field(app: FastAPI, registry: Registry, path: str, field: str) -> None:
    one, several = ask(app, (path, {"inputs": "The fox"}), (path, {"inputs": ["The fox", "A dog"]}))
    assert [list(each) for each in one.json()] == [[field]]
    assert len(several.json()) == 2
    request = registry.requests[0]
    assert isinstance(request, Generate)
    assert request.tokens == (2, 7), "the start token is not part of an answer"
    assert len(request.source) > 1
    assert (5,) in request.sampling.banned
    assert request.beams == BeamSearchOptions(4, 0.6, early_stopping=True)


def test_several_answers_are_lists(app: FastAPI) -> None:
    draws = {"do_sample": True, "num_return_sequences": 2}
    one, several = ask(
        app,
        ("/models/writer", {"inputs": "The fox", "parameters": draws}),
        ("/models/writer", {"inputs": ["The fox", "A dog"], "parameters": draws}),
    )
    assert [list(each) for each in one.json()] == [["generated_text"]] * 2
    assert [len(each) for each in several.json()] == [2, 2]


def test_an_answer_is_not_a_continuation_of_the_text(app: FastAPI) -> None:
    (answer,) = ask(app, ("/models/writer/pipeline/text-generation", {"inputs": "The fox"}))
    assert answer.status_code == 400
    tasks = "the tasks text2text-generation and translation and summarization"
    assert answer.json()["error"] == f"writer has {tasks}, not text-generation"


def test_completions_work_with_encoder_decoders(app: FastAPI, registry: Registry) -> None:
    body = {"model": "writer", "prompt": "The fox", "max_tokens": 5, "temperature": 0}
    scored = {**body, "echo": True, "logprobs": 0}
    answer, refused = ask(app, ("/v1/completions", body), ("/v1/completions", scored))
    assert answer.status_code == 200
    request = registry.requests[0]
    assert isinstance(request, Generate)
    assert (request.tokens, request.sampling.banned, request.beams) == ((2, 7), ((5,),), None)
    assert refused.status_code == 400
    assert "it does not say how likely a prompt is" in refused.json()["error"]["message"]

"""The dialect of Hugging Face's tasks with scripted models: task selection, formats, errors."""

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import orjson
import pytest
from fastapi import FastAPI

from polyhead.service.api.dialects.hf import routes as hf
from polyhead.service.api.dialects.hf.wire import (
    ClassifyRequest,
    FeatureRequest,
    FillMaskRequest,
    HfGenerateRequest,
    QuestionRequest,
    SentenceSimilarityRequest,
    TokenClassifyRequest,
    ZeroShotRequest,
    read_feature,
    read_hf_generate,
    read_question,
    read_token_classify,
)
from polyhead.service.api.shared import dialect
from polyhead.service.api.shared import pipeline_outputs as findings
from polyhead.service.api.shared.hf_generation import GenerateParameters
from polyhead.service.api.shared.hf_generation_write import split_text, stream_events, write_hf_error
from polyhead.service.api.shared.pipeline_outputs import apply_function
from polyhead.service.core.errors import (
    BadRequest,
    Expired,
    NotFound,
    Overloaded,
    PolyheadError,
    StepFailed,
    Unauthorized,
)
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Failed, Generate, Request
from polyhead.service.text import zero_shot
from polyhead.service.text.answer_delta import AnswerDelta, ScoredToken, TokenLogprobs, text_parts
from polyhead.service.text.answer_spans import SpanOptions
from polyhead.service.text.encoder_inputs import WindowOptions
from polyhead.service.text.entities import Entity
from tests.support.scripted import WAIT, Connection, Registry, application, ask, echo, model, token_events, until

LABELS = ("bad", "so-so", "good")
SHOT = {"inputs": "a film", "parameters": {"candidate_labels": ["fox", "dog"]}}


@pytest.fixture(scope="module")
def models(tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path, tiny_generator: Path) -> list[Model]:
    return [
        model(tiny_classifier, "judge", "classify", labels=LABELS),
        model(tiny_classifier, "org/nli", "classify", labels=("contradiction", "neutral", "ENTAILMENT")),
        model(tiny_embedder, "vectors", "embed"),
        model(tiny_ranker, "ranker", "rank", labels=("LABEL_0",)),
        model(tiny_classifier, "tagger", "tag", labels=("O", "PER")),
        model(tiny_classifier, "reader", "span"),
        model(tiny_classifier, "filler", "fill"),
        model(tiny_classifier, "chooser", "choose"),
        model(tiny_generator, "talker", "generate"),
        model(tiny_classifier, "decider", "decide"),
    ]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry, max_batch_texts=8)


def refused(app: FastAPI, path: str, body: Any, status: int = 400) -> str:
    (answer,) = ask(app, (path, body))
    assert answer.status_code == status, answer.text
    assert answer.json().keys() <= {"error", "error_type"}
    return str(answer.json()["error"])


# Task selection


def test_tasks_of_heads(models: list[Model]) -> None:
    assert {one.name: hf.model_tasks(one) for one in models} == {
        "judge": ["text-classification"],
        "org/nli": ["text-classification", "zero-shot-classification"],
        "vectors": ["feature-extraction", "sentence-similarity"],
        "ranker": ["text-classification"],
        "tagger": ["token-classification"],
        "reader": ["question-answering"],
        "filler": ["fill-mask"],
        "chooser": ["multiple-choice"],
        "talker": ["text-generation"],
        "decider": [],
    }


def test_models_for_no_task_of_the_api_are_refused(app: FastAPI) -> None:
    for path in ("/models/decider", "/models/decider/pipeline/fill-mask"):
        message = refused(app, path, {"inputs": "a film"})
        assert message == "decider can answer questions about a text, which is no task of this API"


def test_the_path_or_the_body_selects_the_task(app: FastAPI) -> None:
    like = {"inputs": {"source_sentence": "a film", "sentences": ["a film"]}}
    plain, shot, vector, near, named, at_root = ask(
        app,
        ("/models/org/nli", {"inputs": "a film"}),
        ("/models/org/nli", SHOT),
        ("/models/vectors", {"inputs": "a film"}),
        ("/models/vectors", like),
        ("/models/vectors/pipeline/sentence-similarity", like),
        ("/pipeline/sentence-similarity", like),
    )
    assert [one["label"] for one in plain.json()[0]] == ["contradiction", "neutral", "ENTAILMENT"]
    assert {one["label"] for one in shot.json()} == {"fox", "dog"}
    assert len(vector.json()) == 4
    assert near.json() == named.json() == at_root.json() == [pytest.approx(near.json()[0])]


def test_the_error_for_another_task_lists_the_tasks_of_the_model(app: FastAPI) -> None:
    said = refused(app, "/models/judge/pipeline/fill-mask", {"inputs": "a [MASK]"})
    assert said == "judge has the task text-classification, not fill-mask"
    said = refused(app, "/models/judge", SHOT)
    assert said.startswith("judge has the task text-classification, not zero-shot-classification, which needs a label")
    assert said.endswith("there are: bad, so-so, good")
    said = refused(app, "/models/judge", {"inputs": {"question": "a", "context": "b"}})
    assert said.endswith("; judge has the task text-classification")
    said = refused(app, "/models/vectors", {"inputs": 7})
    assert said.endswith("; vectors has the tasks feature-extraction and sentence-similarity")
    assert "no task is called 'dance'" in refused(app, "/pipeline/dance", {}, 404)
    assert "name one of them in the address" in refused(app, "/", {"inputs": "a"})
    assert "no model is called 'nobody'" in refused(app, "/models/nobody", {"inputs": "a"}, 404)


def test_neighbouring_routes_stay_as_they_are(app: FastAPI) -> None:
    predict, info, listing = ask(
        app, ("/models/judge/predict", {"inputs": "a"}), ("/models/judge/info", None), ("/v1/models/judge", None)
    )
    assert predict.json()[0].keys() == {"label", "score"}
    assert info.json()["served_model_name"] == "judge"
    assert listing.json()["id"] == "judge"


# Reading requests


def test_labels_of_texts(app: FastAPI) -> None:
    one, several, best, raw, high = ask(
        app,
        ("/models/judge", {"inputs": "a film"}),
        ("/models/judge", {"inputs": ["a film", {"text": "a", "text_pair": "film"}]}),
        ("/models/judge", {"inputs": "a film", "parameters": {"top_k": 1}}),
        ("/models/judge", {"inputs": "a film", "parameters": {"function_to_apply": "none", "truncation": True}}),
        ("/models/judge", {"inputs": "a film", "parameters": {"threshold": 40}}),
    )
    assert [each["label"] for each in one.json()[0]] == list(LABELS)
    assert several.json()[0] == one.json()[0]
    assert len(several.json()) == 2
    assert best.json() == [one.json()[0][:1]]
    assert raw.json() == one.json(), "scripted scores get no activation function"
    assert high.json() == [[each for each in one.json()[0] if each["score"] >= 40]]


def test_functions_of_scores() -> None:
    assert apply_function("softmax", [1000.0, 1000.0]) == [0.5, 0.5]
    assert apply_function("sigmoid", [-1000.0, 0.0, 1000.0]) == [0.0, 0.5, 1.0]
    assert apply_function("none", [3.0]) == apply_function("", [3.0]) == [3.0]


def test_windows_only_when_asked() -> None:
    def windows(**given: Any) -> WindowOptions | None:
        wire = QuestionRequest.read({"inputs": {"question": "a", "context": "b"}, "parameters": given})
        return read_question(wire).windows

    assert windows() is None
    assert windows(doc_stride=5) == WindowOptions(overlap=5, size=384)
    assert windows(max_seq_len=100) == WindowOptions(overlap=50, size=100)
    assert windows(max_seq_len=4000) == WindowOptions(overlap=128, size=4000)
    wire = QuestionRequest.read(
        {"inputs": [{"question": "a", "context": "b"}], "parameters": {"top_k": 3, "align_to_words": False}}
    )
    assert read_question(wire).span_options == SpanOptions(top_k=3, whole_words=False)
    assert not wire.is_single
    labelled = TokenClassifyRequest.read({"inputs": "a", "parameters": {"stride": 7, "aggregation_strategy": "max"}})
    assert read_token_classify(labelled).windows == WindowOptions(overlap=7)


def test_options_of_vectors_beside_the_inputs_or_inside() -> None:
    for given in ({"normalize": False, "dimensions": 3}, {"parameters": {"normalize": False, "dimensions": 3}}):
        asked = read_feature(FeatureRequest.read({"inputs": "a", **given}))
        assert (asked.raw, asked.unit, asked.dimensions) == (True, False, 3)
    plain, unit = (read_feature(FeatureRequest.read({"inputs": "a", **given})) for given in ({}, {"normalize": True}))
    assert (plain.raw, plain.unit, unit.raw, unit.unit) == (False, False, False, True)
    with pytest.raises(BadRequest, match="normalize: give all options beside inputs, or all in parameters"):
        read_feature(FeatureRequest.read({"inputs": "a", "normalize": True, "parameters": {"truncate": True}}))


@pytest.mark.parametrize(
    ("given", "temperature"),
    [
        ({}, 0),
        ({"do_sample": True}, 1),
        ({"top_p": 0.5}, 1),
        ({"temperature": 0.3}, 0.3),
        ({"do_sample": False, "top_k": 3}, 0),
    ],
)
def test_tokens_are_drawn_only_when_asked(given: Any, temperature: float) -> None:
    asked = read_hf_generate(
        HfGenerateRequest.read({"inputs": "a", "parameters": {**given, "stop": "x", "stop_sequences": ["y"]}})
    )
    assert asked.sampling.temperature == temperature
    assert asked.stops == ("x", "y")


@pytest.mark.parametrize(
    ("kind", "body", "said"),
    [
        (ClassifyRequest, {"inputs": "a", "parameters": {"top_k": 0}}, "parameters.top_k: must be between 1"),
        (
            ClassifyRequest,
            {"inputs": "a", "parameters": {"topk": 1}},
            "parameters.topk: is not a known field; did you mean",
        ),
        (
            ClassifyRequest,
            {"inputs": "a", "parameters": {"function_to_apply": "tanh"}},
            "parameters.function_to_apply: must",
        ),
        (ClassifyRequest, {"text": "a"}, "text: is not a known field; did you mean inputs?"),
        (ClassifyRequest, {"inputs": "a", "stream": True}, "stream: true is not supported"),
        (ClassifyRequest, {"inputs": [{"text": 1}]}, 'inputs: must be a string, {"text", "text_pair"} or a list'),
        (ClassifyRequest, {}, "inputs: is required"),
        (ClassifyRequest, [], "the body: must be an object"),
        (ClassifyRequest, {"inputs": "a", "options": {"cache": 1}}, "options.cache: is not a known field"),
        (
            TokenClassifyRequest,
            {"inputs": "a", "parameters": {"aggregation_strategy": "best"}},
            "parameters.aggregation_strategy: must",
        ),
        (
            TokenClassifyRequest,
            {"inputs": "a", "parameters": {"ignore_labels": ["x"] * 1001}},
            "ignore_labels: must have at most 1000",
        ),
        (QuestionRequest, {"inputs": {"question": "a"}}, 'inputs: must be {"question", "context"}'),
        (QuestionRequest, {"inputs": {"question": "", "context": "b"}}, 'inputs: must be {"question", "context"}'),
        (
            QuestionRequest,
            {"inputs": [], "parameters": {"max_answer_len": 0}},
            "parameters.max_answer_len: must be between",
        ),
        (
            FillMaskRequest,
            {"inputs": "a", "parameters": {"targets": ["a" * 257]}},
            "parameters.targets: must be a string or a",
        ),
        (
            FillMaskRequest,
            {"inputs": "a", "parameters": {"top_k": 1001}},
            "parameters.top_k: must be between 1 and 1000",
        ),
        (FeatureRequest, {"inputs": "a", "encoding_format": "base64"}, 'encoding_format: "base64" is not supported'),
        (
            SentenceSimilarityRequest,
            {"inputs": {"source_sentence": "a", "sentences": []}},
            "inputs.sentences: must have at least 1",
        ),
        (ZeroShotRequest, {"inputs": "a"}, "parameters: is required"),
        (
            HfGenerateRequest,
            {"inputs": "a", "parameters": {"watermark": True}},
            "parameters.watermark: true is not supported",
        ),
        (
            HfGenerateRequest,
            {"inputs": "a", "parameters": {"best_of": 0}},
            "parameters.best_of: must be between 1 and 128",
        ),
    ],
)
def test_invalid_fields_are_rejected_by_name(kind: Any, body: Any, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        kind.read(body)
    assert said in caught.value.message


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"candidate_labels": []}, "parameters.candidate_labels: must be 1 to 100 labels, got 0"),
        ({"candidate_labels": " , "}, "parameters.candidate_labels: must be 1 to 100 labels, got 0"),
        ({"candidate_labels": ["a"] * 101}, "parameters.candidate_labels: must be 1 to 100 labels, got more"),
        ({"candidate_labels": "a," * 9999}, "parameters.candidate_labels: must be 1 to 100 labels, got more"),
        ({"candidate_labels": "a" * 257}, "parameters.candidate_labels: each must have at most 256 characters"),
        ({"candidate_labels": "a", "hypothesis_template": "This."}, "parameters.hypothesis_template: must have a {}"),
        ({"candidate_labels": "a", "hypothesis_template": "{0}"}, "parameters.hypothesis_template: must have a {}"),
        (
            {"candidate_labels": "a", "hypothesis_template": "{}" * 501},
            "parameters.hypothesis_template: must have at most",
        ),
        ({"candidate_labels": ["a"] * 9}, "inputs: 1 texts with 9 labels are 9 pairs, at most 8 a call"),
    ],
)
def test_labels_and_templates_are_bounded(app: FastAPI, parameters: Any, said: str) -> None:
    assert refused(app, "/models/org/nli", {"inputs": "a", "parameters": parameters}).startswith(said)


def test_pairs_are_counted_before_any_is_made(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(*given: Any) -> str:
        raise AssertionError("a hypothesis is made of a call that is refused")

    monkeypatch.setattr(zero_shot, "fill_hypothesis", made)
    body = {"inputs": ["a"] * 100_000, "parameters": {"candidate_labels": [str(name) for name in range(100)]}}
    said = "inputs: 100000 texts with 100 labels are 10000000 pairs, at most 8 a call"
    assert refused(app, "/models/org/nli", body).startswith(said)


def test_choices_are_compared_with_each_other(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    """Each text has an answer of its own; equal choices have equal scores and keep their order."""
    two = [{"text": "a film", "choices": ["dull", "long", "dull"]}, {"text": "a fox", "choices": ["jumps"]}]
    single, several = ask(
        app,
        ("/models/chooser", {"inputs": two[0]}),
        ("/models/chooser/pipeline/multiple-choice", {"inputs": two}),
    )
    chooser = next(each for each in models if each.task == "choose")
    pairs = [(each["text"], choice) for each in two[:1] for choice in each["choices"]]
    scores = np.array([sum(each.ids) % 97 for each in chooser.tokenizer.encode_batch(pairs)], np.float64)
    shares = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    order = np.argsort(-shares, kind="stable").tolist()
    assert single.json() == [{"index": index, "score": pytest.approx(shares[index])} for index in order]
    assert several.json() == [single.json(), [{"index": 0, "score": 1.0}]]
    assert [request.tokens for request in registry.requests][:3] == [
        tuple(each.ids) for each in chooser.tokenizer.encode_batch(pairs)
    ]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"inputs": "a"}, 'inputs: must be {"text", "choices"} or a list of such'),
        ({"inputs": {"text": "a", "choices": []}}, "inputs"),
        ({"inputs": {"text": "a", "choices": [""]}}, "inputs"),
        ({"inputs": {"text": "a", "choices": ["b"] * 101}}, "inputs"),
        (
            {"inputs": {"text": "a", "choices": ["b"] * 9}},
            "inputs: the texts have 9 choices together, at most 8 a call",
        ),
    ],
)
def test_choices_are_bounded(app: FastAPI, body: Any, said: str) -> None:
    assert refused(app, "/models/chooser", body).startswith(said)


def test_one_invalid_choice_fails_its_text_alone(app: FastAPI) -> None:
    long = {"text": "a", "choices": ["b", "film " * 900]}
    (answer,) = ask(app, ("/models/chooser", {"inputs": [long, {"text": "a", "choices": ["b"]}], "partial": True}))
    first, second = answer.json()
    assert first["index"] == 0
    assert "inputs[0].choices[1]" in first["error"]
    assert second == [{"index": 0, "score": 1.0}]


def test_a_long_unknown_name_gets_no_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(dialect, "get_close_matches", lambda name, *_, **__: compared.append(name) or [])
    with pytest.raises(BadRequest, match=r"^aaa.*: is not a known field$"):
        ClassifyRequest.read({"inputs": "a", "a" * 8_000_000: 1})
    assert not compared
    with pytest.raises(BadRequest):
        ClassifyRequest.read({"inputs": "a", "a" * 100: 1})
    assert compared == ["a" * 100]


def test_a_hypothesis_template_is_not_executed(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    parameters = {"candidate_labels": "{0.__class__}", "hypothesis_template": "{!r} fox {}"}
    ask(app, ("/models/org/nli", {"inputs": "dog", "parameters": parameters}))
    (encoding,) = models[1].tokenizer.encode_batch([("dog", "{!r} fox {0.__class__}")])
    assert registry.requests[0].tokens == tuple(encoding.ids)


def test_the_entailment_label_is_found(models: list[Model]) -> None:
    logits = np.array([[1.0, 0.0, 3.0], [2.0, 9.0, 1.0]])
    assert replace(models[1], labels=("no", "maybe", "Entailment")).entailment_label == 2
    assert replace(models[1], labels=LABELS).entailment_label is None
    one, two = zero_shot.class_probabilities(logits, 2, several=True)
    assert (one, two) == pytest.approx((1 / (1 + np.exp(-2)), 1 / (1 + np.exp(1))))
    assert sum(zero_shot.class_probabilities(logits, 2, several=False)) == pytest.approx(1)
    assert zero_shot.class_probabilities(logits[:1], 0, several=False) == pytest.approx([1 / (1 + np.exp(2))])


# Generation


def test_stop_strings_length_and_the_end(app: FastAPI, models: list[Model]) -> None:
    asked = {"inputs": "The quick fox", "parameters": {"details": True}}
    end, cut, long = ask(
        app,
        ("/models/talker", asked),
        ("/models/talker", {**asked, "parameters": {"details": True, "stop": ["fox"], "return_full_text": True}}),
        ("/models/talker", {**asked, "parameters": {"details": True, "max_new_tokens": 2}}),
    )
    reasons = [answer.json()[0]["details"]["finish_reason"] for answer in (end, cut, long)]
    assert reasons == ["eos_token", "stop_sequence", "length"]
    assert cut.json()[0]["generated_text"] == "The quick foxThe quick fox"
    for answer in (end, long):
        [found] = answer.json()
        assert "".join(token["text"] for token in found["details"]["tokens"]) == found["generated_text"]
    assert refused(app, "/models/talker", {"inputs": "a", "parameters": {"max_new_tokens": 100}}).startswith(
        "parameters.max_new_tokens: the prompt has"
    )
    assert refused(app, "/models/talker", {"inputs": ["a"], "stream": True}).startswith("stream: only for one text")
    (several,) = ask(app, ("/models/talker", {"inputs": ["The fox", "a"]}))
    assert [[one["generated_text"] for one in each] for each in several.json()] == [["The fox"], ["a"]]


def test_an_error_in_a_stream_is_its_last_event(models: list[Model]) -> None:
    def broken(model: Model, request: Request) -> Any:
        yield from token_events("fox", model.tokenizer)
        yield Failed(StepFailed("the step failed"))

    (answer,) = ask(application(Registry(models, broken)), ("/models/talker", {"inputs": "a", "stream": True}))
    events = [orjson.loads(line.removeprefix("data:")) for line in answer.text.split("\n\n") if line]
    assert answer.status_code == 200
    assert events[-1] == {"error": "the step failed", "error_type": "generation"}
    assert events[0]["token"]["text"]


def test_a_client_that_leaves_frees_what_it_held(models: list[Model]) -> None:
    def endless(model: Model, request: Request) -> Any:
        yield from token_events("fox", model.tokenizer)
        yield WAIT
        yield Done("stop", 1)

    registry = Registry(models, endless)

    async def run() -> None:
        connection = Connection("/models/talker", orjson.dumps({"inputs": "a", "stream": True}))
        task = asyncio.create_task(connection.run(application(registry)))
        await until(lambda: b"data:" in connection.body)
        connection.drop()
        await task

    asyncio.run(run())
    assert [source.aborted for source in registry.sources] == [True]
    assert isinstance(registry.requests[0], Generate)


def test_each_token_has_its_part_of_the_text() -> None:
    drawn = [TokenLogprobs(ScoredToken(b"", 0), offset, (), id) for id, offset in enumerate((3, 5, 5, 6))]
    assert [text for _, text in split_text(drawn, 3, "abcde")] == ["ab", "", "c", "de"]
    assert [text for _, text in split_text(drawn[1:], 4, "bcde")] == ["b", "c", "de"]
    assert split_text([], 0, "x") == []


def test_text_without_a_token_is_sent_with_the_next_token(models: list[Model]) -> None:
    """Text that might begin a stop string is sent later than its token."""

    async def pieces() -> AsyncGenerator[tuple[int, AnswerDelta], None]:
        yield 0, AnswerDelta(text_parts("x"), (TokenLogprobs(ScoredToken(b"xab", 0), 0, (), 5),))
        yield 0, AnswerDelta(text_parts("ab"))
        yield 0, AnswerDelta(text_parts("c"), (TokenLogprobs(ScoredToken(b"c", 0), 3, (), 6),))
        yield 0, AnswerDelta(text_parts("d"))
        yield 0, AnswerDelta(finish="length")

    async def events_of() -> list[Any]:
        return [each async for each in stream_events(GenerateParameters(), models[-1], "a", cast(Any, pieces()), 0)]

    events = asyncio.run(events_of())
    assert [event["token"]["text"] for event in events] == ["x", "abc", "d"]
    assert [event["token"]["special"] for event in events] == [False, False, True]
    assert events[-1]["generated_text"] == "xabcd"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("x"), "validation"),
        (Overloaded("x"), "overloaded"),
        (StepFailed("x"), "generation"),
        (Expired("x"), "generation"),
        (NotFound("x"), None),
        (Unauthorized("x"), None),
    ],
)
def test_errors(error: PolyheadError, kind: str | None) -> None:
    assert write_hf_error(error) == {"error": "x"} | ({"error_type": kind} if kind else {})


def test_the_first_token_of_a_text_has_index_1() -> None:
    assert findings.write_entity(Entity("PER", 0.5, "a", 0, 1, index=0))["index"] == 0
    assert "index" not in findings.write_entity(Entity("PER", 0.5, "a", 0, 1))

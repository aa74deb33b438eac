"""The dialect of text-embeddings-inference with scripted models."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi import FastAPI

from polyhead.models.core.late_interaction import LateInteraction, TextRole
from polyhead.models.tokenizer import Encoding
from polyhead.service.api.dialects.tei import routes as tei
from polyhead.service.api.dialects.tei.routes import DIALECT
from polyhead.service.api.dialects.tei.wire import (
    DecodeRequest,
    EmbedAllRequest,
    EmbedRequest,
    EmbedSparseRequest,
    PredictRequest,
    SimilarityRequest,
    TeiRerankRequest,
    TokenizeRequest,
    read_embed,
    read_predict,
    read_rerank_pairs,
)
from polyhead.service.api.dialects.tei.write import write_ranks, write_tei_error
from polyhead.service.api.shared.pipeline_outputs import rank_labels
from polyhead.service.core.errors import (
    BadRequest,
    EmptyInput,
    Expired,
    NotFound,
    Overloaded,
    PolyheadError,
    StepFailed,
    TooLong,
    TooMany,
    Unavailable,
    WrongTask,
)
from polyhead.service.core.model import Model
from polyhead.service.core.request import Encode, Failed
from polyhead.service.resources.request_memory import MIN_REQUEST_BYTES, UNBOUNDED_HEADROOM
from polyhead.service.text import tokenization
from tests.service.api.test_app import call
from tests.support.scripted import WAIT, Connection, Registry, application, ask, echo, model, numbers, states, until

PREDICT = {"inputs": "a good film"}
EMBED = {"inputs": "a good film"}
RERANK = {"query": "a film", "texts": ["a good film", "the quick brown fox", "bad"]}
WIRES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/predict": (PredictRequest, PREDICT),
    "/embed": (EmbedRequest, EMBED),
    "/rerank": (TeiRerankRequest, RERANK),
    "/tokenize": (TokenizeRequest, {"inputs": "a good film"}),
    "/similarity": (SimilarityRequest, {"inputs": {"source_sentence": "a", "sentences": ["a film", "bad"]}}),
    "/decode": (DecodeRequest, {"ids": [5, 6]}),
    "/embed_all": (EmbedAllRequest, EMBED),
    "/embed_sparse": (EmbedSparseRequest, EMBED),
}
VECTORS = "/models/org/vectors:v1"


@pytest.fixture(scope="module")
def models(tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path, tiny_generator: Path) -> list[Model]:
    return [
        model(tiny_classifier, "judge", "classify", labels=("bad", "so-so", "good")),
        model(tiny_embedder, "org/vectors:v1", "embed"),
        model(tiny_ranker, "ranker", "rank", labels=("LABEL_0",)),
        model(tiny_generator, "talker", "generate"),
    ]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def asked(registry: Registry) -> list[Encode]:
    return [request for request in registry.requests if isinstance(request, Encode)]


# Reading requests


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ("a",)),
        (["a"], ("a",)),
        (["a", "b"], (("a", "b"),)),
        ([["a"], ["b", "c"], ["d"]], ("a", ("b", "c"), "d")),
        ([], ()),
    ],
)
def test_texts_and_pairs(given: Any, inputs: Any) -> None:
    asked = read_predict(PredictRequest.read({"inputs": given, "raw_scores": True}))
    assert (asked.inputs, asked.raw, asked.truncate) == (inputs, True, "")


@pytest.mark.parametrize("given", [["a", "b", "c"], [["a", "b", "c"]], [[]], ["a", ["b"]], [1], 1, None, {}, [[1]]])
def test_invalid_inputs_are_rejected(given: Any) -> None:
    with pytest.raises(BadRequest, match=r"inputs: (is required|must be a string, a pair of strings, or a list of)"):
        PredictRequest.read({"inputs": given})


def test_embed_reads_texts_and_ids_and_normalises_by_default() -> None:
    asked = read_embed(EmbedRequest.read({"inputs": ["a", [1, 2]], "dimensions": 2}))
    assert (asked.inputs, asked.raw, asked.dimensions) == (("a", (1, 2)), False, 2)
    assert read_embed(EmbedRequest.read({"inputs": [1, 2]})).inputs == ((1, 2),)
    assert read_embed(EmbedRequest.read({"inputs": "a", "normalize": False})).raw


@pytest.mark.parametrize(
    ("change", "side"),
    [
        ({}, ""),
        ({"truncation_direction": "left"}, ""),
        ({"truncate": True}, "right"),
        ({"truncate": True, "truncation_direction": "Left"}, "left"),
        ({"truncate": True, "truncation_direction": "right"}, "right"),
        ({"truncate": None}, ""),
    ],
)
def test_texts_are_truncated_only_on_request(change: Any, side: str) -> None:
    assert read_rerank_pairs(TeiRerankRequest.read(RERANK | change)).truncate == side
    assert read_predict(PredictRequest.read(PREDICT | change)).truncate == side
    assert read_embed(EmbedRequest.read(EMBED | change)).truncate == side


def test_other_fields_are_refused_by_name() -> None:
    assert PredictRequest.read(PREDICT | {"parameters": {}}) == PredictRequest.read(PREDICT)
    for kind, valid, change in [
        (PredictRequest, PREDICT, {"parameters": {"top_k": 1}}),
        (EmbedRequest, EMBED, {"encoding_format": "base64"}),
        (TokenizeRequest, EMBED, {"prompt_name": "query"}),
    ]:
        with pytest.raises(BadRequest, match=f"{next(iter(change))}: .* is not supported"):
            kind.read(valid | change)
    with pytest.raises(BadRequest, match="model: is not a field of this route; the model is named in the path"):
        PredictRequest.read(PREDICT | {"model": "judge"})


# Writing answers


def test_predict_one_and_several(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    one, pair, several = ask(
        app,
        ("/models/judge/predict", PREDICT),
        ("/models/judge/predict", {"inputs": ["a", "film"]}),
        ("/models/judge/predict", {"inputs": [["a good film"], ["a", "film"]], "raw_scores": True}),
    )
    requests = asked(registry)
    expected = [list(rank_labels(models[0].labels, numbers(models[0], request))) for request in requests]
    assert one.json() == expected[0]
    assert pair.json() == expected[1]
    assert several.json() == [expected[2], expected[3]] == [one.json(), pair.json()]
    assert [request.raw for request in requests] == [False, False, True, True]
    assert set(requests[1].segments) == {0, 1}


def test_predictions_are_sorted_and_name_their_labels() -> None:
    assert list(rank_labels(("bad", "so-so", "good"), [0.25, 0.125, 0.625])) == [
        {"score": 0.625, "label": "good"},
        {"score": 0.25, "label": "bad"},
        {"score": 0.125, "label": "so-so"},
    ]


def test_embed(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    (response,) = ask(app, ("/embed", {"inputs": ["a good film", "bad", [2, 3]], "dimensions": 2}))
    assert response.json() == [numbers(models[1], request) for request in asked(registry)]
    assert [len(vector) for vector in response.json()] == [2, 2, 2]


def test_rerank(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    plain, texts = ask(app, ("/rerank", RERANK), ("/rerank", RERANK | {"return_text": True}))
    scores = [numbers(models[2], request)[0] for request in asked(registry)[:3]]
    expected = sorted(range(3), key=lambda index: -scores[index])
    assert plain.json() == [{"index": index, "score": scores[index]} for index in expected]
    assert [rank["text"] for rank in texts.json()] == [RERANK["texts"][index] for index in expected]
    (encoding,) = models[2].tokenizer.encode_batch([("a film", "a good film")])
    assert asked(registry)[0].tokens == tuple(encoding.ids)


def test_equal_scores_keep_their_order() -> None:
    assert [rank["index"] for rank in write_ranks(TeiRerankRequest.read(RERANK), [0.5, 0.75, 0.5])] == [1, 0, 2]


def test_memory_is_claimed_before_a_list_of_tokens_is_written(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_free_bytes", 0)
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_reserved", 0)  # guides of other tests may be kept in caches
    monkeypatch.setattr(tei, "TOKEN_ENTRY_BYTES", MIN_REQUEST_BYTES // 4)
    body = {"inputs": ["a good film"] * 2}
    [answer] = ask(app, ("/models/judge/tokenize", body))
    assert answer.status_code == 413
    assert "the list of tokens takes about" in answer.text
    monkeypatch.setattr(tei, "TOKEN_ENTRY_BYTES", 1)
    assert ask(app, ("/models/judge/tokenize", body))[0].status_code == 200


def test_memory_is_claimed_for_names_of_special_tokens(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token's name may be much longer than the text of the token."""
    body = {"inputs": ["a good film"] * 2}
    monkeypatch.setattr(Encoding, "pieces", None)
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_free_bytes", 0)
    monkeypatch.setattr(UNBOUNDED_HEADROOM, "_reserved", 0)  # guides of other tests may be kept in caches
    assert ask(app, ("/models/judge/tokenize", body))[0].status_code == 200
    monkeypatch.setattr(tokenization, "BYTES_PER_WRITTEN_BYTE", MIN_REQUEST_BYTES)
    [answer] = ask(app, ("/models/judge/tokenize", body))
    assert answer.status_code == 413
    assert "inputs: the names of its 2 tokens, 10 bytes, takes about" in answer.text


def test_tokenize_counts_bytes(app: FastAPI, models: list[Model]) -> None:
    text = "naïve café, good"
    one, several, bare = ask(
        app,
        ("/models/judge/tokenize", {"inputs": text}),
        ("/models/judge/tokenize", {"inputs": [text, "a"]}),
        ("/models/judge/tokenize", {"inputs": text, "add_special_tokens": False}),
    )
    (tokens,) = one.json()
    assert [token["id"] for token in tokens] == models[0].tokenizer.encode(text).ids
    assert tokens[0] == {"id": 2, "text": "[CLS]", "special": True, "start": None, "stop": None}
    for token in tokens[1:-1]:
        assert not token["special"]
        assert text.encode()[token["start"] : token["stop"]].decode() == token["text"]
    assert tokens[-2]["stop"] == len(text.encode())
    assert several.json()[0] == tokens
    assert len(several.json()) == 2
    assert bare.json() == [tokens[1:-1]]


def test_info(app: FastAPI) -> None:
    judge, vectors, ranker, talker = (
        response.json()
        for response in ask(
            app,
            *((f"/models/{name}/info", None) for name in ("judge", "org/vectors:v1", "ranker", "talker")),
        )
    )
    assert judge["model_type"]["classifier"]["id2label"] == {"0": "bad", "1": "so-so", "2": "good"}
    assert judge["model_type"]["classifier"]["label2id"]["good"] == 2
    assert (judge["served_model_name"], judge["model_dtype"], judge["max_input_length"]) == ("judge", "float32", 64)
    assert "embedding" in vectors["model_type"]
    assert "reranker" in ranker["model_type"]
    assert talker["served_model_name"] == "talker"


def test_a_model_that_compares_vectors_ranks_by_them(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    (response,) = ask(app, (f"{VECTORS}/rerank", RERANK))
    query, *texts = (np.array(numbers(models[1], request)) for request in asked(registry))
    assert all(request.unit for request in asked(registry))
    cosines = [float(query @ text) for text in texts]
    order = sorted(range(3), key=lambda index: -cosines[index])
    assert response.json() == [{"index": index, "score": pytest.approx(cosines[index], rel=1e-6)} for index in order]
    similar, empty = ask(
        app,
        ("/similarity", {"inputs": {"source_sentence": RERANK["query"], "sentences": RERANK["texts"]}}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", ""]}}),
    )
    assert similar.json() == pytest.approx(cosines, rel=1e-6)
    assert (empty.status_code, empty.json()["error_type"]) == (400, "Empty")
    assert empty.json()["error"].startswith("inputs.sentences[1]: is empty")


def test_a_vector_for_each_token(app: FastAPI, registry: Registry) -> None:
    (response,) = ask(app, ("/embed_all", {"inputs": ["a good film", [5]]}))
    lengths = [len(request.tokens) for request in asked(registry)]
    assert response.json() == [[[1.0, 2.0]] * length for length in lengths]
    assert [request.form for request in asked(registry)] == ["tokens"] * 2


def test_rerank_in_the_shape_of_cohere_and_jina(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    wire = {"model": "ranker", "query": "a film", "documents": ["a good film", {"text": "the fox"}, "bad"], "top_n": 2}
    plain, with_documents, none, other = ask(
        app,
        ("/v1/rerank", wire),
        ("/v1/rerank", wire | {"return_documents": True, "model": "org/vectors:v1"}),
        ("/v1/rerank", wire | {"documents": []}),
        ("/v1/rerank", wire | {"model": "judge"}),
    )
    scores = [numbers(models[2], request)[0] for request in asked(registry)[:3]]
    order = sorted(range(3), key=lambda index: -scores[index])[:2]
    assert plain.json()["results"] == [{"index": index, "relevance_score": scores[index]} for index in order]
    assert plain.json()["usage"]["total_tokens"] == sum(len(request.tokens) for request in asked(registry)[:3])
    texts = ["a good film", "the fox", "bad"]
    assert [each["document"]["text"] for each in with_documents.json()["results"]] == [
        texts[each["index"]] for each in with_documents.json()["results"]
    ]
    assert (none.status_code, none.json()["message"]) == (400, "documents: must not be empty")
    assert other.status_code == 400
    assert other.json()["detail"] == "judge cannot do that; models that can: org/vectors:v1, ranker"


def test_tokens_become_texts_again(app: FastAPI, models: list[Model]) -> None:
    ids = models[0].tokenizer.encode("a good film").ids
    one, several, whole, strange = ask(
        app,
        ("/models/judge/decode", {"ids": ids}),
        ("/models/judge/decode", {"ids": [ids, ids[1:2]]}),
        ("/models/judge/decode", {"ids": ids, "skip_special_tokens": False}),
        ("/models/judge/decode", {"ids": [[5], [10**6]]}),
    )
    assert (one.json(), several.json()) == (["a good film"], ["a good film", "a"])
    assert whole.json() == ["[CLS] a good film [SEP]"]
    assert (strange.status_code, strange.json()["error"][:8]) == (422, "ids[1]: ")


# Many texts


def test_a_line_is_sent_for_each_text_when_it_is_computed(app: FastAPI, registry: Registry) -> None:
    texts = [f"a good film {number}" for number in range(200)]
    whole = call(app, "POST", "/embed", json={"inputs": texts}).json()
    lines = call(app, "POST", "/embed", json={"inputs": texts}, headers={"Accept": "application/x-ndjson"})
    assert lines.headers["content-type"] == "application/x-ndjson"
    said = [json.loads(line) for line in lines.text.splitlines()]
    assert said == [{"index": index, "result": vector} for index, vector in enumerate(whole)]


def test_an_error_before_the_first_line_has_its_status_and_one_after_it_ends_the_lines(models: list[Model]) -> None:
    def failing(model: Model, request: Any) -> Any:
        return [Failed(StepFailed("broke"))] if len(request.tokens) > 5 else echo(model, request)

    headers = {"Accept": "application/x-ndjson"}
    app = application(Registry(models, failing))
    first = call(app, "POST", "/embed", json={"inputs": ["a good film of old", "a"]}, headers=headers)
    assert (first.status_code, first.json()["error_type"]) == (424, "Backend")
    later = call(app, "POST", "/embed", json={"inputs": ["a", "a good film of old", "a"]}, headers=headers)
    lines = [json.loads(line) for line in later.text.splitlines()]
    assert (lines[0]["index"], lines[1:]) == (0, [{"error": "broke", "error_type": "Backend"}])
    partial = {"inputs": ["a", "a good film of old", "", "a"], "partial": True}
    lines = [json.loads(line) for line in call(app, "POST", "/embed", json=partial, headers=headers).text.splitlines()]
    assert lines[1] == {"index": 1, "error": "broke", "error_type": "Backend"}
    assert lines[2]["error"].startswith("inputs[2]: is empty")
    assert lines[3]["result"] == lines[0]["result"]


def test_one_bad_text_costs_only_itself(app: FastAPI) -> None:
    texts = [["a good film"], [""], ["a " * 99], ["a", "film"]]
    strict, partial = ask(
        app,
        ("/models/judge/predict", {"inputs": texts}),
        ("/models/judge/predict", {"inputs": texts, "partial": True}),
    )
    assert (strict.status_code, strict.json()["error"][:20]) == (400, "inputs[1]: is empty,")
    good, empty, long, pair = partial.json()
    assert {each["label"] for each in good} == {each["label"] for each in pair} == {"bad", "so-so", "good"}
    assert (empty["index"], empty["error_type"], long["index"], long["error_type"]) == (1, "Empty", 2, "Validation")


# Paths


def test_names_with_slashes_and_colons(app: FastAPI, models: list[Model]) -> None:
    for path in ("/models/org/vectors:v1/embed", "/models/org%2Fvectors%3Av1/embed"):
        (response,) = ask(app, (path, EMBED))
        assert response.status_code == 200, path
    (response,) = ask(app, ("/models/nobody/embed", EMBED))
    assert (response.status_code, response.json()["error_type"]) == (404, "Validation")
    assert "nobody" in response.json()["error"]


def test_the_root_is_for_the_only_model_that_fits(models: list[Model], app: FastAPI) -> None:
    embedded, predicted, informed, tokenized = ask(
        app, ("/embed", EMBED), ("/predict", PREDICT), ("/info", None), ("/tokenize", EMBED)
    )
    assert embedded.status_code == 200
    for response in (predicted, informed, tokenized):  # a classifier and a ranker; three encoders
        assert response.status_code == 400
        assert "/models/NAME/...: judge, " in response.json()["error"]
    for alone in (models[0], models[3]):
        single = application(Registry([alone], echo))
        for response in ask(single, ("/info", None), ("/tokenize", EMBED)):
            assert response.status_code == 200
    both = application(Registry([models[3], models[0]], echo))
    informed, tokenized = ask(both, ("/info", None), ("/tokenize", {"inputs": "a"}))
    assert informed.json()["served_model_name"] == "judge"
    assert tokenized.json()[0][0]["text"] == "[CLS]"


def test_paths_of_the_dialect() -> None:
    for path in ("/predict", "/embed", "/models/a/b/predict", "/info"):
        assert DIALECT.matches(path)
    for path in ("/", "/embedding", "/v1/models", "/models", "/models/a", "/models/a/predict/b", "/modelsx"):
        assert not DIALECT.matches(path)


# Errors


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("no"), 400, "Validation"),
        (BadRequest("no", param="inputs"), 422, "Validation"),
        (TooLong("no", param="inputs"), 413, "Validation"),
        (TooMany("no"), 413, "Validation"),
        (WrongTask("no", param="model"), 424, "Backend"),
        (EmptyInput("no", param="inputs"), 400, "Empty"),
        (NotFound("no"), 404, "Validation"),
        (Overloaded("no"), 429, "Overloaded"),
        (StepFailed("no"), 424, "Backend"),
        (Unavailable("no"), 503, "Unhealthy"),
        (Expired("no"), 504, "Backend"),
    ],
)
def test_errors_in_the_shape_of_the_dialect(error: PolyheadError, status: int, kind: str) -> None:
    assert write_tei_error(error) == {"error": "no", "error_type": kind}
    assert DIALECT.status(error) == status


@pytest.mark.parametrize(
    ("status", "path", "wire", "said"),
    [
        (
            413,
            "/models/judge/predict",
            {"inputs": "a " * 99},
            "inputs: the input has 101 tokens. This model's maximum context length is 64",
        ),
        (413, "/models/judge/predict", {"inputs": [["a"], ["a " * 99]]}, "inputs[1]: the input has 101 tokens"),
        (400, "/models/judge/predict", {"inputs": ""}, "inputs: is empty"),
        (400, "/models/judge/predict", {"inputs": []}, "inputs: must not be empty"),
        (413, "/models/judge/predict", {"inputs": [["a"]] * 9}, "inputs: at most 8 a call, got 9"),
        (422, "/models/judge/predict", {"inputs": "a", "foo": 1}, "foo: is not a known field"),
        (400, "/models/judge/predict", b'{"inputs": "\\udc00"}', "not valid JSON"),
        (424, "/models/judge/embed", EMBED, "judge cannot do that"),
        (422, "/embed", {"inputs": [10**6]}, "outside the vocabulary"),
        (422, "/embed", {"inputs": "a", "dimensions": 5}, "dimensions: org/vectors:v1 has 4, got 5"),
        (400, "/rerank", {"query": "a", "texts": []}, "texts: must not be empty"),
        (422, "/rerank", {"query": "", "texts": ["a"]}, "query: must have at least 1 character"),
        (422, "/rerank", {"query": "a", "texts": "b"}, "texts: must be a list"),
        (400, "/models/judge/tokenize", {"inputs": ["a", ""]}, "inputs[1]: is empty"),
        (400, "/models/judge/tokenize", {"inputs": []}, "inputs: must not be empty"),
    ],
)
def test_bad_requests(registry: Registry, status: int, path: str, wire: Any, said: str) -> None:
    (response,) = ask(application(registry, max_batch_texts=8), (path, wire))
    assert response.status_code == status
    assert said in response.json()["error"]
    assert response.json().keys() == {"error", "error_type"}
    assert not registry.requests


def test_a_text_that_is_too_long_is_truncated_on_request(app: FastAPI, registry: Registry) -> None:
    (response,) = ask(app, ("/models/judge/predict", {"inputs": "a " * 99, "truncate": True}))
    assert response.status_code == 200
    assert len(asked(registry)[0].tokens) == 64


NUMBERS = (-(1 << 63), -1, 0, 1, 1 << 31, 1 << 63, 1e308, 0.5, "1", None, True, [], {})


def fields() -> Iterator[tuple[str, dict[str, Any]]]:
    for path, (kind, valid) in WIRES.items():
        where = f"/models/judge{path}" if path in ("/predict", "/tokenize", "/decode") else path
        for name in (*kind.model_fields, *kind.unsupported):
            for value in NUMBERS:
                yield where, valid | {name: value}


def test_no_value_of_a_numeric_field_causes_a_server_error(app: FastAPI) -> None:
    calls = list(fields())
    for sent, response in zip(calls, ask(app, *calls), strict=True):
        assert response.status_code == 200 or 400 <= response.status_code < 500, sent
        if response.status_code != 200:
            assert response.json()["error"], sent


def test_a_failed_step_fails_the_call(models: list[Model]) -> None:
    registry = Registry(models, lambda model, request: [Failed(StepFailed("broke"))])
    (response,) = ask(application(registry), ("/embed", EMBED))
    assert (response.status_code, response.json()) == (424, {"error": "broke", "error_type": "Backend"})


def test_a_client_that_disconnects_aborts_all_its_texts(models: list[Model]) -> None:
    registry = Registry(models, lambda model, request: [WAIT])

    async def leave() -> None:
        connection = Connection("/embed", json.dumps({"inputs": ["a", "good", "film"]}).encode())
        serving = asyncio.create_task(connection.run(application(registry)))
        await until(lambda: len(registry.sources) == 3)
        connection.drop()
        await asyncio.wait_for(serving, 120)
        assert [source.aborted for source in registry.sources] == [True] * 3

    asyncio.run(leave())


@pytest.fixture
def late_app(tiny_embedder: Path) -> tuple[FastAPI, Registry, Model]:
    """An application with a late-interaction model."""
    query = TextRole(prompt="", prefix=-1, max_tokens=12, expanded=12, skipped=frozenset())
    document = TextRole(prompt="", prefix=-1, max_tokens=30, expanded=0, skipped=frozenset())
    late = LateInteraction(query, document, expansion_token=4, hides_expansion=True, averages=False)
    served = model(tiny_embedder, "colbert", "embed", late=late)
    registry = Registry([served], echo)
    return application(registry), registry, served


def test_a_late_interaction_model_ranks_by_the_vectors_of_tokens(late_app: tuple[FastAPI, Registry, Model]) -> None:
    app, registry, served = late_app
    cohere = {"model": "colbert", "query": RERANK["query"], "documents": RERANK["texts"]}
    tei_answer, cohere_answer = ask(app, ("/rerank", RERANK), ("/v1/rerank", cohere))
    requests = asked(registry)[:4]
    assert [request.hidden for request in requests] == [12 - len(served.tokenizer.encode("a film").ids), 0, 0, 0]
    query, *documents = (np.array(states(request).scores) for request in requests)
    scores = [float((query @ document.T).max(axis=1).sum()) for document in documents]
    order = sorted(range(3), key=lambda index: -scores[index])
    found = tei_answer.json()
    assert [rank["index"] for rank in found] == order
    assert [rank["score"] for rank in found] == pytest.approx([scores[index] for index in order])
    results = cohere_answer.json()["results"]
    assert [each["relevance_score"] for each in results] == pytest.approx([scores[index] for index in order])
    assert cohere_answer.json()["usage"]["total_tokens"] == sum(len(request.tokens) for request in requests)


def test_roles_of_texts_of_a_late_interaction_model(late_app: tuple[FastAPI, Registry, Model]) -> None:
    app, registry, _ = late_app
    document, query, other, one = ask(
        app,
        ("/embed_all", {"inputs": "a film"}),
        ("/embed_all", {"inputs": ["a film"], "prompt_name": "query"}),
        ("/embed_all", {"inputs": "a film", "prompt_name": "title"}),
        ("/embed", {"inputs": "a film"}),
    )
    assert [len(answer.json()[0]) for answer in (document, query)] == [len(asked(registry)[0].tokens), 12]
    assert other.status_code == 422
    assert "prompt_name: should be query or document, got 'title'" in other.text
    assert one.status_code == 422
    assert "colbert has a vector for each token and none for a text; /embed_all returns them" in one.text

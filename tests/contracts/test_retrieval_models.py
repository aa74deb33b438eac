"""Models of retrieval on a real server: the answers are those of the packages that made their folders, which are
recorded in retrieval_answers.json."""

from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.support.processes import Process
from tests.support.retrieval_models import TEXTS, VARIANTS, read_answers

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folders = {name: make(tmp_path_factory.mktemp("retrieval") / name) for name, make in VARIANTS.items()}
    process = Process(*(f"{name}={folder}" for name, folder in folders.items()))
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def ask(server: Process, path: str, **body: Any) -> Any:
    reply = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def embed(server: Process, name: str, **options: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ask(server, "/v1/embeddings", model=name, input=list(TEXTS), **options)["data"]
    assert [each.pop("index") for each in found] == list(range(len(TEXTS)))
    assert {each.pop("object") for each in found} == {"embedding"}
    return found


def check_weights(found: list[dict[str, Any]], expected: list[list[float]]) -> None:
    assert [each["index"] for each in found] == [token for token, _ in expected]
    assert [each["value"] for each in found] == pytest.approx([weight for _, weight in expected], abs=TOLERANCE)


def test_one_request_has_three_outputs_of_m3(server: Process) -> None:
    found = embed(server, "m3", return_sparse=True, return_colbert_vecs=True)
    for each, expected in zip(found, read_answers()["m3"], strict=True):
        assert each.keys() == {"embedding", "sparse_embedding", "colbert_vecs"}
        assert each["embedding"] == pytest.approx(expected["dense"], abs=TOLERANCE)
        check_weights(each["sparse_embedding"], expected["sparse"])
        assert np.array(each["colbert_vecs"]) == pytest.approx(np.array(expected["colbert"]), abs=TOLERANCE)
    for options, field in (
        ({"return_sparse": True}, "sparse_embedding"),
        ({"return_colbert_vecs": True}, "colbert_vecs"),
    ):
        alone = embed(server, "m3", return_dense=False, **options)
        assert alone == [{field: each[field]} for each in found], "the same bits alone"
    assert embed(server, "m3") == [{"embedding": each["embedding"]} for each in found]
    weights = ask(server, "/models/m3/embed_sparse", inputs=list(TEXTS))
    assert weights == [each["sparse_embedding"] for each in found]
    vectors = ask(server, "/models/m3/embed_all", inputs=list(TEXTS))
    assert vectors == [each["colbert_vecs"] for each in found]


@pytest.mark.parametrize("name", ["model2vec", "shared-rows"])
def test_static_embeddings_are_those_of_model2vec(server: Process, name: str) -> None:
    found = [each["embedding"] for each in embed(server, name)]
    assert np.array(found) == pytest.approx(np.array(read_answers()[name]), abs=TOLERANCE)
    refused = httpx.post(f"{server.url}/models/{name}/embed", json={"inputs": "unknown words"}, timeout=60)
    assert (refused.status_code, refused.json()["error_type"]) == (400, "Empty")
    assert "has only words that the model skips" in refused.json()["error"]


def test_static_embeddings_are_those_of_sentence_transformers(server: Process) -> None:
    expected = read_answers()["static"]
    for role, options in (("plain", {}), ("query", {"input_type": "query"}), ("plain", {"input_type": "document"})):
        found = [each["embedding"] for each in embed(server, "static", **options)]
        assert np.array(found) == pytest.approx(np.array(expected[role]), abs=TOLERANCE)
    unknown = ask(server, "/models/static/embed", inputs="unknown words", normalize=False)
    assert len(unknown[0]) == len(expected["plain"][0]), "which it does not skip"


def test_weights_of_words_are_those_of_sentence_transformers(server: Process) -> None:
    found = embed(server, "splade", return_dense=False, return_sparse=True)
    for each, expected in zip(found, read_answers()["splade"], strict=True):
        check_weights(each["sparse_embedding"], expected)
    assert ask(server, "/models/splade/embed_sparse", inputs=list(TEXTS)) == [
        each["sparse_embedding"] for each in found
    ]


def test_queries_and_documents_go_their_own_ways(server: Process) -> None:
    expected = read_answers()["routed-splade"]
    for role in ("query", "document"):
        found = embed(server, "routed-splade", return_dense=False, return_sparse=True, input_type=role)
        for each, weights in zip(found, expected[role], strict=True):
            check_weights(each["sparse_embedding"], weights)
        same = ask(server, "/models/routed-splade/embed_sparse", inputs=list(TEXTS), prompt_name=role)
        assert same == [each["sparse_embedding"] for each in found]
    plain = ask(server, "/models/routed-splade/embed_sparse", inputs=list(TEXTS))
    assert plain == same, "without a role a text is a document"


def test_queries_have_a_network_of_their_own(server: Process) -> None:
    expected = {role: np.array(each) for role, each in read_answers()["asymmetric"].items()}
    for role, options in (
        ("query", {"input_type": "query"}),
        ("document", {"input_type": "document"}),
        ("document", {}),
    ):
        found = [each["embedding"] for each in embed(server, "asymmetric", **options)]
        assert np.array(found) == pytest.approx(expected[role], abs=TOLERANCE)
        alone = [
            ask(server, "/v1/embeddings", model="asymmetric", input=text, **options)["data"][0]["embedding"]
            for text in TEXTS
        ]
        assert alone == found, "the same bits"
        named = {"prompt_name": role} if options else {}
        again = ask(server, "/models/asymmetric/embed", inputs=list(TEXTS), normalize=role == "document", **named)
        assert np.array(again) == pytest.approx(expected[role], abs=TOLERANCE)
    ranked = ask(server, "/models/asymmetric/rerank", query=TEXTS[1], texts=list(TEXTS), raw_scores=True)
    query, documents = expected["query"][1], expected["document"]
    cosines = documents @ query / np.linalg.norm(query)
    assert [each["score"] for each in sorted(ranked, key=lambda each: each["index"])] == pytest.approx(
        cosines, abs=TOLERANCE
    )


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("static", {"return_sparse": True}, "input: static has no weights of words"),
        ("splade", {"return_dense": False, "return_colbert_vecs": True}, "input: splade has no vectors of tokens"),
        ("m3", {"return_dense": False}, "return_dense: false needs return_sparse: true or return_colbert_vecs: true"),
        ("m3", {"input_type": "title"}, "input_type: must be 'query', 'document' or 'passage'"),
    ],
)
def test_outputs_that_there_are_not(server: Process, name: str, options: dict[str, Any], problem: str) -> None:
    body = {"model": name, "input": "a", **options}
    reply = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=60)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]

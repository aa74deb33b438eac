"""Models that read labels beside a text, on a real server: the answers are those of the packages gliner and gliclass,
which are recorded in label_answers.json."""

from collections.abc import Iterator

import httpx
import pytest

from tests.support.label_models import SPAN_VARIANTS, TEXT_VARIANTS, TEXTS, make_variant, read_answers
from tests.support.processes import Process

TOLERANCE = 2e-5  # of a probability


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    names = (*SPAN_VARIANTS, *TEXT_VARIANTS)
    folders = {name: make_variant(name, tmp_path_factory.mktemp("labels") / name) for name in names}
    process = Process(*(f"{name}={folder}" for name, folder in folders.items()))
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.mark.parametrize("name", SPAN_VARIANTS)
def test_spans_are_those_of_gliner(server: Process, name: str) -> None:
    for row in read_answers()[name]:
        text = TEXTS[row["text"]]
        parameters = {
            "candidate_labels": row["labels"],
            "threshold": row["threshold"],
            "flat_ner": row["flat_ner"],
            "multi_label": row["multi_label"],
            "truncation": True,  # gliner reads the first words of a longer text
        }
        reply = httpx.post(f"{server.url}/models/{name}", json={"inputs": text, "parameters": parameters}, timeout=60)
        assert reply.status_code == 200, reply.text
        found = reply.json()
        places = sorted((each["start"], each["end"], each["entity_group"]) for each in found)
        assert places == sorted((start, end, label) for start, end, label, _ in row["answer"])
        scores = {(start, end, label): score for start, end, label, score in row["answer"]}
        for each in found:
            key = each["start"], each["end"], each["entity_group"]
            assert each["score"] == pytest.approx(scores[key], abs=TOLERANCE)
            assert each["word"] == text[each["start"] : each["end"]]


@pytest.mark.parametrize("name", TEXT_VARIANTS)
def test_scores_are_those_of_gliclass(server: Process, name: str) -> None:
    for row in read_answers()[name]:
        parameters = {"candidate_labels": row["labels"], "multi_label": row["multi_label"]}
        body = {"inputs": TEXTS[row["text"]], "parameters": parameters}
        reply = httpx.post(f"{server.url}/models/{name}", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found = {each["label"]: each["score"] for each in reply.json()}
        assert [found[label] for label in row["labels"]] == pytest.approx(row["answer"], abs=TOLERANCE)
        assert sorted(found.values(), reverse=True) == list(found.values())


def test_texts_of_a_batch_are_independent(server: Process) -> None:
    """Texts beside others get the same answers; an error is that of one text with `partial`."""
    parameters = {"candidate_labels": "person, animal", "threshold": 0.3}

    def ask(inputs: object, **others: object) -> httpx.Response:
        body = {"inputs": inputs, "parameters": parameters, **others}
        return httpx.post(f"{server.url}/models/spans-bert", json=body, timeout=60)

    texts = [TEXTS[0], TEXTS[1], "Marie was born in Paris", "a fox by the river"]
    assert ask(texts).json() == [ask(text).json() for text in texts]
    mixed = ask([TEXTS[1], " "], partial=True).json()
    assert mixed[0] == ask(TEXTS[1]).json()
    assert "is empty" in mixed[1]["error"]


@pytest.mark.parametrize(
    ("text", "options", "status", "words"),
    [
        (TEXTS[2], {}, 400, "has 450 words"),
        ("a", {"candidate_labels": ["<<ENT>>"]}, 400, "no label may have <<ENT>> in it"),
        ("a", {"candidate_labels": ","}, 400, "must be 1 to 100 labels"),
        ("a", {"threshold": 2}, 400, "parameters.threshold"),
        ("a", {"stride": 2}, 400, "parameters.stride: is not a known field"),
        ("a fox " * 190, {"candidate_labels": [f"x{n}" for n in range(100)], "threshold": 0}, 413, "65536 spans"),
        ("a", {"candidate_labels": ["fox " * 60 + str(n) for n in range(100)], "truncation": True}, 400, "have "),
    ],
)
def test_errors_name_the_field(server: Process, text: str, options: dict[str, object], status: int, words: str) -> None:
    body = {"inputs": text, "parameters": {"candidate_labels": ["fox"], **options}}
    reply = httpx.post(f"{server.url}/models/spans", json=body, timeout=60)
    assert (reply.status_code, words in reply.json()["error"]) == (status, True), reply.text


def test_other_routes_refuse_models_that_need_labels(server: Process) -> None:
    for path, body in (
        ("/v2/models/spans/infer", {"inputs": []}),
        ("/models/texts/pipeline/text-classification", {"inputs": "a"}),
        ("/models/texts", {"inputs": "a", "parameters": {"candidate_labels": ["b"], "hypothesis_template": "{}"}}),
        ("/models/texts", {"inputs": "a <<LABEL>> b", "parameters": {"candidate_labels": ["b"]}}),
        ("/models/texts", {"inputs": "a " * 1100, "parameters": {"candidate_labels": ["b"]}}),
        ("/models/spans", {"inputs": "a"}),
        ("/v1/explain", {"model": "spans", "input": "a"}),
    ):
        reply = httpx.post(server.url + path, json=body, timeout=60)
        assert reply.status_code in (400, 404), (path, reply.text)
    assert httpx.get(f"{server.url}/v2/models/spans/ready").json() == {"name": "spans", "ready": True}
    assert httpx.get(f"{server.url}/v2/models/spans").status_code == 400
    cut = {"inputs": "a " * 1100, "parameters": {"candidate_labels": ["b", "c"], "truncation": True}}
    assert len(httpx.post(f"{server.url}/models/texts", json=cut, timeout=60).json()) == 2
    assert httpx.get(f"{server.url}/v1/models/texts").json()["tasks"] == ["zero-shot-classification", "decisions"]

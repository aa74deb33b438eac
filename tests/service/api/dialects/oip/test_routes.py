"""The Open Inference Protocol: tensors in JSON and binary, with scripted models; Triton's client on a real server."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import transformers as tf
import tritonclient.http as triton
from fastapi import FastAPI
from tritonclient.utils import InferenceServerException

from polyhead.service.api.dialects.oip.tensors import (
    LENGTH_HEADER,
    InputTensor,
    OutputTensor,
    prefix_length,
    read_texts,
    write_tensors,
)
from polyhead.service.api.dialects.oip.wire import InferRequest
from polyhead.service.api.dialects.oip.write import class_bytes
from polyhead.service.core.errors import BadRequest
from polyhead.service.core.model import Model
from polyhead.service.core.request import Encode, Generate
from tests.service.api.access.test_auth import asked as asked_with
from tests.service.api.access.test_auth import bearer, keys_file
from tests.support import checkpoints
from tests.support.processes import Process
from tests.support.scripted import Registry, application, ask, echo, model, numbers

LABELS = ("bad", "so-so", "good")
TEXTS = ["a good film", "größer, 日本"]
KEY = "s3cret"
ADMIN = {"Authorization": f"Bearer {KEY}"}


def tensor(name: str = "text", data: Any = TEXTS, **others: Any) -> dict[str, Any]:
    return {"name": name, "datatype": "BYTES", "shape": [len(data)], "data": data, **others}


def asked(*inputs: dict[str, Any], **others: Any) -> dict[str, Any]:
    return {"inputs": list(inputs) or [tensor()], **others}


def outputs(answer: Any) -> dict[str, Any]:
    return {one["name"]: one for one in answer.json()["outputs"]}


@pytest.fixture(scope="module")
def models(tiny_classifier: Path, tiny_embedder: Path, tiny_ranker: Path, tiny_generator: Path) -> list[Model]:
    return [
        model(tiny_classifier, "judge", "classify", labels=LABELS),
        model(tiny_embedder, "org/vectors", "embed"),
        model(tiny_ranker, "ranker", "rank", labels=("LABEL_0",)),
        model(tiny_classifier, "reader", "span"),
        model(tiny_generator, "talker", "generate"),
    ]


@pytest.fixture
def registry(models: list[Model]) -> Registry:
    return Registry(models, echo)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry, max_batch_texts=8)


def refused(app: FastAPI, name: str, body: Any, status: int = 400) -> str:
    (answer,) = ask(app, (f"/v2/models/{name}/infer", body))
    assert answer.status_code == status, answer.text
    assert answer.json().keys() == {"error"}
    return str(answer.json()["error"])


# Classes, configuration and statistics


def test_classes_of_an_embedding_have_no_labels(app: FastAPI) -> None:
    wanted = [{"name": "embedding", "parameters": {"classification": 1000}}]
    classes, whole = ask(app, *(("/v2/models/org/vectors/infer", asked(**more)) for more in ({"outputs": wanted}, {})))
    [found], [numbers] = outputs(classes).values(), outputs(whole).values()
    assert (found["datatype"], found["shape"]) == ("BYTES", numbers["shape"])
    width = numbers["shape"][1]
    row = np.array(numbers["data"][:width])
    places = [int(text.split(":")[1]) for text in found["data"][:width]]
    assert row[places].tolist() == sorted(row.tolist(), reverse=True)


def test_classes_of_other_outputs_are_refused(app: FastAPI) -> None:
    for name, output, inputs in (
        ("judge", "label", [tensor()]),
        ("ranker", "score", [tensor(), tensor("text_pair")]),
        ("talker", "text", [tensor()]),
    ):
        wanted = [{"name": output, "parameters": {"classification": 1}}]
        said = "outputs[0].parameters.classification: only of an output with a row of numbers for each text"
        assert refused(app, name, asked(*inputs, outputs=wanted)) == said


def test_classes_are_claimed(models: list[Model]) -> None:
    wire = InferRequest.read(asked(outputs=[{"name": "probabilities", "parameters": {"classification": 9}}]))
    assert class_bytes(wire, models[0]) >= len(LABELS) * 64
    assert class_bytes(InferRequest.read(asked()), models[0]) == 0


def test_statistics_need_the_scope_of_metrics(models: list[Model], tmp_path: Path) -> None:
    keys = keys_file(tmp_path, reader={"scopes": ["models"]}, watcher={"scopes": ["models", "metrics"]})
    paths = ("/v2/models/stats", "/v2/models/judge/stats", "/v2/models/judge/config")
    for access, statuses in (("key", [403, 403, 200]), ("public", [200, 200, 200])):
        app = application(Registry(models, echo), keys_file=keys, metrics_access=access)
        for key, expected in (("reader", statuses), ("watcher", [200, 200, 200])):
            answers = asked_with(app, *(("GET", path, bearer(key)) for path in paths))
            assert [answer.status_code for answer in answers] == expected


# Tensors


def given(
    data: Any = None, raw: bytes | None = None, shape: tuple[int, ...] = (2,), datatype: str = "BYTES"
) -> InputTensor:
    return InputTensor("text", datatype, shape, data, raw)


RAW = b"".join(prefix_length(text.encode()) for text in TEXTS)


def test_strings_in_json_and_beside_it() -> None:
    assert RAW[:4] == bytes((11, 0, 0, 0))
    for shape in ((2,), (2, 1)):
        assert read_texts(given(TEXTS, shape=shape), 8) == TEXTS
        assert read_texts(given([[text] for text in TEXTS], shape=shape), 8) == TEXTS
        assert read_texts(given(raw=RAW, shape=shape), 8) == TEXTS


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (given(TEXTS, datatype="FP32"), 'text: datatype must be BYTES, got "FP32"'),
        (given(TEXTS, shape=()), "text: shape must be [N] or [N, 1], got []"),
        (given(TEXTS, shape=(1, 2)), "text: shape must be [N] or [N, 1], got [1,2]"),
        (given(TEXTS, shape=(9,)), "text: must be 1 to 8 texts, its shape says 9"),
        (given([], shape=(0,)), "text: must be 1 to 8 texts, its shape says 0"),
        (given(TEXTS, shape=(3,)), "text: shape says 3 texts, data has 2"),
        (given("ab"), "text: data must be a list"),
        (given(["a", 1]), "text[1]: must be a string, got 1"),
        (given(["a", ["b", "c"]]), 'text[1]: must be a string, got ["b","c"]'),
        (given(raw=RAW[:-1]), "text[1]: its binary data of "),
        (given(raw=b"\x01"), "text[0]: its binary data of 1 bytes end inside this text"),
        (given(raw=b"\xff\xff\xff\xffa"), "text[0]: its binary data of 5 bytes end"),
        (given(raw=RAW, shape=(1,)), "text: shape says 1 texts, 20 bytes are left"),
        (given(raw=prefix_length(b"a") + prefix_length(b"\xff")), "text[1]: is not UTF-8"),
    ],
)
def test_invalid_tensors_are_rejected(wrong: InputTensor, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        read_texts(wrong, 8)
    assert caught.value.message.startswith(said)


def test_outputs_in_json_and_beside_it() -> None:
    found = [OutputTensor("score", "FP32", (2,), [0.5, 2.0]), OutputTensor("label", "BYTES", (2,), ["é", ""])]
    body = write_tensors({"model_name": "m"}, found, frozenset(("score",)))
    content = b"".join(body.parts)
    head = json.loads(content[: body.json_bytes])
    assert head["outputs"][0] == {
        "name": "score",
        "datatype": "FP32",
        "shape": [2],
        "parameters": {"binary_data_size": 8},
    }
    assert head["outputs"][1]["data"] == ["é", ""]
    assert np.frombuffer(content[body.json_bytes :], "<f4").tolist() == [0.5, 2.0]
    assert write_tensors({}, found[1:], frozenset(("label",))).parts[-1] == b"\x02\0\0\0\xc3\xa9\0\0\0\0"


# Outputs of each head


def test_scores_vectors_and_text(app: FastAPI, registry: Registry, models: list[Model]) -> None:
    judged, pairs, ranked, vectors, said = ask(
        app,
        ("/v2/models/judge/infer", asked(id="7")),
        (
            "/v2/models/judge/versions/1/infer",
            asked(tensor(), tensor("text_pair", ["a", "b"]), parameters={"raw": True}),
        ),
        ("/v2/models/ranker/infer", asked(tensor("text_pair"), tensor("text", ["a", "b"]))),
        ("/v2/models/org/vectors/infer", asked(parameters={"dimensions": 2, "timeout": 5_000_000})),
        ("/v2/models/talker/infer", asked(parameters={"max_tokens": 3})),
    )
    requests = [request for request in registry.requests if isinstance(request, Encode)]
    expected = [numbers(models[0], request) for request in requests[:2]]
    found = outputs(judged)
    assert {key: judged.json()[key] for key in ("model_name", "model_version", "id")} == {
        "model_name": "judge",
        "model_version": "1",
        "id": "7",
    }
    assert found["probabilities"]["shape"] == [2, 3]
    assert found["probabilities"]["data"] == [value for row in expected for value in row]
    assert found["label"] == {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["bad", "bad"]}
    assert [request.raw for request in requests[:4]] == [False, False, True, True]
    assert set(requests[2].segments) == {0, 1}
    (encoding,) = models[2].tokenizer.encode_batch([("a", TEXTS[0])])
    assert requests[4].tokens == tuple(encoding.ids)
    assert outputs(ranked)["score"]["shape"] == [2]
    assert outputs(vectors)["embedding"]["shape"] == [2, 2]
    assert outputs(pairs).keys() == {"probabilities", "label"}
    generated = [request for request in registry.requests if isinstance(request, Generate)]
    assert [request.max_tokens for request in generated] == [3, 3]
    assert outputs(said)["finish_reason"]["data"] == ["length", "length"]


def test_only_requested_outputs_in_their_order(app: FastAPI) -> None:
    one, two = ask(
        app,
        ("/v2/models/judge/infer", asked(outputs=[{"name": "label"}])),
        ("/v2/models/judge/infer", asked(outputs=[{"name": "label"}, {"name": "probabilities"}])),
    )
    assert [each["name"] for each in one.json()["outputs"]] == ["label"]
    assert [each["name"] for each in two.json()["outputs"]] == ["label", "probabilities"]


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        ("judge", {"inputs": []}, "inputs: must have at least 1 item(s)"),
        ("judge", asked(tensor("txt")), "inputs: 'txt' is no input of this model; it takes text, text_pair"),
        ("judge", asked(tensor("text_pair")), "inputs: the tensor text is required"),
        ("judge", asked(tensor(), tensor()), "inputs: there are two tensors 'text'"),
        (
            "judge",
            asked(tensor(), tensor("text_pair", ["a"])),
            "inputs: must all have as many texts, text has 2, text_",
        ),
        ("judge", asked(outputs=[{"name": "score"}]), "outputs[0].name: judge has no output 'score'; it has prob"),
        ("judge", asked(parameters={"top_k": 3}), "parameters.top_k: is not a known field"),
        ("judge", asked(parameters={"sequence_id": 3}), "parameters.sequence_id: 3 is not supported"),
        (
            "judge",
            asked(tensor(parameters={"shared_memory_region": "a"})),
            "inputs[0].parameters.shared_memory_region: ",
        ),
        ("judge", asked(tensor(parameters={"binary_data_size": 3})), "text: has data and a binary_data_size"),
        ("judge", asked(tensor(data=["a", ""])), "text[1]: is empty"),
        ("judge", asked(outputs=[{"name": "label", "parameters": {"classification": 2}}]), "outputs[0].parameters.cl"),
        ("judge", asked(*[tensor()] * 9), "inputs: must have at most 8 items"),
        ("reader", asked(), "inputs: 'text' is no input of this model; it takes question, context"),
        ("reader", asked(tensor("question"), tensor("context", ["a", "film " * 99])), "context[1]: the input has"),
        ("talker", asked(parameters={"max_tokens": 999}), "parameters.max_tokens: the prompt has"),
    ],
)
def test_errors_name_the_tensor(app: FastAPI, registry: Registry, name: str, body: Any, said: str) -> None:
    assert refused(app, name, body).startswith(said)
    assert not registry.requests, "something was computed for it"


def test_the_length_of_binary_data_is_checked(app: FastAPI) -> None:
    head = json.dumps(asked({"name": "text", "datatype": "BYTES", "shape": [2], "parameters": {"binary_data_size": 9}}))

    async def post(body: bytes, length: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.post("/v2/models/judge/infer", content=body, headers={LENGTH_HEADER: length})

    def said(body: bytes, length: Any) -> str:
        answer = asyncio.run(post(body, str(length)))
        assert answer.status_code == 400
        return str(answer.json()["error"])

    full = head.encode() + RAW
    assert said(full, len(head)).startswith(f"inputs: their binary_data_size come to 9 bytes, {len(RAW)} follow")
    for length in (len(full) + 1, -1, "x", "9" * 60):
        assert said(full, length).startswith(f"{LENGTH_HEADER}: must be at most the {len(full)} bytes of the body")
    assert said(full, len(head) - 1).startswith("the body is not valid JSON")


def test_models_and_versions(app: FastAPI) -> None:
    server, live, ready, judge, there, other, nobody = ask(
        app,
        ("/v2", None),
        ("/v2/health/live", None),
        ("/v2/health/ready", None),
        ("/v2/models/org/vectors/versions/1", None),
        ("/v2/models/org/vectors/versions/1/ready", None),
        ("/v2/models/judge/versions/2", None),
        ("/v2/models/nobody/ready", None),
    )
    assert "model_repository" not in server.json()["extensions"]
    assert (live.json(), ready.json()) == ({"live": True}, {"ready": True})
    assert judge.json()["outputs"] == [{"name": "embedding", "datatype": "FP32", "shape": [-1, 4]}]
    assert there.json() == {"name": "org/vectors", "ready": True}
    assert (other.status_code, other.json()["error"]) == (404, "judge has version 1 only, got '2'")
    assert nobody.status_code == 404
    assert ask(app, ("/v2/repository/index", {}))[0].status_code == 404, "without the admin key"


# Triton's client


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_classifier: Path, tiny_generator: Path) -> dict[str, Path]:
    def made(name: str, kind: Any) -> Path:
        return checkpoints.encoder(tmp_path_factory.mktemp(name), kind)

    return {
        "judge": tiny_classifier,
        "tagger": made("tagger", tf.BertForTokenClassification),
        "reader": made("reader", tf.BertForQuestionAnswering),
        "filler": made("filler", tf.BertForMaskedLM),
        "chat": tiny_generator,
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Process]:
    named = (f"{name}={folder}" for name, folder in folders.items())
    process = Process(*named, "--executor", "torch", "--admin-key", KEY, "--drain-seconds", "0", "--model-root", "/")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def client(server: Process) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.url.removeprefix("http://"))


def column(name: str, values: list[str], *, binary: bool) -> triton.InferInput:
    made = triton.InferInput(name, [len(values)], "BYTES")
    made.set_data_from_numpy(np.array(values, dtype=np.object_), binary_data=binary)
    return made


def test_triton_reads_server_and_model_states(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("judge")
    assert client.is_model_ready("judge", "1")
    assert not client.is_model_ready("nobody")
    triton_has = ["classification", "generate", "model_configuration", "schedule_policy", "statistics"]
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data", *triton_has, "model_repository"]
    described = client.get_model_metadata("judge")
    assert [one["name"] for one in described["inputs"]] == ["text", "text_pair"]
    assert described["outputs"][0] == {"name": "probabilities", "datatype": "FP32", "shape": [-1, 3]}
    assert described["parameters"]["labels"] == list(checkpoints.LABELS)


@pytest.mark.parametrize("binary_in", [False, True])
@pytest.mark.parametrize("binary_out", [False, True])
def test_triton_infers(
    client: triton.InferenceServerClient, folders: dict[str, Path], binary_in: bool, binary_out: bool
) -> None:
    wanted = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("label", "probabilities")]
    result = client.infer("judge", [column("text", TEXTS, binary=binary_in)], outputs=wanted, request_id="a")
    reference = tf.pipeline("text-classification", model=str(folders["judge"]), device="cpu")
    probabilities = result.as_numpy("probabilities")
    assert probabilities.shape == (2, 3)
    for row, best, theirs in zip(probabilities, result.as_numpy("label"), reference(TEXTS, top_k=None), strict=True):
        assert (best.decode() if binary_out else best) == theirs[0]["label"]
        scores = {each["label"]: each["score"] for each in theirs}
        assert row.tolist() == pytest.approx([scores[label] for label in checkpoints.LABELS], abs=1e-4)
    assert result.get_response()["id"] == "a"


@pytest.mark.parametrize("binary_out", [False, True])
def test_triton_gets_classes(client: triton.InferenceServerClient, *, binary_out: bool) -> None:
    wanted = [
        triton.InferRequestedOutput("probabilities", binary_data=binary_out, class_count=2),
        triton.InferRequestedOutput("label", binary_data=binary_out),
    ]
    inputs = [column("text", TEXTS, binary=True)]
    result = client.infer("judge", inputs, outputs=wanted, priority=1)
    numbers = client.infer("judge", inputs).as_numpy("probabilities")
    classes, best = result.as_numpy("probabilities"), result.as_numpy("label")
    assert classes.shape == (2, 2)
    for row, texts, label in zip(numbers, classes, best, strict=True):
        order = row.argsort()[::-1][:2]
        said = [text.decode() if binary_out else text for text in texts]
        assert said == [f"{row[place]:f}:{place}:{checkpoints.LABELS[place]}" for place in order]
        assert said[0].endswith(label.decode() if binary_out else label)


def test_triton_reads_configuration_and_statistics(client: triton.InferenceServerClient) -> None:
    config = client.get_model_config("judge", "1")
    assert config["input"][0] == {"name": "text", "data_type": "TYPE_STRING", "dims": [-1]}
    assert config["output"][0] == {"name": "probabilities", "data_type": "TYPE_FP32", "dims": [-1, 3]}
    [before] = client.get_inference_statistics("judge")["model_stats"]
    client.infer("judge", [column("text", TEXTS, binary=True)])
    [after] = client.get_inference_statistics("judge", "1")["model_stats"]
    assert (after["name"], after["version"]) == ("judge", "1")
    assert after["inference_count"] == before["inference_count"] + len(TEXTS)
    assert after["execution_count"] > before["execution_count"]
    assert after["last_inference"] > before["last_inference"]
    stages = after["inference_stats"]
    for name in ("success", "queue", "compute_input", "compute_infer"):
        assert stages[name]["count"] > 0
        assert stages[name]["ns"] > 0
    assert {each["batch_size"] for each in after["batch_stats"]} <= {1, 2}
    every = {each["name"] for each in client.get_inference_statistics()["model_stats"]}
    assert {"judge", "tagger", "reader", "filler", "chat"} <= every


def test_triton_infers_entities_words_and_spans(client: triton.InferenceServerClient, folders: dict[str, Path]) -> None:
    def found(name: str, output: str, *columns: tuple[str, list[str]], **parameters: Any) -> list[Any]:
        inputs = [column(each, values, binary=True) for each, values in columns]
        array = client.infer(name, inputs, parameters=parameters).as_numpy(output)
        return [json.loads(each) for each in array]

    tags = tf.pipeline("token-classification", model=str(folders["tagger"]), device="cpu")
    entities = found("tagger", "entities", ("text", TEXTS), aggregation_strategy="simple")
    assert [[each["word"] for each in one] for one in entities] == [
        [each["word"] for each in one] for one in tags(TEXTS, aggregation_strategy="simple")
    ]
    masked = ["The quick [MASK] fox.", "a [MASK] film"]
    fill = tf.pipeline("fill-mask", model=str(folders["filler"]), device="cpu")
    words = found("filler", "words", ("text", masked), top_k=2)
    assert [[each["sequence"] for each in one] for one in words] == [
        [each["sequence"] for each in one] for one in fill(masked, top_k=2)
    ]
    questions = ("question", ["who", "where"]), ("context", TEXTS)
    answers = found("reader", "answers", *questions, top_k=2, max_answer_len=2)
    for text, one in zip(TEXTS, answers, strict=True):
        assert len(one) == 2
        assert all(text[each["start"] : each["end"]] == each["answer"] for each in one)
    best = client.infer("reader", [column(*each, binary=False) for each in questions], parameters={"max_answer_len": 2})
    assert [each.decode() for each in best.as_numpy("answer")] == [one[0]["answer"] for one in answers]
    said = client.infer("chat", [column("text", ["The quick"], binary=True)], parameters={"max_tokens": 5})
    generator = tf.pipeline("text-generation", model=str(folders["chat"]), device="cpu")
    theirs = generator("The quick", max_new_tokens=5, do_sample=False, return_full_text=False)
    assert said.as_numpy("text")[0].decode() == theirs[0]["generated_text"]


def test_triton_changes_models(
    client: triton.InferenceServerClient, server: Process, tiny_ranker: Path, tmp_path: Path
) -> None:
    def configured(source: Path) -> str:
        return json.dumps({"parameters": {"source": {"string_value": str(source)}}})

    with pytest.raises(InferenceServerException, match="this server needs a key"):
        client.get_model_repository_index()
    with pytest.raises(InferenceServerException, match=r"parameters\.source: is required"):
        client.load_model("ranker", headers=ADMIN)
    client.load_model("ranker", headers=ADMIN, config=configured(tiny_ranker))
    there = {one["name"]: one for one in client.get_model_repository_index(headers=ADMIN)}
    assert there["ranker"] == {"name": "ranker", "version": "1", "state": "READY", "reason": ""}
    scores = client.infer("ranker", [column(name, TEXTS, binary=True) for name in ("text", "text_pair")])
    assert scores.as_numpy("score").shape == (2,)
    client.load_model("ranker", headers=ADMIN)  # again, from its source
    with pytest.raises(InferenceServerException, match="nothing"):
        client.load_model("ranker", headers=ADMIN, config=configured(tmp_path / "nothing"))
    assert client.is_model_ready("ranker")
    client.unload_model("ranker", headers=ADMIN)
    assert not client.is_model_ready("ranker")
    assert "ranker" not in {one["name"] for one in client.get_model_repository_index(headers=ADMIN)}
    asked = {"parameters": {"source": str(tiny_ranker)}}
    answer = httpx.post(f"{server.url}/v2/repository/models/org/ranker/load", json=asked, headers=ADMIN, timeout=60)
    assert answer.json() == {}
    assert client.is_model_ready("org/ranker")

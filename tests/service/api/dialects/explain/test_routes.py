"""Explanations over HTTP: for every task, by token and by the characters of the client's text, within limits."""

import base64
import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers as tf

from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import AnswerTooLarge
from polyhead.service.explain.explain_request import ExplainParameters, ExplainSubject, ShownToken, locate_pieces
from polyhead.service.explain.explain_response import check_size
from tests.models.checkpoint.test_merged_adapter import adapted
from tests.support import checkpoints, translators
from tests.support.processes import PATIENCE, Process

METHODS = (
    *("attention", "attention_rollout", "attention_flow"),
    *("gradient_x_input", "integrated_gradients", "occlusion"),
)
ATTRIBUTES = METHODS[3:]
TEXT = "a good film"
INPUTS: dict[str, Any] = {
    "judge": TEXT,
    "ranker": ["a film", "the quick brown fox"],
    "tagger": TEXT,
    "reader": ["a film", "the quick brown fox"],
    "filler": "a [MASK] film",
    "vectors": TEXT,
    "talker": "the quick brown fox",
    "writer": "a good film",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_classifier: Path, tiny_ranker: Path) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("explained")
    translators.translator(made / "writer", "marian")
    return {
        "judge": tiny_classifier,
        "ranker": tiny_ranker,
        "tagger": checkpoints.encoder(made / "tagger", tf.BertForTokenClassification),
        "reader": checkpoints.encoder(made / "reader", tf.BertForQuestionAnswering),
        "filler": checkpoints.encoder(made / "filler", tf.BertForMaskedLM),
        "vectors": checkpoints.embedder(made / "vectors"),
        "talker": checkpoints.generator(made / "talker"),
        "writer": made / "writer",
    }


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Process]:
    process = Process(
        *(f"{name}={folder}" for name, folder in folders.items()), "--explain-tokens", "48", "--explain-gflop", "100"
    )
    process.ready()
    yield process
    process.stop()


def ask(server: Process, path: str, body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=PATIENCE)


def explain(server: Process, model: str, **asked: Any) -> Any:
    answer = ask(server, "/v1/explain", {"model": model, "input": INPUTS[model], "max_tokens": 3, **asked})
    assert answer.status_code == 200, answer.text
    return answer.json()


def goal(model: str, method: str) -> dict[str, Any]:
    """A target for models whose answer is random, or has no score of its own."""
    if model == "tagger" and method != "attention":
        return {"target": {"start": 2, "end": 6}}
    return {"target": {"text": "a bad film"}} if model == "vectors" and method in ATTRIBUTES else {}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("model", INPUTS)
def test_every_task_is_explained_by_every_method(server: Process, model: str, method: str) -> None:
    said = explain(server, model, method=method, **goal(model, method))
    tokens = len(said["tokens"])
    assert [token["index"] for token in said["tokens"]] == list(range(tokens))
    if method not in ATTRIBUTES:
        for seen in said["attention"]:
            values = np.array(seen["values"])
            assert list(values.shape) == seen["shape"]
            assert values.shape[2:] == (len(seen["rows"]), len(seen["columns"]))
            np.testing.assert_allclose(values.sum(-1), 1, atol=2e-5)
    if method != "attention" and (model != "writer" or method in ATTRIBUTES):
        assert said["attributions"]
    for each in said["attributions"]:
        assert len(each["tokens"]) == tokens
        assert sum(part["score"] for part in each["characters"]) == pytest.approx(
            sum(
                score
                for score, token in zip(each["tokens"], said["tokens"], strict=True)
                if token["text"] is not None and token["start"] < token["end"]
            ),
            abs=1e-5,
        )
    if method == "integrated_gradients":
        for each in said["attributions"]:
            explained = each["completeness"]
            assert explained["delta"] == pytest.approx(sum(each["tokens"]) - explained["difference"], abs=1e-4)
            assert explained["holds"] == (abs(explained["delta"]) <= 0.05 * abs(explained["difference"]) + 1e-4)


def test_without_a_method_the_one_that_suits_is_taken(server: Process) -> None:
    for model, method, shows in (
        ("judge", "integrated_gradients", "attributions"),
        ("talker", "gradient_x_input", "attributions"),
        ("vectors", "attention", "attention"),
    ):
        for asked in ({}, {"method": "auto"}):
            said = explain(server, model, **asked)
            assert (said["method"], bool(said[shows])) == (method, True)


def test_attention_is_that_of_the_reference(server: Process, folders: dict[str, Path]) -> None:
    said = explain(server, "judge", method="attention")
    model: Any = tf.BertForSequenceClassification.from_pretrained(folders["judge"], attn_implementation="eager")
    with torch.no_grad():
        seen = model(torch.tensor([[token["id"] for token in said["tokens"]]]), output_attentions=True).attentions
    np.testing.assert_allclose(said["attention"][0]["values"], torch.cat(seen).numpy(), atol=1e-5)


def test_layers_heads_and_the_largest_weights_alone(server: Process) -> None:
    [whole] = explain(server, "judge", method="attention")["attention"]
    [some] = explain(server, "judge", layers=[1], heads=[3, 0])["attention"]
    assert (some["layers"], some["heads"]) == ([1], [3, 0])
    np.testing.assert_allclose(some["values"], np.array(whole["values"])[[1]][:, [3, 0]], atol=1e-6)
    [top] = explain(server, "judge", top_k=2)["attention"]
    assert "values" not in top
    row, explained = np.array(whole["values"])[1, 2, 3], top["top"][1][2][3]
    assert [column for column, _ in explained] == np.argsort(-row, kind="stable")[:2].tolist()
    assert [weight for _, weight in explained] == pytest.approx(sorted(row, reverse=True)[:2], abs=1e-6)


@pytest.mark.parametrize(("dtype", "exact"), [("float32", 1e-7), ("float16", 1e-3)])
def test_weights_as_base64(server: Process, dtype: str, exact: float) -> None:
    [plain] = explain(server, "judge", method="attention")["attention"]
    [packed] = explain(server, "judge", method="attention", encoding="base64", dtype=dtype)["attention"]
    values = np.frombuffer(base64.b64decode(packed["values"]["data"]), dtype).reshape(packed["shape"])
    np.testing.assert_allclose(values, plain["values"], atol=exact)


def test_the_explained_answer_equals_the_answer(server: Process) -> None:
    said = explain(server, "judge", method="gradient_x_input")
    best = ask(server, "/models/judge", {"inputs": TEXT}).json()[0][0]
    target = said["attributions"][0]["target"]
    assert (target["kind"], target["label"]) == ("label", best["label"])
    assert target["probability"] == pytest.approx(best["score"], abs=1e-5)
    [span] = explain(server, "reader", method="occlusion")["attributions"]
    question, context = INPUTS["reader"]
    answer = ask(server, "/models/reader", {"inputs": {"question": question, "context": context}}).json()
    assert (span["target"]["start"], span["target"]["end"]) == (answer["start"], answer["end"])
    assert {part["text"] for part in span["characters"]} == {0, 1}
    words = explain(server, "filler", method="occlusion")["attributions"][0]["target"]
    assert words["word"] == ask(server, "/models/filler", {"inputs": INPUTS["filler"]}).json()[0]["token_str"]
    written = explain(server, "talker", method="gradient_x_input")
    plain = {"model": "talker", "prompt": INPUTS["talker"], "max_tokens": 3, "temperature": 0}
    assert written["output"] == ask(server, "/v1/completions", plain).json()["choices"][0]["text"]
    ids = [each["target"]["id"] for each in written["attributions"]]
    assert ids == [token["id"] for token in written["tokens"] if token["part"] == "output"]


def test_other_targets(server: Process) -> None:
    other = explain(server, "judge", method="occlusion", target={"label": "neutral"})["attributions"][0]
    assert other["target"]["label"] == "neutral"
    by_number = explain(server, "judge", method="occlusion", target={"label": other["target"]["index"]})
    assert by_number["attributions"][0] == other
    tagged = explain(server, "tagger", method="occlusion", target={"start": 2, "end": 6})["attributions"][0]["target"]
    assert tagged["start"] <= 2 < 6 <= tagged["end"]
    assert TEXT[2:6] == "good"
    said = explain(server, "talker", method="occlusion", target={"text": " dog"})
    assert said["output"] == " dog"
    near = explain(server, "vectors", method="gradient_x_input", target={"text": TEXT})["attributions"][0]["target"]
    assert near == {"kind": "similarity", "text": TEXT, "score": pytest.approx(1, abs=1e-5)}


def test_character_positions_refer_to_the_client_s_text(server: Process) -> None:
    text = "The  Fox – a film"
    said = explain(server, "judge", method="occlusion", input=text)
    for token in said["tokens"]:
        if not token["special"]:
            assert 0 <= token["start"] < token["end"] <= len(text)
    covered = {n for part in said["attributions"][0]["characters"] for n in range(part["start"], part["end"])}
    assert covered == {n for n, letter in enumerate(text) if letter != " "}


def test_alignments_of_a_translator(server: Process) -> None:
    said = explain(server, "writer", method="attention")
    read = [token["index"] for token in said["tokens"] if token["part"] == "input"]
    written = [token["index"] for token in said["tokens"] if token["part"] == "output"]
    kinds = {seen["kind"]: (seen["rows"], seen["columns"]) for seen in said["attention"]}
    assert kinds == {"encoder": (read, read), "decoder": (written, written), "cross": (written, read)}


@pytest.mark.parametrize("method", ["attention_rollout", "attention_flow"])
def test_paths_of_a_translator_are_those_of_its_encoder(server: Process, method: str) -> None:
    """Its answer, which may be longer than the source, has no row among them."""
    said = explain(server, "writer", method=method, max_tokens=20)
    read = [token["index"] for token in said["tokens"] if token["part"] == "input"]
    [paths] = said["attention"]
    assert (paths["rows"], paths["columns"]) == (read, read)
    assert said["attributions"] == []


def test_an_explanation_beside_an_answer(server: Process) -> None:
    why = {"method": "occlusion"}
    plain = ask(server, "/models/judge", {"inputs": TEXT}).json()
    both = ask(server, "/models/judge", {"inputs": TEXT, "explain": why}).json()
    assert both["result"] == plain
    alone = explain(server, "judge", method="occlusion")
    assert both["explanation"]["attributions"] == alone["attributions"]
    body = {"model": "talker", "prompt": INPUTS["talker"], "max_tokens": 3, "seed": 3}
    drawn = ask(server, "/v1/completions", body).json()["choices"]
    explained = ask(server, "/v1/completions", body | {"explain": why}).json()
    assert explained["choices"] == drawn
    assert explained["explanation"]["output"] == drawn[0]["text"]
    assert len(explained["explanation"]["attributions"]) == 3


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_of_no_tokens_has_no_attributions(server: Process, method: str) -> None:
    """The first sampled token is the one that ends the answer."""
    body = {"model": "talker", "prompt": INPUTS["talker"], "allowed_token_ids": [7], "stop_token_ids": [7]}
    explained = ask(server, "/v1/completions", body | {"explain": {"method": method}})
    assert explained.status_code == 200, explained.text
    explanation = explained.json()["explanation"]
    assert (explanation["output"], explanation["usage"]["completion_tokens"]) == ("", 0)
    if method in ATTRIBUTES:
        assert explanation["attributions"] == []


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("judge", {"method": "why"}, 400, "method: must be 'auto', 'attention'"),
    ("judge", {"layers": [2]}, 400, "layers: the network has 2, counted from 0, got 2"),
    ("judge", {"heads": [4]}, 400, "heads: the network has 4, counted from 0, got 4"),
    ("judge", {"method": "occlusion", "target": {"label": "nice"}}, 400, "has no label 'nice'; there are: "),
    ("judge", {"target": {"start": 1, "end": 2}}, 400, "target.start: a model of the task classify is not asked so"),
    ("judge", {"dtype": "float16"}, 400, "dtype: float16 needs the encoding base64"),
    ("judge", {"method": "occlusion", "baseline": "eos"}, 400, "baseline: judge has no token for eos"),
    ("judge", {"method": "occlusion", "baseline": "zero"}, 400, "baseline: what is hidden must be a token"),
    ("judge", {"input": [{"role": "user", "content": "a"}]}, 400, "input: judge reads a text or two"),
    ("judge", {"input": " ".join(["a"] * 47)}, 413, "input: 49 tokens, at most 48 are explained"),
    ("tagger", {"method": "occlusion", "target": {"token": 0}}, 400, "target.token: 0 is no token of the text"),
    ("tagger", {"method": "occlusion", "target": {"start": 2}}, 400, "target.end: must stand beside target.start"),
    ("filler", {"method": "occlusion", "target": {"mask": 1}}, 400, "target.mask: the text has 1 masks"),
    ("vectors", {"method": "occlusion"}, 400, "target.text: a vector is explained by what it is compared with"),
    ("talker", {"target": {"text": "fox " * 200}}, 400, "the model takes 256"),
    ("talker", {"input": "fox " * 30}, 413, "at most 48 are explained"),
    ("reader", {"input": "a b"}, 400, "input: reader answers questions; give a list of two texts"),
    ("reader", {"input": "a", "method": "attention"}, 400, "input: reader answers questions; give a list of two texts"),
    ("talker", {"input": ["a", "b"]}, 400, "input: talker reads a text or messages"),
    ("talker", {"method": "integrated_gradients", "steps": 1000, "max_tokens": 20}, 413, "; ask for at most "),
    ("talker", {"method": "integrated_gradients", "steps": 1000, "max_tokens": 20}, 413, "GFLOP, at most 100 are"),
    ("nobody", {"input": "a"}, 404, "no model is called 'nobody'"),
]


@pytest.mark.parametrize(("model", "asked", "status", "words"), REFUSED)
def test_requests_that_cannot_be_explained_are_rejected(
    server: Process, model: str, asked: dict[str, Any], status: int, words: str
) -> None:
    answer = ask(server, "/v1/explain", {"model": model, "input": INPUTS.get(model, "a"), **asked})
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


def test_options_that_do_not_fit_an_answer(server: Process) -> None:
    for path, body, words in (
        ("/models/judge", {"inputs": [TEXT, TEXT]}, "explain: one input at a time"),
        ("/v1/completions", {"model": "talker", "prompt": "a", "n": 2}, "explain: needs one complete answer"),
        ("/v1/completions", {"model": "talker", "prompt": "a", "stream": True}, "explain: needs one complete answer"),
    ):
        answer = ask(server, path, body | {"explain": {}})
        assert (answer.status_code, words in answer.text) == (400, True), answer.text


def test_explanations_can_be_disabled(folders: dict[str, Path]) -> None:
    """The route does not exist, and the option is rejected before anything is computed."""
    process = Process(*(f"{name}={folders[name]}" for name in ("judge", "talker")), "--explain", "false")
    process.ready()
    off = "this server explains no answers: its setting explain is off"
    for path, body, status, said in (
        ("/v1/explain", {"model": "judge", "input": TEXT}, 404, off),
        ("/models/judge", {"inputs": TEXT, "explain": {}}, 400, f"explain: {off}"),
        ("/v1/completions", {"model": "talker", "prompt": "a", "max_tokens": 4, "explain": {}}, 400, f"explain: {off}"),
    ):
        answer = ask(process, path, body)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"] if isinstance(error, dict) else error) == (status, said)
    models = httpx.get(process.url + "/v1/models", timeout=PATIENCE).json()["data"]
    assert [(model["explain"], model["explain_decisions"]) for model in models] == [([], []), ([], [])]
    assert httpx.get(process.url + "/v1/models/judge", timeout=PATIENCE).json()["explain"] == []
    assert process.rest().total("engine_steps_total") == 0, "a step was computed"
    process.stop()


def test_the_events_end_with_the_same_explanation(server: Process) -> None:
    body = {"model": "judge", "input": TEXT, "method": "integrated_gradients", "steps": 1000}
    with httpx.stream(
        "POST", server.url + "/v1/explain", json=body, headers={"Accept": "text/event-stream"}, timeout=PATIENCE
    ) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        *progress, last = [json.loads(line.removeprefix("data: ")) for line in answer.iter_lines() if line]
    shares = [event["progress"] for event in progress]
    assert 2 < len(shares) <= 100
    assert shares == sorted(set(shares))
    assert last["attributions"] == explain(server, "judge", method="integrated_gradients", steps=1000)["attributions"]


def test_an_explainer_is_counted_and_released_with_its_model(server: Process) -> None:
    explain(server, "judge")
    page = server.rest()
    assert page.total("engine_steps_total", model="judge", task="explain") > 0
    received, ended = page.received_and_ended
    assert received == ended


def test_an_adapter_is_explained_by_its_own_network(tmp_path: Path, tiny_embedder: Path) -> None:
    base: Any = tf.BertForSequenceClassification.from_pretrained(tiny_embedder, num_labels=2)
    merged = adapted(base, tmp_path / "adapter", task_type="SEQ_CLS", base=str(tiny_embedder))
    process = Process(f"trunk={tiny_embedder}", f"trunk:judge={tmp_path / 'adapter'}")
    process.ready()
    body = {"model": "trunk:judge", "input": TEXT}
    said = ask(process, "/v1/explain", body | {"method": "gradient_x_input"}).json()
    ids = torch.tensor([[token["id"] for token in said["tokens"]]])
    with torch.no_grad():
        logits = merged(ids).logits[0]
    target = said["attributions"][0]["target"]
    assert target["score"] == pytest.approx(float(logits[target["index"]]), abs=1e-5)
    assert target["index"] == int(logits.argmax())
    process.stop()


def test_the_error_for_too_many_weights_suggests_limits() -> None:
    shown = tuple(ShownToken(5, "a", False) for _ in range(100))
    subject, bounds = ExplainSubject(shown, (5,) * 100), Settings(explain_mib=1)
    for why, fits in (
        (ExplainParameters(), False),
        (ExplainParameters(layers=(0, 1)), True),
        (ExplainParameters(top_k=1), True),
        (ExplainParameters(as_base64=True, half_precision=True), True),
        (ExplainParameters(as_base64=True), False),
    ):
        with nullcontext() if fits else pytest.raises(AnswerTooLarge, match="ask for fewer layers or heads, a top_k"):
            check_size(why, subject, {"self": (8, 4)}, bounds)
    with pytest.raises(AnswerTooLarge, match="4188160000 weights"):
        check_size(ExplainParameters(top_k=1), subject, {"self": (1024, 409)}, bounds)


def test_pieces_are_found_in_the_messages_of_a_chat() -> None:
    pieces = [b"<s>", b"hi", b" Zo", b"\xc3", b"\xab!", b"</s>", b"no", b"hi"]
    assert locate_pieces(pieces, ["  hi Zoë!", "", "absent", "hi"]) == [
        (None, None, None),
        (0, 2, 4),
        (0, 4, 7),
        (0, 7, 8),
        (0, 7, 9),
        *[(None, None, None)] * 2,
        (3, 0, 2),
    ]


def test_each_piece_is_searched_once() -> None:
    """With many messages, the positions in a long prompt are found without scanning all of it for each message."""
    seen = 0

    class Counted(bytes):
        def __len__(self) -> int:
            nonlocal seen
            seen += 1
            return super().__len__()

    count = 300
    pieces = [Counted(f"<{number}>".encode()) for number in range(count)]
    found = locate_pieces(pieces, [f"<{number}>" for number in range(count)])
    assert found == [(number, 0, len(f"<{number}>")) for number in range(count)]
    assert seen <= 5 * count

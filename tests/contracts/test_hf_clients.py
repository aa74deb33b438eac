"""Hugging Face's client against a real server: its methods return what the pipelines of transformers return."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub.constants
import huggingface_hub.errors
import numpy as np
import pytest
import torch
import transformers as tf
from huggingface_hub import InferenceClient

from polyhead.service.text.answer_spans import SpanOptions
from tests.families.conformance import save_checkpoint
from tests.families.test_encoders import ROWS
from tests.service.text.test_answer_spans import CONTEXT, EPSILON, QUESTION, Case, expected
from tests.support import checkpoints
from tests.support.processes import Process

TEXT = "Der naïve fox jumps over the café in Paris, größer and 日本 too."
MASKED = "The quick [MASK] fox."
NLI = ("contradiction", "neutral", "entailment")
LONG = "The quick brown fox jumps over the lazy dog in Paris, of course. " * 20
Folders = dict[str, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path, tiny_embedder: Path) -> Folders:
    def made(name: str, kind: Any) -> Path:
        return checkpoints.encoder(tmp_path_factory.mktemp(name), kind)

    def made_of(name: str, row: str, **fields: Any) -> Path:
        return save_checkpoint(ROWS[row], tmp_path_factory.mktemp(name), **fields)

    return {
        "judge": made("judge", tf.BertForSequenceClassification),
        "nli": checkpoints.classifier(tmp_path_factory.mktemp("nli"), labels=NLI),
        "tagger": made("tagger", tf.BertForTokenClassification),
        "reader": made("reader", tf.BertForQuestionAnswering),
        "filler": made("filler", tf.BertForMaskedLM),
        "chooser": made("chooser", tf.BertForMultipleChoice),
        "mnli": made_of("mnli", "BartForSequenceClassification", id2label=dict(enumerate(NLI))),
        "vectors": tiny_embedder,
        "chat": tiny_generator,
    }


@pytest.fixture(scope="module")
def server(folders: Folders) -> Iterator[Process]:
    process = Process(*(f"{name}={folder}" for name, folder in folders.items()), "--executor", "torch")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> InferenceClient:
    monkeypatch.setattr(
        huggingface_hub.constants, "HF_HUB_OFFLINE", False
    )  # without it the client rejects the address of this machine
    return InferenceClient()


@pytest.fixture
def at(server: Process) -> Any:
    return lambda name: f"{server.url}/models/{name}"


def pipeline(task: str, folder: Path) -> Any:
    return tf.pipeline(task, model=str(folder), device="cpu")


def same(ours: Any, theirs: Any) -> None:
    """Equal; numbers within 1e-4. Fields that are empty in the client's objects do not count."""
    if isinstance(theirs, dict):
        mine = {key: value for key, value in dict(ours).items() if value is not None}
        assert mine.keys() == theirs.keys()
        for key, value in theirs.items():
            same(mine[key], value)
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif isinstance(theirs, float | np.floating):
        assert ours == pytest.approx(float(theirs), abs=1e-4)
    else:
        assert ours == theirs


def post(url: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(url, json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("function", [None, "sigmoid", "softmax", "none"])
@pytest.mark.parametrize("name", ["judge", "nli"])
def test_text_classification(client: InferenceClient, at: Any, folders: Folders, name: str, function: Any) -> None:
    reference = pipeline("text-classification", folders[name])
    for count in (1, 2, None):
        found = client.text_classification(TEXT, model=at(name), top_k=count, function_to_apply=function)
        options = {"function_to_apply": function} if function else {}
        same(found, reference(TEXT, top_k=count, **options))
    pair = {"text": TEXT, "text_pair": "a good film"}
    answer = post(at(name), {"inputs": [pair, TEXT]}).json()
    same(answer, [reference(pair, top_k=None), reference(TEXT, top_k=None)])


def test_multiple_choice(at: Any, folders: Folders) -> None:
    """The probabilities of the choices, as the class of transformers gives them."""
    choices = ["a good film", "dull", "The quick brown fox"]
    tokenizer = tf.AutoTokenizer.from_pretrained(folders["chooser"])
    network = tf.AutoModelForMultipleChoice.from_pretrained(folders["chooser"]).eval()
    encoded = tokenizer([TEXT] * 3, choices, padding=True, return_tensors="pt")
    with torch.no_grad():
        shares = network(**{name: values[None] for name, values in encoded.items()}).logits.softmax(-1)[0].tolist()
    order = sorted(range(3), key=lambda index: -shares[index])
    expected = [{"index": index, "score": shares[index]} for index in order]
    same(post(at("chooser"), {"inputs": {"text": TEXT, "choices": choices}}).json(), expected)
    same(post(at("chooser"), {"inputs": [{"text": TEXT, "choices": choices}]}).json(), [expected])


def test_classes_by_an_encoder_decoder(client: InferenceClient, at: Any, folders: Folders) -> None:
    """As BART is used with labels that it was not trained on."""
    reference = pipeline("zero-shot-classification", folders["mnli"])
    found = reference(TEXT, ["fox", "film", "money"])
    answer = client.zero_shot_classification(TEXT, ["fox", "film", "money"], model=at("mnli"))
    same(
        [dict(one) for one in answer],
        [{"label": label, "score": score} for label, score in zip(found["labels"], found["scores"], strict=True)],
    )


@pytest.mark.parametrize("strategy", ["none", "simple", "first", "average", "max"])
def test_token_classification(client: InferenceClient, at: Any, folders: Folders, strategy: Any) -> None:
    reference = pipeline("token-classification", folders["tagger"])
    for ignored in (["O"], [], ["O", "MISC", "PER", "B-PER"]):
        found = client.token_classification(
            TEXT, model=at("tagger"), aggregation_strategy=strategy, ignore_labels=ignored
        )
        same(found, reference(TEXT, aggregation_strategy=strategy, ignore_labels=ignored))
    if strategy == "none":
        with pytest.raises(huggingface_hub.errors.BadRequestError, match=r"parameters\.stride: needs"):
            client.token_classification(LONG, model=at("tagger"), stride=10)
    else:
        found = client.token_classification(LONG, model=at("tagger"), aggregation_strategy=strategy, stride=16)
        same(found, reference(LONG, aggregation_strategy=strategy, stride=16))


@pytest.mark.parametrize("top_k", [1, 4])
@pytest.mark.parametrize("impossible", [False, True])
@pytest.mark.parametrize("whole_words", [False, True])
@pytest.mark.parametrize("size", [(256, 0), (40, 10)], ids=["whole", "windows"])
def test_question_answering(
    client: InferenceClient,
    at: Any,
    folders: Folders,
    top_k: int,
    impossible: bool,
    whole_words: bool,
    size: tuple[int, int],
) -> None:
    asking = SpanOptions(top_k=top_k, max_tokens=5, allows_no_answer=impossible, whole_words=whole_words)
    wanted = expected(asking, *Case(folders["reader"], None).windows(*size))
    cut = {"max_seq_len": size[0], "doc_stride": size[1]} if size[1] else {}
    found = client.question_answering(
        QUESTION,
        CONTEXT,
        model=at("reader"),
        top_k=top_k,
        max_answer_len=5,
        handle_impossible_answer=impossible,
        align_to_words=whole_words,
        **cut,
    )
    assert isinstance(found, list) is (top_k > 1)
    for ours, theirs in zip(found if isinstance(found, list) else [found], wanted, strict=True):
        assert theirs.score > EPSILON
        assert (ours.answer, ours.start, ours.end) == (theirs.text, theirs.start, theirs.end)
        assert ours.score == pytest.approx(theirs.score, abs=1e-4)


def test_the_error_for_a_context_that_is_too_long_names_windows(client: InferenceClient, at: Any) -> None:
    with pytest.raises(huggingface_hub.errors.BadRequestError, match=r"inputs: the input has .*doc_stride"):
        client.question_answering(QUESTION, LONG * 4, model=at("reader"))
    assert client.question_answering(QUESTION, LONG * 4, model=at("reader"), max_seq_len=64).answer


@pytest.mark.parametrize("text", [MASKED, "The [MASK] brown [MASK]."])
def test_fill_mask(client: InferenceClient, at: Any, folders: Folders, text: str) -> None:
    reference = pipeline("fill-mask", folders["filler"])
    for options in ({}, {"top_k": 2}, {"targets": ["fox", "dog", "film"]}):
        theirs = reference(text, **options)
        if text == MASKED:
            same(client.fill_mask(text, model=at("filler"), **options), theirs)
        same(post(at("filler"), {"inputs": text, "parameters": options}).json(), theirs)
    same(post(at("filler"), {"inputs": [text, MASKED]}).json(), reference([text, MASKED]))


@pytest.mark.parametrize("several", [False, True])
def test_zero_shot_classification(client: InferenceClient, at: Any, folders: Folders, several: bool) -> None:
    reference = pipeline("zero-shot-classification", folders["nli"])
    for labels in (["fox", "film", "Paris"], ["dog"]):
        for template in ("This example is {}.", "Der {} springt"):
            asked = {"multi_label": several, "hypothesis_template": template}
            theirs = reference(TEXT, labels, **asked)
            found = client.zero_shot_classification(TEXT, labels, model=at("nli"), **asked)
            assert [one.label for one in found] == theirs["labels"]
            assert [one.score for one in found] == pytest.approx(theirs["scores"], abs=1e-4)


def test_feature_extraction(client: InferenceClient, at: Any, folders: Folders) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(folders["vectors"])
    model = tf.AutoModel.from_pretrained(folders["vectors"]).eval()
    with torch.no_grad():
        pooled = model(**tokenizer(TEXT, return_tensors="pt")).last_hidden_state[0].mean(0).numpy()
    unit = pooled / np.linalg.norm(pooled)
    one = client.feature_extraction(TEXT, model=at("vectors"))
    assert one.shape == (32,)
    assert one == pytest.approx(unit, abs=1e-4)
    assert client.feature_extraction(TEXT, model=at("vectors"), normalize=False) == pytest.approx(pooled, abs=1e-4)
    assert client.feature_extraction([TEXT, "a"], model=at("vectors"), dimensions=8).shape == (2, 8)
    cut = client.feature_extraction(LONG, model=at("vectors"), truncate=True, truncation_direction="left")
    inside = {"inputs": LONG, "parameters": {"truncate": True, "truncation_direction": "left"}}
    assert cut == pytest.approx(np.array(post(at("vectors"), inside).json()), abs=1e-6)
    assert cut != pytest.approx(client.feature_extraction(LONG, model=at("vectors"), truncate=True), abs=1e-3)


def test_sentence_similarity(client: InferenceClient, at: Any) -> None:
    others = ["a good film", TEXT, "the quick brown fox"]
    found = client.sentence_similarity(TEXT, others, model=at("vectors"))
    vectors = client.feature_extraction([TEXT, *others], model=at("vectors"), normalize=True)
    assert found == pytest.approx((vectors[1:] @ vectors[0]).tolist(), abs=1e-4)
    assert found[1] == pytest.approx(1, abs=1e-4)
    asked = {"inputs": {"source_sentence": TEXT, "sentences": others}}
    assert post(f"{at('vectors')}/pipeline/sentence-similarity", asked).json() == pytest.approx(found, abs=1e-6)


def test_text_generation(client: InferenceClient, at: Any, folders: Folders) -> None:
    reference = pipeline("text-generation", folders["chat"])
    prompt = "The quick brown"
    for full in (False, True):
        theirs = reference(prompt, max_new_tokens=16, do_sample=False, return_full_text=full)
        ours = client.text_generation(prompt, model=at("chat"), max_new_tokens=16, return_full_text=full)
        assert ours == theirs[0]["generated_text"]
    detailed = client.text_generation(prompt, model=at("chat"), max_new_tokens=16, details=True)
    details = detailed.details
    assert details is not None
    assert "".join(token.text for token in details.tokens) == detailed.generated_text
    assert len(details.tokens) == details.generated_tokens
    assert details.finish_reason in ("length", "eos_token")
    drawn = client.text_generation(prompt, model=at("chat"), max_new_tokens=9, seed=7, top_k=50, details=True)
    again = client.text_generation(prompt, model=at("chat"), max_new_tokens=9, seed=7, top_k=50, details=True)
    assert (drawn.generated_text, drawn.details) == (again.generated_text, again.details)
    assert drawn.details is not None
    assert drawn.details.seed == 7
    assert drawn.generated_text != client.text_generation(prompt, model=at("chat"), max_new_tokens=9)


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"num_beams": 3, "length_penalty": 0.3},
        {"num_beams": 4, "num_return_sequences": 3, "early_stopping": True},
        {"min_new_tokens": 12, "bad_words_ids": [[5], [6, 7]], "suppress_tokens": [138, 217]},
    ],
    ids=lambda options: ",".join(options),
)
def test_text_generation_as_transformers_does(at: Any, folders: Folders, options: dict[str, Any]) -> None:
    prompt, options = "The quick brown", {**options, "max_new_tokens": 12}
    theirs = pipeline("text-generation", folders["chat"])(prompt, do_sample=False, return_full_text=False, **options)
    assert post(at("chat"), {"inputs": prompt, "parameters": options}).json() == theirs


def test_text_generation_with_details(client: InferenceClient, at: Any, folders: Folders) -> None:
    prompt, asked = "The quick brown", {"model": at("chat"), "max_new_tokens": 9, "details": True}
    message = client.text_generation(prompt, decoder_input_details=True, top_n_tokens=2, **asked).details
    assert message is not None
    tokenizer = tf.AutoTokenizer.from_pretrained(folders["chat"])
    model = tf.AutoModelForCausalLM.from_pretrained(folders["chat"]).eval()
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        likely = model(ids).logits[0].log_softmax(-1)
    assert [token.id for token in message.prefill] == ids[0].tolist()
    expected = [float(row[id]) for row, id in zip(likely, ids[0, 1:], strict=False)]
    assert message.prefill[0].logprob is None
    assert [token.logprob for token in message.prefill[1:]] == pytest.approx(expected, abs=1e-4)
    assert message.top_tokens is not None
    for token, top in zip(message.tokens, message.top_tokens, strict=True):
        assert (len(top), dict(top[0])["id"]) == (2, token.id), "the most likely token is chosen"
    best = client.text_generation(prompt, best_of=3, temperature=1.0, seed=1, **asked)
    assert best.details is not None
    assert best.details.best_of_sequences is not None
    tries = [best.details, *best.details.best_of_sequences]
    means = [np.mean([token.logprob for token in each.tokens]) for each in tries]
    assert (len(means), means) == (3, sorted(means, reverse=True))
    number = client.text_generation(prompt, grammar={"type": "regex", "value": "[0-9]{3}"}, **asked)
    assert re.fullmatch("[0-9]{3}", number.generated_text)
    cut = client.text_generation(prompt, truncate=2, **asked)
    assert cut.generated_text == client.text_generation(tokenizer.decode(ids[0, -2:]), **asked).generated_text


@pytest.mark.parametrize("stopped", [False, True])
def test_text_generation_streamed(client: InferenceClient, at: Any, stopped: bool) -> None:
    asked: dict[str, Any] = {"model": at("chat"), "max_new_tokens": 24, "seed": 3, "temperature": 1.2}
    stop: list[str] = [*client.text_generation("größer 日本", **asked)[3:5]] if stopped else []
    asked["stop"] = stop
    whole = client.text_generation("größer 日本", details=True, **asked)
    assert "".join(client.text_generation("größer 日本", stream=True, **asked)) == whole.generated_text
    events = list(client.text_generation("größer 日本", stream=True, details=True, **asked))
    assert [event.index for event in events] == list(range(1, len(events) + 1))
    assert [event.generated_text for event in events[:-1]] == [None] * (len(events) - 1)
    last, details = events[-1], whole.details
    assert last.generated_text == whole.generated_text
    assert not stop or whole.generated_text[-1] in stop, "as text-generation-inference has it"
    assert last.details is not None
    assert details is not None
    assert (last.details.finish_reason, last.details.generated_tokens) == (
        details.finish_reason,
        details.generated_tokens,
    )
    answered = [event.token.id for event in events if not event.token.special]
    assert answered == [token.id for token in details.tokens if not token.special]


def test_a_list_as_it_comes_and_one_bad_text(at: Any) -> None:
    texts = ["a good film", "", "bad"]
    refused = post(at("judge"), {"inputs": texts})
    assert refused.status_code == 400
    assert refused.json()["error"].startswith("inputs[1]: is empty")
    whole = post(at("judge"), {"inputs": texts, "partial": True}).json()
    assert whole[1]["index"] == 1
    assert whole[1]["error"].startswith("inputs[1]: is empty")
    lines = post(at("judge"), {"inputs": texts, "partial": True}, Accept="application/x-ndjson").text.splitlines()
    parsed = [json.loads(line) for line in lines]
    assert [line["index"] for line in parsed] == [0, 1, 2]
    assert [parsed[0]["result"], parsed[2]["result"]] == [whole[0], whole[2]]
    nli = {"inputs": texts, "parameters": {"candidate_labels": "fox, film"}, "partial": True}
    lines = post(at("nli"), nli, Accept="application/x-ndjson").text.splitlines()
    assert ["error" in json.loads(line) for line in lines] == [False, True, False]
    assert [one["label"] for one in json.loads(lines[0])["result"]] in (["fox", "film"], ["film", "fox"])

"""Encoder-decoders on a real server: tiny T5, BART and Marian compared with transformers, and a recurrent network."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
import torch
import transformers as tf

from polyhead.models.checkpoint import load
from polyhead.models.checkpoint import recurrent_folder as recurrent
from polyhead.models.network.ragged import RaggedBatch
from polyhead.models.recurrent import RecurrentConfig, RecurrentTranslator
from polyhead.models.seq2seq.decoding import generate
from polyhead.models.seq2seq.protocol import Seq2Seq
from tests.support.processes import Process
from tests.support.translators import translator

SHAPE: dict[str, Any] = dict(
    vocab_size=384, width=12, hidden=16, attention="luong", score="general", cell="lstm", start=0, end=2, pad=1
)
TEXTS = ["The quick brown fox", "jumps", "over the lazy dog, and away", "A dog. A fox! A dog?", "x y z " * 6]
SEARCH = {"num_beams": 3, "max_length": 14, "length_penalty": 0.7, "no_repeat_ngram_size": 2}
HOW = {
    "t5": {"max_length": 12, "num_beams": 1},
    "bart": {**SEARCH, "early_stopping": True, "forced_bos_token_id": 0},
    "marian": {**SEARCH, "renormalize_logits": True, "bad_words_ids": [[1]], "forced_eos_token_id": 2},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("written")
    for kind, how in HOW.items():
        translator(root / kind, kind, **how)
    torch.manual_seed(1)
    network = RecurrentTranslator(RecurrentConfig(**SHAPE))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.5)
    recurrent.save_recurrent(root / "recurrent", network, root / "t5" / "tokenizer.json")
    return {kind: root / kind for kind in (*HOW, "recurrent")}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Process]:
    process = Process(*(f"{kind}={folder}" for kind, folder in folders.items()), "--cache-tokens", "2048")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def reference_text(folder: Path, text: str, **options: Any) -> str:
    """The answer of transformers."""
    network, words = tf.AutoModelForSeq2SeqLM.from_pretrained(folder), tf.AutoTokenizer.from_pretrained(folder)
    read = words(text, return_tensors="pt").input_ids
    with torch.no_grad():
        found = network.eval().generate(read, use_cache=False, attention_mask=torch.ones_like(read), **options)
    return str(words.decode(found[0], skip_special_tokens=True))


def post(server: Process, path: str, body: Any) -> Any:
    answer = httpx.post(server.url + path, json=body, timeout=60, verify=False)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("kind", HOW)
def test_answers_equal_those_of_transformers(server: Process, folders: dict[str, Path], kind: str) -> None:
    found = post(server, f"/models/{kind}/pipeline/translation", {"inputs": TEXTS})
    assert [each["translation_text"] for each in found] == [reference_text(folders[kind], text) for text in TEXTS]


@pytest.mark.parametrize("kind", HOW)
def test_answers_with_options_equal_those_of_transformers(server: Process, folders: dict[str, Path], kind: str) -> None:
    options = {"num_beams": 2, "length_penalty": 1.5, "early_stopping": False, "max_new_tokens": 8}
    [found] = post(server, f"/models/{kind}", {"inputs": TEXTS[2], "parameters": options})
    # The first token of BART is forced and is not part of the answer.
    counts = {**options, "max_new_tokens": 9} if kind == "bart" else options
    assert found["generated_text"] == reference_text(folders[kind], TEXTS[2], **counts)


@pytest.mark.parametrize("width", [1, 3])
def test_a_recurrent_network_answers_as_without_the_server(
    server: Process, folders: dict[str, Path], width: int
) -> None:
    loaded = load(str(folders["recurrent"]))
    assert loaded.decoding is not None
    sources = [encoding.ids for encoding in loaded.tokenizer.encode_batch(TEXTS)]
    how = replace(loaded.decoding, max_tokens=9, beams=width)
    answers = generate(cast(Seq2Seq, loaded.head), RaggedBatch.of(sources), how)
    options = {"num_beams": width, "max_new_tokens": 9}
    found = post(server, "/models/recurrent/pipeline/translation", {"inputs": TEXTS, "parameters": options})
    said = [loaded.tokenizer.decode(answer.tokens, skip_special=True) for answer in answers]
    assert [each["translation_text"] for each in found] == said


def test_concurrent_requests_are_answered_as_single_ones(server: Process, folders: dict[str, Path]) -> None:
    def one(number: int) -> Any:
        kind, text = list(folders)[number % 4], TEXTS[number % 5]
        return post(server, f"/models/{kind}/pipeline/summarization", {"inputs": text})

    alone = [one(number) for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(one, range(12))) == alone
    assert server.rest().total("kv_blocks_used") == 0


def test_completions_stream_and_count(server: Process, folders: dict[str, Path]) -> None:
    body = {"model": "t5", "prompt": TEXTS[0], "max_tokens": 9, "temperature": 0}
    whole = post(server, "/v1/completions", body)
    assert whole["choices"][0]["text"] == reference_text(folders["t5"], TEXTS[0], max_new_tokens=9, num_beams=1)
    read = tf.AutoTokenizer.from_pretrained(folders["t5"])(TEXTS[0]).input_ids
    assert whole["usage"]["prompt_tokens"] == len(read)
    with httpx.stream(
        "POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=60, verify=False
    ) as s:
        lines = [line for line in s.iter_lines() if line.startswith("data: {")]
    assert (
        "".join(httpx.Response(200, text=line[6:]).json()["choices"][0]["text"] for line in lines)
        == (whole["choices"][0]["text"])
    )


def test_an_input_that_is_too_long_is_rejected(server: Process) -> None:
    answer = httpx.post(f"{server.url}/models/bart", json={"inputs": "fox " * 200}, timeout=60, verify=False)
    assert answer.status_code == 400
    assert "maximum context length is" in answer.json()["error"]
    chat = {"model": "t5", "messages": [{"role": "user", "content": "a"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=chat, timeout=60, verify=False)
    assert answer.status_code == 400
    assert "no chat template" in answer.json()["error"]["message"]


def explain_option(server: Process, model: str, **how: Any) -> tuple[Any, Any]:
    """The explanation of the chosen option, and its attribution."""
    question = {"type": "noul", "instructions": "good?", "explain": how}
    answer = post(server, "/v1/systemone", {"model": model, "state": "the fox", "questions": {"q": question}})
    explained = answer["answers"]["q"]["explanation"]
    [attribution] = explained["attributions"]
    assert attribution["target"]["kind"] == "option"
    return explained, attribution


def test_attributions_of_a_chosen_option_equal_gradients_of_transformers(
    server: Process, folders: dict[str, Path]
) -> None:
    explained, attribution = explain_option(server, "t5", method="gradient_x_input")
    source, written = (
        [token["id"] for token in explained["tokens"] if token["part"] == part] for part in ("input", "output")
    )
    network = tf.AutoModelForSeq2SeqLM.from_pretrained(folders["t5"], dtype=torch.float32).eval()
    embedded = network.get_input_embeddings()(torch.tensor([source])).detach().requires_grad_()
    logits = network(inputs_embeds=embedded, decoder_input_ids=torch.tensor([written[:-1]])).logits
    score = logits[0].gather(1, torch.tensor(written[1:])[:, None]).sum()  # of all tokens of the label
    score.backward()
    wanted = (embedded.grad * embedded)[0].sum(-1)
    assert attribution["target"]["score"] == pytest.approx(score.item(), rel=1e-4)
    assert attribution["tokens"][: len(source)] == pytest.approx(wanted.tolist(), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("model", ["t5", "bart"])
def test_integrated_gradients_of_a_chosen_option_add_up(server: Process, model: str) -> None:
    _, attribution = explain_option(server, model, method="integrated_gradients", steps=50)
    difference = attribution["completeness"]["difference"]
    assert abs(difference) > 1e-3
    assert sum(attribution["tokens"]) == pytest.approx(difference, rel=0.02, abs=1e-3)

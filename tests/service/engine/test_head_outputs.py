"""Heads that answer for each token: equal to the reference, for the requested rows, whatever else is in the batch."""

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf

from polyhead.models import checkpoint
from polyhead.models.checkpoint import Checkpoint
from polyhead.models.core.errors import CheckpointError
from polyhead.models.native.library import runnable_targets
from polyhead.models.network.heads import MaskHead, SparsePooling
from polyhead.service.cli import determinism
from polyhead.service.config.settings import Settings
from polyhead.service.core.errors import BadRequest, StepFailed
from polyhead.service.core.request import Encode, Failed, TokenCandidates, TokenOutputs
from polyhead.service.engine.encoder_worker import EncoderWorker
from polyhead.service.engine.head_outputs import VOCABULARY_ROWS
from polyhead.service.runtime.executor_choice import build_executor, make_deterministic
from polyhead.service.runtime.placement import choose_placement
from polyhead.service.runtime.registry import ModelRegistry
from tests.service.runtime.test_registry import serving
from tests.support import checkpoints
from tests.support.edits import edited, with_tensors
from tests.support.engine_fakes import ask, finish

EXECUTORS = [
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(not runnable_targets(), reason="nothing is compiled")),
]
KINDS = [
    *(tf.BertForTokenClassification, tf.BertForQuestionAnswering, tf.BertForMaskedLM),
    *(tf.RobertaForTokenClassification, tf.RobertaForQuestionAnswering, tf.RobertaForMaskedLM),
    *(tf.XLMRobertaForTokenClassification, tf.XLMRobertaForQuestionAnswering, tf.XLMRobertaForMaskedLM),
    *(tf.DistilBertForTokenClassification, tf.DistilBertForQuestionAnswering, tf.DistilBertForMaskedLM),
]
dice = Random(0)
TEXTS = [tuple(dice.randrange(5, 200) for _ in range(length)) for length in (9, 1, 40, 17)]


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.encoder(tmp_path_factory.mktemp("filler"), tf.BertForMaskedLM)


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.encoder(tmp_path_factory.mktemp("tagger"), tf.BertForTokenClassification)


def settings(executor: str = "torch", **given: Any) -> Settings:
    return Settings(device="cpu", executor=executor, precision="float32", **given)  # type: ignore[arg-type]


def worker(folder: Path, how: Settings | None = None, **budgets: int) -> EncoderWorker:
    loaded, how = checkpoint.load(str(folder)), how or settings()
    make_deterministic(loaded, how, choose_placement(how))
    return encoder(loaded, how, **budgets)


def encoder(loaded: Checkpoint, how: Settings, **budgets: int) -> EncoderWorker:
    head: Any = loaded.head
    executor = build_executor(loaded, how, choose_placement(how))
    return EncoderWorker(executor, head, model="reader", task=loaded.task, **budgets)


def answered(worker: EncoderWorker, *requests: Encode) -> list[Any]:
    tickets = ask(worker, *requests)
    finish(worker)
    return [ticket.events[0] for ticket in tickets]


def read(tokens: Sequence[int], **asked: Any) -> Encode:
    return Encode("test", tuple(tokens), **asked)


def dense(event: TokenOutputs | TokenCandidates) -> np.ndarray[Any, Any]:
    """[rows, columns]; of words, in the order of the vocabulary."""
    if isinstance(event, TokenOutputs):
        return np.asarray(event.scores)
    return np.array([[score for _, score in sorted(row)] for row in event.candidates])


def reference(folder: Path, kind: Any, tokens: Sequence[int], segments: Sequence[int] = ()) -> np.ndarray[Any, Any]:
    asked = {"token_type_ids": torch.tensor([segments])} if segments else {}
    with torch.no_grad():
        out = kind.from_pretrained(folder).eval()(torch.tensor([tokens]), **asked)
    if "start_logits" in out:
        return np.asarray(torch.stack((out.start_logits[0], out.end_logits[0]), dim=1))
    return np.asarray(out.logits[0])


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_logits_are_those_of_the_reference(kind: Any, executor: str, tmp_path: Path) -> None:
    folder = checkpoints.encoder(tmp_path, kind)
    for tokens, event in zip(
        TEXTS,
        answered(worker(folder, settings(executor)), *(read(text, raw=True, top_k=1000) for text in TEXTS)),
        strict=True,
    ):
        expected = reference(folder, kind, tokens)
        assert dense(event) == pytest.approx(expected, abs=2e-5 * float(np.abs(expected).max()))


def test_next_sentence(tmp_path: Path) -> None:
    """Two labels over the pooled first token of a pair."""
    folder = checkpoints.encoder(tmp_path, tf.BertForNextSentencePrediction)
    loaded = checkpoint.load(str(folder))
    assert (loaded.task, loaded.labels) == ("classify", ("LABEL_0", "LABEL_1"))
    tokens, segments = TEXTS[0], (0,) * 4 + (1,) * 5
    [event] = answered(worker(folder), read(tokens, segments=segments))
    logits = torch.tensor(reference(folder, tf.BertForNextSentencePrediction, tokens, segments))
    assert event.values == pytest.approx(logits.softmax(0).tolist(), abs=1e-5)


def test_a_checkpoint_with_both_pretraining_heads_fills_masks(tmp_path: Path) -> None:
    """BERT is pretrained with two heads; the one for masked words is used."""
    folder = checkpoints.encoder(tmp_path, tf.BertForPreTraining)
    [event] = answered(worker(folder), read(TEXTS[0], raw=True, top_k=1000))
    with torch.no_grad():
        out = tf.BertForPreTraining.from_pretrained(folder).eval()(torch.tensor([TEXTS[0]]))
    assert dense(event) == pytest.approx(np.asarray(out.prediction_logits[0]), abs=1e-4)


def test_the_checkpoint_describes_its_head(tagger: Path, filler: Path, tmp_path: Path) -> None:
    tags, words = checkpoint.load(str(tagger)), checkpoint.load(str(filler))
    assert (tags.task, tags.labels, tags.max_tokens) == ("tag", checkpoints.ENTITIES, checkpoints.POSITIONS)
    assert (words.task, words.labels) == ("fill", ())
    spans = checkpoints.encoder(tmp_path, tf.RobertaForQuestionAnswering)
    assert checkpoint.load(str(spans)).task == "span"
    with pytest.raises(CheckpointError, match=r"classifier\.bias.*its shape is \[6\].*asks for \[2\]"):
        checkpoint.load(str(edited(tagger, tmp_path / "other", id2label=None)))


def test_answers_are_probabilities_unless_raw_is_set(tagger: Path, filler: Path) -> None:
    text = TEXTS[0]
    closed, raw = (np.asarray(event.scores) for event in answered(worker(tagger), read(text), read(text, raw=True)))
    assert closed == pytest.approx(np.exp(raw) / np.exp(raw).sum(1, keepdims=True), abs=1e-6)
    every = 1000
    closed, raw = map(dense, answered(worker(filler), read(text, top_k=every), read(text, raw=True, top_k=every)))
    assert closed == pytest.approx(np.exp(raw) / np.exp(raw).sum(1, keepdims=True), abs=1e-6)


def test_only_requested_rows_are_answered(tagger: Path, tiny_embedder: Path) -> None:
    text, other = TEXTS[2], TEXTS[3]
    reader = worker(tagger)
    every, some, beside = answered(reader, read(text), read(text, rows=(3, 4, 39)), read(other))
    assert dense(some) == pytest.approx(dense(every)[[3, 4, 39]], abs=1e-6)
    assert dense(beside).shape == (17, 6)
    vector, part = answered(worker(tiny_embedder), read(text, rows=(0,)), read(text))
    assert vector.values != pytest.approx(part.values), "a head that pools uses the requested rows only"
    for wrong in ((40,), (3, 3), (4, 3), (-1, 2)):
        with pytest.raises(BadRequest, match="rows must be ascending and below the 40 tokens"):
            reader.validate(read(text, rows=wrong))


def test_only_requested_rows_are_computed(filler: Path) -> None:
    loaded = checkpoint.load(str(filler))
    seen: list[int] = []
    loaded.head.register_forward_hook(lambda module, given, out: seen.append(len(out)))
    [event] = answered(encoder(loaded, settings()), read(TEXTS[2], rows=(7,)))
    assert seen == [1]
    assert len(event.candidates) == 1


def test_the_most_likely_words(filler: Path) -> None:
    text, rows = TEXTS[2], (3, 20)
    whole, few, some, two = answered(
        worker(filler),
        read(text, rows=rows, top_k=1000),
        read(text, rows=rows),
        read(text, rows=rows, targets=(9, 200, 17)),
        read(text, rows=rows, targets=(9, 200, 17), top_k=2),
    )
    for row in range(2):
        ranked = whole.candidates[row]
        assert [score for _, score in ranked] == sorted((score for _, score in ranked), reverse=True)
        assert sum(score for _, score in ranked) == pytest.approx(1)
        assert dict(few.candidates[row]) == pytest.approx(dict(ranked[:5]))
        wanted = {word: score for word, score in ranked if word in (9, 200, 17)}
        assert dict(some.candidates[row]) == pytest.approx(wanted), "probabilities among all words"
        assert [word for word, _ in some.candidates[row]] == list(wanted)
        assert two.candidates[row] == some.candidates[row][:2]
    with pytest.raises(BadRequest, match="top_k: at least 1"):
        worker(filler).validate(read(text, top_k=0))


def test_a_text_with_nan_states_fails_alone(filler: Path, tagger: Path) -> None:
    for folder in (filler, tagger):
        loaded = checkpoint.load(str(folder))
        with torch.no_grad():
            loaded.network.segments.weight[1] = float("nan")  # type: ignore[union-attr]
        bad = read(TEXTS[0], segments=(0,) * 8 + (1,))
        good, failed = answered(encoder(loaded, settings()), read(TEXTS[3]), bad)
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, StepFailed)
        assert isinstance(good, TokenOutputs | TokenCandidates)


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("kind", ["filler", "tagger"])
def test_the_batch_changes_no_bit(request: pytest.FixtureRequest, kind: str, executor: str) -> None:
    """More rows than one step of the output matrix takes, and requests with different options."""
    reader = worker(request.getfixturevalue(kind), settings(executor, deterministic=True))
    ways: list[dict[str, Any]] = [{}, {"raw": True, "top_k": 3}, {"rows": (0,)}, {"targets": (7, 8), "top_k": 1}]
    requests = [read(text, **way) for text in (*TEXTS, TEXTS[2]) for way in ways]
    assert sum(len(each.rows or each.tokens) for each in requests) > 3 * VOCABULARY_ROWS
    together, _ = determinism.run_batch(reader, requests)
    for question in together:
        [alone], _ = determinism.run_batch(reader, [question.request])
        assert question.events == alone.events
        assert determinism.max_difference(question.events, alone.events) == 0


def test_differences_of_answers_are_measured(tagger: Path) -> None:
    reader = worker(tagger)
    (one, other), _ = determinism.run_batch(reader, [read(TEXTS[0]), read(TEXTS[0][::-1])])
    assert determinism.max_difference(one.events, other.events) > 0.01


def test_an_output_matrix_that_is_tied_to_the_embeddings(filler: Path, tmp_path: Path) -> None:
    def copied(tensors: dict[str, torch.Tensor]) -> None:
        tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()

    def another(tensors: dict[str, torch.Tensor]) -> None:
        copied(tensors)
        tensors["cls.predictions.decoder.weight"] += 1

    for change, tied in ((lambda tensors: None, True), (copied, True), (another, False)):
        folder = with_tensors(edited(filler, tmp_path / str(tied), tie_word_embeddings=True), tmp_path / "it", change)
        loaded = checkpoint.load(str(folder))
        assert isinstance(loaded.head, MaskHead)
        assert (loaded.head.output.weight is loaded.network.tokens.weight) is tied


def test_names_of_older_checkpoints(filler: Path, tmp_path: Path) -> None:
    """Norms with gamma and beta, and the bias under both of its names, beside a head that is not used."""

    def older(tensors: dict[str, torch.Tensor]) -> None:
        for new, old in (("weight", "gamma"), ("bias", "beta")):
            norm = "cls.predictions.transform.LayerNorm"
            tensors[f"{norm}.{old}"] = tensors.pop(f"{norm}.{new}")
        tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
        tensors["cls.seq_relationship.weight"] = torch.zeros(2, 32)

    old = with_tensors(filler, tmp_path / "older", older)
    one, other = (answered(worker(folder), read(TEXTS[0])) for folder in (filler, old))
    assert one == other


@pytest.mark.skipif(not runnable_targets(), reason="nothing is compiled here")
def test_served_by_the_compiled_step(filler: Path) -> None:
    """It frees the network's own matrix, which the head also reads."""

    async def act(served: ModelRegistry) -> TokenCandidates:
        await served.load_all()
        [stream] = served.submit(served.models()[0], [read(TEXTS[0], rows=(3,), raw=True)])
        events = [event async for event in stream]
        assert isinstance(events[0], TokenCandidates), events
        return events[0]

    found = serving({"words": str(filler)}, act, precision="float32")
    expected = torch.tensor(reference(filler, tf.BertForMaskedLM, TEXTS[0])[3]).topk(5)
    assert [word for word, _ in found.candidates[0]] == expected.indices.tolist()
    assert [score for _, score in found.candidates[0]] == pytest.approx(expected.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("pooling", [SparsePooling(), SparsePooling(sums=True), SparsePooling(log_twice=True)])
def test_weights_of_words(filler: Path, pooling: SparsePooling) -> None:
    """As sentence-transformers' SpladePooling computes them; the texts have several steps of rows."""
    text = TEXTS[0] * 5
    made = worker(filler)
    made._heads[0].texts["words"].sparse = pooling
    logits = torch.tensor(reference(filler, tf.BertForMaskedLM, text))
    weights = logits.relu().log1p()
    weights = weights.log1p() if pooling.log_twice else weights
    expected = weights.sum(0) if pooling.sums else weights.amax(0)
    [event, _] = answered(made, read(text, form="words"), read(TEXTS[1], form="words"))
    found = torch.zeros_like(expected)
    for token, weight in event.candidates[0]:
        found[token] = weight
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert answered(made, read(text, form="words")) == [event], "the same bits alone"


@pytest.mark.parametrize("asked", [{}, {"form": "words"}])
def test_a_text_of_many_masks_takes_many_steps(asked: Any, filler: Path) -> None:
    """A step reads a piece of VOCABULARY_ROWS rows, and what nobody waits for is not read."""
    rows, pieces = 3 * VOCABULARY_ROWS, list[int]()
    slow, fast = worker(filler), worker(filler)
    slow.reading_turn_s, fast.reading_turn_s = 0, 60
    head = slow._heads[0].texts[asked.get("form", "")]
    head.register_forward_hook(lambda _, given, __: pieces.append(len(given[0])))  # type: ignore[attr-defined]
    text, other = read([5] * rows, **asked), read([6] * rows, **asked)
    [expected] = answered(fast, text)
    assert answered(slow, text) == [expected]
    assert pieces == [VOCABULARY_ROWS] * 3
    [ticket] = ask(slow, other)
    slow.step()
    slow.abort(ticket)
    assert not slow.has_work
    slow.check_invariants()
    assert len(pieces) == 4

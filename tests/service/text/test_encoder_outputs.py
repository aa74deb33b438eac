"""Outputs of token-level heads: equal to those of transformers' pipelines, in windows, and few at a time in
the engine.
"""

import asyncio
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhead.service.concurrency.thread_pool import OwnerThreads, ThreadPool
from polyhead.service.core.errors import (
    AnswerTooLarge,
    BadRequest,
    Expired,
    Overloaded,
    PolyheadError,
    StepFailed,
    TooLong,
    TooMany,
)
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Encode, Failed, HeadOutput, Terms, TokenCandidates
from polyhead.service.resources.request_memory import Headroom, MemoryClaim
from polyhead.service.text import encoder_inputs as inputs
from polyhead.service.text import encoder_outputs as answers
from polyhead.service.text.answer_spans import SpanOptions
from polyhead.service.text.encoder_inputs import (
    MAX_WINDOWS,
    EncodedInput,
    EncodingRequest,
    WindowOptions,
    build_encoding_request,
    read_inputs,
    window_rows,
)
from polyhead.service.text.encoder_outputs import (
    EncoderOutput,
    FillOutput,
    ScoreOutput,
    SpanOutput,
    SparseVector,
    SubmittedAhead,
    TagOutput,
    TokenVectors,
    stream_outputs,
    submit_inputs,
)
from polyhead.service.text.entities import Aggregation
from polyhead.service.text.event_source import Submit
from polyhead.service.text.output_job import OutputJob
from polyhead.service.text.tokenization import DEFAULT_TERMS
from tests.service.engine.test_head_outputs import answered, worker
from tests.support import checkpoints
from tests.support.scripted import WAIT, Source, model

AHEAD = 4096
LONG = "The quick brown fox, in Paris: unbelievable jumping! Größere naïve café (schöner) lovers of a lazy dog. " * 6


class Case:
    """A served model, without HTTP."""

    def __init__(self, folder: Path, task: Any, **others: Any) -> None:
        self.folder, self.worker = folder, worker(folder)
        self.model = model(folder, "reader", task, **({"max_tokens": 64, "width": 32} | others))

    def submit(self, requests: Sequence[Any]) -> list[Source]:
        events = answered(self.worker, *requests)
        return [
            Source([event, Done("encoded", len(each.tokens))]) for event, each in zip(events, requests, strict=True)
        ]

    def replies(self, *inputs: Any, **asked: Any) -> list[Any]:
        reading = EncodingRequest(field="inputs", inputs=inputs, **asked)
        reads = read_inputs(self.model, reading, "call", DEFAULT_TERMS)
        return collected(self.model, reading, reads, self.submit)


def output_job(**options: Any) -> OutputJob:
    return OutputJob(OwnerThreads(ThreadPool(1, "text", math.inf), "reading the answer", "", ""), **options)


def collected(
    model: Model, reading: EncodingRequest, reads: Any, submit: Submit
) -> list[EncoderOutput | PolyheadError]:
    async def collect() -> list[EncoderOutput | PolyheadError]:
        sources = submit_inputs(reads, submit, AHEAD)
        return [reply async for reply in stream_outputs(model, reading, reads, sources, output_job())]

    return asyncio.run(collect())


@pytest.fixture(scope="module")
def tagger(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = checkpoints.encoder(tmp_path_factory.mktemp("tagger"), tf.BertForTokenClassification)
    return Case(folder, "tag", labels=checkpoints.ENTITIES)


@pytest.fixture(scope="module")
def filler(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(checkpoints.encoder(tmp_path_factory.mktemp("filler"), tf.BertForMaskedLM), "fill")


@pytest.fixture(scope="module")
def finder(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(checkpoints.encoder(tmp_path_factory.mktemp("finder"), tf.BertForQuestionAnswering), "span")


def pipeline(case: Case, task: str, kind: Any, **how: Any) -> Any:
    tokenizer = tf.PreTrainedTokenizerFast.from_pretrained(case.folder, model_max_length=case.model.max_tokens)
    return tf.pipeline(task, model=kind.from_pretrained(case.folder), tokenizer=tokenizer, **how)


@pytest.mark.parametrize("aggregation", ["simple", "first", "average", "max"])
def test_long_texts_are_labelled_in_windows_as_the_pipeline_does(tagger: Case, aggregation: Aggregation) -> None:
    theirs = pipeline(
        tagger, "token-classification", tf.BertForTokenClassification, stride=9, aggregation_strategy=aggregation
    )(LONG)
    [ours] = tagger.replies(LONG, aggregation=aggregation, windows=WindowOptions(overlap=9))
    assert isinstance(ours, TagOutput)
    for entity, expected in zip(ours.entities, theirs, strict=True):
        place = tuple(expected[key] for key in ("entity_group", "start", "end"))
        assert (entity.label, entity.start, entity.end) == place
        assert entity.score == pytest.approx(expected["score"], abs=1e-4)
    assert len(LONG) > ours.entities[-1].start > len(LONG) // 2
    assert ours.usage.prompt_tokens > tagger.model.max_tokens


@pytest.mark.parametrize("targets", [(), ("fox", "dog", "a")])
@pytest.mark.parametrize("text", ["The quick [MASK] fox.", "A [MASK] film, [MASK] shot"])
def test_masks_are_filled_as_the_pipeline_does(filler: Case, text: str, targets: tuple[str, ...]) -> None:
    fill = pipeline(filler, "fill-mask", tf.BertForMaskedLM)
    theirs = fill(text, top_k=3, targets=list(targets)) if targets else fill(text, top_k=3)
    theirs = theirs if text.count("[MASK]") > 1 else [theirs]
    [ours] = filler.replies(text, top_k=3, targets=targets)
    assert isinstance(ours, FillOutput)
    for mask, expected in zip(ours.masks, theirs, strict=True):
        assert [word.score for word in mask] == pytest.approx([each["score"] for each in expected], abs=1e-4)
        said = [(word.token, word.text, word.filled_text) for word in mask]
        assert said == [(each["token"], each["token_str"], each["sequence"]) for each in expected]


def test_invalid_requests_for_masks(filler: Case) -> None:
    for asked, sentence in [
        ({"inputs": ("no mask",)}, r"inputs: has no \[MASK\] to be filled in"),
        ({"inputs": ("a [MASK]", "none")}, r"inputs\[1\]: has no \[MASK\]"),
        ({"inputs": ("[MASK] " * 30,), "top_k": 999}, "999 words for each of 30 masks, at most 10000 are returned"),
        ({"inputs": ("[MASK]",), "targets": ("fox", "foxes and")}, r"targets\[1\]: 'foxes and' is no token of reader"),
        ({"inputs": ((5, 6),)}, "inputs: must be text"),
        ({"inputs": ("[MASK]",), "windows": WindowOptions()}, "reads no windows"),
    ]:
        with pytest.raises(BadRequest, match=sentence):
            filler.replies(*asked.pop("inputs"), **asked)


def test_answers_are_found_in_the_windows_of_a_long_context(finder: Case) -> None:
    question = "What is it?"
    short, whole = finder.replies(
        (question, "Paris, of course"), (question, LONG), windows=WindowOptions(overlap=8, size=40)
    )
    assert isinstance(short, SpanOutput)
    assert isinstance(whole, SpanOutput)
    assert (short.answers[0].text, len(short.answers)) == ("Paris, of course"[slice(*span(short))], 1)
    assert LONG[slice(*span(whole))] == whole.answers[0].text
    [cut] = finder.replies((question, LONG), truncate="right", span_options=SpanOptions(top_k=3))
    assert len(cut.answers) == 3
    reading = EncodingRequest(field="inputs", inputs=((question, LONG),), windows=WindowOptions(overlap=8, size=40))
    [read] = read_inputs(finder.model, reading, "call", DEFAULT_TERMS)
    assert isinstance(read, EncodedInput)
    expected = tf.PreTrainedTokenizerFast.from_pretrained(finder.folder)(
        question, LONG, truncation="only_second", max_length=40, stride=8, return_overflowing_tokens=True
    )
    assert [list(request.tokens) for request in read.requests] == expected["input_ids"]
    assert [part.offsets for part in read.parts] == [each.offsets for each in expected.encodings]


def test_the_spans_of_all_windows_of_a_context_are_bounded(finder: Case) -> None:
    """Those of one context: each is an answer of its own, and many short contexts have a window each."""
    windows, options = WindowOptions(overlap=8, size=40), SpanOptions(top_k=1000)
    with pytest.raises(
        TooMany, match=r"^parameters.top_k: 1000 answers .* 2010 spans of each of \d+ windows, .* 65536"
    ) as e:
        finder.replies(("What is it?", LONG * 4), windows=windows, span_options=options)
    assert e.value.param == "parameters.top_k"
    found = finder.replies(*[("What is it?", "Paris, of course")] * 40, windows=windows, span_options=options)
    assert all(found)


class RecordingClaim(MemoryClaim):
    """Records what is claimed, and what is reserved for work on threads."""

    def __init__(self) -> None:
        super().__init__(Headroom())
        self.claimed, self.reservations = list[int](), list[int]()

    @property
    def size(self) -> int:
        return self._size

    def grow(self, size: int, what: str) -> None:
        self.claimed.append(size)
        super().grow(size, what)

    @contextmanager
    def reserved(self, size: int, what: str) -> Iterator[None]:
        self.reservations.append(size)
        with super().reserved(size, what):
            yield


def read_outputs(case: Case, reading: EncodingRequest, job: OutputJob) -> list[Any]:
    reads = read_inputs(case.model, reading, "call", DEFAULT_TERMS)

    async def collect() -> list[Any]:
        sources = submit_inputs(reads, case.submit, AHEAD)
        return [reply async for reply in stream_outputs(case.model, reading, reads, sources, job)]

    return asyncio.run(collect())


def test_what_answers_take_is_claimed(finder: Case, filler: Case) -> None:
    claim, windows = RecordingClaim(), WindowOptions(overlap=8, size=40)
    question = EncodingRequest(
        field="inputs", inputs=(("What is it?", LONG),), windows=windows, span_options=SpanOptions(top_k=50)
    )
    [found] = read_outputs(finder, question, output_job(claim=claim))
    count = len(read_inputs(finder.model, question, "call", DEFAULT_TERMS)[0].requests)  # type: ignore[union-attr]
    compared = answers.BYTES_PER_SPAN * 110 * count
    texts = sum(answers.BYTES_PER_ANSWER + 4 * len(answer.text) for answer in found.answers)
    assert claim.reservations == [compared]
    assert claim.held == claim.size == texts, "it is given back"
    claim = RecordingClaim()
    masked = EncodingRequest(field="inputs", inputs=("The [MASK] fox.",), top_k=7)
    read_outputs(filler, masked, output_job(claim=claim))
    assert claim.size == 7 * (answers.BYTES_PER_ANSWER + 4 * len("The [MASK] fox."))


@pytest.mark.parametrize("kind", ["finder", "tagger", "filler"])
def test_no_answer_is_read_after_the_deadline_or_when_nobody_waits(kind: str, request: pytest.FixtureRequest) -> None:
    """The work on the thread ends at the next window, or after few words for a mask."""
    case: Case = request.getfixturevalue(kind)
    reading = {
        "finder": EncodingRequest(
            field="inputs", inputs=(("What is it?", LONG),), windows=WindowOptions(overlap=8, size=40)
        ),
        "tagger": EncodingRequest(
            field="inputs", inputs=(LONG,), windows=WindowOptions(overlap=9), aggregation="simple"
        ),
        "filler": EncodingRequest(field="inputs", inputs=("The [MASK] fox.",)),
    }[kind]
    assert read_outputs(case, reading, output_job())
    job = output_job()
    job.is_abandoned = True
    with pytest.raises(Expired, match="the deadline has passed while the answer was being read"):
        read_outputs(case, reading, job)
    with pytest.raises(Expired):
        read_outputs(case, reading, output_job(terms=Terms(deadline=0.0)))


def test_a_call_that_ends_leaves_its_work_behind(finder: Case) -> None:
    job = output_job()
    read_outputs(finder, EncodingRequest(field="inputs", inputs=(("What?", "Paris"),)), job)
    assert job.is_abandoned
    with pytest.raises(Expired):
        job.check()


def span(found: SpanOutput) -> tuple[int, int]:
    return found.answers[0].start, found.answers[0].end


def test_a_text_may_be_too_long(tagger: Case, finder: Case) -> None:
    with pytest.raises(TooLong, match=r"inputs\[1\]: the input has \d+ tokens. This model's maximum context length is"):
        tagger.replies("short", LONG)
    with pytest.raises(BadRequest, match="windows of 12 tokens have no room beside 10 others and 8 shared"):
        finder.replies(("What is it, then?", LONG), windows=WindowOptions(overlap=8, size=12))
    long = "a " * 4000
    with pytest.raises(BadRequest, match=f"would be read in 3939 windows, at most {MAX_WINDOWS}"):
        tagger.replies(long, windows=WindowOptions(overlap=61))


def test_the_windows_of_one_call_are_bounded_together(tagger: Case) -> None:
    """Each input alone is within the limit; inputs that fit in one window do not count."""
    long = EncodingRequest(
        field="inputs",
        inputs=("a " * 900, "a " * 900, "short"),
        windows=WindowOptions(overlap=61),
        partial=True,
        max_window_tokens=100_000,
    )
    with pytest.raises(
        TooMany, match=r"^inputs: would be read in 1678 windows of 107392 tokens together, at most 10"
    ) as e:
        read_inputs(tagger.model, long, "call", DEFAULT_TERMS)
    assert e.value.param == "inputs"
    one = replace(long, inputs=("a " * 900, *["a fox"] * 20_000))
    assert len(read_inputs(tagger.model, one, "call", DEFAULT_TERMS)) == 20_001
    many = EncodingRequest(field="inputs", inputs=("a " * 900,) * 5, windows=long.windows)
    with pytest.raises(TooMany, match="at most 262144 tokens a call"):
        read_inputs(tagger.model, many, "call", DEFAULT_TERMS)


def test_windows_are_made_lazily(tagger: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def counted(*given: Any) -> Encode:
        made.append(1)
        return build_encoding_request(*given)

    monkeypatch.setattr(inputs, "build_encoding_request", counted)
    reading = EncodingRequest(field="inputs", inputs=("a " * 500,) * 4, windows=WindowOptions(overlap=61))
    reads = read_inputs(tagger.model, reading, "call", DEFAULT_TERMS)
    count = sum(len(read.requests) for read in reads if isinstance(read, EncodedInput))
    assert count > 1500
    assert len(made) <= 2 * len(reads), "one is computed first, to get the length of all"
    engine = Slow()

    async def begin() -> None:
        sources = SubmittedAhead(lazily(reads), engine, AHEAD)
        await sources.next()
        sources.close()

    asyncio.run(begin())
    assert 0 < len(engine.sources) <= AHEAD // 64
    assert len(made) < AHEAD // 64 + 2 * len(reads) + 2


def lazily(reads: Sequence[Any]) -> Iterator[Encode]:
    for read in reads:
        yield from read.requests


def test_the_words_for_all_masks_of_a_call_are_limited(filler: Case) -> None:
    text = "[MASK] " * 9 + "a " * 40
    reading = EncodingRequest(field="inputs", inputs=(text,) * 10, top_k=300, partial=True)
    assert len(read_inputs(filler.model, reading, "call", DEFAULT_TERMS)) == 10
    with pytest.raises(
        TooMany, match=r"^parameters.top_k: \d+ words for each mask, each with its whole text"
    ) as caught:
        read_inputs(filler.model, replace(reading, inputs=(text,) * 1000), "call", DEFAULT_TERMS)
    assert caught.value.param == "parameters.top_k"
    few = replace(reading, inputs=(text,) * 1000, targets=("fox",))
    assert len(read_inputs(filler.model, few, "call", DEFAULT_TERMS)) == 1000


@settings(max_examples=200)
@given(st.integers(0, 60), st.integers(0, 5), st.integers(8, 20), st.integers(0, 6))
def test_windows_are_the_whole_text_and_overlap(length: int, beside: int, limit: int, overlap: int) -> None:
    texts: list[int | None] = [None] * beside + [0] * length
    if limit - beside - overlap < 1:
        return
    found = window_rows(texts, limit, overlap, last=0, where="it")
    rows = [[row for row in rows if texts[row] == 0] for rows in found]
    assert all(len(part) <= limit and list(part[:beside]) == list(range(beside)) for part in found)
    assert sorted({row for part in rows for row in part}) == list(range(beside, beside + length))
    for before, after in pairwise(rows):
        assert before[len(before) - overlap :] == after[:overlap]
        assert before[-1] < after[-1]


def test_an_invalid_text_fails_alone_on_request(tagger: Case) -> None:
    good, empty, long, last = tagger.replies("A fox", "", LONG, "Paris", partial=True)
    assert isinstance(good, TagOutput)
    assert isinstance(last, TagOutput)
    assert (empty.message, empty.param) == ("inputs[1]: is empty, there is nothing to read", "inputs[1]")
    assert isinstance(long, TooLong)


# Forms of outputs


def test_states_of_tokens_and_weights_of_words(tiny_embedder: Path, filler: Case) -> None:
    embedder = Case(tiny_embedder, "embed")
    [states, vector] = embedder.replies("A quick fox", form="tokens") + embedder.replies("A quick fox")
    ids = torch.tensor([embedder.model.tokenizer.encode("A quick fox").ids])
    with torch.no_grad():
        expected = tf.AutoModel.from_pretrained(tiny_embedder)(ids).last_hidden_state[0]
        logits = tf.BertForMaskedLM.from_pretrained(filler.folder)(ids).logits[0]
    assert isinstance(states, TokenVectors)
    assert isinstance(vector, ScoreOutput)
    assert np.asarray(states.rows) == pytest.approx(expected.numpy(), abs=1e-5)
    [weights] = filler.replies(tuple(ids[0].tolist()), form="words")
    assert isinstance(weights, SparseVector)
    splade = enumerate(logits.relu().log1p().amax(dim=0).tolist())
    assert dict(weights.weights) == pytest.approx({id: value for id, value in splade if value}, abs=1e-5)
    with pytest.raises(BadRequest, match="reader has no vectors of tokens"):
        filler.replies("[MASK]", form="tokens")


def test_the_vectors_of_all_tokens_of_one_call_are_bounded(tiny_embedder: Path) -> None:
    wide = Case(tiny_embedder, "embed", width=1 << 20)
    asked = EncodingRequest(field="inputs", inputs=("a fox",), form="tokens")
    assert read_inputs(wide.model, asked, "call", DEFAULT_TERMS)
    with pytest.raises(AnswerTooLarge, match=r"^inputs: vectors of 1048576 numbers for \d+ tokens, at most 16777216"):
        read_inputs(wide.model, replace(asked, inputs=("a fox",) * 9), "call", DEFAULT_TERMS)
    assert read_inputs(wide.model, replace(asked, inputs=("a fox",) * 9, form=""), "call", DEFAULT_TERMS)


def test_the_weights_of_words_of_one_call_are_bounded(filler: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_SPARSE_WEIGHTS", 100)
    event = TokenCandidates((tuple((word, 1.0) for word in range(40)),))

    def submit(requests: Sequence[Any]) -> list[Source]:
        return [Source([event, Done("encoded", 1)]) for _ in requests]

    asked = EncodingRequest(field="inputs", inputs=("a",) * 3, form="words")
    reads = read_inputs(filler.model, asked, "call", DEFAULT_TERMS)
    assert len(collected(filler.model, asked, reads[:2], submit)) == 2
    with pytest.raises(AnswerTooLarge, match=r"^inputs: the answer has more than 100 weights of words"):
        collected(filler.model, asked, reads, submit)


def test_forms_of_outputs_share_a_step(tiny_embedder: Path) -> None:
    embedder = Case(tiny_embedder, "embed")
    texts = ["A quick fox", "Paris", "a lazy dog in the café"]
    ids = [tuple(embedder.model.tokenizer.encode(text).ids) for text in texts]
    mixed = answered(
        embedder.worker,
        *(Encode("it", each, form=form) for each in ids for form in ("tokens", "")),  # type: ignore[arg-type]
    )
    alone = [answered(embedder.worker, Encode("it", each))[0].values for each in ids]
    assert [event.values for event in mixed[1::2]] == [pytest.approx(values, abs=1e-6) for values in alone]
    assert [event.scores.shape[0] for event in mixed[::2]] == [len(each) for each in ids]


# Few at a time


def request(tokens: int) -> Encode:
    return Encode("it", (1,) * tokens)


class Slow:
    """An engine that answers on command, and may be full."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.sources: list[Source] = []
        self.refusals = 0

    def __call__(self, requests: Sequence[Any]) -> list[Source]:
        if self.refusals:
            self.refusals -= 1
            raise Overloaded("no room", retry_after=1)
        self.calls.append(sum(len(each.tokens) for each in requests))
        new = [Source([HeadOutput([float(len(each.tokens))]), Done("encoded", len(each.tokens))]) for each in requests]
        self.sources += new
        return new

    @property
    def open(self) -> int:
        return sum(not source.ended for source in self.sources)


def many(lengths: Sequence[int]) -> tuple[EncodingRequest, list[EncodedInput]]:
    return EncodingRequest(field="inputs", inputs=("a",) * len(lengths)), [
        EncodedInput("a", (request(each),)) for each in lengths
    ]


def test_a_long_call_has_few_texts_with_the_engine(tiny_classifier: Path) -> None:
    judge, engine = model(tiny_classifier, "judge", "classify"), Slow()
    asked, reads = many([64] * 1000)
    most = 0

    async def collect() -> int:
        nonlocal most
        count = 0
        async for reply in stream_outputs(judge, asked, reads, submit_inputs(reads, engine, AHEAD), output_job()):
            assert isinstance(reply, ScoreOutput)
            count, most = count + 1, max(most, engine.open)
        return count

    assert asyncio.run(collect()) == 1000
    assert most * 64 <= AHEAD
    assert sum(engine.calls) == 64_000
    assert len(engine.calls) > 5
    assert min(engine.calls[:-1]) >= AHEAD // 2, "the groups are too small"


def test_a_text_longer_than_the_limit_of_the_engine_s_tokens(tiny_classifier: Path) -> None:
    judge, engine = model(tiny_classifier, "judge", "classify"), Slow()
    found = collected(judge, *many([AHEAD + 1, 5, AHEAD * 2]), engine)
    assert [reply.values[0] for reply in found if isinstance(reply, ScoreOutput)] == [AHEAD + 1, 5, AHEAD * 2]


def test_without_free_tokens_a_call_is_rejected_at_its_beginning_and_waits_later(tiny_classifier: Path) -> None:
    judge, engine = model(tiny_classifier, "judge", "classify"), Slow()
    engine.refusals = 1
    with pytest.raises(Overloaded):
        collected(judge, *many([64] * 300), engine)

    async def collect() -> int:
        count = 0
        asked, reads = many([64] * 300)
        async for _ in stream_outputs(judge, asked, reads, submit_inputs(reads, engine, AHEAD), output_job()):
            count += 1
            engine.refusals = 3 if count == 1 else engine.refusals
        return count

    assert asyncio.run(collect()) == 300


def test_a_failure_ends_the_call_unless_the_other_answers_are_requested(tiny_classifier: Path) -> None:
    judge = model(tiny_classifier, "judge", "classify")
    asked, reads = many([3, 3, 3])
    one, failed = [HeadOutput([0.25]), Done("encoded", 3)], [Failed(StepFailed("broke"))]

    def collected_errors(*scripts: Sequence[Any]) -> tuple[Submit, list[Source]]:
        sources = [Source(script) for script in scripts]
        return (lambda _: sources), sources

    submit, sources = collected_errors(one, failed, [WAIT])
    with pytest.raises(StepFailed, match="broke"):
        collected(judge, asked, reads, submit)
    assert all(source.ended or source.aborted for source in sources)
    submit, _ = collected_errors(one, failed, one)
    found = collected(judge, replace(asked, partial=True), reads, submit)
    assert [type(each) for each in found] == [ScoreOutput, StepFailed, ScoreOutput]
    submit, _ = collected_errors([HeadOutput([float("nan")]), Done("encoded", 3)], one, one)
    with pytest.raises(StepFailed, match="not finite"):
        collected(judge, asked, reads, submit)
    submit, _ = collected_errors([HeadOutput([float("nan")]), Done("encoded", 3)], one, one)
    found = collected(judge, replace(asked, partial=True), reads, submit)
    assert [type(each) for each in found] == [StepFailed, ScoreOutput, ScoreOutput]

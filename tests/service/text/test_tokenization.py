"""Tokenisation on threads: its cost for each owner, its recorded time, texts that are too long."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from polyhead.service.concurrency.thread_pool import ThreadPool, WorkItem
from polyhead.service.concurrency.thread_pool import WorkInfo as Task
from polyhead.service.core.errors import BadRequest, EmptyInput, TooLong
from polyhead.service.core.grammar import Grammar
from polyhead.service.core.model import Model
from polyhead.service.core.request import Sampling, Terms
from polyhead.service.text.encoder_inputs import EncodingRequest
from polyhead.service.text.generation_request import GenerationRequest
from polyhead.service.text.tokenization import (
    CHARACTERS_PER_TEXT,
    GRAMMAR_CHARACTERS,
    LONG_CHARACTERS,
    Decoding,
    TextProcessor,
)
from tests.support.scripted import model
from tests.support.text_calls import inputs, prompts, run


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Path) -> Model:
    return model(tiny_classifier, "judge", "classify", labels=("bad", "good"))


# Tokenisation


def test_work_is_charged_to_its_owner_by_its_texts(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any kind of job; grammars too, of which even a small one costs as much as a long text."""
    pieces, start = list[Task](), ThreadPool.start

    def noted(threads: ThreadPool, function: Callable[[], object], piece: Task) -> WorkItem:
        pieces.append(piece)
        return start(threads, function, piece)

    async def act() -> None:
        text = TextProcessor(threads=1, batch_limit=4, on_tokenised=lambda *_: None)
        terms = Terms(owner="good")
        texts = ["The fox", "a"]
        await text.tokenize(generator, texts, special=False, terms=terms)
        await text.read_inputs(generator, EncodingRequest(field="inputs", inputs=tuple(texts)), "call", terms)
        await text.render_prompt(generator, "The fox", "prompt", special=False, terms=terms)
        await text.decode(generator, Decoding([[1, 2, 3]]), terms)
        asked = GenerationRequest(field="prompt", prompts=("The fox",), sampling=Sampling())
        await text.read_prompts(generator, replace(asked, grammar=Grammar("regex", "[ab]+", "regex")), "call", terms)
        text.close()

    monkeypatch.setattr(ThreadPool, "start", noted)
    asyncio.run(act())
    assert {piece.owner for piece in pieces} == {"good"}
    costs = [texts * CHARACTERS_PER_TEXT + characters for texts, characters in ((2, 8), (2, 8), (1, 7), (1, 3), (1, 7))]
    assert [piece.size for piece in pieces] == [*costs, GRAMMAR_CHARACTERS + 5]


def test_many_short_texts_and_banned_words_are_long_work(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as a long text: the threads for short texts are left to others."""
    pools, start, many = list[str](), ThreadPool.start, LONG_CHARACTERS // CHARACTERS_PER_TEXT

    def noted(threads: ThreadPool, function: Callable[[], object], piece: Task) -> WorkItem:
        pools.append(threads._name)
        return start(threads, function, piece)

    async def act() -> None:
        text = TextProcessor(threads=1, batch_limit=2 * many, on_tokenised=lambda *_: None)
        words = ("a",) * many
        asked = GenerationRequest(field="prompt", prompts=words, sampling=Sampling(), max_tokens=1)
        one = replace(asked, prompts=("a",))
        for each in (asked, replace(one, bad_words=words), one):
            await text.read_prompts(generator, each, "call")
        await text.tokenize(generator, words, special=False)
        await text.read_inputs(generator, EncodingRequest(field="inputs", inputs=words), "call")
        await text.decode(generator, Decoding([[1]] * many))
        text.close()

    monkeypatch.setattr(ThreadPool, "start", noted)
    asyncio.run(act())
    assert pools == ["text-long", "text-long", "text", *["text-long"] * 3]


def test_the_time_is_recorded_once_for_each_call_and_for_failed_ones(generator: Model) -> None:
    times: list[tuple[str, str, float]] = []
    asked = GenerationRequest(field="prompt", prompts=("a", "b"), sampling=Sampling())
    run(TextProcessor.read_prompts, generator, asked, times)
    with pytest.raises(EmptyInput):
        run(TextProcessor.read_prompts, generator, replace(asked, prompts=("",)), times)
    assert [call[:2] for call in times] == [("talker", "generate")] * 2
    assert all(seconds > 0 for *_, seconds in times)


def test_extremely_long_texts_are_rejected_before_tokenisation(generator: Model, classifier: Model) -> None:
    long = "a" * ((1 << 16) + 1)
    for attempt in (lambda: prompts(generator, long), lambda: inputs(classifier, long, truncate="right")):
        with pytest.raises(
            TooLong,
            match=r"has 65537 characters, at most 65536 are read. This model's maximum context length is \d+ tokens",
        ):
            attempt()


def test_every_token_is_one_the_network_knows(generator: Model) -> None:
    """A tokenizer may have more tokens than the network has rows."""
    small = replace(generator, vocab_size=3)
    for prompt in ("abc", (5,)):
        with pytest.raises(BadRequest, match="is outside the vocabulary of 3"):
            prompts(small, prompt)
    with pytest.raises(BadRequest, match="stop_token_ids: token 99999 is outside"):
        prompts(generator, "a", stop_tokens=frozenset({99999}))

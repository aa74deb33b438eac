"""Tokens to text: stop strings, incomplete characters, several answers at once."""

import asyncio
import gc
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.core.errors import StepFailed
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Failed, Generate, GeneratedToken, Sampling
from polyhead.service.text.answer_delta import AnswerDelta, Usage, join_deltas
from polyhead.service.text.answer_stream import AnswerStream, collect_deltas, join_answers
from polyhead.service.text.detokenizer import MIN_LOGPROB, Detokenizer
from polyhead.service.text.event_source import EventReader
from polyhead.service.text.stop_strings import StopBuffer, StopRules, StopString, failure_table
from tests.support.scripted import WAIT, Source, model, token_events


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


def split(text: str, cuts: Iterable[int]) -> list[str]:
    borders = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[start:end] for start, end in pairwise(borders)]


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The definition: the text before the first complete stop string, the longest of those that end there."""
    found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return text[: min(found)[1]] if found else text


@st.composite
def stopped_texts(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text with many repetitions, and stop strings of which some are in it."""
    text = draw(st.text("ab", max_size=30))
    places = draw(st.lists(st.tuples(st.integers(0, 25), st.integers(1, 8)), max_size=2))
    inside = [text[start : start + length] for start, length in places]
    return text, [stop for stop in inside if stop] + draw(st.lists(st.text("ab", min_size=1, max_size=5), max_size=2))


@settings(max_examples=500)
@given(stopped_texts(), st.lists(st.integers(0, 30), max_size=8))
def test_stop_strings_are_found_across_any_split(given: tuple[str, list[str]], cuts: list[int]) -> None:
    text, stops = given
    tail, shown = StopBuffer(StopRules(tuple(stops))), ""
    for part in split(text, cuts):
        more = tail.push(part)
        shown += more
        assert text.startswith(shown)
        if tail.found:
            break
        # text that is held back may still begin a stop string, and no more is held back
        assert not tail.pending or any(stop.startswith(tail.pending) for stop in stops)
    if not tail.found:
        shown += tail.flush()
    assert shown == before_stop(text, stops)
    assert bool(tail.found) == any(stop in text for stop in stops)


def test_one_stop_string_is_found_where_it_first_ends() -> None:
    """All strings of two letters: the search can only go wrong on strings that repeat themselves."""
    texts = ["".join(letters) for letters in product("ab", repeat=9)]
    for stop in ("".join(letters) for length in range(1, 6) for letters in product("ab", repeat=length)):
        for text in texts:
            search = StopString(stop, failure_table(stop))
            end = next((end for end, char in enumerate(text, 1) if search.push(char)), 0)
            assert end == (text.find(stop) + len(stop) if stop in text else 0), (stop, text)


@settings(max_examples=150, deadline=None)
@example(text="é", stops=["é"], logprobs=0)
@given(
    text=st.text(st.sampled_from("ab é🙂日\n"), max_size=20),
    stops=st.lists(st.text(st.sampled_from("ab é🙂日"), min_size=1, max_size=3), max_size=3),
    logprobs=st.sampled_from([-1, 0, 2]),
)
def test_answers_detokenised_token_by_token(generator: Model, text: str, stops: list[str], logprobs: int) -> None:
    events = token_events(text, generator.tokenizer)
    request = Generate("id", (1,), 99, logprobs=logprobs)
    pieces = written(generator.tokenizer, stops, request, [*events, Done("length", 1, len(events))])
    answer = join_deltas(pieces)
    assert answer.text == before_stop(text, stops)
    assert all(not piece.finish for piece in pieces[:-1])
    assert answer.finish == ("stop" if any(stop in text for stop in stops) else "length")
    assert "\ufffd" not in answer.text
    if logprobs < 0:
        assert answer.logprobs == ()
    else:
        offsets = [drawn.offset for drawn in answer.logprobs]
        assert offsets == sorted(offsets)
        assert b"".join(drawn.token.data for drawn in answer.logprobs).decode("utf-8", "ignore").startswith(answer.text)
        assert answer.finish == "length" or all(offset < len(answer.text) for offset in offsets)
        assert answer.finish == "stop" or len(answer.logprobs) == len(events)


def written(tokenizer: Tokenizer, stops: Sequence[str], request: Generate, script: Sequence[Any]) -> list[AnswerDelta]:
    async def collect() -> list[AnswerDelta]:
        async with aclosing(
            AnswerStream(tokenizer, StopRules(tuple(stops)), [request], EventReader([Source(script)]))
        ) as items:
            return [piece async for _, piece in items]

    return asyncio.run(collect())


def test_incomplete_characters_are_not_sent(generator: Model) -> None:
    transcript = Detokenizer(generator.tokenizer, StopRules(), Generate("id", (1,), 9, logprobs=0))
    ids = [event.id for event in token_events("é🙂", generator.tokenizer)]
    assert len(ids) > 2, "the test needs characters of several tokens"
    pieces = [transcript.push(GeneratedToken(id, -1.0)) for id in ids]
    assert "".join(piece.text for piece in pieces) == "é🙂"
    assert {piece.text for piece in pieces} <= {"", "é", "🙂", "é🙂"}


def test_an_incomplete_character_at_the_end_is_a_replacement_character(generator: Model) -> None:
    (first, *_) = token_events("🙂", generator.tokenizer)
    pieces = written(generator.tokenizer, (), Generate("id", (1,), 9), [first, Done("length", 1, 1)])
    assert join_deltas(pieces).text == generator.tokenizer.decode([first.id])


def test_tokens_wait_with_their_text(generator: Model) -> None:
    events = [GeneratedToken(event.id, -1.0) for event in token_events("xab", generator.tokenizer)]
    transcript = Detokenizer(generator.tokenizer, StopRules(("ab!",)), Generate("id", (1,), 9, logprobs=0))
    pieces = [transcript.push(event) for event in events]
    assert ("".join(piece.text for piece in pieces), transcript.tail.pending) == ("x", "ab")
    assert b"".join(token.token.data for piece in pieces for token in piece.logprobs) == b"x"
    last = transcript.close(Done("length", 1, len(events)))
    assert last.text == "ab"
    assert len([token for piece in (*pieces, last) for token in piece.logprobs]) == len(events)


def test_tokens_without_text_are_not_lost(generator: Model) -> None:
    control, *half = (
        generator.tokenizer.bos_id or 0,
        *(event.id for event in token_events("🙂", generator.tokenizer)[:2]),
    )
    script = [*(GeneratedToken(id, -1.0) for id in (control, *half)), Done("length", 1, 3)]
    answer = join_deltas(written(generator.tokenizer, ("!",), Generate("id", (1,), 9, logprobs=0), script))
    assert len(answer.logprobs) == 3


def test_minus_infinity_is_a_valid_logprob(generator: Model) -> None:
    event = GeneratedToken(5, float("-inf"), ((6, float("nan")),))
    request = Generate("id", (1,), 9, logprobs=1)
    answer = join_deltas(written(generator.tokenizer, (), request, [event, Done("stop", 1, 1)]))
    assert [answer.logprobs[0].token.logprob, next(answer.logprobs[0].top).logprob] == [MIN_LOGPROB] * 2


def test_no_stop_string_ends_an_answer_before_its_minimum(generator: Model) -> None:
    events = [*token_events("ab ", generator.tokenizer), *token_events("ab ", generator.tokenizer)]
    script, least = [*events, Done("length", 1, len(events))], len(events) // 2 + 1
    for fewest, text, finish in ((0, "", "stop"), (least, "ab ", "stop"), (99, "ab ab ", "length")):
        request = Generate("id", (1,), 99, sampling=Sampling(min_tokens=fewest))
        answer = join_deltas(written(generator.tokenizer, ("ab",), request, script))
        assert (answer.text, answer.finish) == (text, finish)


def generated(model: Model, stops: Sequence[str], *scripts: Sequence[Any]) -> tuple[list[AnswerDelta], list[Source]]:
    async def collect() -> tuple[list[AnswerDelta], list[Source]]:
        sources = [Source(script) for script in scripts]
        requests = [Generate(f"id-{index}", (1, 2, 3), 99) for index in range(len(scripts))]
        items = AnswerStream(model.tokenizer, StopRules(tuple(stops)), requests, EventReader(sources))
        try:
            return await join_answers(await collect_deltas(items)), sources
        except StepFailed:
            assert all(source.ended or source.aborted for source in sources)
            raise

    return asyncio.run(collect())


def test_a_stop_string_closes_the_source_as_answered(generator: Model) -> None:
    script = [*token_events("one two three", generator.tokenizer), WAIT]
    (answer,), (source,) = generated(generator, ["two"], script)
    assert (answer.text, answer.finish) == ("one ", "stop")
    assert (source.answered, source.aborted) == (True, False)
    assert source.given < len(script) - 1
    assert answer.usage == Usage(3, source.given)


def test_several_answers_are_streamed_independently(generator: Model) -> None:
    long = [*token_events("a long story", generator.tokenizer), Done("stop", 3, 9, 2)]
    answers, sources = generated(generator, ["!"], long, [*token_events("b!", generator.tokenizer), WAIT], long)
    assert [answer.text for answer in answers] == ["a long story", "b", "a long story"]
    assert [source.answered for source in sources] == [False, True, False]
    assert answers[0].usage == Usage(3, 9, 2)


def test_one_failure_ends_all_answers(generator: Model) -> None:
    failed = [*token_events("a", generator.tokenizer), Failed(StepFailed("the step failed"))]
    with pytest.raises(StepFailed, match="the step failed"):
        generated(generator, [], [WAIT], failed, [WAIT])
    with pytest.raises(StepFailed, match="the step failed"):
        generated(generator, [], failed)


@pytest.mark.parametrize("count", [1, 3])
def test_closing_the_answers_aborts_the_requests(generator: Model, count: int) -> None:
    async def leave() -> list[Source]:
        sources = [Source([*token_events("a", generator.tokenizer), WAIT]) for _ in range(count)]
        requests = [Generate(f"id-{index}", (1,), 99) for index in range(count)]
        items = AnswerStream(generator.tokenizer, StopRules(), requests, EventReader(sources))
        await anext(items)
        await items.aclose()
        assert len(asyncio.all_tasks()) == 1, "a request still runs"
        return sources

    assert all(source.aborted for source in asyncio.run(leave()))


def test_the_likeliest_tokens_are_no_objects_that_garbage_collection_examines(generator: Model) -> None:
    """An answer may have a million of them, for as long as its client needs to read it."""
    event = GeneratedToken(5, -1.0, ((5, -1.0), (6, -2.0)))
    request = Generate("id", (1,), 9, logprobs=2)
    [scored] = join_deltas(written(generator.tokenizer, (), request, [event, Done("stop", 1, 1)])).logprobs
    gc.collect()
    gc.collect()  # a tuple of tuples is left out after those in it
    assert not any(gc.is_tracked(each) for each in (scored.likeliest, *scored.likeliest))
    assert [each.id for each in scored.top] == [5, 6]

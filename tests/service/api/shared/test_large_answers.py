"""A single answer with very many tokens or log-probabilities is processed in slices and written on a thread."""

import asyncio
import math
import threading
import tracemalloc
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest

from polyhead.service.api.dialects.anthropic import routes as anthropic
from polyhead.service.api.dialects.hf import routes as hf
from polyhead.service.api.dialects.oip import routes as oip
from polyhead.service.api.dialects.ollama import routes as ollama
from polyhead.service.api.dialects.openai import routes as openai
from polyhead.service.api.dialects.openai import write as openai_write
from polyhead.service.api.dialects.openai.write import write_text_logprobs
from polyhead.service.api.dialects.responses import routes as responses
from polyhead.service.api.dialects.tgi import routes as tgi
from polyhead.service.api.shared import generation_calls as generating
from polyhead.service.api.shared import streaming as stream
from polyhead.service.api.shared.encoding_calls import run_off_loop
from polyhead.service.api.shared.openai_errors import write_logprobs, write_scored_token
from polyhead.service.api.shared.streaming import MAX_OBJECTS, dumps_sliced
from polyhead.service.concurrency.thread_pool import ThreadPool
from polyhead.service.concurrency.time_slices import SLICE_SIZE, TOKENS_PER_SLICE
from polyhead.service.core.errors import BodyTooLarge, Overloaded
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Event, Generate, GeneratedToken, PromptScores
from polyhead.service.engine.event_stream import Stream
from polyhead.service.engine.worker import RequestTiming
from polyhead.service.resources.request_memory import Headroom, MemoryClaim
from polyhead.service.text import score_claim, stop_strings
from polyhead.service.text.answer_delta import AnswerDelta, ScoredToken, TokenLogprobs
from polyhead.service.text.answer_stream import CLAIM_TOKENS, AnswerStream, collect_deltas
from polyhead.service.text.detokenizer import Detokenizer
from polyhead.service.text.event_source import EventReader
from polyhead.service.text.score_claim import ScoreClaim
from polyhead.service.text.stop_strings import StopRules
from tests.contracts.test_slices import TurnCounter
from tests.service.api.operations.test_admin import Client
from tests.service.api.operations.test_admin import serving as served
from tests.support.engine_fakes import generate
from tests.support.scripted import model as scripted_model

PROMPT = [5, 6, 7]
MARK = 2  # a token without text


LONG = 5 * SLICE_SIZE + 17


TOP = ((5, -1.0), (6, -2.0))


@pytest.fixture
def generator(tiny_generator: Path) -> Model:
    return scripted_model(tiny_generator, "talker", "generate")


# Events


def test_all_events_of_a_search_are_delivered_in_slices(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = TurnCounter()
    monkeypatch.setattr(Stream, "receive", turns.count("received", Stream.receive))
    asked = {"prompt": PROMPT, "max_tokens": 50, "ignore_eos": True, "logprobs": 2}
    search = {"use_beam_search": True, "n": 8, "best_of": 8, "temperature": 0}

    async def act(client: Client) -> None:
        turns.count_turn()
        answer = await client.ask("POST", "/v1/completions", {"model": "chat", **asked, **search})
        assert answer.status_code == 200, answer.text[:300]
        assert [len(choice["logprobs"]["tokens"]) for choice in answer.json()["choices"]] == [50] * 8

    served(act, {"chat": tiny_generator})
    assert turns.total["received"] >= 8 * 51
    assert turns.most["received"] <= SLICE_SIZE


# Detokenisation


class ReadySource:
    """A source whose events are all available."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events, self.timing = deque(events), RequestTiming()

    @property
    def is_open(self) -> bool:
        return bool(self.events)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while self.events:
            yield self.events.popleft()

    def take(self) -> Event | None:
        return self.events.popleft() if self.events else None

    def on_ready(self, function: Callable[[], None]) -> None: ...

    def close(self, *, answered: bool = False) -> None:
        self.is_closed = True


def read(turns: TurnCounter, generator: Model, request: Generate, events: Sequence[Event]) -> list[AnswerDelta]:
    async def run() -> list[AnswerDelta]:
        turns.count_turn()
        answers = AnswerStream(generator.tokenizer, StopRules(), [request], EventReader([ReadySource(events)]))
        found = [piece async for _, piece in answers]
        await asyncio.sleep(0)
        return found

    return asyncio.run(run())


def test_available_tokens_are_detokenised_in_slices(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = TurnCounter()
    monkeypatch.setattr(Detokenizer, "push", turns.count("pushed", Detokenizer.push))
    request = generate(PROMPT, LONG, logprobs=2)
    tokens = [GeneratedToken(5, -1.0, TOP)] * LONG
    found = read(turns, generator, request, [*tokens, Done("length", 3, LONG)])
    assert sum(len(piece.logprobs) for piece in found) == LONG
    assert turns.total["pushed"] == LONG
    assert turns.most["pushed"] <= TOKENS_PER_SLICE


def test_the_scores_of_a_prompt_are_processed_in_slices(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = TurnCounter()
    monkeypatch.setattr(Detokenizer, "score_fields", turns.count("scored", Detokenizer.score_fields))
    request = generate([5] * LONG, 1, prompt_logprobs=2)
    scores = PromptScores(((-1.0, TOP),) * (LONG - 1))
    found = read(turns, generator, request, [scores, Done("length", LONG)])
    assert [len(piece.prompt_logprobs) for piece in found] == [LONG, 0]
    assert found[0].prompt_logprobs[0].token.logprob is None
    assert [each.offset for each in found[0].prompt_logprobs[:2]] == [0, len(generator.tokenizer.stream().push(5))]
    assert turns.total["scored"] == 3 * LONG - 2
    assert turns.most["scored"] <= 3 * TOKENS_PER_SLICE


def test_a_failure_table_is_made_once_for_all_answers_of_a_call(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = list[str](), stop_strings.failure_table

    def noted(stop: str) -> list[int]:
        made.append(stop)
        return real(stop)

    monkeypatch.setattr(stop_strings, "failure_table", noted)
    stops = [letter * 99 + "!" for letter in "abc"]
    asked = {"model": "chat", "prompt": [PROMPT] * 4, "n": 5, "max_tokens": 2, "stop": stops}

    async def act(client: Client) -> None:
        answer = await client.ask("POST", "/v1/completions", asked)
        assert len(answer.json()["choices"]) == 20

    served(act, {"chat": tiny_generator})
    assert made == stops


# Writing


MODEL = {"model": "chat"}


MESSAGES = [{"role": "user", "content": "The fox"}]


CALLS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any, str]] = {
    "completions": (
        "/v1/completions",
        {"prompt": PROMPT, "ignore_eos": True},
        {"max_tokens": 40, "logprobs": 5},
        openai,
        "write_completion",
    ),
    "prompt": (
        "/v1/completions",
        {"prompt": PROMPT * 20, "max_tokens": 1},
        {"echo": True, "logprobs": 5},
        openai,
        "write_completion",
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "ignore_eos": True, "max_tokens": 2},
        {"max_tokens": 40, "logprobs": True, "top_logprobs": 5},
        openai,
        "write_chat",
    ),
    "responses": (
        "/v1/responses",
        {"input": "The fox", "max_output_tokens": 16, "temperature": 0},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 20, "max_output_tokens": 40},
        responses,
        "write_response",
    ),
    "tgi": (
        "/models/chat/generate",
        {"inputs": "The fox", "parameters": {"max_new_tokens": 2}},
        {"parameters": {"max_new_tokens": 40, "details": True, "top_n_tokens": 5}},
        tgi,
        "write_answers",
    ),
    "hf": (
        "/models/chat",
        {"inputs": "The fox", "parameters": {"max_new_tokens": 2}},
        {"parameters": {"max_new_tokens": 40, "details": True, "top_n_tokens": 5}},
        hf.hf_write,
        "write_hf_generate",
    ),
    "oip": (
        "/v2/models/chat/generate",
        {"text_input": "The fox", "parameters": {"max_tokens": 2, "temperature": 0}},
        {"parameters": {"max_tokens": 100, "temperature": 0, "details": True}},
        oip,
        "write_text_response",
    ),
    "anthropic": (
        "/v1/messages",
        {"messages": MESSAGES, "max_tokens": 2, "temperature": 0},
        {"max_tokens": 100},
        anthropic,
        "write_message",
    ),
    "ollama": (
        "/api/chat",
        {"messages": MESSAGES, "stream": False, "options": {"num_predict": 2, "temperature": 0}},
        {"options": {"num_predict": 100, "temperature": 0}},
        ollama,
        "write_answer",
    ),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_large_answer_is_written_on_a_thread(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Even for few answers; a small answer is written on the event loop."""
    path, small, large, module, name = CALLS[call]
    where, real = list[bool](), getattr(module, name)

    def noted(*given: Any) -> Any:
        where.append(threading.current_thread() is threading.main_thread())
        return real(*given)

    async def act(client: Client) -> None:
        for body in (small, small | large):
            answer = await client.ask("POST", path, body if path.startswith(("/models", "/v2")) else body | MODEL)
            assert answer.status_code == 200, answer.text[:300]

    monkeypatch.setattr(module, name, noted)
    monkeypatch.setattr(generating, "INLINE_SCORES", 700 if call == "responses" else 100)
    served(act, {"chat": tiny_generator})
    assert where == [True, False]


def drawn(count: int, tops: int) -> tuple[TokenLogprobs, ...]:
    token = ScoredToken(b"a", -1.0, 5)
    return (TokenLogprobs(token, 0, ((b"a", -1.0, 5),) * tops, 5),) * count


def request_of(owner: str, threads: ThreadPool) -> Any:
    state = SimpleNamespace(context=SimpleNamespace(owner=owner))
    return SimpleNamespace(
        state=state, app=SimpleNamespace(state=SimpleNamespace(server=SimpleNamespace(request_threads=threads)))
    )


def test_large_answers_of_one_key_do_not_delay_the_answer_of_another() -> None:
    """While the only thread is busy, twenty answers of one key wait, and then one of another key comes."""
    written, free = list[str](), threading.Event()

    async def run() -> None:
        threads = ThreadPool(1, "requests", math.inf)

        def write(owner: str) -> asyncio.Task[None]:
            def content() -> None:
                free.wait()
                written.append(owner)

            return asyncio.create_task(run_off_loop(request_of(owner, threads), 1 << 12, content))

        sent = [write("many") for _ in range(20)]
        await asyncio.sleep(0)
        sent.append(write("one"))
        await asyncio.sleep(0)
        free.set()
        await asyncio.gather(*sent)
        threads.close()

    try:
        asyncio.run(run())
    finally:
        free.set()
    assert len(written) == 21
    assert written.index("one") <= 2, "the thread finishes what it has begun; then it is the other key's turn"


class ThreadedJson:
    """Stands for orjson; notes the bytes of each call on the main thread, and on others."""

    def __init__(self) -> None:
        self.inline, self.aside = list[int](), list[int]()

    def dumps(self, value: Any, **options: Any) -> bytes:
        written = orjson.dumps(value, **options)
        is_main = threading.current_thread() is threading.main_thread()
        (self.inline if is_main else self.aside).append(len(written))
        return written


STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": PROMPT * 60, "n": 4, "prompt_logprobs": 5, "max_tokens": 1}),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "fox " * 60}], "n": 2, "prompt_logprobs": 5, "max_tokens": 1},
    ),
    "responses": (
        "/v1/responses",
        {"input": "The fox", "max_output_tokens": 200, "top_logprobs": 5, "include": ["message.output_text.logprobs"]},
    ),
    "tokens without text": (
        "/v1/completions",
        {"prompt": PROMPT, "allowed_token_ids": [MARK], "ignore_eos": True, "logprobs": 5, "max_tokens": 200},
    ),
    "chat tokens without text": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "fox"}],
            "allowed_token_ids": [MARK],
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 5,
            "max_tokens": 200,
        },
    ),
    "echoed fields": (
        "/v1/responses",
        {
            "input": "The fox",
            "max_output_tokens": 16,
            "tools": [{"type": "function", "name": "f", "parameters": {"description": "\0" * stream.INLINE_BYTES}}],
            "tool_choice": "none",
        },
    ),
}


@pytest.mark.parametrize("call", STREAMS)
def test_a_large_event_of_a_stream_is_written_on_a_thread_in_small_parts(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The scores of a prompt, the last events of a response, which repeat the whole answer, and the last event of an
    answer without text, which has all its tokens.
    """
    path, body = STREAMS[call]
    json = ThreadedJson()

    async def act(client: Client) -> None:
        monkeypatch.setattr(stream, "orjson", json)
        answer = await client.ask("POST", path, body | MODEL | {"stream": True, "temperature": 0})
        assert answer.status_code == 200, answer.text[:300]
        assert "error" not in answer.text[-300:]

    served(act, {"chat": tiny_generator})
    assert max(json.inline, default=0) <= 6 * stream.INLINE_BYTES // 10
    assert sum(json.aside) > stream.INLINE_BYTES // 2
    assert max(json.aside) <= 20_000


def test_the_log_probabilities_of_a_stream_claim_memory(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt, which are kept for all answers, of a response, which are kept for its last events, and of tokens
    without text, which wait for the next text.
    """
    monkeypatch.setattr(score_claim, "CLAIM_STEP", 10)
    taken, real = list[int](), MemoryClaim.grow

    def noted(self: MemoryClaim, size: int, what: str) -> None:
        real(self, size, what)
        taken.append(size if what == "the answer" else 0)

    sums = dict[str, int]()

    async def act(client: Client) -> None:
        monkeypatch.setattr(MemoryClaim, "grow", noted)
        for call in ("completions", "chat", "responses", "tokens without text", "chat tokens without text"):
            path, body = STREAMS[call]
            taken.clear()
            answer = await client.ask("POST", path, body | MODEL | {"stream": True, "temperature": 0})
            assert answer.status_code == 200, answer.text[:300]
            sums[call] = sum(taken)

    served(act, {"chat": tiny_generator})
    assert all(total > 100 * 6 * score_claim.SCORE_BYTES for total in sums.values()), sums


def test_a_stream_that_takes_more_memory_than_there_is_ends_with_an_error(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(score_claim, "CLAIM_STEP", 100)
    real = MemoryClaim.grow

    def refuse(self: MemoryClaim, size: int, what: str) -> None:
        if what == "the answer":
            raise Overloaded("there is no memory", retry_after=1)
        real(self, size, what)

    async def act(client: Client) -> None:
        monkeypatch.setattr(MemoryClaim, "grow", refuse)
        path, body = STREAMS["responses"]
        answer = await client.ask("POST", path, body | MODEL | {"stream": True, "temperature": 0})
        *_, (_, data) = (event.split("\ndata: ") for event in answer.text.strip().split("\n\n"))
        last = orjson.loads(data)
        assert last["type"] == "response.failed"
        assert "ask for fewer of them" in last["response"]["error"]["message"]
        assert last["response"]["output"][0]["content"][0]["logprobs"]

    served(act, {"chat": tiny_generator})


def test_a_long_text_is_never_copied_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"one": ["a" * 50] * 20_000, "more": [{"inner": [[1.5] * 3000] * 100}]}
    chunks = stream.dump_chunks(content, b"before", b"after")
    assert max(map(len, chunks)) <= 2 * stream.CHUNK_BYTES
    assert b"".join(chunks) == b"before%safter" % orjson.dumps(content)
    table = np.ones((5, 5, 60, 60), np.float32)
    sizes = ThreadedJson()
    monkeypatch.setattr(stream, "orjson", sizes)
    stream.dump_chunks({"values": table})
    assert max(sizes.inline) <= 5 * stream.MAX_NUMBERS


def test_one_large_object_is_not_written_as_json_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def dumps(value: Any, **options: Any) -> bytes:
        written = orjson.dumps(value, **options)
        sizes.append(len(written))
        return written

    tops = {f"token {number}": -float(number) for number in range(20)}
    scores = {"tokens": ["a"] * LONG, "top_logprobs": [tops] * LONG}
    content = {"choices": [{"index": 0, "logprobs": scores}], "few": [{"one": [1, 2]}, {"two": ({},)}]}
    monkeypatch.setattr(stream, "orjson", SimpleNamespace(dumps=dumps))
    whole = dumps_sliced(content)
    monkeypatch.undo()
    assert whole == orjson.dumps(content)
    assert max(sizes) <= MAX_OBJECTS * (len(orjson.dumps(tops)) + 1) + 1


# Memory


class ScoredCall:
    """A call of a `generator` with `free` bytes, or the minimum, for log-probabilities, whose events are there."""

    def __init__(self, generator: Model, free: int = 1 << 40) -> None:
        self.tokenizer, self.headroom = generator.tokenizer, Headroom(free)
        self.claim = MemoryClaim(self.headroom)

    def answers(self, *events: Event, prompt: int = 3) -> AnswerStream:
        requests = [generate([SHOWN] * prompt, LONG, logprobs=20, prompt_logprobs=20)]
        self.source = ReadySource(events)
        answers = AnswerStream(self.tokenizer, StopRules(), requests, EventReader([self.source]))
        answers.scores = ScoreClaim(self.claim)
        answers.scores.expect(requests)
        return answers

    @property
    def claimed(self) -> int:
        return self.claim._size


SHOWN = 5  # a token with text
STEP_TOKENS = score_claim.CLAIM_STEP // 21 + 1  # tokens with 20 alternatives for which memory is claimed at a time
STEP_BYTES = score_claim.SCORE_BYTES * score_claim.CLAIM_STEP


def scored_token(id: int = SHOWN) -> GeneratedToken:
    return GeneratedToken(id, -1.0, tuple((other, -2.0) for other in range(20)))


@pytest.fixture
def generator_with_mark(tiny_generator: Path) -> tuple[Model, int]:
    """A model, and a token of it without text."""
    generator = scripted_model(tiny_generator, "talker", "generate")
    mark = generator.tokenizer.eos_id
    assert mark is not None
    assert not generator.tokenizer.stream().push(mark)
    return generator, mark


def test_kept_log_probabilities_claim_memory(generator: Model) -> None:
    call, count = ScoredCall(generator), 9 * STEP_TOKENS
    [deltas] = asyncio.run(collect_deltas(call.answers(*[scored_token()] * count, Done("length", 3, count))))
    tokens = [token for delta in deltas for token in delta.logprobs]
    assert len(tokens) == count
    assert 0 <= score_claim.score_memory(tokens) - call.claimed < STEP_BYTES


@pytest.mark.parametrize("streamed", [False, True])
def test_log_probabilities_that_wait_for_their_text_claim_memory(
    generator_with_mark: tuple[Model, int], streamed: bool
) -> None:
    """Tokens without text are sent with the next text, or at the end; until then a stream has nothing to send."""
    generator, mark = generator_with_mark
    call, count = ScoredCall(generator), 5 * STEP_TOKENS

    async def run() -> None:
        answers = call.answers(*[scored_token(mark)] * count, scored_token(), *[scored_token()] * 9)
        if not streamed:
            answers.keep_scores()
        _, delta = await anext(answers)
        assert len(delta.logprobs) == count + 1
        assert 0 <= score_claim.score_memory(delta.logprobs) - call.claimed < STEP_BYTES
        await anext(answers)
        if streamed:
            assert call.claimed < STEP_BYTES
        else:
            assert call.claimed > score_claim.score_memory(delta.logprobs) - STEP_BYTES

    asyncio.run(run())


@pytest.mark.parametrize("id", ["shown", "mark"])
def test_sent_log_probabilities_claim_no_memory(generator_with_mark: tuple[Model, int], id: str) -> None:
    generator, mark = generator_with_mark
    call, count = ScoredCall(generator), 5 * STEP_TOKENS
    token = scored_token(mark if id == "mark" else SHOWN)

    async def run() -> int:
        answers, most = call.answers(*[token] * count, Done("length", 3, count)), 0
        async for _ in answers:
            most = max(most, call.claimed)
        return most

    most = asyncio.run(run())
    assert (most > 4 * STEP_BYTES) == (id == "mark"), "those of the last delta are claimed until it is sent"
    assert call.claimed < STEP_BYTES


def test_the_memory_of_a_long_delta_is_released_in_slices(
    generator_with_mark: tuple[Model, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, (generator, mark) = TurnCounter(), generator_with_mark
    monkeypatch.setattr(ScoreClaim, "remove", turns.count("removed", ScoreClaim.remove))
    request = generate(PROMPT, LONG, logprobs=20)
    read(turns, generator, request, [*[scored_token(mark)] * LONG, Done("length", 3, LONG)])
    assert (turns.total["removed"], turns.most["removed"]) == (-(-LONG // CLAIM_TOKENS), 1)


def test_log_probabilities_behind_a_stop_string_claim_no_memory(
    generator_with_mark: tuple[Model, int],
) -> None:
    generator, mark = generator_with_mark
    call = ScoredCall(generator)

    async def run() -> None:
        answers = call.answers(*[scored_token(mark)] * (3 * STEP_TOKENS), scored_token())
        answers._stops = StopRules((generator.tokenizer.decode([SHOWN]),))
        _, delta = await anext(answers)
        assert (delta.finish, delta.logprobs) == ("stop", ())
        assert call.claimed > 2 * STEP_BYTES
        with pytest.raises(StopAsyncIteration):
            await anext(answers)
        assert call.claimed < STEP_BYTES

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_takes_more_than_there_is_ends(generator_with_mark: tuple[Model, int], streamed: bool) -> None:
    generator, mark = generator_with_mark
    call = ScoredCall(generator, free=0)
    token = scored_token(mark if streamed else SHOWN)
    count = 2 * int(call.headroom.total) // (21 * score_claim.SCORE_BYTES)
    answers = call.answers(*[token] * count, Done("length", 3, count))

    async def run() -> None:
        if streamed:
            async for _ in answers:
                pass
        else:
            await collect_deltas(answers)

    with pytest.raises(BodyTooLarge, match=r"logprobs: .* ask for fewer of them"):
        asyncio.run(run())
    assert call.headroom.total - 2 * STEP_BYTES < call.claimed <= call.headroom.total
    assert call.source.is_closed


@pytest.mark.parametrize("repeated", [1, 7])
def test_the_scores_of_a_prompt_are_counted_as_often_as_they_are_written(generator: Model, repeated: int) -> None:
    call, top = ScoredCall(generator), tuple((other, -2.0) for other in range(20))
    scores = PromptScores(((-1.0, top),) * STEP_TOKENS)
    answers = call.answers(scores, Done("length", 3, 0), prompt=STEP_TOKENS + 1)
    assert call.claimed >= STEP_BYTES, "before they are read: they may wait in the stream of each prompt"
    [deltas] = asyncio.run(collect_deltas(answers, repeated))
    size = score_claim.score_memory(deltas[0].prompt_logprobs)
    assert abs(repeated * size - call.claimed) < STEP_BYTES


def test_a_call_whose_prompts_have_too_many_scores_is_refused_before_it_is_computed(
    tiny_generator: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of all prompts of a stream may wait, since they are read one after another as the client reads."""
    submitted, real = list[int](), MemoryClaim.grow

    def refuse(self: MemoryClaim, size: int, what: str) -> None:
        if what == "the answer":
            raise Overloaded("there is no memory", retry_after=1)
        real(self, size, what)

    def noted(*given: Any) -> Any:
        submitted.append(0)
        return call_submitter(*given)

    call_submitter = generating.call_submitter
    monkeypatch.setattr(generating, "call_submitter", noted)

    async def act(client: Client) -> None:
        body = {"prompt": [PROMPT * 60] * 12, "prompt_logprobs": 5, "max_tokens": 1, "stream": True}
        accepted = await client.ask("POST", "/v1/completions", body | MODEL)
        assert (accepted.status_code, len(submitted)) == (200, 1), accepted.text[:300]
        monkeypatch.setattr(MemoryClaim, "grow", refuse)
        refused = await client.ask("POST", "/v1/completions", body | MODEL)
        assert (refused.status_code, len(submitted)) == (429, 1), refused.text[:300]
        assert "ask for fewer of them" in refused.text

    served(act, {"chat": tiny_generator})


def test_a_call_that_has_ended_frees_its_memory(tiny_generator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(score_claim, "CLAIM_STEP", 10)
    taken, real = list[tuple[MemoryClaim, int]](), MemoryClaim.grow

    def noted(self: MemoryClaim, size: int, what: str) -> None:
        real(self, size, what)
        taken.append((self, size if what == "the answer" else 0))

    async def act(client: Client) -> None:
        monkeypatch.setattr(MemoryClaim, "grow", noted)
        path, small, large, *_ = CALLS["completions"]
        answer = await client.ask("POST", path, small | large | MODEL)
        assert answer.status_code == 200, answer.text[:300]

    served(act, {"chat": tiny_generator})
    scored = [claim for claim, size in taken if size]
    assert len(scored) >= 5
    assert all(claim._size == 0 for claim in scored)


def list_scores(tokens: Sequence[TokenLogprobs]) -> list[Any]:
    return [
        write_scored_token(each.token) | {"top_logprobs": [write_scored_token(one) for one in each.top]}
        for each in tokens
    ]


@pytest.mark.parametrize("data", [b"\x80" * 400, b"\0" * 400, b'"' * 400, "語".encode() * 100, b"a"])
@pytest.mark.parametrize("write", [list_scores, write_logprobs, write_text_logprobs])
def test_log_probabilities_take_no_more_than_is_claimed_whatever_their_tokens_spell(
    data: bytes, write: Callable[[Sequence[TokenLogprobs]], Any]
) -> None:
    token = ScoredToken(data, -1.2345678901234567, 5)
    others = tuple((data + b"%d" % number, -1.2345678901234567, 6) for number in range(3))
    tokens = [TokenLogprobs(token, 1000, others, 5)] * 200
    limit, sizes = score_claim.score_memory(tokens), list[int]()
    while len(sizes) < 3 and limit < min(sizes, default=math.inf):  # threads that others left take memory too
        tracemalloc.start()
        try:
            written = dumps_sliced(write(tokens))
            sizes.append(max(tracemalloc.get_traced_memory()[1], len(written)))
        finally:
            tracemalloc.stop()
    assert min(sizes) <= limit


@pytest.mark.parametrize("text", ["\0" * 3000, '"\\' * 1500, "é語😀\ufffd" * 700])
def test_long_texts_are_written_in_parts_as_they_are_in_one(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def dumps(value: Any, **options: Any) -> bytes:
        written = orjson.dumps(value, **options)
        sizes.append(len(written))
        return written

    content = {"prompt": text, "few": [1], "all": [text, "a"], "one": {"text": text}}
    monkeypatch.setattr(stream, "orjson", SimpleNamespace(dumps=dumps))
    written = dumps_sliced(content), dumps_sliced({"prompt": text})
    monkeypatch.undo()
    assert written == (orjson.dumps(content), orjson.dumps({"prompt": text}))
    assert max(sizes) <= 6 * stream.MAX_CHARACTERS + 2


def test_choices_of_a_completion_are_made_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together those of 16,384 prompts are hundreds of thousands of objects, which a garbage collection examines."""
    made, write_choice = list[int](), openai_write.write_text_choice

    def noted(call: openai_write.CompletionInfo, index: int, piece: AnswerDelta, *, first: bool) -> dict[str, Any]:
        made.append(index)
        return write_choice(call, index, piece, first=first)

    monkeypatch.setattr(openai_write, "write_text_choice", noted)
    answers = [AnswerDelta(logprobs=drawn(1, 2))] * 50
    written = openai_write.write_completion(openai_write.CompletionInfo("id", "m", 1), answers)
    assert made == []
    choices = orjson.loads(dumps_sliced(written))["choices"]
    assert [each["index"] for each in choices] == sorted(set(made)) == list(range(50))

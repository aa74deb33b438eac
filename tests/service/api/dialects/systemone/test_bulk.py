"""POST /v1/systemone with a body of lines: an answer for each state, as soon as it is known."""

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from fastapi import FastAPI

from polyhead.service.api.access import middleware
from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.access.request_context import IGNORED_HEADER
from polyhead.service.api.shared import bulk_calls
from polyhead.service.api.shared.bulk_calls import CALLS_AHEAD, CHARACTERS_AHEAD
from polyhead.service.concurrency.thread_pool import ThreadPool, WorkInfo, WorkItem
from polyhead.service.core.model import Model
from polyhead.service.core.request import Done, Generate, GeneratedToken, Request, Task
from polyhead.service.decisions import generator_reads
from polyhead.service.resources.request_memory import Headroom, MemoryClaim
from polyhead.service.text import tokenization
from polyhead.service.text.tokenization import CHARACTERS_PER_TEXT, LONG_CHARACTERS
from tests.support.scripted import WAIT, Connection, Registry, application, ask, model, until

PATH, LINES = "/v1/systemone", "application/x-ndjson"
QUESTIONS = {
    "urgent": {"type": "noul", "instructions": "Is it urgent?"},
    "team": {"type": "choice", "criteria": {"billing": None, "support": "all else"}},
}
LABELS = ("negative", "positive")
FIRST = {"model": "talker", "questions": QUESTIONS}


def score_targets(_: Model, request: Request) -> Iterable[Any]:
    """Log-probabilities that are computed from the prompt and the targets."""
    assert isinstance(request, Generate)
    top = tuple((token, -1.0 - (sum(request.tokens) + token) % 7) for token in request.targets)
    yield GeneratedToken(request.targets[0], -1.0, top)
    yield Done("length", len(request.tokens), 1)


@pytest.fixture(scope="module")
def talker(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate", max_tokens=1 << 16)


@pytest.fixture
def registry(talker: Model) -> Registry:
    return Registry([talker], score_targets)


@pytest.fixture
def app(registry: Registry) -> FastAPI:
    return application(registry)


def test_what_the_model_reads_is_claimed(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question is read after the whole text: a call whose prompts take too much memory is refused."""
    app = application(registry, Headroom(free=0))
    body = json.dumps(FIRST | {"state": "A fox."}).encode()
    assert post(app, body, **{"Content-Type": "application/json"}).status_code == 200
    monkeypatch.setattr(generator_reads, "BYTES_PER_SHARED_TOKEN", 1 << 23)
    refused = post(app, body, **{"Content-Type": "application/json"})
    assert refused.status_code == 413
    error = refused.json()["error"]
    assert error["param"] == "questions"
    assert "what the model reads of them takes about" in error["message"]


@pytest.mark.parametrize("task", ["generate", "rank", "label_texts"])
def test_questions_cost_what_is_written_of_their_options_in_all_orders(
    tiny_generator: Path, tiny_classifier: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short text with many long options is long work, and takes no thread for short texts."""
    pieces, start = list[tuple[str, int]](), ThreadPool.start

    def noted(threads: ThreadPool, function: Callable[[], object], piece: WorkInfo) -> WorkItem:
        if "its text tokens" in piece.label:
            pieces.append((threads._name, piece.size))
        return start(threads, function, piece)

    folder = tiny_generator if task == "generate" else tiny_classifier
    app = application(Registry([model(folder, "judge", task, labels=LABELS)], lambda *_: [Done("length", 1, 1)]))
    count, orders = 100, 1 if task == "rank" else 6
    criteria = {name: name * 200 for name in "abc"}
    asked = {f"q{number}": {"type": "choice", "criteria": criteria, "permutations": 6} for number in range(count)}
    monkeypatch.setattr(ThreadPool, "start", noted)
    for questions in ({"q": asked["q0"]}, asked):
        post(app, json.dumps({"state": "a", "questions": questions}).encode(), **{"Content-Type": "application/json"})
    assert {name for name, size in pieces if size < LONG_CHARACTERS} == {"text"}
    name, size = max(pieces, key=itemgetter(1))
    assert size >= count * orders * (600 + CHARACTERS_PER_TEXT)
    assert name == ("text-long" if orders > 1 else "text")


def written(*lines: Any) -> bytes:
    return b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in lines)


def post(app: FastAPI, body: bytes, path: str = PATH, **headers: str) -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.post(path, content=body, headers={"Content-Type": LINES, **headers})

    return asyncio.run(run())


def answers(response: httpx.Response) -> list[Mapping[str, Any]]:
    """The lines of an answer by their index."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == LINES
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert sorted(line["index"] for line in lines) == list(range(len(lines)))
    return sorted(lines, key=lambda line: int(line["index"]))


def calls_of(registry: Registry) -> set[str]:
    """The calls that have requests in the engine."""
    return {request.id.split("-")[1] for request in registry.requests}


def connect(body: bytes) -> Connection:
    connection = Connection(PATH, body)
    headers = cast(list[tuple[bytes, bytes]], connection.scope["headers"])
    headers[0] = (b"content-type", LINES.encode())
    return connection


def test_a_state_in_a_body_of_lines_is_answered_as_one_alone(app: FastAPI) -> None:
    states = ["The invoice is wrong.", {"text": "It burns!", "from": "Ann"}, ["one", "two"]]
    lines = [states[0], {"state": states[1], "id": "b"}, {"state": states[2], "id": 7}]
    found = answers(post(app, written(FIRST, *lines)))
    alone = [answer.json() for answer in ask(app, *((PATH, {**FIRST, "state": state}) for state in states))]
    assert len({json.dumps(each["answers"]) for each in alone}) > 1, "the answers do not depend on the state"
    for line, single in zip(found, alone, strict=True):
        assert {name: line[name] for name in single if name not in ("id", "created")} == {
            name: single[name] for name in single if name not in ("id", "created")
        }
    assert found[0]["id"].startswith("decision-")
    assert [line["id"] for line in found[1:]] == ["b", 7]


@pytest.mark.parametrize(
    ("task", "question", "said"),
    [
        ("classify", {"type": "choice", "criteria": {"negative": None, "angry": None}}, "options must be labels of it"),
        ("classify", {"type": "noul", "instructions": "angry"}, "instructions must be labels of it"),
        ("rank", {"type": "noul"}, "has neither instructions nor criteria"),
        ("label_texts", {"type": "noul"}, "has neither instructions nor criteria"),
    ],
)
def test_questions_that_no_text_can_have_answered_are_refused_before_the_lines(
    tiny_classifier: Path, task: Any, question: Mapping[str, Any], said: str
) -> None:
    judge = replace(model(tiny_classifier, "judge", "classify"), task=task, labels=LABELS)
    registry = Registry([judge], score_targets)
    refused = post(application(registry), written({"questions": {"tone": question}}, "one", "two"))
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "questions.tone"
    assert error["message"].startswith("questions.tone: ")
    assert said in error["message"]
    assert not registry.requests


def test_too_many_reads_are_refused_before_the_lines(app: FastAPI, registry: Registry) -> None:
    wide = {"type": "choice", "criteria": {str(number): None for number in range(250)}, "permutations": 24}
    refused = post(app, written({"questions": dict.fromkeys(map(str, range(20)), wide)}, "one", "two"))
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("questions: they need 4800 reads of the model")
    assert not registry.requests


def test_instructions_that_are_not_read_are_named_in_the_header(tiny_classifier: Path) -> None:
    judge = replace(model(tiny_classifier, "judge", "classify"), labels=LABELS)
    tone = {"type": "choice", "instructions": "What?", "criteria": dict.fromkeys(LABELS)}
    answer = post(application(Registry([judge], score_targets)), written({"questions": {"tone": tone}}, b"[1]"))
    assert answer.status_code == 200
    assert answer.headers[IGNORED_HEADER] == "questions.tone.instructions"
    named = {f"天\r\nSet-Cookie: x, {number}": tone for number in range(60)}
    answer = post(application(Registry([judge], score_targets)), written({"questions": named}, b"[1]"))
    assert answer.status_code == 200
    shown = answer.headers[IGNORED_HEADER]
    assert shown.startswith("questions.%E5%A4%A9%0D%0ASet-Cookie: x%2C 0.instructions, ")
    assert re.search(r", and \d+ more$", shown)
    assert len(shown) < 1100


def test_a_state_that_is_wrong_does_not_disturb_the_others(app: FastAPI) -> None:
    lines = ["fine", b"{", {"id": "c"}, {"state": "", "id": "d"}, {"state": "x", "stat": 1}, b" ", [1], "fine"]
    found = answers(post(app, written(FIRST, *lines)))
    assert [line.get("answers") is None for line in found] == [False, True, True, True, True, True, False]
    assert found[0]["answers"] == found[-1]["answers"]
    messages = [line["error"]["message"] for line in found[1:-1]]
    assert messages == [line["detail"] for line in found[1:-1]]
    assert messages[0].startswith("line 3 is not valid JSON")
    assert messages[1] == "state: is required"
    assert (found[3]["id"], messages[2]) == ("d", "state: is empty, there is nothing to decide about")
    assert messages[3] == "stat: is not a known field; did you mean state?"
    assert messages[4] == 'line 8: must be a text, or an object as in {"state": "a text"}, got [1]'


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "the body: must have a line with the questions and a line for each state"),
        (written(FIRST), 400, "the body: must have a line with the questions and a line for each state"),
        (written(FIRST, b"\r\n", b""), 400, "the body: must have a line with the questions and a line for each state"),
        (written(b"{", "a"), 400, "line 1 is not valid JSON"),
        (written({**FIRST, "state": "a"}, "a"), 400, 'state: must be on the lines after this one, got "a"'),
        (written({"questions": {"q": {"type": "odd"}}}, "a"), 400, 'questions.q.type: "odd" is not supported'),
        (written({**FIRST, "model": "gone"}, "a"), 404, "no model is called 'gone'"),
        (written(FIRST, *["a"] * 21), 400, "the body: has 21 lines after the first, at most 20 are read"),
    ],
    ids=["empty", "no states", "empty lines", "no JSON", "a state", "a question", "a model", "too many"],
)
def test_what_is_wrong_with_all_states_is_an_error_of_the_call(
    registry: Registry, body: bytes, status: int, said: str
) -> None:
    answer = post(application(registry, max_batch_texts=20), body)
    assert answer.status_code == status
    assert answer.json()["error"]["message"].startswith(said), answer.text
    assert not registry.requests


def test_the_path_of_a_model_names_it(app: FastAPI) -> None:
    [line] = answers(post(app, written({"questions": QUESTIONS}, "a"), f"/models/talker{PATH}"))
    assert line["model"] == "talker"


def test_calls_that_wait_are_aborted_when_the_client_leaves(talker: Model) -> None:
    registry = Registry([talker], lambda *_: [WAIT])
    headroom = Headroom()
    app = application(registry, headroom)

    async def run() -> None:
        connection = connect(written(FIRST, *(f"state {number}" for number in range(CALLS_AHEAD * 3))))
        task = asyncio.create_task(connection.run(app))
        await until(lambda: len(calls_of(registry)) == CALLS_AHEAD)
        connection.drop()
        await task
        await until(lambda: all(source.aborted for source in registry.sources))
        assert len(calls_of(registry)) == CALLS_AHEAD

    asyncio.run(run())
    assert headroom._reserved == 0


def test_a_client_that_leaves_between_two_lines_aborts_the_rest(talker: Model) -> None:
    def answer_first_call(_: Model, request: Request) -> Iterable[Any]:
        return score_targets(talker, request) if len(calls_of(registry)) == 1 else [WAIT]

    registry, headroom = Registry([talker], answer_first_call), Headroom()
    app = application(registry, headroom)

    async def run() -> None:
        connection = connect(written(FIRST, *(f"state {number}" for number in range(CALLS_AHEAD * 2))))
        task = asyncio.create_task(connection.run(app))
        await until(lambda: b"\n" in connection.body)
        connection.drop()
        await task
        await until(lambda: all(source.aborted or source.ended for source in registry.sources))
        await until(lambda: headroom._reserved == 0)  # a thread may still read a text

    asyncio.run(run())
    assert cast(AppState, app.state.server).admission.in_flight == 0


def test_no_call_begins_while_the_client_does_not_read(registry: Registry, app: FastAPI) -> None:
    count, gate = CALLS_AHEAD * 4, asyncio.Event()

    async def run() -> None:
        connection = connect(written(FIRST, *(f"state {number}" for number in range(count))))
        connection.sending = gate.wait
        task = asyncio.create_task(connection.run(app))
        await until(lambda: len(calls_of(registry)) == CALLS_AHEAD)
        await until(lambda: all(source.ended for source in registry.sources))
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(calls_of(registry)) == CALLS_AHEAD
        gate.set()
        await task
        assert connection.body.count(b"\n") == count

    asyncio.run(run())
    assert len(calls_of(registry)) == count


def test_long_states_take_turns(talker: Model) -> None:
    """Calls whose texts are longer than CHARACTERS_AHEAD together are not in the engine at once."""
    registry = Registry([talker], lambda *_: [WAIT])
    app = application(registry)
    long = "a " * (CHARACTERS_AHEAD // 3 // len(QUESTIONS) // 2)

    async def run() -> None:
        connection = connect(written(FIRST, *[long] * 8))
        task = asyncio.create_task(connection.run(app))
        await until(lambda: len(calls_of(registry)) == 2)
        for _ in range(100):
            await asyncio.sleep(0.001)
        assert len(calls_of(registry)) == 2
        connection.drop()
        await task

    asyncio.run(run())


def test_a_state_waits_while_others_have_the_capacity(registry: Registry) -> None:
    app = application(registry, max_tokens_in_flight=1000)
    server = cast(Any, app.state.server)
    tokenise, calls = server.text.run, 0

    async def tokenise_and_fill(*arguments: Any) -> Any:
        """Other requests take all room after this one was admitted."""
        nonlocal calls
        calls += 1
        server.engine.tokens = 1000 if calls <= 2 else 0
        return await tokenise(*arguments)

    server.text.run = tokenise_and_fill
    found = answers(post(app, written(FIRST, "a", "b")))
    assert calls > 2
    assert [sorted(line["answers"]) for line in found] == [sorted(QUESTIONS)] * 2


class RecordingHeadroom(Headroom):
    """Records the bytes that were reserved at one time, at most, and in all."""

    most = all = 0

    def reserve(self, size: int, what: str, before: int = 0, owner: str = "") -> None:
        super().reserve(size, what, before, owner)
        self.most, self.all = max(self.most, self._reserved), self.all + size


def test_memory_is_released_with_each_answer(registry: Registry) -> None:
    count, criteria = 200, {f"option {number}": None for number in range(26)}
    questions = {f"q{number}": {"type": "choice", "criteria": criteria} for number in range(4)}
    headroom = RecordingHeadroom()
    app = application(registry, headroom)
    body = written({"model": "talker", "questions": questions}, *["x"] * count)
    assert len(answers(post(app, body))) == count
    assert 0 < headroom.most < headroom.all / 4
    assert headroom._reserved == 0


def test_the_memory_of_a_state_is_released_with_its_answer(registry: Registry) -> None:
    """Found by an attack: a call held the memory of its whole body until its end."""
    headroom, reserved = Headroom(), list[int]()
    app, body = application(registry, headroom), written(FIRST, *["a " * 5000] * 24)

    async def note() -> None:
        reserved.append(headroom._reserved)

    async def run() -> None:
        connection = connect(body)
        connection.sending = note
        await connection.run(app)
        assert connection.body.count(b"\n") == 24

    asyncio.run(run())
    assert max(reserved) > 3 * len(body)
    assert reserved[-1] < 3 * len(body) / 10
    assert headroom._reserved == 0


def test_a_state_that_can_never_fit_beside_its_body_is_refused_at_once(registry: Registry) -> None:
    """Found by an attack: the line waited for ever for memory that its own call held."""
    headroom = Headroom(free=0)
    found = answers(post(application(registry, headroom), written(FIRST, "fine", {"state": "a" * 207_000, "id": 7})))
    assert "answers" in found[0]
    assert (found[1]["id"], found[1]["status"]) == (7, 413)
    assert "state of 2070" in found[1]["error"]["message"]
    assert headroom._reserved == 0


def test_two_calls_that_wait_for_each_other_both_end(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by an attack: the bodies of both left no room for a line of either."""
    monkeypatch.setattr(tokenization, "BYTES_PER_CHARACTER", 16_000)
    for module in (middleware, bulk_calls):
        monkeypatch.setattr(module, "BYTES_PER_BODY_BYTE", 300)
    for name, seconds in {
        "MIN_PAUSE_S": 0.001,
        "MAX_PAUSE_S": 0.001,
        "MAX_IDLE_S": 0.01,
        "SHORT_WAIT_S": 0.002,
    }.items():
        monkeypatch.setattr(bulk_calls, name, seconds)
    headroom, count = Headroom(free=0), 30
    app = application(registry, headroom)
    engine, others = cast(Any, app.state.server.engine), MemoryClaim(headroom)
    body = written(FIRST, *["a" * 1000] * count)

    async def run() -> list[Connection]:
        others.grow(14 << 20, "others")
        engine.tokens = 1  # they make progress
        connections = [connect(body), connect(body)]
        calls = [asyncio.create_task(each.run(app)) for each in connections]
        await until(lambda: headroom._reserved >= others.held + 2 * 300 * len(body))
        engine.tokens = 0
        others.release()
        async with asyncio.timeout(120):
            await asyncio.gather(*calls)
        return connections

    lines = [json.loads(line) for each in asyncio.run(run()) for line in each.body.splitlines()]
    refused = [line for line in lines if "status" in line]
    assert len(lines) == 2 * count
    assert 0 < len(refused) < len(lines)
    assert {(line["status"], line["error"]["code"]) for line in refused} == {(429, "overloaded")}
    assert headroom._reserved == 0


def test_one_timing_is_kept_of_a_state(app: FastAPI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "polyhead.http")
    found = answers(post(app, written(FIRST, "a", "b", "c")))
    [record] = [record for record in caplog.records if getattr(record, "path", "") == PATH]
    fields = cast(Any, record)
    assert len(found) == 3
    assert (fields.requests, fields.outcome) == (3, "done")

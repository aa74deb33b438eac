"""Admission: which requests are admitted, the Retry-After of others, deadlines and priorities in header and body."""

import asyncio
import math
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import httpx
import orjson
import pytest
from fastapi import FastAPI

from polyhead.models.tokenizer import Tokenizer
from polyhead.service.api.access.admission import MAX_WAIT_S, RATE_SAMPLES, Admission, AdmissionLimits
from polyhead.service.api.access.app_state import AppState
from polyhead.service.api.shared import json_body as body
from polyhead.service.api.shared.streaming import JsonResponse
from polyhead.service.core.errors import BadRequest, Overloaded, Unavailable
from polyhead.service.core.model import Model
from tests.support.scripted import WAIT, Connection, FakeEngine, Registry, application, ask, echo, model, until

GO_ON = {"model": "talker", "prompt": "The fox"}
PLENTY = 1 << 40
KEYS = "a=ka,b=kb"


@pytest.fixture(scope="module")
def generator(tiny_generator: Path) -> Model:
    return model(tiny_generator, "talker", "generate")


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Path) -> Model:
    return model(tiny_classifier, "judge", "classify", labels=("bad", "good"))


def server_of(app: FastAPI) -> AppState:
    return cast(AppState, app.state.server)


def engine_of(app: FastAPI) -> FakeEngine:
    return cast(FakeEngine, server_of(app).engine)


def metric(app: FastAPI, sample: str) -> float:
    [page] = ask(app, ("/metrics", None))
    return sum(float(line.rpartition(" ")[2]) for line in page.text.splitlines() if line.startswith(sample))


def post(app: FastAPI, content: Any, headers: Mapping[str, str], path: str = "/v1/completions") -> httpx.Response:
    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            return await client.post(path, json=content, headers=headers)

    return asyncio.run(run())


# Permits


def test_over_the_bound_is_429_before_the_body_is_read(generator: Model) -> None:
    app = application(Registry([generator], lambda model, request: [WAIT]), max_requests=2)

    async def run() -> list[Connection]:
        inside = [Connection("/v1/completions", orjson.dumps(GO_ON)) for _ in range(2)]
        tasks = [asyncio.create_task(one.run(app)) for one in inside]
        await until(lambda: server_of(app).admission.in_flight == 2)
        outside = [Connection(path, b"{") for path in ("/v1/completions", "/predict")]
        for one in outside:
            await one.run(app)
            assert one.incoming.qsize() == 1, "the body was read"
        for one in inside:
            one.drop()
        await asyncio.gather(*tasks)
        return outside

    openai, tei = asyncio.run(run())
    for one in (openai, tei):
        assert one.sent[0]["status"] == 429
        assert 1 <= int(dict(one.sent[0]["headers"])[b"retry-after"]) <= MAX_WAIT_S
    assert orjson.loads(openai.body)["error"]["code"] == "overloaded"
    assert orjson.loads(tei.body) == {
        "error": orjson.loads(openai.body)["error"]["message"],
        "error_type": "Overloaded",
    }
    assert server_of(app).admission.in_flight == 0
    assert metric(app, "polyhead_http_requests_in_flight") == 0
    assert metric(app, 'polyhead_rejections_total{code="overloaded"}') == 2


def test_other_routes_take_no_permit(generator: Model) -> None:
    app = application(Registry([generator], echo), max_requests=1)
    with server_of(app).admission.admit():
        assert ask(app, ("/v1/models", None))[0].status_code == 200
        assert ask(app, ("/v1/completions", GO_ON))[0].status_code == 429
    assert ask(app, ("/v1/completions", GO_ON))[0].status_code == 200


def test_while_draining_no_request_is_admitted(generator: Model) -> None:
    app = application(Registry([generator], echo))
    server_of(app).admission.close()
    refused, live, ready = ask(app, ("/v1/completions", GO_ON), ("/livez", None), ("/readyz", None))
    assert (refused.status_code, live.status_code, ready.status_code) == (503, 200, 503)
    assert int(refused.headers["retry-after"]) >= 1
    assert ready.json()["draining"] is True
    assert ready.json()["reasons"] == ["the server is shutting down"]


def test_a_permit_is_returned_after_errors() -> None:
    admission = Admission(AdmissionLimits(1, PLENTY), FakeEngine())
    with pytest.raises(ZeroDivisionError), admission.admit():
        raise ZeroDivisionError
    assert admission.in_flight == 0
    admission.close()
    with pytest.raises(Unavailable):
        admission.admit().__enter__()


def test_a_request_is_not_counted_while_its_response_waits_for_the_client() -> None:
    admission = Admission(AdmissionLimits(1, PLENTY), FakeEngine())
    with admission.open_permit() as permit:
        with permit.leave_uncounted():
            assert admission.in_flight == 0, "its body is not complete"
        permit.acquire()
        with permit.leave_uncounted(), admission.admit():
            assert (admission.in_flight, admission.unfinished) == (1, 2)
        assert admission.in_flight == 1
        with permit.leave_uncounted(), admission.open_permit() as other:
            other.acquire()
        with pytest.raises(Overloaded), admission.admit():
            pass
    assert admission.in_flight == 0


# Tokens


def test_at_the_limit_of_tokens_in_flight_no_request_is_admitted(generator: Model) -> None:
    """The request is rejected before its body is read."""
    app = application(Registry([generator], echo), max_tokens_in_flight=100)
    engine_of(app).tokens = 100
    [refused] = ask(app, ("/v1/completions", b"{"))
    assert refused.status_code == 429
    assert "100 tokens are in flight" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    engine_of(app).tokens = 99
    assert ask(app, ("/v1/completions", b"{"))[0].status_code == 400


def test_a_call_over_the_token_limit_is_rejected_after_tokenisation(generator: Model) -> None:
    registry = Registry([generator], echo)
    app = application(registry, max_tokens_in_flight=100)
    engine_of(app).tokens = 90
    asked = GO_ON | {"prompt": list(range(3, 14)), "max_tokens": 1}
    [refused] = ask(app, ("/v1/completions", asked))
    assert refused.status_code == 429
    assert "90 tokens are in flight, with 11 more they are over 100" in refused.json()["error"]["message"]
    assert not registry.requests
    assert metric(app, 'polyhead_requests_total{model="talker",outcome="rejected",task="generate"}') == 1
    assert ask(app, ("/v1/completions", asked | {"prompt": list(range(3, 13))}))[0].status_code == 200
    engine_of(app).tokens = 0  # no request is in flight: one call is always admitted
    assert ask(app, ("/v1/completions", asked | {"prompt": [list(range(3, 53))] * 3}))[0].status_code == 200


# Shares of keys


def test_one_key_cannot_take_all_places() -> None:
    admission = Admission(AdmissionLimits(8, PLENTY, share=0.5), FakeEngine(), {"a", "b"})
    with ExitStack() as inside:
        for _ in range(4):
            inside.enter_context(admission.admit("a"))
        with pytest.raises(Overloaded, match="4 requests for this key are in flight"):
            inside.enter_context(admission.admit("a"))
        for _ in range(4):
            inside.enter_context(admission.admit("b"))
        with pytest.raises(Overloaded, match="8 requests are in flight"):
            inside.enter_context(admission.admit("b"))


def test_requests_of_a_key_that_are_counted_again_take_no_room_from_other_keys() -> None:
    admission = Admission(AdmissionLimits(8, PLENTY, share=0.5), FakeEngine(), {"a", "b"})
    with ExitStack() as inside:
        with ExitStack() as unread:
            for _ in range(12):
                permit = inside.enter_context(admission.open_permit("a"))
                permit.acquire()
                unread.enter_context(permit.leave_uncounted())
            assert admission.in_flight == 0
        assert admission.in_flight == 12
        with pytest.raises(Overloaded, match="4 requests for this key"):
            inside.enter_context(admission.admit("a"))
        for _ in range(4):
            inside.enter_context(admission.admit("b"))
        with pytest.raises(Overloaded, match="8 requests are in flight"):
            inside.enter_context(admission.admit())


def test_one_large_call_takes_no_more_than_its_share_of_the_tokens() -> None:
    """A key without tokens in flight may send a call of any size."""
    load = FakeEngine()
    admission = Admission(AdmissionLimits(8, 100, share=0.5), load, {"a", "b"})
    with admission.admit("a"):
        admission.check_tokens("a", 500)
    load.tokens, load.owned = 500, {"a": 500}
    with admission.admit("b"):
        admission.check_tokens("b", 50)
    load.tokens, load.owned = 520, {"a": 500, "b": 20}
    with pytest.raises(Overloaded, match="500 tokens for this key"):
        admission.admit("a").__enter__()
    load.tokens, load.owned = 550, {"a": 500, "b": 50}
    with pytest.raises(Overloaded, match="550 tokens are in flight"):
        admission.admit("b").__enter__()


def test_one_key_cannot_take_all_tokens() -> None:
    load = FakeEngine()
    admission = Admission(AdmissionLimits(8, 100, share=0.5), load, {"a", "b"})
    load.tokens, load.owned = 40, {"a": 40}
    with pytest.raises(Overloaded, match="40 tokens for this key are in flight, with 11 more they are over 50"):
        admission.check_tokens("a", 11)
    admission.check_tokens("a", 10)
    admission.check_tokens("b", 60)  # with none of its own one call is let in
    load.tokens, load.owned = 50, {"a": 50}
    with pytest.raises(Overloaded, match="50 tokens for this key are in flight"):
        admission.admit("a").__enter__()
    with admission.admit("b"):
        pass


def test_a_single_key_has_all() -> None:
    admission = Admission(AdmissionLimits(8, 100, share=0.5), FakeEngine(), {"default"})
    with ExitStack() as inside:
        for _ in range(8):
            inside.enter_context(admission.admit("default"))


def test_a_thousand_requests_of_one_client_do_not_block_another(generator: Model) -> None:
    app = application(Registry([generator], lambda model, request: [WAIT]), max_requests=10, api_keys=KEYS)

    async def run() -> list[int]:
        greedy = [Connection("/v1/completions", orjson.dumps(GO_ON), key="ka") for _ in range(1000)]
        tasks = [asyncio.create_task(one.run(app)) for one in greedy]
        await until(lambda: sum(bool(one.sent) for one in greedy) == 995)
        modest = Connection("/v1/completions", orjson.dumps(GO_ON | {"stream": True}), key="kb")
        tasks.append(asyncio.create_task(modest.run(app)))
        await until(lambda: len(cast(Registry, server_of(app).registry).requests) == 6)
        for one in (*greedy, modest):
            one.drop()
        await asyncio.gather(*tasks)
        return [one.sent[0]["status"] for one in greedy]

    statuses = asyncio.run(run())
    assert statuses.count(429) == 995


# Retry-After


class ManualClock:
    """A clock that the test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_wait_is_computed_from_the_rate_of_late() -> None:
    clock = ManualClock()
    admission = Admission(AdmissionLimits(8, PLENTY), FakeEngine(), clock=clock)
    with ExitStack() as inside:
        inside.enter_context(admission.admit())
        for _ in range(2 * RATE_SAMPLES):
            clock.now += 0.5
            with admission.admit():
                pass
        assert admission.estimate_wait() == 1  # one in flight, two a second end
        for _ in range(7):
            inside.enter_context(admission.admit())
        with pytest.raises(Overloaded) as caught:
            inside.enter_context(admission.admit())
        assert caught.value.retry_after == 4  # eight in flight
        clock.now += 1000
        assert admission.estimate_wait() == MAX_WAIT_S


def test_a_request_without_tokens_needs_a_place_only() -> None:
    load = FakeEngine()
    admission = Admission(AdmissionLimits(1, 10), load)
    load.tokens = 10
    with pytest.raises(Overloaded, match="10 tokens are in flight"):
        admission.admit().__enter__()
    with admission.admit(has_tokens=False), pytest.raises(Overloaded, match="1 requests are in flight"):
        admission.admit(has_tokens=False).__enter__()


def test_before_the_first_end_the_wait_grows_with_the_time() -> None:
    clock = ManualClock()
    admission = Admission(AdmissionLimits(1, PLENTY), FakeEngine(), clock=clock)
    with admission.admit():
        assert admission.estimate_wait() == 1
        clock.now += 5
        assert admission.estimate_wait() == 5


def test_after_a_pause_the_rate_is_measured_anew() -> None:
    clock = ManualClock()
    admission = Admission(AdmissionLimits(1, PLENTY), FakeEngine(), clock=clock)
    for _ in range(10):
        with admission.admit():
            clock.now += 10
    clock.now += 3600
    with admission.admit():
        clock.now += 2
        assert admission.estimate_wait() == 2


def tokens_leave(admission: Admission, load: FakeEngine, owner: str, each: int) -> None:
    """A request with so many tokens is submitted and ends."""
    with admission.admit(owner):
        admission.add_submitted(owner, each)
        load.tokens += each
        load.owned[owner] = load.tokens_of(owner) + each
        load.tokens -= each
        load.owned[owner] -= each


def test_the_wait_for_tokens_is_computed_from_the_tokens_that_left() -> None:
    clock, load = ManualClock(), FakeEngine()
    admission = Admission(AdmissionLimits(100, 1000), load, clock=clock)
    with admission.admit():
        admission.add_submitted("", 900)
        load.tokens = 900
        for _ in range(10):  # ten a second, 100 tokens a second: requests would have to wait for 1 s only
            clock.now += 0.1
            tokens_leave(admission, load, "", 10)
        with pytest.raises(Overloaded) as caught:
            admission.check_tokens("", 101)
        assert caught.value.retry_after == 9  # 900 in flight
        load.tokens += 100
        admission.add_submitted("", 100)
        with pytest.raises(Overloaded) as caught:
            admission.admit().__enter__()
        assert caught.value.retry_after == 10
        load.tokens = 500  # half of the long request's tokens have ended: 600 in this second
        with pytest.raises(Overloaded) as caught:
            admission.check_tokens("", 501)
        assert caught.value.retry_after == 1


def test_an_owner_over_its_share_waits_for_its_own_requests() -> None:
    clock, load = ManualClock(), FakeEngine()
    admission = Admission(AdmissionLimits(8, PLENTY, share=0.5), load, {"a", "b"}, clock)
    with ExitStack() as inside:
        for _ in range(4):
            inside.enter_context(admission.admit("a"))
        for _ in range(RATE_SAMPLES):
            clock.now += 0.25
            with admission.admit("b"):  # four a second end, but none of this owner
                pass
        with pytest.raises(Overloaded) as caught:
            inside.enter_context(admission.admit("a"))
    assert caught.value.retry_after == MAX_WAIT_S


# Deadlines and priorities


def test_terms_reach_the_engine(generator: Model, classifier: Model) -> None:
    registry = Registry([generator, classifier], echo)
    app = application(registry)
    asked = {"priority": 7, "timeout": 30}
    began = time.perf_counter()
    answers = ask(
        app,
        ("/v1/completions", GO_ON | asked),
        ("/v1/chat/completions", {"model": "talker", "messages": [{"role": "user", "content": "x"}]} | asked),
        ("/predict", {"inputs": "x"} | asked),
    )
    assert [answer.status_code for answer in answers] == [200] * 3
    assert len(registry.requests) == 3
    for request in registry.requests:
        assert request.terms.priority == 7
        assert began + 30 < request.terms.deadline < time.perf_counter() + 30
    ask(app, ("/predict", {"inputs": "x"}))
    assert (registry.requests[-1].terms.priority, registry.requests[-1].terms.deadline) == (0, math.inf)


@pytest.mark.parametrize(
    ("header", "field", "setting", "expected"),
    [("5", 20, 10, 5), ("20", 5, 10, 5), ("20", 30, 5, 5), ("5.5", 0, 0, 5.5)],
)
def test_the_shortest_time_counts(generator: Model, header: str, field: float, setting: float, expected: float) -> None:
    registry = Registry([generator], echo)
    app = application(registry, request_seconds=setting)
    began = time.perf_counter()
    asked = GO_ON | ({"timeout": field} if field else {})
    assert post(app, asked, {"X-Request-Timeout": header}).status_code == 200
    assert began + expected < registry.requests[0].terms.deadline < time.perf_counter() + expected


@pytest.mark.parametrize(
    "header", ["0", "-1", "", "abc", "1e3", "nan", "inf", "1,5", " ", "0.0001", "99999999999", "٣"]
)
def test_an_invalid_timeout_header_is_rejected_before_the_body_is_read(generator: Model, header: str) -> None:
    answer = post(application(Registry([generator], echo)), None, {"X-Request-Timeout": header.encode()})  # type: ignore[dict-item]
    assert answer.status_code == 400
    assert "X-Request-Timeout: must be a number of seconds from 0.001" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "X-Request-Timeout"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("timeout", 0, "must be between 0.001 and"),
        ("timeout", -1, "must be between 0.001 and"),
        ("timeout", "5", "must be a number"),
        ("priority", 101, "must be between -100 and 100"),
        ("priority", 1.5, "must be a whole number"),
    ],
)
def test_fields_out_of_bounds_are_named(
    generator: Model, classifier: Model, field: str, value: Any, message: str
) -> None:
    app = application(Registry([generator, classifier], echo))
    for path, asked, status in (("/v1/completions", GO_ON, 400), ("/predict", {"inputs": "x"}, 422)):
        [answer] = ask(app, (path, asked | {field: value}))
        assert answer.status_code == status
        assert f"{field}: {message}" in answer.text


def expired(app: FastAPI, answer: httpx.Response) -> None:
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "expired"
    assert metric(app, "polyhead_requests_received_total") == 1
    assert metric(app, "polyhead_requests_total{") == 1
    assert server_of(app).admission.in_flight == 0


def test_a_body_that_takes_too_long_expires_at_the_deadline(generator: Model) -> None:
    app = application(Registry([generator], echo), request_seconds=0.05)

    async def run() -> Connection:
        connection = Connection("/v1/completions", b"")
        connection.incoming.get_nowait()
        await connection.run(app)
        return connection

    began = time.monotonic()
    connection = asyncio.run(run())
    assert time.monotonic() - began >= 0.05
    assert connection.sent[0]["status"] == 504
    assert metric(app, 'polyhead_requests_total{model="",outcome="expired"') == 1


def test_a_request_expires_during_tokenisation(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may go on, but nothing is submitted."""
    encode = Tokenizer.encode_batch

    answered = threading.Event()

    def slowly(*given: Any, **named: Any) -> Any:
        answered.wait()
        return encode(*given, **named)

    monkeypatch.setattr(Tokenizer, "encode_batch", slowly)
    registry = Registry([generator], echo)
    app = application(registry)
    answer = post(app, GO_ON | {"timeout": 0.05, "stream": True}, {})
    answered.set()
    expired(app, answer)
    assert metric(app, 'polyhead_requests_total{model="talker",outcome="expired",task="generate"}') == 1
    assert not registry.requests


def test_nothing_is_submitted_after_the_deadline(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a request whose tokenisation ended in time."""
    registry = Registry([generator], echo)
    app = application(registry)
    tokenised = server_of(app).text._run

    async def late(*given: Any) -> Any:
        done = await tokenised(*given)
        time.sleep(0.1)
        return done

    monkeypatch.setattr(server_of(app).text, "_run", late)
    expired(app, post(app, GO_ON | {"timeout": 0.05}, {}))
    assert not registry.requests


# Bodies with many values


def too_many(content: bytes) -> bool:
    try:
        body.parse_json(content, "the body")
    except BadRequest:
        return True
    return False


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1 << 16])
@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b'["' + rb",[{\",[{\\" * 9 + b'"]', 1),
        (b'["a","b",{"c":[1,2]}]', 6),
        (rb'["\\","\\\"",",",[[]]]', 6),
        (b"[[[[[]]]]]", 5),
    ],
)
def test_values_are_counted_and_text_is_not(
    monkeypatch: pytest.MonkeyPatch, size: int, content: bytes, found: int
) -> None:
    monkeypatch.setattr(body, "SCAN_BYTES", size)
    orjson.loads(content)
    monkeypatch.setattr(body, "MAX_VALUES", found)
    assert not too_many(content)
    monkeypatch.setattr(body, "MAX_VALUES", found - 1)
    assert too_many(content)


def test_a_body_of_brackets_is_rejected_before_lists_are_made(
    generator: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = application(Registry([generator], echo))
    brackets = b'{"model":"talker","prompt":[' + b"[]," * 2_000_000 + b"[]]}"
    monkeypatch.setattr(body.orjson, "loads", None)  # before the lists are made
    [answer] = ask(app, ("/v1/completions", brackets))
    assert answer.status_code == 400
    assert f"the body: has more than {body.MAX_VALUES} values" in answer.json()["error"]["message"]


def test_a_long_text_full_of_commas_is_one_value(generator: Model) -> None:
    app = application(Registry([generator], echo))
    [answer] = ask(app, ("/v1/completions", GO_ON | {"prompt": "a,[{" * 500_000}))
    assert "has 2000000 characters" in answer.json()["error"]["message"]


def test_a_drain_counts_requests_without_a_permit(generator: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """While they are answered: those that need a key, not those that are polled or public."""
    app, counted = application(Registry([generator], echo)), dict[str, int]()
    admission = server_of(app).admission
    respond = JsonResponse.__call__

    async def call(self: JsonResponse, scope: Any, receive: Any, send: Any) -> None:
        counted[scope["path"]] = admission.unfinished
        await respond(self, scope, receive, send)

    monkeypatch.setattr(JsonResponse, "__call__", call)
    ask(app, ("/v1/models", None), ("/v1/models/nobody", None))
    assert counted == {"/v1/models": 1, "/v1/models/nobody": 1}
    for path in ("/livez", "/metrics", "/docs"):
        with monkeypatch.context() as patched:
            patched.setattr(admission, "count_unfinished", None)
            assert ask(app, (path, None))[0].status_code == 200
    assert admission.unfinished == 0
    admission.close()
    assert ask(app, ("/v1/models", None))[0].status_code == 200

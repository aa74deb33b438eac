"""Request counts of a real server: each request is counted once when it is received and once when it ends, as read from
the metrics."""

import asyncio
import json
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.crowd import COMPLETIONS, Moment, ask, completion, leave, together
from tests.support.processes import Page, Process

OUTCOMES = ("done", "failed", "aborted", "rejected", "expired")
PROMPT = [40, 41, 42]
PLACES = 3
LONG = "The quick brown fox, größer and schöner. " * 25_000  # some seconds of tokenisation

Action = Callable[[Process], None]


@pytest.fixture(scope="module")
def server(long_generator: Path, tiny_classifier: Path) -> Iterator[Process]:
    bounds = ("--max-requests", str(PLACES), "--max-tokens-in-flight", "500", "--max-running", "2")
    process = Process(f"chat={long_generator}", f"judge={tiny_classifier}", *bounds, "--max-body-bytes", "2000000")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def opened(server: Process, content: bytes, *headers: str, length: int = 0) -> socket.socket:
    """A connection on which a request, or only its beginning, was sent."""
    client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: localhost",
        f"Content-Length: {length or len(content)}",
        *headers,
        "",
        "",
    ]
    client.sendall("\r\n".join(lines).encode() + content)
    return client


def post(server: Process, path: str, content: Any, status: int, **headers: str) -> httpx.Response:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    answer = httpx.post(server.url + path, content=body, headers=headers, timeout=60)
    assert answer.status_code == status, answer.text
    return answer


def in_flight(server: Process, count: int) -> None:
    server.until(lambda: server.page.total("http_requests_in_flight") == count)


# Each event, and the number of ends of each outcome that it causes


def answered(server: Process) -> None:
    post(server, COMPLETIONS, completion(PROMPT, 4), 200)
    asyncio.run(ask(server.url, COMPLETIONS, completion(PROMPT, 4, stream=True)))
    post(server, COMPLETIONS, completion(PROMPT, 4) | {"prompt": ["a", "b", "c"]}, 200)
    post(server, "/models/judge/predict", {"inputs": [["a"], ["b"]]}, 200)


def stopped_by_a_string(server: Process) -> None:
    text = post(server, COMPLETIONS, completion(PROMPT, 30), 200).json()["choices"][0]["text"]
    choice = post(server, COMPLETIONS, completion(PROMPT, 30, stop=text[5:9]), 200).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["text"]) <= 5) == ("stop", True)


def read_without_a_request(server: Process) -> None:
    for path in ("/v1/models", "/readyz", "/models/judge/info", "/openapi.json"):
        assert server.get(path).is_success
    post(server, "/models/judge/tokenize", {"inputs": "a good film"}, 200)


def rejected_by_access_checks(server: Process) -> None:
    post(server, "/nowhere", {}, 404)
    post(server, "/livez", {}, 405)
    post(server, COMPLETIONS, b" " * 2_000_001, 413)
    post(server, COMPLETIONS, completion(PROMPT, 1), 400, **{"X-Request-Timeout": "soon"})


def rejected_by_the_dialect(server: Process) -> None:
    post(server, COMPLETIONS, b"{", 400)
    post(server, COMPLETIONS, completion(PROMPT, 1) | {"tempratur": 1}, 400)
    post(server, COMPLETIONS, completion(PROMPT, 1) | {"model": "nobody"}, 404)
    post(server, "/predict", {"inputs": 5}, 422)


def rejected_for_its_tokens(server: Process) -> None:
    post(server, COMPLETIONS, completion([999_999], 1), 400)
    post(server, COMPLETIONS, completion(PROMPT, 20_000), 400)
    asked = completion(PROMPT, 1) | {"prompt": [[40], [41] * 17_000]}
    post(server, COMPLETIONS, asked, 400)
    assert server.page.total("requests_total", model="chat", task="generate", outcome="rejected") >= 3


def rejected_without_a_free_place(server: Process) -> None:
    """Three requests stay until their clients disconnect; two are rejected."""
    with ExitStack() as held:
        for _ in range(PLACES):
            held.enter_context(opened(server, json.dumps(completion(PROMPT, 16_000)).encode()))
        server.until(lambda: server.page.total("requests_running") == 2 and server.page.total("requests_waiting") == 1)
        for path in (COMPLETIONS, "/predict"):
            assert int(post(server, path, completion(PROMPT, 1), 429).headers["retry-after"]) >= 1


def rejected_for_tokens_in_flight(server: Process) -> None:
    """One request stays until its client disconnects; two are rejected: one after tokenisation and one before its body
    is read."""
    with opened(server, json.dumps(completion([40] * 400, 10_000)).encode()):
        server.until(lambda: server.page.total("tokens_in_flight") == 400)
        post(server, COMPLETIONS, completion([41] * 101, 1), 429)
        with opened(server, json.dumps(completion([40] * 100, 10_000)).encode()):
            server.until(lambda: server.page.total("tokens_in_flight") == 500)
            post(server, COMPLETIONS, b"{", 429)


def expired(server: Process) -> None:
    """Running, queued, being tokenised, and with an incomplete body."""

    async def send_together() -> None:
        asked = completion(PROMPT, 16_000, timeout=0.4)
        answers = await together(ask(server.url, COMPLETIONS, asked) for _ in range(PLACES))
        assert {(answer.status, answer.code) for answer in answers} == {(504, "expired")}

    asyncio.run(send_together())
    post(server, COMPLETIONS, completion(PROMPT, 1, timeout=0.2) | {"prompt": LONG}, 504)
    with opened(server, b"{", "X-Request-Timeout: 0.1", length=9) as client:
        assert client.recv(1000).startswith(b"HTTP/1.1 504 ")


def expired_in_a_stream(server: Process) -> None:
    answer = asyncio.run(ask(server.url, COMPLETIONS, completion(PROMPT, 16_000, stream=True, timeout=0.4)))
    assert answer.whole
    assert answer.status == 200
    assert json.loads(answer.data[-1])["error"]["code"] == "expired"
    assert "error" not in json.loads(answer.data[-2])


def disconnected_in_the_body(server: Process) -> None:
    with opened(server, b"{", length=9):
        in_flight(server, 1)


def disconnected_while_tokenised(server: Process) -> None:
    with opened(server, json.dumps(completion(PROMPT, 1) | {"prompt": LONG}).encode()):
        in_flight(server, 1)
    in_flight(server, 0)  # though its tokenisation goes on


def disconnected_while_queued(server: Process) -> None:
    with ExitStack() as held:
        for stream in (True, False, True):
            held.enter_context(opened(server, json.dumps(completion(PROMPT, 16_000, stream=stream)).encode()))
        server.until(lambda: server.page.total("requests_waiting") == 1)


def disconnected_in_the_prompt(server: Process) -> None:
    with opened(server, json.dumps(completion([40] * 16_000, 1)).encode()):
        server.until(lambda: server.page.total("requests_running") == 1)


def disconnected_in_a_stream(server: Process) -> None:
    asked = completion(PROMPT, 16_000, stream=True)
    asyncio.run(together(leave(server.url, COMPLETIONS, asked, Moment(events=count)) for count in (1, 5)))


EVENTS: list[tuple[Action, dict[str, int]]] = [
    (answered, {"done": 7}),
    (stopped_by_a_string, {"done": 2}),
    (read_without_a_request, {}),
    (rejected_by_access_checks, {"rejected": 4}),
    (rejected_by_the_dialect, {"rejected": 4}),
    (rejected_for_its_tokens, {"rejected": 3}),
    (rejected_without_a_free_place, {"rejected": 2, "aborted": 3}),
    (rejected_for_tokens_in_flight, {"rejected": 2, "aborted": 2}),
    (expired, {"expired": 5}),
    (expired_in_a_stream, {"expired": 1}),
    (disconnected_in_the_body, {"aborted": 1}),
    (disconnected_while_tokenised, {"aborted": 1}),
    (disconnected_while_queued, {"aborted": 3}),
    (disconnected_in_the_prompt, {"aborted": 1}),
    (disconnected_in_a_stream, {"aborted": 2}),
]


def ends(page: Page) -> Counter[str]:
    return Counter({outcome: int(page.total("requests_total", outcome=outcome)) for outcome in OUTCOMES})


@pytest.mark.parametrize(("event", "expected"), [pytest.param(*event, id=event[0].__name__) for event in EVENTS])
def test_every_end_is_counted_once(server: Process, event: Action, expected: dict[str, int]) -> None:
    """When a client has disconnected, nothing of its request stays allocated."""
    before = server.rest()
    event(server)
    after = server.rest()
    assert ends(after) - ends(before) == Counter(expected)
    assert after.total("requests_received_total") - before.total("requests_received_total") == sum(expected.values())


def test_received_and_ended_requests_are_equal_when_idle(server: Process) -> None:
    """Also for the texts of a call whose client has disconnected."""
    before = server.page.total("requests_received_total", model="judge")
    asked = {"inputs": [["a good film"]] * 200}
    asyncio.run(leave(server.url, "/models/judge/predict", asked, Moment(seconds=0.01)))
    server.until(lambda: server.page.total("requests_received_total", model="judge") > before)
    page = server.rest()
    received, ended = page.received_and_ended
    assert received == ended > 0
    assert page.total("rejections_total") == page.total("requests_total", outcome="rejected")
    assert page.total("kv_blocks_used") == page.total("engine_stalled_seconds") == 0
    for model in ("chat", "judge", ""):
        assert page.total("requests_received_total", model=model) == page.total("requests_total", model=model)

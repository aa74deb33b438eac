"""A list of thousands of texts is computed in parts, so that other requests are answered meanwhile; against a real
server."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from polyhead.service.api.shared.encoding_calls import STEPS_AHEAD
from polyhead.service.config.settings import Settings
from tests.support.processes import Process

COUNT = 10_000
TEXT = "The quick brown fox jumps over the lazy dog in the café " * 2
LINES = {"Accept": "application/x-ndjson"}


@pytest.fixture(scope="module")
def server(tiny_embedder: Path, tiny_classifier: Path) -> Iterator[Process]:
    process = Process(f"vectors={tiny_embedder}", f"judge={tiny_classifier}")
    process.ready()
    yield process
    assert process.stop() == 0, process.log


def test_other_requests_are_answered_during_a_call_of_thousands_of_texts(server: Process) -> None:
    texts = [f"{number} {TEXT}" for number in range(COUNT // 2)]
    done = threading.Event()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(httpx.post(f"{server.url}/embed", json={"inputs": texts}, timeout=120))
        done.set()

    asking = threading.Thread(target=ask)
    asking.start()
    beside, most = 0, 0.0
    while not done.is_set():
        for path in ("/models/vectors/embed", "/models/judge/predict"):
            assert httpx.post(server.url + path, json={"inputs": "a fox"}, timeout=120).status_code == 200
        most = max(most, server.page.total("tokens_in_flight"))
        beside += not done.is_set()
    asking.join()
    assert answers[0].status_code == 200, answers[0].text[:200]
    assert len(answers[0].json()) == len(texts)
    assert beside >= 5, "the other requests waited for the whole list"
    assert 0 < most <= STEPS_AHEAD * Settings().encoder_step_tokens, (
        "more tokens of the list were in the engine at once"
    )


def test_lines_are_sent_before_all_texts_are_computed(server: Process) -> None:
    before = server.page.total("requests_total", model="vectors", outcome="done")
    texts = [f"{number} {TEXT}" for number in range(2000)]
    with httpx.stream("POST", f"{server.url}/embed", json={"inputs": texts}, headers=LINES, timeout=120) as response:
        lines = response.iter_lines()
        first = json.loads(next(lines))
        computed = server.page.total("requests_total", model="vectors", outcome="done") - before
        assert (first["index"], len(first["result"])) == (0, 32)
        assert computed < len(texts)
        assert [json.loads(line)["index"] for line in lines] == list(range(1, len(texts)))


def test_a_client_that_disconnects_stops_the_remaining_texts(server: Process) -> None:
    before = server.page.received_and_ended[0]
    texts = [f"{number} {TEXT}" for number in range(COUNT)]
    with httpx.stream("POST", f"{server.url}/embed", json={"inputs": texts}, headers=LINES, timeout=120) as response:
        next(response.iter_lines())
    received, ended = server.rest().received_and_ended
    assert received == ended
    assert received - before < COUNT

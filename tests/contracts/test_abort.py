"""Contract: a client that disconnects leaves nothing allocated, whenever and however it disconnects, and the other
requests do not change."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crowd import COMPLETIONS, PATIENCE, Alone, Moment, ask, completion, leave, prompts, together
from tests.support.faults import Fault
from tests.support.processes import FaultServer, Page

RUNNING, CHUNK = 16, 32
LONG = 12_000  # tokens


@pytest.fixture(scope="module")
def server(start_fault_server: Callable[..., FaultServer], long_generator: Path) -> FaultServer:
    return start_fault_server(
        f"chat={long_generator}",
        *("--max-running", str(RUNNING), "--prefill-chunk", str(CHUNK), "--step-tokens", "256"),
        *("--cache-tokens", "16384", "--max-requests", "512", "--deterministic", "true"),
    )


def storm(server: FaultServer, count: int, seed: int) -> None:
    """Send `count` requests, at most 64 at once, whose clients disconnect while they send, are queued, in the prompt,
    at the first token, in the middle, before the last token, or while a whole answer is computed."""
    draw = random.Random(seed)

    def one(prompt: list[int]) -> tuple[dict[str, object], Moment]:
        tokens = draw.randrange(2, 24)
        events, tokens = draw.choice(((0, tokens), (0, 2_000), (1, 2_000), (tokens, 2_000), (tokens - 1, tokens)))
        body = completion(prompt, tokens, stream=bool(events) or draw.random() < 0.5)
        hurry = PATIENCE if events else draw.random() * 0.2
        sent = 0.5 if not events and draw.random() < 0.2 else 1.0
        return body, Moment(hurry, events, politely=draw.random() < 0.5, sent=sent)

    asked = [one(prompt) for length in (1, 24, 200) for prompt in prompts(-(-count // 3), length, seed)]
    draw.shuffle(asked)
    asyncio.run(together((leave(server.url, COMPLETIONS, body, moment) for body, moment in asked), most=64))


@pytest.mark.timeout(3600)
def test_requests_of_clients_that_disconnect_are_freed(server: FaultServer, full: bool) -> None:
    storm(server, 150, seed=1)
    server.rest()
    descriptors, census, resident = server.descriptors(), server.census(), server.resident()
    storm(server, 10_000 if full else 400, seed=2)
    page = server.rest()
    assert page.total("requests_total", outcome="aborted") > 120
    assert page.total("requests_total", outcome="failed") == 0
    assert page.received_and_ended[0] == page.received_and_ended[1]
    server.until(lambda: server.descriptors() <= descriptors)  # the metrics that were read last include a request
    server.until(lambda: all(now <= before for now, before in zip(server.census(), census, strict=True)))
    assert server.resident() < resident + 20
    assert "Traceback" not in server.log
    assert not [line for line in server.lines if line.get("level") in ("error", "critical")]


def begun(server: FaultServer, count: int, body: dict[str, object], moment: Moment) -> None:
    asyncio.run(together(leave(server.url, COMPLETIONS, body, moment) for _ in range(count)))


async def counted(server: FaultServer, name: str, count: int) -> Page:
    """The metrics as soon as the counter `name` is `count`."""
    found = await asyncio.to_thread(server.until, lambda: page if (page := server.page).total(name) == count else None)
    assert isinstance(found, Page)
    return found


@pytest.mark.parametrize("streamed", [False, True])
def test_work_stops_when_the_client_disconnects(server: FaultServer, streamed: bool) -> None:
    """In the middle of an answer, in the middle of a prompt, and before either."""
    server.arm(Fault("slow", seconds=0.01))
    answer = completion(prompts(1)[0], LONG, stream=streamed)
    begun(server, 1, answer, Moment(0.3))
    server.rest()  # the whole answer takes two minutes
    before = server.page.total("tokens_total", kind="computed")
    begun(server, 1, completion(prompts(1, LONG)[0], 1, stream=streamed), Moment(0.3))
    assert server.rest().total("tokens_total", kind="computed") - before < LONG / 2

    async def behind_others() -> None:
        crowd = [asyncio.create_task(leave(server.url, COMPLETIONS, answer, Moment())) for _ in range(RUNNING)]
        await counted(server, "requests_running", RUNNING)
        asked = completion([201], 2, stream=streamed)
        last = asyncio.create_task(leave(server.url, COMPLETIONS, asked, Moment()))
        await counted(server, "requests_waiting", 1)
        last.cancel()
        page = await counted(server, "requests_waiting", 0)
        assert page.total("requests_running") == RUNNING
        for task in crowd:
            task.cancel()
        await asyncio.gather(last, *crowd, return_exceptions=True)

    asyncio.run(behind_others())
    server.rest()
    server.arm()


def test_ten_of_a_hundred_clients_disconnect_and_the_others_get_the_same_answers(
    server: FaultServer, alone: Alone
) -> None:
    bodies = [completion(prompt, 16) for prompt in prompts(100, 24, seed=3)]
    expected = alone(server.url, bodies[10:])

    async def crowd() -> list[str]:
        leaving = together(leave(server.url, COMPLETIONS, body, Moment(0.02 * n)) for n, body in enumerate(bodies[:10]))
        aborted = asyncio.create_task(leaving)
        answers = await together(ask(server.url, COMPLETIONS, body) for body in bodies[10:])
        await aborted
        return [answer.text for answer in answers]

    assert asyncio.run(crowd()) == expected
    server.rest()


def test_the_next_request_is_served_after_two_hundred_large_requests_are_aborted(server: FaultServer) -> None:
    begun(server, 200, completion([202, 203], 10_000, stream=True), Moment(0.5))
    answer = asyncio.run(ask(server.url, COMPLETIONS, completion([204], 4)))
    assert answer.json["usage"]["completion_tokens"] == 4
    server.rest()
    computed = server.page.total("tokens_total", kind="computed")
    time.sleep(0.3)
    assert server.page.total("tokens_total", kind="computed") == computed

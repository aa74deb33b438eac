"""Contract: no request starves: not one request of a client beside hundreds of another client, not a short prompt
beside long ones, not classifications beside generations. A request that has expired is not computed."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.crowd import COMPLETIONS, Answer, ask, completion, prompts, together
from tests.support.faults import Fault
from tests.support.processes import FaultServer, Page

RUNNING = 8
FEW, MANY = ({"Authorization": f"Bearer {name}-secret"} for name in ("few", "many"))


@pytest.fixture(scope="module")
def server(start_fault_server: Callable[..., FaultServer], long_generator: Path, tiny_classifier: Path) -> FaultServer:
    return start_fault_server(
        *(f"chat={long_generator}", f"judge={tiny_classifier}"),
        *("--max-running", str(RUNNING), "--cache-tokens", "32768", "--max-requests", "2100"),
        *("--api-keys", "few=few-secret,many=many-secret", "--key-share", "0.9"),
    )


@pytest.fixture(autouse=True)
def no_faults(server: FaultServer) -> None:
    server.arm()
    server.rest()


def complete(server: FaultServer, prompt: list[int], tokens: int, key: dict[str, str] = MANY, **others: Any) -> Any:
    return ask(server.url, COMPLETIONS, completion(prompt, tokens, **others), key)


async def until(server: FaultServer, condition: Callable[[Page], bool]) -> None:
    while not condition(await asyncio.to_thread(lambda: server.page)):
        await asyncio.sleep(0.01)


async def behind(server: FaultServer, crowd: list[list[int]], ask: Callable[[], Any]) -> tuple[list[Answer], Answer]:
    """The answers of many requests and of one that is received last. No step ends before the last one is received."""
    server.arm(Fault("hang"))
    before = server.page.received_and_ended[0]
    many = asyncio.gather(*(complete(server, prompt, 16) for prompt in crowd))
    await until(server, lambda page: page.received_and_ended[0] - before >= len(crowd))
    one = asyncio.create_task(ask())
    await until(server, lambda page: page.received_and_ended[0] - before > len(crowd))
    server.arm(Fault("slow", seconds=0.004))
    return await many, await one


def test_one_request_is_not_starved_by_a_thousand(server: FaultServer, full: bool) -> None:
    crowd = prompts(1_000 if full else 200, 24, seed=7)
    many, one = asyncio.run(behind(server, crowd, lambda: complete(server, [201] * 24, 16, FEW)))
    assert {answer.status for answer in [*many, one]} == {200}
    meanwhile = [answer for answer in many if one.began <= answer.ended <= one.ended]
    assert len(meanwhile) <= 4 * RUNNING, "the request waited for too many others"


def test_priority_goes_first(server: FaultServer) -> None:
    crowd = prompts(100, 24, seed=8)
    many, one = asyncio.run(behind(server, crowd, lambda: complete(server, [201] * 24, 16, priority=5)))
    assert len([answer for answer in many if one.began <= answer.ended <= one.ended]) <= 4 * RUNNING


def test_long_prompts_do_not_block_short_ones(server: FaultServer) -> None:
    server.arm(Fault("hang"))
    before = server.page.received_and_ended[0]

    async def both() -> tuple[list[Answer], list[Answer]]:
        long = asyncio.gather(*(complete(server, prompt, 4) for prompt in prompts(3, 4_000, seed=9)))
        await until(server, lambda page: page.received_and_ended[0] - before >= 3)
        short = asyncio.gather(*(complete(server, [201, n], 2) for n in range(10, 13)))
        await until(server, lambda page: page.received_and_ended[0] - before >= 6)
        server.arm(Fault("slow", seconds=0.01))
        return await long, await short

    long, short = asyncio.run(both())
    assert {answer.status for answer in [*long, *short]} == {200}
    assert max(answer.ended for answer in short) < min(answer.ended for answer in long)


def test_classifications_and_generations_share_the_engine(server: FaultServer) -> None:
    """Neither delays the other: during 20 classifications every generation goes on."""
    server.arm(Fault("slow", seconds=0.01))  # 35 s of it

    async def both() -> tuple[list[Answer], float]:
        streams = [complete(server, prompt, 3_500, stream=True) for prompt in prompts(RUNNING, 24, seed=10)]
        running_streams = asyncio.gather(*streams)
        await until(server, lambda page: page.total("requests_running") == RUNNING)
        before = await asyncio.to_thread(lambda: server.page)
        judged = [
            await ask(server.url, "/models/judge/predict", {"inputs": f"a good film {n}"}, MANY) for n in range(20)
        ]
        after = await asyncio.to_thread(lambda: server.page)
        assert after.total("requests_running", model="chat") == RUNNING
        running_streams.cancel()
        await asyncio.gather(running_streams, return_exceptions=True)
        named = {"kind": "computed", "model": "chat"}
        return judged, after.total("tokens_total", **named) - before.total("tokens_total", **named)

    judged, computed = asyncio.run(both())
    assert {answer.status for answer in judged} == {200}
    assert computed >= 10 * RUNNING
    server.rest()


@pytest.mark.parametrize("given", ["header", "body"])
def test_a_request_that_expires_in_the_queue_is_not_computed(server: FaultServer, given: str) -> None:
    server.arm(Fault("slow", seconds=0.02))  # 30 s of it, if it stays
    headers = MANY | ({"X-Request-Timeout": "0.3"} if given == "header" else {})
    body = completion([201] * 24, 50, **({} if given == "header" else {"timeout": 0.3}))

    async def both() -> tuple[list[Answer], list[Answer]]:
        running = asyncio.gather(*(complete(server, prompt, 1_500) for prompt in prompts(RUNNING, 24, seed=11)))
        await until(server, lambda page: page.total("requests_running") == RUNNING)
        late = await together(ask(server.url, COMPLETIONS, body, headers) for _ in range(50))
        assert not running.done()
        server.arm()
        return await running, late

    before = server.page
    running, late = asyncio.run(both())
    assert {answer.status for answer in running} == {200}
    assert {(answer.status, answer.code) for answer in late} == {(504, "expired")}
    after = server.rest()
    computed = after.total("tokens_total", kind="computed") - before.total("tokens_total", kind="computed")
    cached = after.total("prefix_cached_tokens_total") - before.total("prefix_cached_tokens_total")
    assert computed + cached == RUNNING * (24 + 1_500 - 1), "tokens were computed for expired requests"
    assert after.total("requests_total", outcome="expired") - before.total("requests_total", outcome="expired") == 50
    assert after.received_and_ended[0] == after.received_and_ended[1]


def test_a_request_that_expires_while_running_stops(server: FaultServer) -> None:
    server.arm(Fault("slow", seconds=0.01))  # 50 s of it
    before = server.page
    answer = asyncio.run(complete(server, [201] * 24, 5_000, timeout=0.5))
    assert (answer.status, answer.code) == (504, "expired")
    after = server.rest()
    assert after.total("tokens_total", kind="computed") - before.total("tokens_total", kind="computed") < 5_000

"""The contract: nobody starves.  Not the client with one request beside the one with hundreds, not the short prompt
beside the long, not the classification beside the conversations; and what is too late costs nothing."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.crowd import COMPLETIONS, Answer, ask, completion, prompts, together
from tests.support.faults import Fault
from tests.support.processes import Faulted, Page

RUNNING = 8
FEW, MANY = ({"Authorization": f"Bearer {name}-secret"} for name in ("few", "many"))


@pytest.fixture(scope="module")
def server(faulted: Callable[..., Faulted], long_generator: Path, tiny_classifier: Path) -> Faulted:
    return faulted(
        *(f"chat={long_generator}", f"judge={tiny_classifier}"),
        *("--max-running", str(RUNNING), "--cache-tokens", "32768", "--max-requests", "2100"),
        *("--api-keys", "few=few-secret,many=many-secret", "--key-share", "0.9"),
    )


@pytest.fixture(autouse=True)
def whole(server: Faulted) -> None:
    server.arm()
    server.rest()


def talk(server: Faulted, prompt: list[int], tokens: int, key: dict[str, str] = MANY, **others: Any) -> Any:
    return ask(server.url, COMPLETIONS, completion(prompt, tokens, **others), key)


async def until(server: Faulted, condition: Callable[[Page], bool]) -> None:
    while not condition(await asyncio.to_thread(lambda: server.page)):
        await asyncio.sleep(0.01)


async def behind(server: Faulted, crowd: list[list[int]], ask: Callable[[], Any]) -> tuple[list[Answer], Answer]:
    """The answers of a crowd and of one who came last: no step ends before it is there, too."""
    server.arm(Fault("hang"))
    before = server.page.books[0]
    many = asyncio.gather(*(talk(server, prompt, 16) for prompt in crowd))
    await until(server, lambda page: page.books[0] - before >= len(crowd))
    one = asyncio.create_task(ask())
    await until(server, lambda page: page.books[0] - before > len(crowd))
    server.arm(Fault("slow", seconds=0.004))
    return await many, await one


def test_one_request_is_not_starved_by_a_thousand(server: Faulted, full: bool) -> None:
    crowd = prompts(1_000 if full else 200, 24, seed=7)
    many, one = asyncio.run(behind(server, crowd, lambda: talk(server, [201] * 24, 16, FEW)))
    assert {answer.status for answer in [*many, one]} == {200}
    meanwhile = [answer for answer in many if one.began <= answer.ended <= one.ended]
    assert len(meanwhile) <= 4 * RUNNING, "its turn came after that of many"


def test_priority_goes_first(server: Faulted) -> None:
    crowd = prompts(100, 24, seed=8)
    many, one = asyncio.run(behind(server, crowd, lambda: talk(server, [201] * 24, 16, priority=5)))
    assert len([answer for answer in many if one.began <= answer.ended <= one.ended]) <= 4 * RUNNING


def test_long_prompts_do_not_block_short_ones(server: Faulted) -> None:
    server.arm(Fault("hang"))
    before = server.page.books[0]

    async def both() -> tuple[list[Answer], list[Answer]]:
        long = asyncio.gather(*(talk(server, prompt, 4) for prompt in prompts(3, 4_000, seed=9)))
        await until(server, lambda page: page.books[0] - before >= 3)
        short = asyncio.gather(*(talk(server, [201, n], 2) for n in range(10, 13)))
        await until(server, lambda page: page.books[0] - before >= 6)
        server.arm(Fault("slow", seconds=0.01))
        return await long, await short

    long, short = asyncio.run(both())
    assert {answer.status for answer in [*long, *short]} == {200}
    assert max(answer.ended for answer in short) < min(answer.ended for answer in long)


def test_classifications_and_conversations_share_the_engine(server: Faulted) -> None:
    """Neither holds the other up: while the one is answered 20 times, each of the other goes on."""
    server.arm(Fault("slow", seconds=0.01))  # 35 s of it

    async def both() -> tuple[list[Answer], float]:
        talks = [talk(server, prompt, 3_500, stream=True) for prompt in prompts(RUNNING, 24, seed=10)]
        talking = asyncio.gather(*talks)
        await until(server, lambda page: page.total("requests_running") == RUNNING)
        before = await asyncio.to_thread(lambda: server.page)
        judged = [
            await ask(server.url, "/models/judge/predict", {"inputs": f"a good film {n}"}, MANY) for n in range(20)
        ]
        after = await asyncio.to_thread(lambda: server.page)
        assert after.total("requests_running", model="chat") == RUNNING
        talking.cancel()
        await asyncio.gather(talking, return_exceptions=True)
        named = {"kind": "computed", "model": "chat"}
        return judged, after.total("tokens_total", **named) - before.total("tokens_total", **named)

    judged, computed = asyncio.run(both())
    assert {answer.status for answer in judged} == {200}
    assert computed >= 10 * RUNNING
    server.rest()


@pytest.mark.parametrize("given", ["header", "body"])
def test_what_expires_in_the_queue_costs_nothing(server: Faulted, given: str) -> None:
    server.arm(Fault("slow", seconds=0.02))  # 30 s of it, if it stays
    headers = MANY | ({"X-Request-Timeout": "0.3"} if given == "header" else {})
    body = completion([201] * 24, 50, **({} if given == "header" else {"timeout": 0.3}))

    async def both() -> tuple[list[Answer], list[Answer]]:
        running = asyncio.gather(*(talk(server, prompt, 1_500) for prompt in prompts(RUNNING, 24, seed=11)))
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
    assert computed + cached == RUNNING * (24 + 1_500 - 1), "somebody computed for those who were late"
    assert after.total("requests_total", outcome="expired") - before.total("requests_total", outcome="expired") == 50
    assert after.books[0] == after.books[1]


def test_what_expires_while_it_is_computed_stops(server: Faulted) -> None:
    server.arm(Fault("slow", seconds=0.01))  # 50 s of it
    before = server.page
    answer = asyncio.run(talk(server, [201] * 24, 5_000, timeout=0.5))
    assert (answer.status, answer.code) == (504, "expired")
    after = server.rest()
    assert after.total("tokens_total", kind="computed") - before.total("tokens_total", kind="computed") < 5_000

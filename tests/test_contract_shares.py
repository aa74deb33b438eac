"""The contract: nobody starves.  Not the client with one request beside the one with hundreds, not the short prompt
beside the long, not the classification beside the conversations; and what is too late costs nothing."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from crowd import COMPLETIONS, Answer, ask, completion, prompts, together
from faults import Fault
from processes import Faulted, Page

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


def test_one_request_is_not_starved_by_a_thousand(server: Faulted, full: bool) -> None:
    server.arm(Fault("slow", seconds=0.004))
    crowd, before = 1_000 if full else 200, server.page.books[0]

    async def both() -> tuple[list[Answer], Answer]:
        many = asyncio.gather(*(talk(server, prompt, 16) for prompt in prompts(crowd, 24, seed=7)))
        await until(server, lambda page: page.books[0] - before >= crowd)
        one = await talk(server, [201] * 24, 16, FEW)
        assert not many.done()
        return await many, one

    many, one = asyncio.run(both())
    assert {answer.status for answer in [*many, one]} == {200}
    meanwhile = [answer for answer in many if one.began <= answer.ended <= one.ended]
    assert len(meanwhile) <= 4 * RUNNING, "its turn came after that of many"


def test_priority_goes_first(server: Faulted) -> None:
    server.arm(Fault("slow", seconds=0.004))
    before = server.page.books[0]

    async def raced() -> tuple[list[Answer], Answer]:
        many = asyncio.gather(*(talk(server, prompt, 16) for prompt in prompts(100, 24, seed=8)))
        await until(server, lambda page: page.books[0] - before >= 100)
        one = await talk(server, [201] * 24, 16, priority=5)
        return await many, one

    many, one = asyncio.run(raced())
    assert len([answer for answer in many if one.began <= answer.ended <= one.ended]) <= 4 * RUNNING


def test_long_prompts_do_not_block_short_ones(server: Faulted) -> None:
    async def both() -> tuple[list[Answer], list[Answer]]:
        long = asyncio.gather(*(talk(server, prompt, 4) for prompt in prompts(3, 4_000, seed=9)))
        await until(server, lambda page: page.total("requests_running") > 0)
        short = [await talk(server, [201, n], 2) for n in range(10, 13)]
        return await long, short

    long, short = asyncio.run(both())
    assert {answer.status for answer in [*long, *short]} == {200}
    assert max(answer.ended for answer in short) < min(answer.ended for answer in long)
    assert max(answer.seconds for answer in short) < min(answer.seconds for answer in long) / 3


def test_classifications_and_conversations_share_the_engine(server: Faulted) -> None:
    """Neither holds the other up."""

    async def both() -> tuple[list[Answer], list[Answer]]:
        talks = [
            asyncio.create_task(talk(server, prompt, 300, stream=True)) for prompt in prompts(RUNNING, 24, seed=10)
        ]
        await asyncio.sleep(0.1)
        judged = [
            await ask(server.url, "/models/judge/predict", {"inputs": f"a good film {n}"}, MANY) for n in range(20)
        ]
        return [await talk for talk in talks], judged

    talks, judged = asyncio.run(both())
    assert {answer.status for answer in judged} == {200}
    assert judged[-1].ended < min(answer.ended for answer in talks)
    assert max(answer.seconds for answer in judged) < 1
    for answer in talks:
        pauses = [after - before for before, after in zip(answer.times, answer.times[1:], strict=False)]
        assert max(pauses) < 1
        assert len([moment for moment in answer.times if judged[0].began < moment < judged[-1].ended]) >= 10


@pytest.mark.parametrize("given", ["header", "body"])
def test_what_expires_in_the_queue_costs_nothing(server: Faulted, given: str) -> None:
    server.arm(Fault("slow", seconds=0.01))
    headers = MANY | ({"X-Request-Timeout": "0.3"} if given == "header" else {})
    body = completion([201] * 24, 50, **({} if given == "header" else {"timeout": 0.3}))

    async def both() -> tuple[list[Answer], list[Answer]]:
        running = asyncio.gather(*(talk(server, prompt, 80) for prompt in prompts(RUNNING, 24, seed=11)))
        await until(server, lambda page: page.total("requests_running") == RUNNING)
        late = await together(ask(server.url, COMPLETIONS, body, headers) for _ in range(50))
        assert not running.done()
        return await running, late

    before = server.page
    running, late = asyncio.run(both())
    assert {answer.status for answer in running} == {200}
    assert {(answer.status, answer.code) for answer in late} == {(504, "expired")}
    assert max(answer.seconds for answer in late) < 0.8
    after = server.rest(2)
    computed = after.total("tokens_total", kind="computed") - before.total("tokens_total", kind="computed")
    cached = after.total("prefix_cached_tokens_total") - before.total("prefix_cached_tokens_total")
    assert computed + cached == RUNNING * (24 + 80 - 1), "somebody computed for those who were late"
    assert after.total("requests_total", outcome="expired") - before.total("requests_total", outcome="expired") == 50
    assert after.books[0] == after.books[1]


def test_what_expires_while_it_is_computed_stops(server: Faulted) -> None:
    server.arm(Fault("slow", seconds=0.01))
    began = time.perf_counter()
    answer = asyncio.run(talk(server, [201] * 24, 5_000, timeout=0.5))
    assert (answer.status, answer.code) == (504, "expired")
    assert time.perf_counter() - began < 1
    server.rest(1)

"""Contract: a cache that is much too small for the requests delays answers and changes none; a request that can never
fit is rejected at once; cached and recomputed prefixes give the same answers."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.crowd import COMPLETIONS, Alone, Answer, ask, completion, prompts, together
from tests.support.faults import Fault
from tests.support.processes import FaultServer

CACHE = 1024  # tokens
PROMPT, ANSWER = 40, 88
STREAMS = 4 * CACHE // (PROMPT + ANSWER)
MEAN_PREEMPTIONS = 1.5  # preemptions of a request, on average


@pytest.fixture(scope="module")
def server(start_fault_server: Callable[..., FaultServer], tiny_generator: Path) -> FaultServer:
    return start_fault_server(f"chat={tiny_generator}", "--cache-tokens", str(CACHE), "--deterministic", "true")


def answered(server: FaultServer, bodies: list[dict[str, object]]) -> list[Answer]:
    return asyncio.run(together(ask(server.url, COMPLETIONS, body) for body in bodies))


def test_a_cache_of_a_quarter_of_the_needed_size_changes_no_answer(
    server: FaultServer, alone: Alone, full: bool
) -> None:
    asked = [completion(prompt, ANSWER) for prompt in prompts(STREAMS * (4 if full else 1), PROMPT, seed=4)]
    for seed, body in enumerate(asked[::2]):
        body |= {"temperature": 1.0, "seed": seed}
    expected = alone(server.url, asked)
    before = server.rest()
    answers = answered(server, [body | {"stream": True} for body in asked])
    assert [answer.text for answer in answers] == expected
    page = server.rest()
    preempted = page.total("preemptions_total") - before.total("preemptions_total")
    assert 0 < preempted <= MEAN_PREEMPTIONS * len(asked)
    assert page.total("requests_total", outcome="failed") == 0


def test_a_request_that_can_never_fit_is_rejected_at_once_and_delays_no_other(server: FaultServer) -> None:
    """Longer than the cache, or longer than the model's context."""
    server.arm(Fault("slow", seconds=0.002))
    impossible = [completion([201] * prompt, tokens) for prompt, tokens in ((CACHE + 1, 1), (10, CACHE), (200, 57))]

    async def crowded() -> tuple[list[Answer], list[Answer]]:
        crowd = asyncio.gather(*(ask(server.url, COMPLETIONS, completion(one, 40)) for one in prompts(60, 60, seed=5)))
        while not (await asyncio.to_thread(lambda: server.page)).total("requests_waiting"):
            await asyncio.sleep(0)
        server.arm(Fault("hang"))  # nothing is computed while they are rejected
        refused = [await ask(server.url, COMPLETIONS, body) for body in impossible * 3]
        assert not crowd.done()
        server.arm()
        return refused, await crowd

    refused, crowd = asyncio.run(crowded())
    assert {answer.status for answer in refused} == {400}
    assert {answer.json["error"]["param"] for answer in refused} == {"prompt", "max_tokens"}
    assert {answer.status for answer in crowd} == {200}


def test_a_cached_prefix_gives_the_same_answer_as_a_recomputed_one(server: FaultServer, alone: Alone) -> None:
    """A prompt whose prefix was computed for other requests is answered like a prompt without cached tokens."""
    prefix, *ends = prompts(9, 64, seed=6)
    bodies = [completion([*prefix, *end[:8]], 16) for end in ends]
    fresh = alone(server.url, bodies[:1])
    answers = answered(server, bodies)
    again = answered(server, bodies)
    assert all(answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64 for answer in again)
    assert [answer.text for answer in answers] == [answer.text for answer in again] == alone(server.url, bodies)
    assert answers[0].text == fresh[0]


def test_a_cached_block_is_not_found_after_another_prefix(
    server: FaultServer, exact: FaultServer, alone: Alone
) -> None:
    """The other server has none of these prompts in its cache."""
    one, other, common = prompts(3, 16, seed=16)
    asked = completion([*other, *common, 201], 16)
    for stored in ([*one, *common, 202], [*other, 202]):
        answered(server, [completion(stored, 1)])
    (answer,) = answered(server, [asked])
    assert answer.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 16
    assert [answer.text] == alone(exact.url, [asked])

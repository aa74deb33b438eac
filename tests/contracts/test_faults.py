"""Contract: a request that fails fails alone. The other requests get exactly their answers and the server stays ready.
A model that cannot compute any more is named by /readyz until it can compute again."""

import asyncio
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from polyhead.models.tokenizer import Tokenizer
from tests.support.crowd import COMPLETIONS, Alone, Answer, ask, completion, prompts, together
from tests.support.faults import Fault
from tests.support.processes import FaultServer

MARK = 250  # the first token of the request that fails
POISON = 251
CHUNK = 32  # tokens of a prompt in a step, as the server is set
WORD = "money"


@pytest.fixture(scope="module")
def server(exact: FaultServer) -> FaultServer:
    return exact


@pytest.fixture(autouse=True)
def no_faults(server: FaultServer) -> None:
    server.arm()
    server.rest()


NEIGHBOURS = [completion(prompt, 16) for prompt in prompts(12, 24, seed=3)]


def beside(server: FaultServer, *failing: dict[str, Any], model: str = "chat") -> tuple[list[Answer], list[Answer]]:
    """The neighbours and the failing requests, all at once."""

    async def crowd() -> list[Answer]:
        bodies = [body | {"model": model} for body in (*NEIGHBOURS, *failing)]
        return await together(ask(server.url, COMPLETIONS, body) for body in bodies)

    answers = asyncio.run(crowd())
    return answers[: len(NEIGHBOURS)], answers[len(NEIGHBOURS) :]


SEEDS = count(1000)


def failing(first: int = MARK) -> dict[str, Any]:
    """A prompt that was not sent before: none of it is in the cache."""
    (prompt,) = prompts(1, 99, seed=next(SEEDS))
    return completion([first, *prompt], 8)


@pytest.mark.parametrize("kind", ["raise", "memory", "device memory", "nan"])
@pytest.mark.parametrize(
    "after", [0, 2, 6], ids=["in its first chunk", "in the middle of its prompt", "while it answers"]
)
def test_a_request_that_fails_fails_alone(server: FaultServer, alone: Alone, kind: Any, after: int) -> None:
    expected = alone(server.url, NEIGHBOURS)
    server.arm(Fault("slow", seconds=0.002), Fault(kind, token=MARK, after=after))
    asked = failing()
    answers, (wrong,) = beside(server, asked)
    assert (wrong.status, wrong.code) == (500, "step_failed")
    assert [answer.text for answer in answers] == expected
    assert server.get("/readyz").status_code == 200
    server.arm()
    server.rest()
    assert beside(server, asked)[1][0].text == alone(server.url, [asked])[0], (
        "the cache has blocks of the failed request"
    )


def test_nan_keys_fail_only_their_request(server: FaultServer, alone: Alone) -> None:
    """The keys are computed by the real network; the next request that gets the blocks does not read them."""
    expected = alone(server.url, NEIGHBOURS)
    server.arm(Fault("poison", token=POISON))
    for _ in range(3):
        answers, wrong = beside(server, failing(POISON), failing(POISON), model="fragile")
        assert [answer.text for answer in answers] == expected
        assert {(answer.status, answer.code) for answer in wrong} == {(500, "step_failed")}
    assert server.get("/readyz").status_code == 200
    before = server.rest().total("tokens_total", kind="computed")
    asyncio.run(ask(server.url, COMPLETIONS, failing(POISON) | {"model": "fragile"}))
    assert server.rest().total("tokens_total", kind="computed") - before <= CHUNK, "the rest of the prompt was computed"


@pytest.mark.parametrize("kind", ["raise", "memory"])
def test_a_single_failed_step_fails_no_request(server: FaultServer, alone: Alone, kind: Any) -> None:
    expected = alone(server.url, NEIGHBOURS)
    server.arm(Fault(kind, after=3, times=1, among=3))  # in a step of one sequence its request would fail
    answers, _ = beside(server)
    assert [answer.text for answer in answers] == expected


@pytest.mark.parametrize("after", [0, 1, 5])
def test_an_error_after_the_first_byte_is_one_last_event(server: FaultServer, alone: Alone, after: int) -> None:
    asked = failing()
    server.arm(Fault("raise", token=MARK, after=4 + after))  # its prompt takes four chunks
    answers, (wrong,) = beside(server, asked | {"stream": True})
    assert [answer.text for answer in answers] == alone(server.url, NEIGHBOURS)
    assert (wrong.status, wrong.whole) == (200, True)
    *before, last = wrong.data
    assert json.loads(last)["error"]["code"] == "step_failed"
    assert "error" not in "".join(before)
    server.arm()
    (expected,) = alone(server.url, [asked])
    assert expected.startswith("".join(wrong.deltas))


def test_a_text_that_fails_fails_alone(server: FaultServer, tiny_classifier: Path) -> None:
    """The same for encoders, in their dialect."""
    tokenizer = Tokenizer.from_folder(tiny_classifier)
    (mark,) = set(tokenizer.encode(f"my {WORD}").ids) - set(tokenizer.encode("my").ids)
    texts = [f"a good film, a bad film {n}" for n in range(20)]

    async def crowd() -> list[Answer]:
        asked = [*texts[:10], f"my {WORD} back", *texts[10:]]
        predict = "/models/judge/predict"
        return list(await asyncio.gather(*(ask(server.url, predict, {"inputs": text}) for text in asked)))

    expected = asyncio.run(crowd())
    assert {answer.status for answer in expected} == {200}
    server.arm(Fault("raise", token=mark, of="encoder"))
    wrong = asyncio.run(crowd())
    assert (wrong[10].status, wrong[10].json["error_type"]) == (424, "Backend")
    del expected[10], wrong[10]
    assert [answer.json for answer in wrong] == [answer.json for answer in expected]
    assert server.get("/readyz").status_code == 200


def test_readyz_names_a_model_that_fails_until_it_computes_again(server: FaultServer) -> None:
    server.arm(Fault("raise"))
    answers, _ = beside(server)
    assert {(answer.status, answer.code) for answer in answers} == {(500, "step_failed")}
    ready = server.get("/readyz")
    assert ready.status_code == 503
    assert ready.json()["reasons"] == ["chat cannot compute any more"]
    assert server.get("/livez").status_code == 200
    judged = asyncio.run(ask(server.url, "/models/judge/predict", {"inputs": "a good film"}))
    assert judged.status == 200
    server.arm()
    server.until(lambda: server.get("/readyz").status_code == 200)
    assert server.page.received_and_ended[0] == server.page.received_and_ended[1]

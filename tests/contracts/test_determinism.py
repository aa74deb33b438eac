"""Contract: the same request gets the same answer, whatever other requests are in its batch."""

import asyncio
import random
from typing import Any

import pytest

from tests.support.crowd import COMPLETIONS, Alone, Answer, ask, completion, prompts, together
from tests.support.processes import FaultServer


@pytest.fixture(scope="module")
def server(exact: FaultServer) -> FaultServer:
    return exact


def mixed(count: int) -> list[dict[str, Any]]:
    """Prompts of 1 to 120 tokens, greedy and seeded."""
    draw = random.Random(14)
    made = []
    for number in range(count):
        (prompt,) = prompts(1, draw.choice((1, 7, 24, 60, 120)), seed=number)
        sampled = {"temperature": 1.0, "seed": number} if number % 2 else {}
        made.append(completion(prompt, draw.randrange(2, 14), **sampled))
    return made


def test_answers_do_not_depend_on_the_batch(server: FaultServer, alone: Alone, full: bool) -> None:
    asked = mixed(200 if full else 80)
    expected = alone(server.url, asked)
    for most in (2, 7, 32):
        answers = asyncio.run(together((ask(server.url, COMPLETIONS, body) for body in asked), most=most))
        assert [answer.text for answer in answers] == expected


def test_scores_do_not_depend_on_the_batch(server: FaultServer, full: bool) -> None:
    """Equal to the last bit."""
    draw = random.Random(15)
    words = ["a", "good", "bad", "film", "dull", "long", "money", "fox", "dog", "the", "was", "beautifully", "shot"]
    texts = [" ".join(draw.choices(words, k=draw.randrange(1, 60))) for _ in range(200 if full else 100)]

    def scored(most: int) -> list[Any]:
        def one(text: str) -> Any:
            return ask(server.url, "/models/judge/predict", {"inputs": text})

        answers: list[Answer] = asyncio.run(together(map(one, texts), most=most))
        return [answer.json for answer in answers]

    expected = scored(1)
    assert len({str(scores) for scores in expected}) > len(texts) / 2
    for most in (2, 7, 32):
        assert scored(most) == expected

"""Check that a decision has the same bits alone, in company, with its prefix stored or not, and under preemption.

A part of benchmarks.decisions (`--figures bits`). Each kind of model is served with a small cache. One call, with a
question of each type, is answered alone; then it is repeated in four cases, and every number of each answer must be
identical. The company is 32 clients whose calls have other texts, and who, where the model generates, let it write.
Their sequences together do not fit into the cache, so they preempt each other: the server counts how often.
"""

import asyncio
import contextlib
import itertools
import re
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from benchmarks.serving import Running, serve

STORED = "stored"  # the salt of the prefix that is in the cache
COMPANY = 32  # clients
TOGETHER = 16  # repeats at a time in company
CASES = {  # whether the prefix is stored, and whether there is company
    "alone, prefix stored": (True, False),
    "alone, prefix not stored": (False, False),
    "in company, prefix stored": (True, True),
    "in company, prefix not stored": (False, True),
}
CACHE = ("--cache-tokens", "1536", "--max-running", "16", "--prefill-chunk", "64")
PREEMPTIONS = re.compile(r"^polyhead_preemptions_total\S* (\S+)$", re.MULTILINE)
Body = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """What is served, in which precision, and the questions that it can answer."""

    name: str
    source: str
    precision: str
    questions: Body
    writes: bool = False  # it generates


@dataclass
class Found:
    """Repeats of each case, those with other numbers than the first answer, and preemptions."""

    repeats: dict[str, int]
    differing: dict[str, int]
    preemptions: int


async def ask(http: httpx.AsyncClient, questions: Body, state: str, salt: str) -> Body:
    body = {"state": state, "questions": questions} | ({"cache_salt": salt} if salt else {})
    answer = await http.post("/v1/systemone", json=body)
    if answer.status_code != 200:
        raise ValueError(f"the call failed with status {answer.status_code}: {answer.text}")
    found = answer.json()
    return {"answers": found["answers"], "diagnostics": found["diagnostics"]}


async def accompany(http: httpx.AsyncClient, kind: Kind, texts: Sequence[str], number: int) -> None:
    """The calls of one client of the company, until it is cancelled."""
    for turn in itertools.count(number, COMPANY):
        text = texts[turn % len(texts)]
        if kind.writes and (number + turn // COMPANY) % 2:
            body = {"model": "it", "prompt": text, "max_tokens": 48, "ignore_eos": True, "temperature": 0}
            (await http.post("/v1/completions", json=body)).raise_for_status()
        else:
            await ask(http, kind.questions, text, "")


@contextlib.asynccontextmanager
async def company(http: httpx.AsyncClient, kind: Kind, texts: Sequence[str]) -> AsyncIterator[None]:
    """32 clients while the block runs. Raises the error of a call that failed."""
    tasks = [asyncio.create_task(accompany(http, kind, texts, number)) for number in range(COMPANY)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one


async def take_turns(http: httpx.AsyncClient, kind: Kind, state: str, salts: Iterator[str]) -> list[Body]:
    """The answers to calls one after the other, as long as there are salts, which other clients take too."""
    return [await ask(http, kind.questions, state, salt) for salt in salts]


async def repeat(server: Running, kind: Kind, texts: Sequence[str], repeats: int) -> Found:
    """`repeats` of the call with the first text, over all cases."""
    found = Found({}, {}, 0)
    state, others, each = texts[0], texts[1:], -(-repeats // len(CASES))
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=httpx.Limits(max_connections=64)) as http:
        first = await ask(http, kind.questions, state, STORED)
        for case, (stored, accompanied) in CASES.items():
            salts = iter([STORED if stored else f"{case} {number}" for number in range(each)])
            async with company(http, kind, others) if accompanied else contextlib.nullcontext():
                turns = (take_turns(http, kind, state, salts) for _ in range(TOGETHER if accompanied else 1))
                answers = [answer for turn in await asyncio.gather(*turns) for answer in turn]
            found.repeats[case] = len(answers)
            found.differing[case] = sum(answer != first for answer in answers)
        page = (await http.get("/metrics")).text
    found.preemptions = sum(int(float(count)) for count in PREEMPTIONS.findall(page))
    return found


def check(kind: Kind, texts: Sequence[str], repeats: int, threads: int) -> dict[str, Any]:
    """A row: the repeats, how many differ, and how many sequences were preempted."""
    flags = ("--precision", kind.precision, "--threads", str(threads), "--log-level", "warning", *CACHE)
    with serve(f"it={kind.source}", *flags) as server:
        found = asyncio.run(repeat(server, kind, texts, repeats))
    return {
        "kind": kind.name,
        "repeats": sum(found.repeats.values()),
        **{case: f"{found.differing[case]} of {count}" for case, count in found.repeats.items()},
        "differing": sum(found.differing.values()),
        "preemptions": found.preemptions,
    }

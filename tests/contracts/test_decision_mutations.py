"""Malformed questions: 1,000 mutations of valid bodies of both dialects. Each is answered, or refused by the name of
the field and of the question; none is a server error.
"""

import asyncio
from pathlib import Path

import httpx

from tests.support.decision_mutations import MUTATIONS, SYSTEMONE, Mutation, mutations, written
from tests.support.scripted import Registry, application, echo, model


def fault_of(answer: httpx.Response, mutation: Mutation) -> str:
    """What is wrong with an answer; empty if it is right."""
    if answer.status_code == 200:
        return ""
    if not 400 <= answer.status_code < 500:
        return "is a server error"
    error = answer.json()["error"]
    message, param = str(error["message"]), str(error["param"] or "")
    if not message.startswith((f"{param or 'the body'}:", "the body is not valid JSON", "no model is called")):
        return "does not begin with its field"
    if mutation.changes > 1 or not param:
        return ""
    whole = mutation.field.partition(".")[0].partition("[")[0]
    known = whole if len(mutation.place) < 3 else mutation.field
    return "" if param.startswith(known) else f"does not name {known}"


def test_a_mutated_body_is_answered_or_refused_by_its_field(tiny_generator: Path) -> None:
    talker = model(tiny_generator, "talker", "generate", max_tokens=1 << 16)
    app = application(Registry([talker], echo))
    wrong, statuses = list[str](), list[int]()

    async def run() -> None:
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://testserver") as client:
            expected = (await client.post("/v1/systemone", json=SYSTEMONE)).json()["answers"]
            for number, mutation in enumerate(mutations()):
                sent = client.post(mutation.path, content=written(mutation.body))
                if number % 50:
                    answer = await sent
                else:
                    answer, other = await asyncio.gather(sent, client.post("/v1/systemone", json=SYSTEMONE))
                    assert other.json()["answers"] == expected
                statuses.append(answer.status_code)
                if fault := fault_of(answer, mutation):
                    shown = f"{mutation.path} {mutation.place} {written(mutation.body)[:300]!r}"
                    wrong.append(f"{shown}: {answer.status_code} {answer.text:.300}: {fault}")

    asyncio.run(run())
    assert not wrong, f"{len(wrong)}:\n" + "\n".join(wrong[:30])
    assert statuses.count(200) > MUTATIONS / 20
    assert statuses.count(400) > MUTATIONS / 2

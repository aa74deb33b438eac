"""Generate documents of a given form, check that complete ones are valid, and measure the saving by forced tokens.

    python -m benchmarks.structured [--documents 1000] [--first 0] [--jumps 40]

SmolLM2-135M-Instruct generates JSON for schemas of forty shapes, 32 at a time, over HTTP. `jsonschema`, which is
independent of the server's grammars, validates the documents. Then some are generated with forced tokens and without:
a request for log-probabilities computes a step for every token.
"""

import argparse
import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import httpx
import jsonschema

from benchmarks.serving import Running, machine, serve
from polyhead.service.config import settings
from polyhead.service.runtime import quickstart

TOGETHER, MOST_TOKENS = 32, 160
THINGS = ("a city", "a recipe", "a song", "a train", "a doctor's visit", "a football match", "a house", "a whale")
NAMES = ("name", "title", "kind", "colour", "owner", "place", "unit", "code", "note", "state", "phase", "grade")
WORDS = ("red", "green", "blue", "small", "large", "open", "closed", "north", "south", "alpha", "beta", "größer", "a b")
FORMATS = ("date", "time", "date-time", "ipv4", "uuid", "email", "duration", "hostname")
PATTERNS = (
    "^[A-Z]{3}$",
    "^[a-z]+-[0-9]{2}$",
    "^(yes|no|maybe)$",
    "^#[0-9a-f]{6}$",
    r"^\d{1,3}(\.\d{2})?$",
    "^x.{2,5}y$",
)
Schema = dict[str, Any]
Shape = Callable[[Random], Schema]


def text(random: Random) -> Schema:
    return {"type": "string", "maxLength": random.randint(4, 24)}


def words(random: Random, most: int = 4) -> list[str]:
    return random.sample(WORDS, random.randint(2, most))


def thing(random: Random, *fields: Schema, **more: Any) -> Schema:
    """An object of these fields, all required, no others."""
    names = random.sample(NAMES, len(fields))
    named = dict(zip(names, fields, strict=True))
    return {"type": "object", "properties": named, "required": names, "additionalProperties": False} | more


def whole(random: Random) -> Schema:
    low = random.randint(-50, 500)
    return {"type": "integer", "minimum": low, "maximum": low + random.randint(1, 5000)}


def number(random: Random) -> Schema:
    low = round(random.uniform(-9, 9), 2)
    return {"type": "number", "exclusiveMinimum": low, "maximum": low + random.randint(1, 90)}


def several(random: Random, items: Schema) -> Schema:
    least = random.randint(0, 2)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + random.randint(1, 2)}


def nested(random: Random, depth: int) -> Schema:
    inner = thing(random, text(random)) if depth == 0 else nested(random, depth - 1)
    return thing(random, inner, {"type": "boolean"})


def tree(random: Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}
    return {"$defs": {"node": thing(random, text(random), children)}, "$ref": "#/$defs/node"}


def referred(random: Random) -> Schema:
    body = thing(random, {"$ref": "#/$defs/point"}, {"$ref": "#/$defs/point"}, text(random))
    return body | {"$defs": {"point": thing(random, number(random), number(random))}}


def optional(random: Random) -> Schema:
    body = thing(random, text(random), whole(random), {"type": "boolean"}, {"enum": words(random)})
    return body | {"required": random.sample(body["required"], 2)}


def mapped(random: Random) -> Schema:
    return {"type": "object", "additionalProperties": whole(random), "minProperties": 1, "maxProperties": 3}


def told_apart(random: Random) -> Schema:
    first, second = words(random, 2)
    shape = {"type": "object", "required": ["kind", "value"], "additionalProperties": False}
    arms = [
        shape | {"properties": {"kind": {"const": kind}, "value": value}}
        for kind, value in ((first, whole(random)), (second, text(random)))
    ]
    return {"oneOf": arms}


SHAPES: Sequence[Shape] = (
    lambda random: thing(random, text(random)),
    lambda random: thing(random, text(random), text(random), text(random)),
    lambda random: thing(random, whole(random), whole(random)),
    lambda random: thing(random, number(random), text(random)),
    lambda random: thing(random, {"type": "integer", "exclusiveMinimum": 0, "multipleOf": random.choice((2, 5, 10))}),
    lambda random: thing(random, {"type": "boolean"}, {"type": "null"}, text(random)),
    lambda random: thing(random, {"enum": words(random)}, {"enum": words(random)}),
    lambda random: thing(random, {"enum": [*words(random), 7, None, True, 1.5]}),
    lambda random: thing(random, {"const": random.choice(WORDS)}, text(random)),
    lambda random: thing(random, {"const": {"a": [1, random.randint(2, 9)]}}, whole(random)),
    lambda random: thing(random, several(random, text(random))),
    lambda random: thing(random, several(random, whole(random)), text(random)),
    lambda random: thing(random, several(random, {"enum": words(random)})),
    lambda random: several(random, thing(random, text(random), whole(random))),
    lambda random: thing(random, several(random, several(random, {"type": "boolean"}))),
    lambda random: thing(random, {"type": "array", "prefixItems": [text(random), whole(random)], "items": False}),
    lambda random: nested(random, 1),
    lambda random: nested(random, 3),
    lambda random: thing(random, nested(random, 0), several(random, nested(random, 0))),
    tree,
    referred,
    lambda random: {"definitions": {"w": {"enum": words(random)}}} | thing(random, {"$ref": "#/definitions/w"}),
    optional,
    lambda random: optional(random) | {"additionalProperties": whole(random), "required": []},
    mapped,
    lambda random: {
        "type": "object",
        "patternProperties": {"^[a-z]{2,6}$": text(random)},
        "additionalProperties": False,
    },
    lambda random: thing(random, {"type": "string", "format": random.choice(FORMATS)}),
    lambda random: thing(random, *({"type": "string", "format": each} for each in random.sample(FORMATS, 3))),
    lambda random: thing(random, {"type": "string", "pattern": random.choice(PATTERNS)}),
    lambda random: thing(random, *({"type": "string", "pattern": each} for each in random.sample(PATTERNS, 3))),
    lambda random: thing(random, {"type": "string", "minLength": 3, "maxLength": random.randint(3, 9)}, text(random)),
    lambda random: thing(random, {"anyOf": [text(random), {"type": "null"}]}, {"type": ["integer", "null"]}),
    lambda random: thing(random, {"anyOf": [whole(random), {"enum": words(random)}, several(random, text(random))]}),
    lambda random: {"anyOf": [thing(random, text(random)), thing(random, whole(random), text(random))]},
    told_apart,
    lambda random: (
        {
            "allOf": [
                {"type": "object", "properties": {"a": text(random)}, "required": ["a"]},
                optional(random) | {"additionalProperties": True},
            ]
        }
        | {"properties": {"a": True}, "additionalProperties": True}
    ),
    lambda random: {"enum": [{"a": 1}, [random.randint(0, 9)], random.choice(WORDS), None]},
    lambda random: {"type": "string", "maxLength": random.randint(1, 40)},
    lambda random: thing(random, {"type": "string"}, {"type": "number"}),
    lambda random: {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]},
)


def ask(number: int) -> tuple[Schema, str]:
    """The schema of a document, and what it is to be about."""
    random = Random(number)
    schema = SHAPES[number % len(SHAPES)](random)
    return (
        schema,
        f"Describe {random.choice(THINGS)} as a short JSON document for this schema: {json.dumps(schema)[:300]}",
    )


async def document(client: httpx.AsyncClient, number: int, **fields: Any) -> dict[str, Any]:
    schema, about = ask(number)
    body = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": about}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "document", "schema": schema}},
        "max_tokens": MOST_TOKENS,
        "temperature": 0.7,
        "seed": number,
        **fields,
    }
    answer = await client.post("/v1/chat/completions", json=body)
    if answer.status_code != 200:
        raise ValueError(f"document {number}, {json.dumps(schema)}: {answer.text}")
    return dict(answer.json())


def verdict(number: int, answer: dict[str, Any]) -> str:
    """valid, cut, or what is wrong with it."""
    choice = answer["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut by max_tokens"
    schema, _ = ask(number)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    try:
        jsonschema.Draft202012Validator(schema, format_checker=checker).validate(
            json.loads(choice["message"]["content"])
        )
    except (ValueError, jsonschema.ValidationError) as error:
        return f"INVALID: {number}, {json.dumps(schema)}: {choice['message']['content']}: {str(error).splitlines()[0]}"
    return "valid"


async def documents(server: Running, numbers: Sequence[int], together: int, **fields: Any) -> list[dict[str, Any]]:
    gate = asyncio.Semaphore(together)

    async def one(number: int) -> dict[str, Any]:
        async with gate:
            return await document(client, number, **fields)

    async with httpx.AsyncClient(base_url=server.url, timeout=600) as client:
        return await asyncio.gather(*map(one, numbers))


def validity(server: Running, numbers: Sequence[int]) -> None:
    began = time.perf_counter()
    answers = asyncio.run(documents(server, numbers, TOGETHER))
    seconds = time.perf_counter() - began
    found = Counter(map(verdict, numbers, answers))
    tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
    print(f"documents {numbers[0]} to {numbers[-1]}: {tokens} tokens in {seconds:.0f} s, {TOGETHER} at a time")
    for said, count in found.most_common():
        print(f"  {count:5d} {said}")


def steps(server: Running) -> float:
    page = httpx.get(f"{server.url}/metrics").text
    return sum(float(each) for each in re.findall(r"^polyhead_engine_steps_total\S* (\S+)$", page, re.MULTILINE))


def jumps(server: Running, numbers: Sequence[int]) -> None:
    asyncio.run(documents(server, numbers, TOGETHER, max_tokens=1))  # schemas are compiled, prompts are cached
    for name, together in (("one at a time", 1), (f"{TOGETHER} at a time", TOGETHER)):
        for kind, fields in (("without", {"logprobs": True}), ("with jumps", {})):
            before, began = steps(server), time.perf_counter()
            answers = asyncio.run(documents(server, numbers, together, **fields))
            seconds, taken = time.perf_counter() - began, steps(server) - before
            tokens = sum(answer["usage"]["completion_tokens"] for answer in answers)
            print(f"{name:14s} {kind:11s} {tokens:6d} tokens, {taken / tokens:5.2f} steps a token, {seconds:6.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--jumps", type=int, default=40, help="documents written with and without; 0: none")
    asked = parser.parse_args()
    print(machine())
    folder = settings.default_model_dir()
    with serve(f"smollm2={quickstart.sources(folder)['smollm2']}") as server:
        if asked.documents:
            validity(server, range(asked.first, asked.first + asked.documents))
        if asked.jumps:
            jumps(server, range(asked.jumps))


if __name__ == "__main__":
    main()

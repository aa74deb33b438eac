"""Compares /openapi.json with the server: every status and error format is described, and none is a 5xx.

The requests are generated from the description, with valid and invalid bodies, from a fixed seed."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import CHECKS

from polyhead.service.api.shared.dialect import BodyDescription, inline_schema
from polyhead.service.core.errors import BadRequest
from tests.support.processes import Process
from tests.support.scripted import Registry, application, echo, routes

KEY, ADMIN = "a-client-s-key", "an-administrator-s-key"
LONG, LONGEST = 4000, 20_000  # length of a schema from which cases take long to generate
LEAST = 500  # of all together
CHECKED = ("status_code_conformance", "content_type_conformance", "response_schema_conformance")
SERVED = ("chat", "judge", "ranker", "embedder")
TIMELY = ("timeout",)  # a timeout that is too short is answered with 504, as the description says


@pytest.fixture(scope="module")
def served(tiny_generator: Path, tiny_classifier: Path, tiny_ranker: Path, tiny_embedder: Path) -> Iterator[str]:
    """The address of a real server with a model of every kind."""
    folders = dict(zip(SERVED, (tiny_generator, tiny_classifier, tiny_ranker, tiny_embedder), strict=True))
    named = [f"{name}={folder}" for name, folder in folders.items()]
    process = Process(*named, "--api-key", KEY, "--admin-key", ADMIN, "--threads", "1")
    try:
        process.ready()
        yield process.url
    finally:
        process.child.kill()
        process.child.wait()


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    with requests.Session() as one:
        one.trust_env = False  # else it looks for proxies and passwords before every call
        yield one


def real(case: Case, draw: st.DataObject) -> None:
    """An unknown model name is rejected before anything else is checked, so most cases get a name that is served."""
    name = draw.draw(st.sampled_from((*SERVED, *SERVED, "nobody")))
    if isinstance(case.body, dict) and "model" in case.operation.body[0].definition["schema"].get("properties", {}):
        case.body["model"] = name
    if "name" in (case.path_parameters or {}):
        case.path_parameters["name"] = name


def key_of(path: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {ADMIN if path.startswith(('/admin', '/v2/repository')) else KEY}"}


def described(url: str) -> Any:
    return httpx.get(f"{url}/openapi.json", headers=key_of("/openapi.json"), timeout=60, verify=False).json()


def tried(operation: Any, mode: GenerationMode, count: int, session: requests.Session, seen: Counter[int]) -> None:
    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def one(case: Case, data: st.DataObject) -> None:
        if not operation.path.startswith(("/admin", "/v2/repository")):
            real(case, data)
        response = case.call(session=session, headers=key_of(operation.path))
        seen[response.status_code] += 1
        late = response.status_code == 504 and isinstance(case.body, dict) and case.body.keys() & set(TIMELY)
        assert response.status_code < 500 or late, (operation.label, case.body, response.text)
        case.validate_response(response, checks=CHECKS.get_by_names(CHECKED))

    one()


def counts(operation: Any, full: bool) -> tuple[int, int]:
    """The number of cases with a body that the operation accepts, and with any other body."""
    if not operation.body:
        return 4, 0
    size = len(json.dumps(operation.body[0].definition))
    if size > LONGEST:
        return 2, 1
    if size > LONG:
        return (5, 2) if full else (3, 2)
    return (14, 3) if full else (5, 2)


@pytest.mark.timeout(600)  # a minute of processor time, most of it for generating the bodies
def test_every_answer_is_described(served: str, session: requests.Session, full: bool) -> None:
    schema = schemathesis.openapi.from_dict(described(served))
    schema.config.update(base_url=served)
    seen: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        allowed, forbidden = counts(operation, full)
        tried(operation, GenerationMode.POSITIVE, allowed, session, seen)
        if forbidden:
            tried(operation, GenerationMode.NEGATIVE, forbidden, session, seen)
    assert seen.total() >= LEAST
    assert {200, 400, 404} <= set(seen)


# The bounds of numbers

NUMBERS = {"integer", "number"}
Place = tuple[str | int, ...]


def numbers_of(schema: Any, place: Place = ()) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The schemas of numbers anywhere in `schema`, and their places."""
    if isinstance(schema, dict):
        kinds = schema.get("type", ())
        if NUMBERS & {kinds} if isinstance(kinds, str) else isinstance(kinds, list) and NUMBERS & set(kinds):
            yield place, schema
        for key, inner in schema.items():
            yield from numbers_of(inner, (*place, key))
    elif isinstance(schema, list):
        for at, inner in enumerate(schema):
            yield from numbers_of(inner, (*place, at))


def test_every_number_of_the_description_has_bounds() -> None:
    found = dict(numbers_of(application(Registry([], echo)).openapi()))
    assert len(found) > 1000
    unbounded = [
        "/".join(map(str, place)) for place, schema in found.items() if not {"minimum", "maximum"} <= {*schema}
    ]
    assert not unbounded


def least(schema: dict[str, Any]) -> Any:
    """A small value that the schema allows."""
    if "default" in schema:
        return schema["default"]
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return least(schema[key][0])
    match schema.get("type"):
        case "object":
            return {name: least(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [least(schema["items"]) for _ in range(schema.get("minItems", 0))]
        case "integer" | "number":
            return schema["minimum"]
        case "boolean":
            return False
        case _:
            return "a" * max(schema.get("minLength", 1), 1)


def values_at_bounds(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values that the schema allows, in each of which one number is at one of its bounds; and the name of its field."""
    for key in ("anyOf", "oneOf"):
        for each in schema.get(key, ()):
            yield from values_at_bounds(each)
    match schema.get("type"):
        case "integer" | "number":
            for bound in (schema["minimum"], schema["maximum"]):
                yield "", int(bound) if schema["type"] == "integer" else bound
        case "array":
            yield from ((f"[0]{field}", [value]) for field, value in values_at_bounds(schema["items"]))
        case "object":
            whole = least(schema)
            for name, inner in schema.get("properties", {}).items():
                yield from ((f".{name}{field}", {**whole, name: value}) for field, value in values_at_bounds(inner))


def test_no_body_is_refused_for_a_number_within_its_bounds() -> None:
    """Each wire object of each route is read with each of its numbers at each of its bounds."""
    described = [getattr(route, "openapi_extra", None) for route in routes(application(Registry([], echo)))]
    bodies = [each for each in described if isinstance(each, BodyDescription)]
    tried, refused = 0, list[tuple[str, str]]()
    for kind in {kind for each in bodies for kind in (*each.kinds, *each.lines)}:
        for field, body in values_at_bounds(inline_schema(kind)):
            tried += 1
            try:
                kind.read(body)
            except BadRequest as error:
                if error.param == field.removeprefix("."):
                    refused.append((kind.__name__, error.message))
    assert tried > 800
    assert not refused

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

from tests.support.processes import Process

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


def counts(operation: Any) -> tuple[int, int]:
    """The number of cases with a body that the operation accepts, and with any other body."""
    if not operation.body:
        return 4, 0
    size = len(json.dumps(operation.body[0].definition))
    if size > LONGEST:
        return 2, 1
    return (5, 2) if size > LONG else (14, 3)


@pytest.mark.timeout(600)  # a minute of processor time, most of it for generating the bodies
def test_every_answer_is_described(served: str, session: requests.Session) -> None:
    schema = schemathesis.openapi.from_dict(described(served))
    schema.config.update(base_url=served)
    seen: Counter[int] = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        allowed, forbidden = counts(operation)
        tried(operation, GenerationMode.POSITIVE, allowed, session, seen)
        if forbidden:
            tried(operation, GenerationMode.NEGATIVE, forbidden, session, seen)
    assert seen.total() >= LEAST
    assert {200, 400, 404} <= set(seen)

"""No error body has information about the machine: of 2,500 errors and more, by every route and in every dialect."""

import itertools
import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polyhead.service.api.access.auth import required_access
from tests.service.api.operations.test_admin import KEY, Client, serving
from tests.support.places import ROOT

LEAST = 2500
EACH = 2  # values of each field, which take turns; all of them with --full
CANARY = "a-value-of-the-environment-that-nobody-may-see"
VALUES: tuple[Any, ...] = (-1, 10**30, {"x": 1}, ["a", {"b": "c"}], "\x00../..{{ 1 }}")
GARBAGE = (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 2000, b'{"a":' * 2000, b"NaN", b'{"model":1e999}')
MISSED = (
    "/nowhere",
    "/v1/nowhere",
    "/v1/messages/x",
    "/v2/models/x/y/z",
    "/models",
    "/admin/x",
    "/../etc",
    "/%00",
    "/v2/",
)
BODY: dict[str, Any] = {
    "model": "chat",
    "prompt": "a",
    "inputs": "a",
    "input": "a",
    "text_input": "a",
    "query": "a",
    "documents": ["a"],
    "texts": ["a"],
    "messages": [{"role": "user", "content": "a"}],
    "max_tokens": 1,
    "ids": [1],
    "tokens": [1],
    "name": "new",
    "source": "x",
}


def leaks(base: Path) -> re.Pattern[str]:
    """Information about this machine that a body contains: folders, values of the environment, addresses, messages of
    Python."""
    folders = {str(base), sys.prefix, sys.base_prefix, str(Path.home()), str(ROOT), os.getcwd(), "/tmp/", "/usr/"}
    values = {value for value in os.environ.values() if len(value) > 7}
    words = "|".join(re.escape(each) for each in sorted(folders | values, key=len, reverse=True) if len(each) > 1)
    python = (
        r"Traceback|File \"|\.py\b|site-packages|\b0x[0-9a-f]{6,}|<(class|function|module) |\w+ object at |pydantic"
    )
    return re.compile(
        rf"{words}|{python}|\b\d+\.\d+\.\d+\.\d+\b|localhost|(?<![\w.<)])/(tmp|home|root|etc|usr|var|opt)/"
    )


def asked(paths: dict[str, Any], values: Callable[[], Iterable[Any]]) -> Iterator[tuple[str, str, bytes]]:
    """Every route with invalid values of every field, with bodies that are not JSON, and for unknown models."""
    for template, operations in paths.items():
        for method, operation in operations.items():
            for name in ("chat", "judge", "cut", "gone", "nobody", "..%2f..%2fetc%2fpasswd", "%00", "a" * 3000):
                path = re.sub(r"\{\w+\}", name, template)
                yield method.upper(), path, json.dumps(BODY).encode()
                if path == template:
                    break
            path = template.replace("{name}", "chat").replace("{task}", "text-generation").replace("{version}", "1")
            schema = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
            for kind in schema.get("anyOf", [schema]):
                yield from invalid_bodies(method.upper(), path, kind, values)
    for path in MISSED:
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            yield method, path, b"{}"


def invalid_bodies(
    method: str, path: str, schema: dict[str, Any], values: Callable[[], Iterable[Any]]
) -> Iterator[tuple[str, str, bytes]]:
    fields = schema.get("properties", {})
    fine = {name: value for name, value in BODY.items() if name in fields}
    for content in GARBAGE if fields else ():
        yield method, path, content
    for field in (*fields, "unknown"):
        for value in values():
            yield method, path, json.dumps(fine | {field: value}).encode()
        yield method, path, json.dumps({name: value for name, value in fine.items() if name != field}).encode()


def broken(base: Path, folder: Path) -> dict[str, Path]:
    """Models that cannot be loaded; the names of their folders have a space and would show the path."""
    cut = base / "a folder" / "cut"
    shutil.copytree(folder, cut)
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:-100])
    bare = base / "a folder" / "bare"
    shutil.copytree(folder, bare)
    (bare / "config.json").unlink()
    return {"cut": cut, "bare": bare, "gone": base / "a folder" / "nowhere" / "gone"}


@pytest.mark.timeout(400)
def test_no_error_has_information_about_the_machine(
    tiny_generator: Path, tiny_classifier: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    monkeypatch.setenv("SOMETHING_SECRET", CANARY)
    seen, found = Counter[int](), list[tuple[str, str]]()
    turn = itertools.cycle(VALUES)
    pattern = leaks(tmp_path.parent)

    def look(answer: httpx.Response) -> None:
        if answer.status_code >= 400:
            seen[answer.status_code] += 1
            reported = f"{answer.text} {dict(answer.headers)}"
            if leak := pattern.search(reported):
                found.append(
                    (f"{answer.request.method} {answer.request.url.raw_path.decode()[:80]}: {leak[0]}", reported[:400])
                )

    async def act(client: Client) -> None:
        paths = (await client.ask("GET", "/openapi.json")).json()["paths"]
        for method, path, content in asked(paths, lambda: VALUES if full else itertools.islice(turn, EACH)):
            headers = KEY if required_access(path, method) == "admin" else {}
            look(await client.http.request(method, path, content=content, headers=headers))
        for source in (tmp_path / "a folder" / "cut", tmp_path / "a folder" / "x y", "org/name", tmp_path):
            look(await client.ask("POST", "/admin/models", {"name": "new", "source": str(source)}))
        for name in ("cut", "bare", "gone"):
            look(await client.ask("POST", f"/admin/models/{name}/reload"))
        look(await client.ask("GET", "/readyz"))
        look(await client.http.get("/v1/models/cut", headers={"Authorization": "Bearer wrong"}))
        index = await client.ask("POST", "/v2/repository/index", {}, headers=KEY)
        assert not pattern.search(index.text), "the cause of a load error, which clients can read, names the machine"

    models = {"chat": tiny_generator, "judge": tiny_classifier, **broken(tmp_path, tiny_classifier)}
    serving(act, models)
    assert not found, f"{len(found)}: {found[:5]}"
    assert seen.total() >= LEAST, seen
    assert not {500, 502} & set(seen), seen

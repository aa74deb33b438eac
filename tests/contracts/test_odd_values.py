"""A value of any type at any place of any body is read, or rejected with the name of its field; it never causes a
5xx."""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers as tf

from polyhead.service.api.batches.file_store import StoredFile
from polyhead.service.core.errors import BadRequest
from tests.service.api.operations.test_admin import KEY, Client, serving
from tests.service.api.shared.test_fields import ROWS, SECTIONS, body_of
from tests.support import checkpoints, translators
from tests.support.edits import edited
from tests.support.odd_values import (
    BATCH,
    LONG_VALUES,
    ROUTES,
    UNHASHABLE,
    VALUES,
    Place,
    Route,
    inside,
    is_named,
    places,
    replaced,
)

ANSWERS = ("contradiction", "neutral", "entailment")
LEAST = 4000  # bodies over HTTP
LONG_LEAST = 1000  # of them with long keys and values
TOO_LONG = re.compile(
    "context_length_exceeded|answer_too_large|the model takes [0-9]+|maximum context length is [0-9]+"
)  # the value was read
READS = "{% if documents %}{{ documents[0].text }}{{ enable_thinking }}{% endif %}"
FIELD = re.compile(r"([^:.\[]*)")
REFUSED = (400, 422)
ROOM = 600  # tokens
MAX_ERROR_CHARS = 1000  # of a message, and of a field that it names
MAX_ERROR_BYTES = 3000  # of an answer; some have the message twice


def test_no_wire_object_raises_an_unexpected_error() -> None:
    """Each value of each example of docs/dialects.md, which has every field of every wire object."""
    tried, unnamed = 0, list[tuple[Any, str]]()
    seen = set[str]()
    for row in ROWS:
        if row.state not in ("done", "harmless"):
            continue
        section, body = SECTIONS[row.section], body_of(row)
        for place in places(body):
            for value in (*VALUES, *LONG_VALUES):
                odd = replaced(body, place, value)
                if (said := f"{row.section} {json.dumps(odd)}") in seen:
                    continue
                seen.add(said)
                tried += 1
                try:
                    section.tried(odd)
                except BadRequest as error:  # any other exception fails the test here
                    if len(error.message) > MAX_ERROR_CHARS or len(error.param) > MAX_ERROR_CHARS:
                        unnamed.append((place, f"{len(error.message)} characters: {error.message[:300]}"))
                    if not is_named(place, error.message) and not contradicted(place, error.message):
                        unnamed.append((place, error.message))
    assert not unnamed
    assert tried > 10_000


def contradicted(place: Place, said: str) -> bool:
    """Whether the error is about another field, which does not fit the value that was read."""
    return FIELD.match(said).group(1) not in ("", "the body", str(place[0]))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_generator: Path) -> dict[str, Path]:
    """A model for every task.

    The context of the generator has room for tools in its prompt. A sixth of its tokens end an answer: some bodies do
    not limit it.
    """
    made = tmp_path_factory.mktemp("odd")
    chat_folder = edited(tiny_generator, made / "chat", max_position_embeddings=ROOM)
    ends = {"eos_token_id": list(range(100, 164))}
    (chat_folder / "generation_config.json").write_text(json.dumps(ends))
    (chat_folder / "chat_template.jinja").write_text(checkpoints.CHAT_TEMPLATE + READS)
    translators.translator(made / "writer", "marian")
    return {
        "chat": chat_folder,
        "judge": checkpoints.classifier(made / "judge", labels=ANSWERS),
        "ranker": checkpoints.ranker(made / "ranker"),
        "embedder": checkpoints.embedder(made / "embedder"),
        "tagger": checkpoints.encoder(made / "tagger", tf.BertForTokenClassification),
        "reader": checkpoints.encoder(made / "reader", tf.BertForQuestionAnswering),
        "chooser": checkpoints.encoder(made / "chooser", tf.BertForMultipleChoice),
        "filler": checkpoints.encoder(made / "filler", tf.BertForMaskedLM),
        "writer": made / "writer",
    }


def odd_requests(route: Route, *, full: bool) -> Iterator[tuple[str, Place, Any]]:
    """The path, the place of the odd value, the body.

    Further paths of the same route get fewer values. So do places inside, and fields that another body of the route
    has too; they get different ones in turn: the parsing of every value at every place is tested without HTTP above.
    """
    half, turn, seen = itertools.cycle((0, 1)), itertools.cycle(VALUES), set[str]()
    for number, path in enumerate(route.addresses.values()):
        for body in route.bodies:
            yield path, (), dict(body)
            if number and not full:
                first = next(iter(body))
                yield from ((path, (first,), replaced(body, (first,), value)) for value in UNHASHABLE)
                continue
            for place in places(body):
                few = len(place) > 2 or (field := f"{place} {inside(body, place)}") in seen
                values: Iterable[Any] = VALUES
                if few and not full:
                    values = (*UNHASHABLE[:2], *itertools.islice(turn, 2))
                elif len(place) > 1 and not full:
                    values = VALUES[next(half) :: 2]
                yield from ((path, place, replaced(body, place, value)) for value in values)
                if not few:
                    seen.add(field)


@pytest.mark.timeout(600)
def test_no_route_answers_a_value_with_a_server_error(folders: dict[str, Path], tmp_path: Path, full: bool) -> None:
    wrong, sent, known = list[str](), 0, set[str]()

    async def act(client: Client) -> None:
        nonlocal sent
        paths = (await client.ask("GET", "/openapi.json")).json()["paths"]
        for path, methods in paths.items():
            bodies = [each["requestBody"]["content"] for each in methods.values() if "requestBody" in each]
            known.update(path for body in bodies if "application/json" in body)
        for route in ROUTES:
            first = next(iter(route.addresses.values()))
            for path, place, body in odd_requests(route, full=full):
                administers = path.startswith(("/admin", "/v2/repository"))
                headers = KEY if administers else {}
                answer = await client.http.request(route.method, path, json=body, headers=headers)
                sent += 1
                if error := error_of(answer, place, path == first):
                    wrong.append(f"{path} {place} {inside(body, place)!r:.60}: {error:.300}")

    keep_file(tmp_path / "files", BATCH["input_file_id"])
    serving(act, folders, explain_tokens=48, files_dir=str(tmp_path), responses_mib=1)
    assert not wrong, f"{len(wrong)}: " + "\n".join(wrong[:60])
    assert known == {address for route in ROUTES for address in route.addresses}
    assert sent >= LEAST, sent


@pytest.mark.timeout(600)
def test_no_error_repeats_a_long_key_or_value(folders: dict[str, Path], tmp_path: Path) -> None:
    """At each place of each body, and in paths, queries and headers."""
    long, refused = list[str](), 0

    async def act(client: Client) -> None:
        async def ask(method: str, path: str, where: str, **given: Any) -> None:
            nonlocal refused
            headers = (KEY if path.startswith(("/admin", "/v2/repository")) else {}) | given.pop("headers", {})
            answer = await client.http.request(method, path, headers=headers, **given)
            if answer.status_code >= 400:
                refused += 1
                named = sum(len(name) + len(value) for name, value in answer.headers.raw)
                if len(answer.content) > MAX_ERROR_BYTES or named > MAX_ERROR_BYTES:
                    long.append(f"{path[:60]} {where}: {len(answer.content)} {answer.text[:300]}")

        for route in ROUTES:
            path, turn = next(iter(route.addresses.values())), itertools.cycle(LONG_VALUES)
            for body in route.bodies:
                for place in places(body):
                    for value in itertools.islice(turn, len(LONG_VALUES) if len(place) == 1 else 2):
                        await ask(route.method, path, str(place), json=replaced(body, place, value))
        word = "y" * 8000
        described = (await client.ask("GET", "/openapi.json")).json()["paths"]
        for path, methods in described.items():
            for method, operation in methods.items():
                await ask(method, re.sub(r"\{\w+\}", word, path), "the path", json={})
                await ask(method, f"{path}?{word}={word}", "a query")
                for given in operation.get("parameters", ()):
                    await ask(method, f"{path}?{given['name']}={word}", "a query", headers={given["name"]: word})
        headers = ("content-encoding", "origin", "sec-fetch-site", "host", "x-request-timeout", "authorization")
        for name in (*headers, "x-request-id", "traceparent", "inference-header-content-length"):
            for path in ("/v1/completions", "/v2/models/chat/infer", "/api/chat"):
                await ask("POST", path, name, json={}, headers={name: word})

    keep_file(tmp_path / "files", BATCH["input_file_id"])
    serving(act, folders, explain_tokens=48, files_dir=str(tmp_path), responses_mib=1)
    assert not long, f"{len(long)}: " + "\n".join(long[:60])
    assert refused > LONG_LEAST, refused


def keep_file(folder: Path, file_id: str) -> None:
    """A file as if it had been uploaded before the server was started."""
    folder.mkdir()
    file = StoredFile(id=file_id, owner="", created_at=1, filename="requests.jsonl", purpose="batch")
    (folder / f"{file_id}.json").write_text(file.model_dump_json())
    (folder / f"{file_id}.content").touch()


def error_of(answer: httpx.Response, place: Place, first: bool) -> str:
    """The error in an answer, or an empty string. Some of the further paths of a route name no model."""
    fine = answer.status_code < (300 if first and not place else 500)
    if not fine and "odd" not in answer.text and "gone" not in answer.text:
        return f"{answer.status_code} {answer.text}"
    if answer.status_code not in REFUSED or not place or not first or TOO_LONG.search(answer.text):
        return ""
    if is_named(place, answer.text) or any(contradicted(place, said) for said in sentences(answer.json())):
        return ""
    return f"does not name its field: {answer.text}"


def sentences(body: Any) -> list[str]:
    """The texts in an error body that begin with a field."""
    inner = body.values() if isinstance(body, dict) else body if isinstance(body, list) else ()
    if isinstance(body, str) and ": " in body:
        return [body]
    return [said for each in inner for said in sentences(each)]

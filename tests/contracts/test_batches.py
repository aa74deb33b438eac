"""Files and batches with OpenAI's client, against a real server: answered, resumed after a kill, cancelled, bounded."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from tests.support.faults import Fault
from tests.support.processes import FaultServer, Process

ENDED = {"failed", "completed", "expired", "cancelled"}
NAMES = [f"user{number}" for number in range(16)]


def key_of(name: str) -> str:
    return f"a-key-of-{name}"


def api_keys(names: list[str]) -> str:
    return ",".join(f"{name}={key_of(name)}" for name in names)


class Server:
    """A server with a folder of files, which may be started again on the same folder.

    `api_key` is that of the client that comes next. A test of a server that several tests share has a key of its own,
    and so sees none of their files."""

    def __init__(self, models: list[str], folder: Path, *flags: str, faults: Path | None = None) -> None:
        arguments = (*models, "--files-dir", str(folder), "--threads", "1", *flags)
        self.folder, self.api_key = folder, "none"
        self.process = FaultServer(faults, *arguments) if faults else Process(*arguments)
        self.process.ready()

    def client(self, key: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.process.url}/v1", api_key=key or self.api_key, max_retries=0)

    def post(self, path: str, **content: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.api_key}"} | content.pop("headers", {})
        return httpx.post(self.process.url + path, headers=headers, timeout=60, **content)

    def arm(self, *faults: Fault) -> None:
        assert isinstance(self.process, FaultServer)
        self.process.arm(*faults)


@pytest.fixture(scope="module")
def models(tiny_generator: Path, tiny_classifier: Path, tiny_embedder: Path) -> list[str]:
    return [f"chat={tiny_generator}", f"judge={tiny_classifier}", f"vectors={tiny_embedder}"]


@pytest.fixture(scope="module")
def shared(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("batches")
    found = Server(models, folder / "files", "--api-keys", api_keys(NAMES), faults=folder)
    yield found
    assert found.process.stop() == 0, found.process.log


numbers = count()


@pytest.fixture
def server(shared: Server) -> Server:
    """The server of all tests, with a key that no other test has."""
    shared.api_key = key_of(NAMES[next(numbers)])
    return shared


def lines_of(endpoint: str, bodies: list[Any]) -> bytes:
    requests = [
        {"custom_id": f"r{i}", "method": "POST", "url": endpoint, "body": body} for i, body in enumerate(bodies)
    ]
    return b"".join(json.dumps(request).encode() + b"\n" for request in requests)


def upload(client: openai.OpenAI, content: bytes) -> str:
    return client.files.create(file=("requests.jsonl", content), purpose="batch").id


def begin(client: openai.OpenAI, endpoint: Any, bodies: list[Any]) -> Batch:
    file = upload(client, lines_of(endpoint, bodies))
    return client.batches.create(input_file_id=file, endpoint=endpoint, completion_window="24h")


def ended(server: Server, client: openai.OpenAI, batch_id: str) -> Batch:
    server.process.until(lambda: client.batches.retrieve(batch_id).status in ENDED)
    return client.batches.retrieve(batch_id)


def answers(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id
    return {line["custom_id"]: line for line in map(json.loads, client.files.content(file_id).text.splitlines())}


def chat(number: int, tokens: int = 8) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"text {number}"}]
    return {"model": "chat", "messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def test_requests_are_answered_as_over_http(server: Server) -> None:
    client = server.client()
    bodies = [chat(number) for number in range(20)]
    wrong = {"model": "unknown", "messages": [{"role": "user", "content": "text"}]}
    batch = ended(server, client, begin(client, "/v1/chat/completions", [*bodies, wrong]).id)
    assert (batch.status, batch.request_counts and batch.request_counts.to_dict()) == (
        "completed",
        {"total": 21, "completed": 20, "failed": 1},
    )
    found = answers(client, batch.output_file_id)
    assert len(found) == 20
    for number, body in enumerate(bodies):
        response = found[f"r{number}"]["response"]
        assert response["status_code"] == 200
        alone = server.post("/v1/chat/completions", json=body).json()
        assert response["body"]["choices"] == alone["choices"]
    error = answers(client, batch.error_file_id)["r20"]
    assert error["response"]["status_code"] == 404
    assert error["response"]["body"]["error"]["code"] == "model_not_found"
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert {file.purpose for file in client.files.list()} == {"batch", "batch_output"}


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        ("/v1/embeddings", {"model": "vectors", "input": ["a text", "another"]}),
        ("/v1/moderations", {"model": "judge", "input": "a text"}),
        ("/v1/completions", {"model": "chat", "prompt": "a text", "max_tokens": 3}),
        ("/v1/responses", {"model": "chat", "input": "a text", "max_output_tokens": 3}),
    ],
)
def test_every_endpoint(server: Server, endpoint: str, body: Any) -> None:
    client = server.client()
    batch = ended(server, client, begin(client, endpoint, [body]).id)
    assert batch.status == "completed"
    found = answers(client, batch.output_file_id)["r0"]["response"]
    alone = server.post(endpoint, json=body).json()
    assert (found["status_code"], found["body"].keys()) == (200, alone.keys())


STEPS = 60  # in which some of LONGER are answered, but not the last
LONGER = [chat(number, 4 + 2 * number) for number in range(60)]


def test_a_killed_server_goes_on_where_it_was(models: list[str], tmp_path: Path) -> None:
    """It is killed while most requests are not answered, since its engine hangs after some steps."""
    first = Server(models[:1], tmp_path / "files", faults=tmp_path)
    first.arm(Fault("hang", after=STEPS))
    client = first.client()
    batch = begin(client, "/v1/chat/completions", LONGER)
    first.process.until(lambda: done(client, batch.id) > 5)
    first.process.child.kill()
    first.process.child.wait()
    contents = (tmp_path / "files" / "files").glob("*.content")
    output = next(path for path in contents if b"batch_req" in path.read_bytes())
    written = output.read_bytes()
    output.write_bytes(written[:-7])  # as if the last line were cut off
    kept = {json.loads(line)["id"] for line in written.splitlines()[:-1]}
    second = Server(models[:1], tmp_path / "files")
    client = second.client()
    found = ended(second, client, batch.id)
    assert (found.status, found.request_counts and found.request_counts.completed) == ("completed", len(LONGER))
    lines = client.files.content(found.output_file_id or "").text.splitlines()
    assert len(lines) == len(LONGER) == len({json.loads(line)["custom_id"] for line in lines})
    assert kept <= {json.loads(line)["id"] for line in lines}, "answers were computed again"
    assert second.process.stop() == 0


def done(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts else 0


def test_a_cancelled_batch_keeps_what_was_answered(server: Server) -> None:
    client = server.client()
    server.arm(Fault("hang", after=STEPS))
    batch = begin(client, "/v1/chat/completions", LONGER)
    with pytest.raises(openai.ConflictError, match="is read by a batch"):
        client.files.delete(batch.input_file_id)
    server.process.until(lambda: done(client, batch.id) > 0)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    server.arm()
    found = ended(server, client, batch.id)
    assert found.status == "cancelled"
    assert found.request_counts
    assert 0 < found.request_counts.completed < len(LONGER)
    assert len(answers(client, found.output_file_id)) == found.request_counts.completed
    assert client.files.delete(batch.input_file_id).deleted
    server.process.rest()


def test_a_file_with_errors_fails_before_any_request(server: Server) -> None:
    client = server.client()
    good = json.loads(lines_of("/v1/embeddings", [{"model": "vectors", "input": "a"}]))
    wrong = {
        "no JSON": b"{",
        "url": json.dumps(good | {"custom_id": "a", "url": "/v1/completions"}).encode(),
        "custom_id": json.dumps(good).encode(),
        "body.stream": json.dumps(good | {"custom_id": "b", "body": {"stream": True}}).encode(),
        "method": json.dumps(good | {"custom_id": "c", "method": "GET"}).encode(),
    }
    file = upload(client, b"\n".join([json.dumps(good).encode(), *wrong.values()]))
    batch = client.batches.create(input_file_id=file, endpoint="/v1/embeddings", completion_window="24h")
    found = ended(server, client, batch.id)
    assert found.status == "failed"
    assert found.errors
    assert [(error.line, error.param) for error in found.errors.data or ()] == [
        (2, None),
        (3, "url"),
        (4, "custom_id"),
        (5, "body.stream"),
        (6, "method"),
    ]
    assert found.output_file_id is None


def test_each_key_sees_its_own_and_has_its_share(models: list[str], tmp_path: Path) -> None:
    server = Server(models[2:], tmp_path / "files", "--api-keys", api_keys(["one", "two"]), "--files-mib", "1")
    one, two = server.client(key_of("one")), server.client(key_of("two"))
    batch = begin(one, "/v1/embeddings", [{"model": "vectors", "input": "a"}])
    found = ended(server, one, batch.id)
    for call in (
        lambda: two.files.content(found.output_file_id or ""),
        lambda: two.files.retrieve(batch.input_file_id),
        lambda: two.files.delete(batch.input_file_id),
        lambda: two.batches.retrieve(batch.id),
        lambda: two.batches.cancel(batch.id),
        lambda: two.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/embeddings", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    assert list(two.files.list()) == list(two.batches.list()) == []
    with pytest.raises(openai.AuthenticationError):
        server.client("another").files.list()
    upload(two, b"x" * (500 << 10))
    with pytest.raises(openai.APIStatusError, match="the files of a key may have 524288 bytes") as caught:
        upload(two, b"x" * (30 << 10))
    assert caught.value.status_code == 507
    assert server.process.stop() == 0


def test_uploads_that_are_refused(server: Server) -> None:
    client = server.client()
    with pytest.raises(openai.BadRequestError, match="purpose: must be 'batch'"):
        client.files.create(file=("a.jsonl", b"x"), purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match=r"expires_after.seconds: must be between 3600 and 2592000, got 5"):
        client.files.create(
            file=("a.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 5}
        )
    kept = client.files.create(
        file=("a.jsonl", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert kept.expires_at == kept.created_at + 3600
    for status, problem, form in (
        (415, "any web page can send it", {"data": {"purpose": "batch"}}),
        (400, "must be a form", {"json": {"purpose": "batch"}}),
        (400, "other: is not a known field", {"files": {"file": ("a", b"x")}, "data": {"other": "x"}}),
        (400, "file: is required", {"files": {"purpose": (None, b"batch")}}),
    ):
        answer = server.post("/v1/files", **form)
        assert (answer.status_code, problem in answer.text) == (status, True), answer.text
    unknown = "unknown-name-of-a-charset"
    for kind in (
        f"boundary=b; charset={unknown}",
        "boundary=b; charset=undefined",
        f'boundary=b; x="{";" * 9000}',
        "x=b",
    ):
        headers = {"Content-Type": f"multipart/form-data; {kind}"}
        answer = server.post("/v1/files", headers=headers, content=form_with_name("a"))
        assert (answer.status_code, "must be a form" in answer.text) == (400, True), answer.text
    headers = {"Content-Type": "multipart/form-data; boundary=b; charset=utf-8"}
    for name, status in (("a\ud800", 400), ("Größe", 200)):
        body = form_with_name(name)
        assert server.post("/v1/files", headers=headers, content=body).status_code == status
    assert [file.filename for file in client.files.list().data] == ["Größe", "a.jsonl"]


def form_with_name(name: str) -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\nx\r\n'
    purpose = '--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    return head.encode(errors="surrogatepass") + purpose.encode()


def test_one_folder_has_one_server(server: Server, models: list[str]) -> None:
    second = Process(models[0], "--files-dir", str(server.folder))
    assert second.child.wait() == 2
    assert "is used by another server" in second.log


def test_a_server_without_a_folder_says_so(models: list[str]) -> None:
    process = Process(models[0])
    process.ready()
    client = openai.OpenAI(base_url=f"{process.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="--files-dir FOLDER"):
        client.files.list()
    process.stop()

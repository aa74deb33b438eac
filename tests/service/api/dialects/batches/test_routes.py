"""Lists of files and batches: in pages, and with a claim on memory for requests; contents; errors of parameters."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import Request

from polyhead.service.api.access.admission import Admission, AdmissionLimits
from polyhead.service.api.access.request_context import RequestContext
from polyhead.service.api.batches.batch import Batch
from polyhead.service.api.batches.batch_lines import LineRoom
from polyhead.service.api.batches.batch_runner import BatchRunner
from polyhead.service.api.batches.batch_store import BatchStore
from polyhead.service.api.batches.file_store import PIECE_BYTES, FileStore, StoredFile, StoreLimits
from polyhead.service.api.batches.record_folder import new_id
from polyhead.service.api.dialects.batches import routes
from polyhead.service.api.dialects.batches.wire import read_line
from polyhead.service.api.shared import dialect
from polyhead.service.concurrency.time_slices import LoopTurns
from polyhead.service.core.errors import Overloaded
from polyhead.service.resources.request_memory import Headroom, MemoryClaim
from tests.support.scripted import Connection, Registry, application, echo

METADATA = {str(number): "x" * 512 for number in range(16)}


def new_batch(file: StoredFile, **fields: Any) -> Batch:
    return Batch(id=new_id("batch_"), owner="", created_at=1, endpoint="/v1/embeddings", input_file=file.id, **fields)


async def open_runner(folder: Path) -> BatchRunner:
    async def never_called(owner: str, path: str, body: bytes) -> Any:
        raise AssertionError

    runner = BatchRunner(BatchStore(FileStore(folder, StoreLimits(1 << 20))), never_called, read_line, LineRoom())
    await runner.open()
    return runner


def ask(runner: BatchRunner, headroom: Headroom) -> Request:
    context = RequestContext("id", claim=MemoryClaim(headroom))
    admission = Admission(AdmissionLimits(1, 1), SimpleNamespace(tokens=0, tokens_of=lambda _: 0))
    server = SimpleNamespace(turns=LoopTurns(), admission=admission)
    app = SimpleNamespace(state=SimpleNamespace(batches=runner, server=server))
    return Request({"type": "http", "app": app, "state": {"context": context}})


def test_files_are_listed_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_PAGE_FILES", 3)

    async def read_pages(runner: BatchRunner, order: Any) -> list[list[str]]:
        found, page = list[list[str]](), {"last_id": "", "has_more": True}
        while page["has_more"]:
            request = ask(runner, Headroom())
            answer = await routes.list_files(request, after=str(page["last_id"]), order=order, limit=10_000)
            page = json.loads(bytes(answer.body))
            found.append([file["filename"] for file in page["data"]])
        return found

    async def run() -> None:
        runner = await open_runner(tmp_path)
        for number in range(7):
            await runner.store.files.add("", str(number), b"x")
        assert await read_pages(runner, "desc") == [["6", "5", "4"], ["3", "2", "1"], ["0"]]
        assert await read_pages(runner, "asc") == [["0", "1", "2"], ["3", "4", "5"], ["6"]]
        runner.store.files.close()

    asyncio.run(run())


def test_lists_are_claimed(tmp_path: Path) -> None:
    async def run() -> None:
        runner, headroom = await open_runner(tmp_path), Headroom(1 << 30)
        file = await runner.store.files.add("", "a", b"x")
        await runner.store.add(new_batch(file, metadata=METADATA))
        for list_some in (routes.list_files, routes.list_batches):
            request = ask(runner, headroom)
            answer = await list_some(request, after="", limit=100)
            claimed = headroom.shortfall(int(headroom.total))
            assert len(answer.body) < claimed < 100_000
            request.state.context.claim.release()
            headroom.reserve(int(headroom.total), "others")
            with pytest.raises(Overloaded, match="the list takes about"):
                await list_some(ask(runner, headroom), after="", limit=100)
            headroom.release(int(headroom.total))
        runner.store.files.close()

    asyncio.run(run())


def test_large_lists_take_a_place_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists need no permit otherwise, and a key could claim all memory with lists that it does not read."""

    async def run() -> None:
        runner = await open_runner(tmp_path)
        file = await runner.store.files.add("", "a", b"x")
        await runner.store.add(new_batch(file))
        for free, taken in ((1 << 16, 0), (100, 1)):
            monkeypatch.setattr(dialect, "FREE_BYTES", free)
            for list_some in (routes.list_files, routes.list_batches):
                request = ask(runner, Headroom())
                await list_some(request, after="", limit=100)
                admission: Admission = request.app.state.server.admission
                assert admission.in_flight == taken
                assert not any(permit.has_tokens for permit in admission._permits)
                if taken:
                    with pytest.raises(Overloaded, match="1 requests are in flight"):
                        await list_some(request, after="", limit=100)
                request.state.context.cleanup.close()
                assert admission.in_flight == 0
        runner.store.files.close()

    asyncio.run(run())


def test_a_batch_and_a_content_that_are_read_slowly_are_claimed(tmp_path: Path) -> None:
    async def run() -> None:
        runner, headroom = await open_runner(tmp_path), Headroom(1 << 30)
        file = await runner.store.files.add("", "a", b"x" * (2 * PIECE_BYTES))
        batch = new_batch(file, metadata=METADATA)
        await runner.store.add(batch)
        for show, name, least in (
            (routes.show_batch, batch.id, 16 * 512),
            (routes.send_content, file.id, 2 * PIECE_BYTES),
        ):
            request = ask(runner, headroom)
            await show(request, name)
            assert least < headroom.shortfall(int(headroom.total)) < 4 * PIECE_BYTES
            request.state.context.cleanup.close()
            request.state.context.claim.release()
            headroom.reserve(int(headroom.total), "others")
            with pytest.raises(Overloaded, match="takes about"):
                await show(ask(runner, headroom), name)
            headroom.release(int(headroom.total))
        runner.store.files.close()

    asyncio.run(run())


def test_contents_and_errors_over_http(tmp_path: Path) -> None:
    async def run() -> None:
        app = application(Registry([], echo), files_dir=str(tmp_path))
        store = app.state.batches.store.files
        await app.state.batches.open()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://localhost") as client:
            contents = {"a b.jsonl": b"", "a.jsonl": b"x" * PIECE_BYTES, "Größe": b"xyz" * PIECE_BYTES}
            for name, content in contents.items():
                file = await store.add("", name, content)
                answer = await client.get(f"/v1/files/{file.id}/content")
                assert (answer.status_code, answer.content) == (200, content)
                assert answer.headers["content-length"] == str(len(content))
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["content-disposition"] in (
                    'attachment; filename="a.jsonl"',
                    "attachment; filename*=utf-8''a%20b.jsonl",
                    "attachment; filename*=utf-8''Gr%C3%B6%C3%9Fe",
                )
            for name, own in (("../../x", "x"), ("..\\y", "y"), ("a/z/", "z"), ("..", ""), ("a/..", ""), ("/", "")):
                named = await store.add("", name, b"x")
                answer = await client.get(f"/v1/files/{named.id}/content")
                assert answer.headers["content-disposition"] == f'attachment; filename="{own or named.id}"', name
            store.content_path(file.id).write_bytes(b"")
            answer = await client.get(f"/v1/files/{file.id}/content")
            assert (answer.status_code, "shorter than it was" in answer.text) == (507, True), answer.text
            for value, problem in (
                ("0", "must be between 1 and 10000"),
                ("9" * 99, "must be between"),
                ("9" * 5000, "must be a whole number"),
                ("1e400", "must be a whole number"),
            ):
                answer = await client.get("/v1/files", params={"limit": value})
                error = answer.json()["error"]
                assert (answer.status_code, error["param"]) == (400, "limit")
                assert error["message"].startswith(f"limit: {problem}"), error
            error = (await client.get("/v1/files", params={"order": "up"})).json()["error"]
            assert error["message"] == """order: must be 'asc' or 'desc', got "up\""""
        store.close()

    asyncio.run(run())


def test_a_client_that_leaves_while_it_cancels_a_batch_is_no_bug(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        app = application(Registry([], echo), files_dir=str(tmp_path))
        connection = Connection("/v1/batches/batch_1/cancel", b"")
        connection.incoming.get_nowait()
        connection.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
        connection.drop()
        await connection.run(app)
        assert connection.sent[0]["status"] == 499

    with caplog.at_level("INFO"):
        asyncio.run(run())
    assert [record.outcome for record in caplog.records if record.name == "polyhead.http"] == ["aborted"]  # type: ignore[attr-defined]
    assert not [record for record in caplog.records if record.exc_info]

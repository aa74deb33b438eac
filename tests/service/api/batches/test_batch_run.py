"""Batches with a server that is a function: room, loading models, time, a full disk, files that were changed."""

import asyncio
import errno
import json
import os
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from polyhead.service.api.access.auth import Keys
from polyhead.service.api.access.own_calls import OWN_CALL, OwnAnswer, OwnCalls
from polyhead.service.api.batches import batch_lines, batch_run, batch_store, file_store, record_folder
from polyhead.service.api.batches.batch import KEPT_BYTES, WINDOW_S, Batch, BatchError
from polyhead.service.api.batches.batch_lines import (
    BYTES_PER_LINE_BYTE,
    LONG_LINE_BYTES,
    BatchLine,
    LineReader,
    LineRoom,
    ReadRequest,
    answered_id,
    write_answer,
    write_expired,
)
from polyhead.service.api.batches.batch_runner import BatchRunner
from polyhead.service.api.batches.batch_store import MAX_UNFINISHED, BatchStore
from polyhead.service.api.batches.file_store import FileStore, StoredFile, StoreLimits
from polyhead.service.api.batches.record_folder import DISK_THREADS, Disk, RecordFolder, new_id
from polyhead.service.api.dialects.batches.wire import BatchRequest, read_line
from polyhead.service.concurrency.thread_pool import ThreadPool
from polyhead.service.config.settings import Settings, SettingsError
from polyhead.service.core.errors import Conflict, InsufficientStorage, NotFound, TooMany, Unavailable
from polyhead.service.resources.request_memory import Headroom, MemoryClaim

ENDPOINT = "/v1/embeddings"
Call = Callable[[str, str, bytes], Coroutine[Any, Any, OwnAnswer]]
UNBOUNDED_ROOM = LineRoom()


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def lines(count: int, mark: int = 0) -> bytes:
    request = {"method": "POST", "url": ENDPOINT}
    bodies = [{"n": number, "mark": mark} for number in range(count)]
    named = [{**request, "custom_id": str(body["n"]), "body": body} for body in bodies]
    return b"".join(json.dumps(line).encode() + b"\n" for line in named)


class Batches:
    """A runner in `folder` whose requests are answered by `call`."""

    def __init__(self, folder: Path, call: Call, size: int = 1 << 20, room: LineRoom = UNBOUNDED_ROOM) -> None:
        self.clock = Clock()
        self.files = FileStore(folder, StoreLimits(size), clock=self.clock)
        self.store = BatchStore(self.files, self.clock)
        self.runner = BatchRunner(self.store, call, read_line, room)

    async def start(self) -> None:
        await self.runner.open()
        self.task = asyncio.create_task(self.runner.run())
        await asyncio.sleep(0)

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def begin(self, content: bytes, owner: str = "me") -> str:
        file = await self.files.add(owner, "requests.jsonl", content)
        now = int(self.clock())
        batch = Batch(id=new_id("batch_"), owner=owner, created_at=now, endpoint=ENDPOINT, input_file=file.id)
        return (await self.runner.begin(batch)).id

    async def end(self, batch_id: str) -> Batch:
        """The batch when it has ended and its record is written."""
        while not self.store[batch_id].has_ended or batch_id in self.runner._runs:
            await asyncio.sleep(0.001)
        return self.store[batch_id]

    def written(self, file_id: str) -> dict[str, Any]:
        found = map(json.loads, self.files.content_path(file_id).read_text().splitlines())
        return {line["custom_id"]: line for line in found}


async def succeed(owner: str, path: str, body: bytes) -> OwnAnswer:
    return OwnAnswer(200, bytearray(body))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MIN_PAUSE_S", 0.0)
    monkeypatch.setattr(batch_run, "MAX_PAUSE_S", 0.001)


def test_a_request_is_sent_again_until_there_is_room(tmp_path: Path) -> None:
    tries = Counter[bytes]()

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        assert (owner, path) == ("me", ENDPOINT)
        tries[body] += 1
        return OwnAnswer((429, 503, 429, 200)[tries[body] - 1], bytearray(body), headers={"retry-after": "9"})

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        batch = await batches.end(await batches.begin(lines(40)))
        assert (batch.status, batch.completed, batch.failed, batch.error_file) == ("completed", 40, 0, "")
        assert {line["response"]["body"]["n"] for line in batches.written(batch.output_file).values()} == set(range(40))
        assert set(tries.values()) == {4}
        await batches.stop()

    asyncio.run(run())


def test_a_model_that_never_comes_is_an_error_of_its_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "MAX_NOT_READY_S", 0.01)

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        return OwnAnswer(503, bytearray(b'{"error":1}'))

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        batch = await batches.end(await batches.begin(lines(3)))
        assert (batch.status, batch.completed, batch.failed, batch.output_file) == ("completed", 0, 3, "")
        assert batches.written(batch.error_file)["0"]["response"]["status_code"] == 503
        await batches.stop()

    asyncio.run(run())


def test_what_is_not_answered_in_time_is_listed(tmp_path: Path) -> None:
    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        number = json.loads(body)["n"]
        if number > 5:
            await asyncio.Event().wait()
        if number == 5:  # after it, which is written last, no time is left
            [batch] = batches.store.unfinished()
            while batches.store[batch.id].completed < 5:
                await asyncio.sleep(0)
            batches.clock.now += WINDOW_S
        return OwnAnswer(200, bytearray(body))

    batches = Batches(tmp_path, call)

    async def run() -> None:
        await batches.start()
        batch = await batches.end(await batches.begin(lines(30)))
        assert (batch.status, batch.completed, batch.failed) == ("expired", 6, 24)
        errors = batches.written(batch.error_file)
        assert len(errors) == 24
        assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}
        await batches.stop()

    asyncio.run(run())


def test_a_full_disk_fails_the_batch_and_keeps_what_was_written(tmp_path: Path) -> None:
    content = lines(50)

    async def run() -> None:
        batches = Batches(tmp_path, succeed, size=len(content) + 1000)
        await batches.start()
        batch = await batches.end(await batches.begin(content))
        assert batch.status == "failed"
        assert [error.code for error in batch.errors] == ["insufficient_storage"]
        assert 0 < len(batches.written(batch.output_file)) < 50
        with pytest.raises(InsufficientStorage, match="all files may have"):
            await batches.files.add("me", "another", content)
        await batches.stop()

    asyncio.run(run())


def test_a_key_that_is_gone_fails_the_batch(tmp_path: Path) -> None:
    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        raise NotFound("the key 'me' exists no more")

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        batch = await batches.end(await batches.begin(lines(2)))
        assert (batch.status, batch.errors[0].message) == ("failed", "the key 'me' exists no more")
        await batches.stop()

    asyncio.run(run())


def test_batches_of_one_key_run_one_after_the_other(tmp_path: Path) -> None:
    running, most = Counter[int](), 0

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        nonlocal most
        mark = json.loads(body)["mark"]
        running[mark] += 1
        assert +running == {mark: running[mark]}
        most = max(most, running[mark])
        if most == batch_run.CALLS_AHEAD:
            full.set()
        await full.wait()
        running[mark] -= 1
        return OwnAnswer(200, bytearray(body))

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        begun = [await batches.begin(lines(20, mark)) for mark in range(3)]
        assert [(await batches.end(batch)).completed for batch in begun] == [20, 20, 20]
        assert most == batch_run.CALLS_AHEAD
        assert [batch.id for batch in batches.store.list_batches("me")] == begun[::-1]
        await batches.stop()

    full = asyncio.Event()
    asyncio.run(run())


def test_a_fault_of_the_server_fails_the_batch_and_the_next_one_runs(tmp_path: Path) -> None:
    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        if json.loads(body)["mark"] == 0:
            raise ZeroDivisionError
        return OwnAnswer(200, bytearray(body))

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        first, second = [await batches.begin(lines(3, mark)) for mark in range(2)]
        assert [error.code for error in (await batches.end(first)).errors] == ["internal_error"]
        assert (await batches.end(second)).status == "completed"
        await batches.stop()

    asyncio.run(run())


def test_the_last_write_of_a_record_wins(tmp_path: Path) -> None:
    """An owner has several threads, and the first write may take longer."""

    async def run() -> None:
        disk = Disk()
        records = RecordFolder(tmp_path, StoredFile, disk)
        await records.read_all()
        file = StoredFile(id=f"file-{0:024x}", owner="", created_at=1, filename="a", purpose="batch", bytes=0)
        versions = [file.model_copy(update={"bytes": size}) for size in range(50)]
        await asyncio.gather(*(records.write(each) for each in versions))
        assert await records.read_all() == [versions[-1]]
        disk.close()

    asyncio.run(run())


def test_a_content_that_is_longer_than_all_files_may_be_is_not_read(tmp_path: Path) -> None:
    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        kept, changed = [await batches.files.add("me", name, b"{}") for name in "ab"]
        await batches.stop()
        os.truncate(batches.files.content_path(changed.id), 1 << 40)  # sparse
        again = Batches(tmp_path, succeed)
        await again.start()
        assert [each.id for each in again.files.list_files("me")] == [kept.id]
        await again.stop()

    asyncio.run(run())


def test_a_disk_that_is_full_ends_the_batch_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        monkeypatch.setattr("polyhead.service.api.batches.record_folder.replace_file", refuse)
        return OwnAnswer(200, bytearray(body))

    def refuse(path: Path, content: bytes, mode: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path), len(content), mode)

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        batch = await batches.end(await batches.begin(lines(2)))
        assert (batch.status, batch.completed) == ("completed", 2)
        with pytest.raises(InsufficientStorage, match="No space left on device"):
            await batches.begin(lines(2))
        await batches.stop()

    asyncio.run(run())


def test_a_key_has_so_many_batches_at_most(tmp_path: Path) -> None:
    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        for _ in range(MAX_UNFINISHED):
            await batches.begin(lines(1))
        with pytest.raises(TooMany, match=f"{MAX_UNFINISHED} batches of this key have not ended"):
            await batches.begin(lines(1))
        await batches.stop()

    asyncio.run(run())


def test_files_whose_time_is_over_are_deleted(tmp_path: Path) -> None:
    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        file = await batches.files.add("me", "a", b"x", seconds=3600)
        batches.clock.now += 3601
        with pytest.raises(NotFound):
            batches.files.find(file.id, "me")
        await batches.files.remove_expired()
        assert not batches.files.content_path(file.id).exists()
        await batches.stop()

    asyncio.run(run())


def test_records_that_cannot_be_read_are_left_alone(tmp_path: Path) -> None:
    """Nothing in the folder keeps the server from starting, and no record leads to a path outside of it."""

    async def first() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        await batches.end(await batches.begin(lines(1)))
        await batches.stop()

    asyncio.run(first())
    [batch] = (tmp_path / "batches").glob("*.json")
    hostile = json.loads(batch.read_text())
    for number, content in enumerate(
        ("", "{", "[]", json.dumps(hostile | {"id": "../../etc/passwd"}), json.dumps(hostile | {"status": "none"}))
    ):
        (tmp_path / "batches" / f"batch_{number:024x}.json").write_text(content)

    async def second() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        assert [found.id for found in batches.store.list_batches("me")] == [batch.stem]
        await batches.stop()

    asyncio.run(second())


def test_the_largest_batch_is_found_again(tmp_path: Path) -> None:
    """With the longest metadata and errors, of characters that take six bytes in its record."""
    metadata = {f"{number:02d}" + "\0" * 62: "\1" * 512 for number in range(16)}
    wire = BatchRequest.read(
        {"input_file_id": "", "endpoint": ENDPOINT, "completion_window": "24h", "metadata": metadata}
    )
    wrong = json.dumps({"method": "POST", "url": ENDPOINT, "custom_id": "\1" * 600, "body": {}, "\1" * 600: 1})

    async def first() -> str:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        file = await batches.files.add("me", "a", b"\n".join([wrong.encode()] * 30))
        batch = Batch(id=new_id("batch_"), owner="me", created_at=1, endpoint=ENDPOINT, input_file=file.id)
        ended = await batches.end((await batches.runner.begin(batch.model_copy(update={"metadata": wire.metadata}))).id)
        assert (ended.status, len(ended.errors)) == ("failed", 20)
        await batches.stop()
        return ended.model_dump_json()

    async def second() -> str:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        [batch] = batches.store.list_batches("me")
        await batches.stop()
        return batch.model_dump_json()

    largest = asyncio.run(first())
    assert 1 << 16 < len(largest) < record_folder.MAX_RECORD_BYTES / 2, len(largest)
    assert asyncio.run(second()) == largest


def test_a_batch_whose_input_is_gone_fails(tmp_path: Path) -> None:
    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        file = await batches.files.add("me", "a", lines(1))
        batches.files.content_path(file.id).unlink()
        batch = Batch(id=new_id("batch_"), owner="me", created_at=0, endpoint=ENDPOINT, input_file=file.id)
        batches.clock.now = 1.0
        await batches.runner.begin(batch)
        ended = await batches.end(batch.id)
        assert (ended.status, ended.errors[0].code) == ("failed", "insufficient_storage")
        await batches.stop()

    asyncio.run(run())


def test_two_servers_do_not_share_a_folder(tmp_path: Path) -> None:
    first = FileStore(tmp_path, StoreLimits(1))
    with pytest.raises(SettingsError, match="is used by another server"):
        FileStore(tmp_path, StoreLimits(1))
    first.close()
    FileStore(tmp_path, StoreLimits(1)).close()


@pytest.mark.parametrize(
    "end",
    [
        b'{"custom_id": "3", "resp',
        b"{broken}\n",
        b"[]\n",
        b'{"custom_id": 3}\n',
        b'{"id":"a","custom_id":"3","response":"\0"}\n',
        pytest.param(b'{"id":"a","custom_id":"3","response":"%b\0"}\n' % (b"x" * LONG_LINE_BYTES), id="a hole"),
    ],
)
def test_answers_behind_a_broken_line_are_computed_again(tmp_path: Path, end: bytes) -> None:
    answered = list[int]()

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        answered.append(json.loads(body)["n"])
        if len(answered) > 4:
            await asyncio.Event().wait()
        return OwnAnswer(200, bytearray(body))

    async def first() -> str:
        batches = Batches(tmp_path, call)
        await batches.start()
        batch = await batches.begin(lines(10))
        while batches.store[batch].completed < 4:
            await asyncio.sleep(0.001)
        file = batches.files.content_path(batches.store[batch].output_file)
        await batches.stop()
        kept = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join((*kept[:3], end, *kept[3:])))
        return batch

    async def second(batch_id: str) -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        batch = await batches.end(batch_id)
        assert (batch.status, batch.completed) == ("completed", 10)
        path = batches.files.content_path(batch.output_file)
        assert len(path.read_bytes().splitlines()) == len(batches.written(batch.output_file)) == 10
        assert batches.files.find(batch.output_file, "me").bytes == path.stat().st_size
        await batches.stop()

    asyncio.run(second(asyncio.run(first())))


def test_answers_are_not_parsed_when_a_batch_is_continued(tmp_path: Path) -> None:
    """Numbers take five times the memory of their text, and nothing is claimed for them."""
    answer = OwnAnswer(200, bytearray(b"[" + b"0.125," * (1 << 20) + b"1]"))
    line = BatchLine(1, 'a"b,"response":{\u2028', 0, 1)

    async def run() -> None:
        files = FileStore(tmp_path, StoreLimits(1 << 30))
        await files.open()
        file = await files.start_output("me", "answers.jsonl")
        for _ in range(2):
            await files.append(file, write_answer(line, answer))
        await files.append(file, [write_expired(line)])
        size = files.size(file)
        with files.content_path(file).open("ab") as content:  # what the server was writing when it was killed
            content.write(b"".join(write_answer(line, answer))[:-1])
        tracemalloc.start()
        try:
            assert await files.continue_output(file, answered_id) == [line.custom_id] * 3
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()
        assert files.size(file) == size == files.content_path(file).stat().st_size
        files.close()

    asyncio.run(run())


def test_room_of_deleted_files_is_free_again(tmp_path: Path) -> None:
    async def run() -> None:
        batches = Batches(tmp_path, succeed, size=1000)
        await batches.start()
        for _ in range(5):
            file = await batches.files.add("me", "a", b"x" * 600)
            with pytest.raises(InsufficientStorage, match=r"1000 bytes together .* and have 600"):
                await batches.files.add("me", "b", b"x" * 600)
            await batches.files.delete(file.id, "me")
        await batches.stop()

    asyncio.run(run())


def test_an_upload_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stray = tmp_path / "files" / "file-0123456789abcdef01234567.content"

    async def run() -> None:
        files = FileStore(tmp_path, StoreLimits(100))
        await files.open()
        with monkeypatch.context() as patch:
            patch.setattr(StoredFile, "model_dump_json", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await files.add("", "a", b"x" * 60)
        assert not list((tmp_path / "files").iterdir())
        kept = await files.add("", "a", b"x" * 60)
        files.close()
        stray.write_bytes(b"of a server that was killed")
        again = FileStore(tmp_path, StoreLimits(100))
        await again.open()
        again.close()
        assert not stray.exists()
        assert again.content_path(kept.id).read_bytes() == b"x" * 60

    asyncio.run(run())


def test_an_output_that_cannot_be_begun_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        files = FileStore(tmp_path, StoreLimits(100, files=1))
        await files.open()
        with monkeypatch.context() as patch:
            patch.setattr(StoredFile, "model_dump_json", lambda _: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                await files.start_output("", "a")
        assert not list((tmp_path / "files").iterdir())
        await files.start_output("", "a")
        files.close()

    asyncio.run(run())


def test_outputs_of_a_server_that_was_killed_before_its_batch_named_them_are_removed(tmp_path: Path) -> None:
    async def run() -> None:
        before = Batches(tmp_path, succeed)
        await before.runner.open()
        file = await before.files.add("me", "requests.jsonl", lines(1))
        lost, kept = [await before.files.start_output("me", name) for name in ("lost", "kept")]
        batch = Batch(id=new_id("batch_"), owner="me", created_at=1, endpoint=ENDPOINT, input_file=file.id)
        await before.store.add(batch.model_copy(update={"output_file": kept}))
        before.files.close()
        after = Batches(tmp_path, succeed)
        await after.runner.open()
        assert [after.files.contains(name) for name in (file.id, lost, kept)] == [True, False, True]
        assert {path.stem for path in (tmp_path / "files").iterdir()} == {file.id, kept}
        after.files.close()

    asyncio.run(run())


def test_empty_lines_of_a_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_lines, "MAX_READ_LINES", 4)
    path, read = tmp_path / "requests", partial(read_line, ENDPOINT)
    path.write_bytes(b"\n\n" + lines(2))
    reader = read_short_lines(path, read)
    assert (len(reader.lines), len(reader.errors)) == (2, 0)
    for content in (b"\n" * 5, b"\n\n" + lines(3), b"\n" * 1000 + lines(1)):
        path.write_bytes(content)
        reader = read_short_lines(path, read)
        [error] = reader.errors
        assert (error.code, "4 lines with empty ones" in error.message) == ("too_many", True)
        assert reader._count == 5, "the rest of them is not read"


def test_a_long_empty_line_is_no_request(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    path.write_bytes(lines(1) + b" " * (2 * batch_lines.LONG_LINE_BYTES + 1) + b"\n" + lines(2)[len(lines(1)) :])
    reader = read_short_lines(path, partial(read_line, ENDPOINT))
    assert ([line.number for line in reader.lines], reader.errors) == ([1, 3], [])


def read_short_lines(path: Path, read: ReadRequest) -> LineReader:
    reader = LineReader(path, read)
    while not reader.is_complete:
        assert reader.read_part() is None
    return reader


def test_lines_are_found_wherever_a_piece_of_work_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Short and long ones, empty ones, one without a line break at the end of the file."""
    monkeypatch.setattr(batch_lines, "LONG_LINE_BYTES", 64)
    path, sizes = tmp_path / "requests", (1, 2, 63, 64, 65, 66, 127, 128, 129, 1000)
    whole = b"".join(b"x" * (size - 1) + b"\n" for size in (*sizes, *reversed(sizes)))
    for content in (whole, whole + b"y", whole[:-1]):
        expected, start = [], 0
        for line in content.splitlines(keepends=True):
            expected += [(start, len(line))] if line.strip() else []
            start += len(line)
        path.write_bytes(content)
        for part in (1, 100, 1 << 20):
            monkeypatch.setattr(batch_lines, "PART_BYTES", part)
            reader, long = LineReader(path, lambda number, content: (str(number), content)), list[BatchLine]()
            while not reader.is_complete:
                if (found := reader.read_part()) is not None:
                    long.append(found)
                    reader.add(found, str(found.number))
            assert [(line.start, line.size) for line in reader.lines] == expected, part
            assert [line.size > 64 for line in long] == [True] * sum(size > 64 for _, size in expected)


def test_a_key_has_its_share_of_the_number_of_files(tmp_path: Path) -> None:
    async def run() -> None:
        files = FileStore(tmp_path, StoreLimits(1 << 20, 0.5, files=4), owners=("one", "two"))
        await files.open()
        first = await files.add("one", "a", b"x")
        await files.start_output("one", "b")
        with pytest.raises(InsufficientStorage, match="a key may have 2 files together, and there are as many"):
            await files.add("one", "c", b"x")
        with pytest.raises(InsufficientStorage, match="a key may have 2 files"):
            await files.start_output("one", "c")
        assert (await files.add("two", "a", b"x")).owner == "two"
        await files.delete(first.id, "one")
        await files.add("one", "c", b"x")
        await files.add("two", "b", b"x")
        with pytest.raises(InsufficientStorage, match="all keys may have 4 files together"):
            await files.add("three", "a", b"x")
        files.close()

    asyncio.run(run())


def test_a_file_is_not_found_while_it_is_deleted_nor_deleted_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_missing(path: Path, *, missing_ok: bool) -> None:
        assert missing_ok
        seen.append((path.suffix, files.contains(kept.id)))
        with pytest.raises(NotFound):
            files.find(kept.id, "me")

    def fail(path: Path, *, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    seen = list[tuple[str, bool]]()
    files = FileStore(tmp_path, StoreLimits(100))

    async def add() -> StoredFile:
        await files.open()
        return await files.add("me", "a", b"x" * 60)

    async def delete() -> None:
        files.hold(kept.id)
        with pytest.raises(Conflict, match="is read by a batch, or sent to a client"):
            await files.delete(kept.id, "me")
        files.release(kept.id)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fail)
            with pytest.raises(InsufficientStorage, match="Read-only"):
                await files.delete(kept.id, "me")
        assert files.find(kept.id, "me").bytes == 60
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", find_missing)
            await files.delete(kept.id, "me")
        assert seen == [(".content", True), (".json", True)]
        assert not files.contains(kept.id)
        files.close()

    kept = asyncio.run(add())
    asyncio.run(delete())


def test_what_is_left_of_a_failed_upload_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk that is read-only for a moment, where not even the rest can be removed: its bytes are not counted for
    ever."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    async def run() -> None:
        files = FileStore(tmp_path, StoreLimits(100))
        await files.open()
        with monkeypatch.context() as patch:
            patch.setattr(file_store, "write_file", fail)
            patch.setattr(Path, "unlink", fail)
            with pytest.raises(InsufficientStorage, match="Read-only"):
                await files.add("me", "a", b"x" * 60)
            with pytest.raises(InsufficientStorage, match="do not fit"):
                await files.add("me", "a", b"x" * 60)
            await files.remove_expired()
        await files.remove_expired()
        assert (await files.add("me", "a", b"x" * 60)).bytes == 60
        files.close()

    asyncio.run(run())


def test_a_key_with_many_batches_loses_its_own_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where several are added at a time, and after all are read again."""
    monkeypatch.setattr(batch_store, "MAX_KEPT_BYTES", 6 * KEPT_BYTES)

    async def run() -> list[str]:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        ones = [await batches.begin(lines(1), "one") for _ in range(2)]
        for each in ones:
            await batches.end(each)
        for _ in range(4):
            many = await asyncio.gather(*(batches.begin(lines(1), "many") for _ in range(3)))
            for each in many:
                await batches.end(each)
        assert [batch.id for batch in batches.store.list_batches("one")] == ones[::-1]
        assert {each.id for each in batches.store.list_batches("many")} >= set(many)
        assert len(list((tmp_path / "batches").iterdir())) == 6
        await batches.stop()
        return ones

    async def again(ones: list[str]) -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        assert {batch.id for batch in batches.store.list_batches("one")} == set(ones)
        assert len(list(batches.store.list_batches("many"))) == 4
        await batches.stop()

    asyncio.run(again(asyncio.run(run())))


def test_a_batch_without_room_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_store, "MAX_KEPT_BYTES", 3 * KEPT_BYTES // 2)

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        await asyncio.Event().wait()
        raise AssertionError

    async def run() -> None:
        batches = Batches(tmp_path, call)
        await batches.start()
        first = await batches.begin(lines(1))
        for _ in range(2):
            with pytest.raises(InsufficientStorage, match="none of them has ended"):
                await batches.begin(lines(1))
        assert [batch.id for batch in batches.store.list_batches("me")] == [first]
        newest = next(batches.files.list_files("me"))
        await batches.files.delete(newest.id, "me")  # no batch holds it
        await batches.stop()

    asyncio.run(run())


def test_answers_are_claimed_until_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the app, then by the batch, which gives all back: of what it writes, tries again, cancels or cannot write."""
    headroom, tries, fails = Headroom(1 << 30), Counter[int](), False
    total, seen = int(headroom.total), list[float]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, claim = json.loads((await receive())["body"]), scope[OWN_CALL].claim
        claim.grow(1000, "the answer")
        tries[body["n"]] += 1
        status = 429 if tries[body["n"]] == 1 else 200
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})
        if body["mark"] and body["n"] == 3:
            raise RuntimeError

    def append(path: Path, size: int, parts: list[bytes | bytearray]) -> None:
        if parts:
            seen.append(headroom.shortfall(total))
        if fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        record_folder.append_whole(path, size, parts)

    async def run() -> None:
        nonlocal fails
        batches = Batches(tmp_path, OwnCalls(app, Keys(Settings()), headroom))
        await batches.start()
        batch = await batches.end(await batches.begin(lines(20)))
        assert (batch.status, batch.completed) == ("completed", 20)
        answers = batches.written(batch.output_file)
        assert [answers[str(n)]["response"]["body"]["n"] for n in range(20)] == list(range(20))
        assert (len(seen), min(seen) >= 1000, headroom.shortfall(total)) == (20, True, 0)
        fails = True
        batch = await batches.end(await batches.begin(lines(20, mark=1)))
        assert (batch.status, headroom.shortfall(total)) == ("failed", 0)
        await batches.stop()

    monkeypatch.setattr(file_store, "append_whole", append)
    asyncio.run(run())


def test_texts_and_errors_of_a_batch_count() -> None:
    batch = Batch(id=new_id("batch_"), owner="me", created_at=0, endpoint=ENDPOINT, input_file="")
    assert batch.kept_bytes == KEPT_BYTES
    assert batch.model_copy(update={"metadata": {"a" * 64: "b" * 512}}).kept_bytes > KEPT_BYTES + 4 * 576
    errors = [BatchError(code="a", message="b" * 500)] * 20
    assert batch.model_copy(update={"errors": errors}).kept_bytes > KEPT_BYTES + 20 * 2000


async def upload(batches: Batches, owner: str) -> None:
    await batches.files.add(owner, "a", b"x")


async def delete(batches: Batches, owner: str) -> None:
    await batches.files.delete(next(batches.files.list_files(owner)).id, owner)


async def download(batches: Batches, owner: str) -> None:
    pieces = batches.files.read_pieces(next(batches.files.list_files(owner)))
    assert b"".join([piece async for piece in pieces]) == lines(3)


async def answer_batch(batches: Batches, owner: str) -> None:
    file = next(batches.files.list_files(owner))
    batch = Batch(id=new_id("batch_"), owner=owner, created_at=1, endpoint=ENDPOINT, input_file=file.id)
    await batches.end((await batches.runner.begin(batch)).id)


async def expire(batches: Batches, owner: str) -> None:
    file = next(batches.files.list_files(owner))
    batches.clock.now += 3601
    cleaning = asyncio.create_task(batches.files.remove_expired())
    try:
        while batches.files.contains(file.id):
            await asyncio.sleep(0.001)
    finally:
        cleaning.cancel()


@pytest.mark.parametrize("use", [upload, delete, download, answer_batch, expire])
def test_slow_work_of_one_key_on_the_disk_delays_no_other(
    tmp_path: Path, use: Callable[[Batches, str], Coroutine[Any, Any, None]]
) -> None:
    """All of it is work of the key: it waits for the work of its own that has begun before."""
    goes_on = threading.Event()

    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        for owner in ("slow", "other"):
            await batches.files.add(owner, "a", lines(3), seconds=3600)
        slow = [asyncio.create_task(batches.files.disk.run("slow", goes_on.wait)) for _ in range(4 * DISK_THREADS)]
        if use is not expire:
            slow.append(asyncio.create_task(use(batches, "slow")))
        await asyncio.sleep(0)
        await use(batches, "other")
        assert not any(task.done() for task in slow)
        goes_on.set()
        await asyncio.gather(*slow)
        await batches.stop()

    try:
        asyncio.run(run())
    finally:
        goes_on.set()


def refuse_writes(path: Path, target: Path) -> None:
    """Leaves the beginning of a file, as on a disk that becomes full while it is written."""
    os.truncate(path, 1)
    raise OSError(errno.ENOSPC, "No space left on device", str(target))


def test_a_full_disk_keeps_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would take an inode: of uploads, of batches, and of the files that batches write."""

    def count() -> list[str]:
        return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())

    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        file = await batches.files.add("me", "a", lines(1))
        before = count()
        monkeypatch.setattr(Path, "replace", refuse_writes)
        for _ in range(3):
            batch = Batch(id=new_id("batch_"), owner="me", created_at=1, endpoint=ENDPOINT, input_file=file.id)
            with pytest.raises(InsufficientStorage):
                await batches.files.add("me", "b", b"x")
            with pytest.raises(InsufficientStorage):
                await batches.files.start_output("me", "b")
            with pytest.raises(InsufficientStorage):
                await batches.runner.begin(batch)
        assert count() == before
        assert [each.id for each in batches.files.list_files("me")] == [file.id]
        batches.files.limits = StoreLimits(1 << 20, files=2)
        monkeypatch.undo()
        await batches.files.add("me", "c", b"x")  # the others are not counted any more
        await batches.stop()

    asyncio.run(run())


def test_parts_of_records_that_an_earlier_server_left_are_removed(tmp_path: Path) -> None:
    async def run() -> None:
        first = Batches(tmp_path, succeed)
        await first.start()
        kept = await first.files.add("me", "a", b"x" * 60)
        await first.stop()
        strays = [tmp_path / "files" / "file-0123456789abcdef01234567.new", tmp_path / "files" / f"{kept.id}.new"]
        strays.append(tmp_path / "batches" / "batch_0123456789abcdef01234567.new")
        deleted = tmp_path / "files" / "file-0123456789abcdef01234568.json"
        deleted.write_text(kept.model_copy(update={"id": deleted.stem}).model_dump_json())
        other = tmp_path / "files" / "notes.new"
        for path in (*strays, other):
            path.write_bytes(b"{")
        again = Batches(tmp_path, succeed)
        await again.start()
        assert not any(path.exists() for path in (*strays, deleted))
        assert other.exists()
        assert again.files.find(kept.id, "me") == kept
        await again.stop()

    asyncio.run(run())


def test_nothing_that_was_put_into_the_folder_stops_the_start_or_is_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Pipes, links, folders and numbers beyond all bounds, in place of a record or of a content."""
    folder, secret = tmp_path / "store" / "files", tmp_path / "secret"
    secret.write_bytes(b"x" * 100)
    names = [f"file-{number:024x}" for number in range(9)]

    def put(name: str, **changes: Any) -> None:
        record = {"id": name, "owner": "me", "created_at": 1, "filename": "a", "purpose": "batch", "bytes": 3} | changes
        (folder / f"{name}.json").write_text(json.dumps(record))
        (folder / f"{name}.content").write_bytes(b"abc")

    async def run() -> None:
        (tmp_path / "store").mkdir()
        folder.mkdir()
        os.mkfifo(folder / f"{names[0]}.json")
        (folder / f"{names[1]}.content").mkdir()
        put(names[2])
        (folder / f"{names[2]}.content").unlink()
        (folder / f"{names[2]}.content").symlink_to(secret)
        (folder / f"{names[3]}.json").symlink_to(secret)
        put(names[4], bytes=10**18)
        put(names[5], created_at=10**30)
        put(names[6], filename="x" * 256)
        put(names[7])
        (folder / f"{names[7]}.content").unlink()
        os.mkfifo(folder / f"{names[7]}.content")
        put(names[8])
        batches = Batches(tmp_path / "store", succeed)
        await batches.start()
        assert [file.id for file in batches.files.list_files("me")] == [names[8]]
        await batches.files.add("me", "a", b"x")
        for name in set(names) - {names[8]}:
            assert f"{folder / name}." in caplog.text
        (folder / f"{names[8]}.content").unlink()
        for swap in ((folder / f"{names[8]}.content").symlink_to, lambda _: os.mkfifo(folder / f"{names[8]}.content")):
            swap(secret)  # while the server runs
            with pytest.raises(InsufficientStorage):
                await anext(batches.files.read_pieces(batches.files.find(names[8], "me")))
            (folder / f"{names[8]}.content").unlink()
        await batches.stop()

    asyncio.run(run())


def test_a_batch_reads_and_writes_files_of_its_own_key_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also where its record says something else."""
    asked = list[str]()

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        asked.append(owner)
        return OwnAnswer(200, bytearray(body))

    async def run() -> None:
        first = Batches(tmp_path, call)
        await first.start()
        mine, others = await first.files.add("me", "a", lines(1)), await first.files.add("other", "a", lines(1))
        output = await first.files.start_output("other", "b")
        await first.stop()
        (tmp_path / "secret.content").write_bytes(lines(1))
        record = {"owner": "me", "created_at": 1_000_000, "endpoint": ENDPOINT, "input_file": mine.id}
        wrong: list[dict[str, Any]] = [
            {"input_file": others.id},
            {"input_file": "../secret"},
            {"output_file": output},
            {"error_file": mine.id},
            {"created_at": 10**30},
            {"created_at": -1},
            {"times": {"failed": -(10**300)}},
            {"endpoint": "/admin/models"},
        ]
        for number, changes in enumerate(wrong):
            name = f"batch_{number:024x}"
            (tmp_path / "batches" / f"{name}.json").write_text(json.dumps(record | {"id": name} | changes))
        missing = f"batch_{99:024x}"
        gone = record | {"id": missing, "input_file": "file-" + "0" * 24}
        (tmp_path / "batches" / f"{missing}.json").write_text(json.dumps(gone))
        again = Batches(tmp_path, call)
        await again.start()
        ended = await again.end(missing)
        assert (ended.status, ended.errors[0].code) == ("failed", "not_found")
        assert [batch.id for batch in again.store.list_batches("me")] == [missing]
        for number in range(len(wrong)):
            assert f"batch_{number:024x}.json is not read" in caplog.text
        await again.stop()

    asyncio.run(run())
    assert not asked


@pytest.mark.parametrize("unread", ["{", "foreign", "elsewhere", ""])
def test_the_output_of_a_batch_that_cannot_be_read_is_kept(unread: str, tmp_path: Path) -> None:
    """Found in a review: what it had answered was removed with the first start that could not read its record."""

    async def run() -> None:
        first = Batches(tmp_path, succeed)
        await first.start()
        output, others = await first.files.start_output("me", "b"), await first.files.add("other", "a", lines(1))
        await first.stop()
        name = f"batch_{1:024x}"
        record = {"id": name, "owner": "me", "created_at": 1, "endpoint": ENDPOINT, "input_file": others.id}
        record |= {"output_file": output} | ({"id": f"batch_{2:024x}"} if unread == "elsewhere" else {})
        if unread:
            text = unread if unread == "{" else json.dumps(record)
            (tmp_path / "batches" / f"{name}.json").write_text(text)
        again = Batches(tmp_path, succeed)
        await again.start()
        assert again.files.contains(output) == bool(unread)
        await again.stop()

    asyncio.run(run())


def test_an_empty_output_that_cannot_be_removed_ends_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batches of its key that wait are answered."""

    def fail(path: Path, *, missing_ok: bool) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        monkeypatch.setattr(Path, "unlink", fail)
        begun = [await batches.begin(lines(1, mark)) for mark in range(2)]
        assert [(await batches.end(batch)).status for batch in begun] == ["completed"] * 2
        monkeypatch.undo()
        await batches.stop()

    asyncio.run(run())


# Long lines

LONG_TEXT = "\U0001f600" + 100_000 * "a"  # of which Python makes four bytes for each of its bytes
WIDENED_BYTES = 4 * len(LONG_TEXT) - len(LONG_TEXT.encode())
SOME = 1 << 14  # bytes, more than the short values of a line take


def long_line(custom_id: str = "long") -> bytes:
    request = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": {"text": LONG_TEXT}}
    return json.dumps(request, ensure_ascii=False).encode() + b"\n"


LINE_BYTES = BYTES_PER_LINE_BYTE * len(long_line())
NEEDED = LINE_BYTES + WIDENED_BYTES  # beside a few short values


class Parsed:
    """Reads lines as the server does, and keeps for each long one what was reserved, and on which thread it ran."""

    def __init__(self, headroom: Headroom, monkeypatch: pytest.MonkeyPatch) -> None:
        self.headroom, self.reserved, self.threads = headroom, list[float](), set[str]()
        self.running = self.most = 0
        self._lock = threading.Lock()
        monkeypatch.setitem(globals(), "read_line", self.read)

    def read(self, endpoint: str, number: int, content: bytes) -> tuple[str, bytes]:
        if len(content) <= LONG_LINE_BYTES:
            return READ_LINE(endpoint, number, content)
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.reserved.append(self.headroom.shortfall(int(self.headroom.total)))
            self.threads.add(threading.current_thread().name)
        try:
            return READ_LINE(endpoint, number, content)
        finally:
            with self._lock:
                self.running -= 1


READ_LINE = read_line


class SmallHeadroom(Headroom):
    """Has `total` bytes, however few."""

    def __init__(self, total: int) -> None:
        super().__init__()
        self.bytes = total

    @property
    def total(self) -> float:
        return self.bytes


def test_a_long_line_is_parsed_when_its_memory_is_claimed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By all batches together, on the threads for it, and given back before the request is sent."""
    headroom = SmallHeadroom(2 * NEEDED + SOME)
    total, parsed = int(headroom.total), Parsed(headroom, monkeypatch)
    room, kept, sizes = LineRoom(headroom, ThreadPool(8, "lines", 60)), list[float](), list[int]()

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        if len(body) > LONG_LINE_BYTES:
            kept.append(parsed.running or headroom.shortfall(total))
            sizes.append(len(body))
        return OwnAnswer(200, bytearray(b"{}"))

    async def run() -> None:
        batches = Batches(tmp_path, call, 1 << 30, room)
        await batches.start()
        begun = [await batches.begin(lines(2) + long_line(), owner) for owner in "abcdef"]
        ended = [await batches.end(batch) for batch in begun]
        assert [(batch.status, batch.completed, batch.total) for batch in ended] == [("completed", 3, 3)] * 6
        await batches.stop()

    asyncio.run(run())
    assert min(parsed.reserved) >= NEEDED
    assert (len(parsed.reserved) >= 12, 1 <= parsed.most <= 2, len(sizes)) == (True, True, 6)
    assert {name.partition("_")[0] for name in parsed.threads} == {"lines"}
    assert headroom.shortfall(total) == 0


def test_a_long_line_waits_for_memory_that_others_have(tmp_path: Path) -> None:
    headroom = SmallHeadroom(NEEDED + SOME)
    others = MemoryClaim(headroom)
    others.grow(2 * SOME, "another request")

    async def run() -> None:
        batches = Batches(tmp_path, succeed, 1 << 30, LineRoom(headroom))
        await batches.start()
        waiting, cancelled = await batches.begin(long_line()), await batches.begin(long_line(), "other")
        for _ in range(20):
            await asyncio.sleep(0.002)
        assert {batches.store[batch].status for batch in (waiting, cancelled)} == {"validating"}
        await batches.runner.cancel(cancelled, "other")
        assert (await batches.end(cancelled)).status == "cancelled"
        others.close()
        batch = await batches.end(waiting)
        assert (batch.status, batch.completed) == ("completed", 1)
        others_again = MemoryClaim(headroom)
        others_again.grow(2 * SOME, "another request")
        late = await batches.begin(long_line())
        batches.clock.now += WINDOW_S
        batch = await batches.end(late)
        assert (batch.status, batch.errors[0].code) == ("failed", "overloaded")
        others_again.close()
        await batches.stop()

    asyncio.run(run())
    assert headroom.shortfall(int(headroom.total)) == 0


@pytest.mark.parametrize("total", [LINE_BYTES - 1, NEEDED - 1])
def test_a_long_line_that_never_has_memory_is_an_error_of_the_file(tmp_path: Path, total: int) -> None:
    """For its bytes, or for the values in them; the batch is not begun."""
    headroom = SmallHeadroom(total)

    async def run() -> None:
        batches = Batches(tmp_path, succeed, 1 << 30, LineRoom(headroom))
        await batches.start()
        batch = await batches.end(await batches.begin(lines(2) + long_line()))
        [error] = batch.errors
        assert (batch.status, error.code, error.line) == ("failed", "body_too_large", 3)
        assert error.message.startswith("line 3 takes about ")
        assert error.message.endswith("for requests")
        await batches.stop()

    asyncio.run(run())


def test_a_batch_waits_for_a_thread_that_cannot_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the file is read, and before a request is sent."""
    monkeypatch.setattr(batch_run, "MIN_PAUSE_S", 0.0)
    parse, tries = LineRoom.parse, 0

    async def parse_at_every_third_try(self: LineRoom, *arguments: Any) -> tuple[str, bytes]:
        nonlocal tries
        tries += 1
        if tries % 3:
            raise Unavailable("the system starts no more threads")
        return await parse(self, *arguments)

    monkeypatch.setattr(LineRoom, "parse", parse_at_every_third_try)

    async def run() -> None:
        batches = Batches(tmp_path, succeed)
        await batches.start()
        batch = await batches.end(await batches.begin(lines(2) + long_line()))
        assert (batch.status, batch.completed, batch.failed, tries) == ("completed", 3, 0, 6)
        await batches.stop()

    asyncio.run(run())


def test_a_long_line_that_has_no_memory_any_more_is_an_error_of_its_request(tmp_path: Path) -> None:
    """A model was loaded after the file was checked.  The other requests are answered."""
    headroom = SmallHeadroom(NEEDED + SOME)

    async def call(owner: str, path: str, body: bytes) -> OwnAnswer:
        return OwnAnswer(200, bytearray(b"{}"))

    async def run() -> None:
        batches = Batches(tmp_path, call, 1 << 30, LineRoom(headroom))
        open_outputs = batch_run.BatchRun._open_outputs

        async def load_then_open(self: Any, found: Any) -> Any:
            headroom.bytes = NEEDED - 1
            return await open_outputs(self, found)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch_run.BatchRun, "_open_outputs", load_then_open)
            await batches.start()
            batch = await batches.end(await batches.begin(lines(2) + long_line()))
        assert (batch.status, batch.completed, batch.failed) == ("completed", 2, 1)
        response = batches.written(batch.error_file)["long"]["response"]
        assert (response["status_code"], response["body"]["error"]["code"]) == (413, "body_too_large")
        assert response["body"]["error"]["message"].startswith("line 3 takes about ")
        await batches.stop()

    asyncio.run(run())


def test_the_body_of_a_request_is_not_kept_while_it_waits_to_be_sent_again(tmp_path: Path) -> None:
    left, tries = 0, 0

    class Body(bytes):
        def __init__(self, _: bytes) -> None:
            nonlocal left
            left += 1

        def __del__(self) -> None:
            nonlocal left
            left -= 1

    def read(endpoint: str, number: int, content: bytes) -> tuple[str, bytes]:
        custom_id, body = READ_LINE(endpoint, number, content)
        return custom_id, Body(body)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal tries
        tries += 1
        body = await receive()
        assert (body["body"], left) == (b'{"n":0,"mark":0}', 1)
        del body
        async with asyncio.timeout(30):  # the thread that read it may not have left the function yet
            while left:
                await asyncio.sleep(0)
        await send({"type": "http.response.start", "status": 200 if tries == 4 else 429, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    async def run() -> None:
        batches = Batches(tmp_path, OwnCalls(app, Keys(Settings()), Headroom()))
        batches.runner._read_line = read
        await batches.start()
        assert (await batches.end(await batches.begin(lines(1)))).status == "completed"
        await batches.stop()

    asyncio.run(run())
    assert (tries, left) == (4, 0)

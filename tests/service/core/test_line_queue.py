"""The queue in front of the log: who logs never waits for who reads, and what is dropped is counted and said."""

import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from polyhead.service.core import line_queue
from polyhead.service.core.line_queue import LineQueue

LINE = "a line of the log, of some length\n"
SENTENCE = "{} lines were dropped\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """A pipe that is not read yet: the end to read, and a stream that writes."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        yield reading, stream


def open_queue(stream: TextIO) -> LineQueue:
    return LineQueue(stream, SENTENCE.format)


def read_until(reading: int, is_last: Callable[[bytes], bool]) -> list[str]:
    content = b""
    while not is_last(content):
        content += os.read(reading, 1 << 16)
    return content.decode().splitlines(keepends=True)


def test_a_reader_that_stops_delays_nobody_and_what_is_lost_is_counted(pipe: tuple[int, TextIO]) -> None:
    """The pipe takes 64 KiB, the queue a mebibyte; ten times as much is written before a byte is read."""
    reading, stream = pipe
    queue, count = open_queue(stream), 10 * line_queue.QUEUED_CHARS // len(LINE)
    for _ in range(count):
        queue.write(LINE)
    assert 0 < queue.dropped < count
    assert queue._queued_chars <= line_queue.QUEUED_CHARS
    assert not queue.drain(0)
    *kept, said = read_until(reading, lambda content: content.endswith(b"dropped\n"))
    assert set(kept) == {LINE}
    assert said == SENTENCE.format(queue.dropped), "one line, behind those that were kept"
    assert len(kept) + queue.dropped == count
    queue.write("the next one\n")
    assert read_until(reading, lambda content: content.endswith(b"\n")) == ["the next one\n"]
    queue.close()
    os.close(reading)


def test_lines_keep_their_order_and_are_written_at_the_end(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    stream.write("before\n")
    queue, lines = open_queue(stream), [f"line {number}\n" for number in range(500)]
    for line in lines:
        queue.write(line)
    queue.close()
    assert read_until(reading, lambda content: content.endswith(b" 499\n")) == ["before\n", *lines]
    queue._thread.join()
    queue.close()  # logging closes handlers twice
    os.close(reading)


def test_lines_that_cannot_be_written_are_counted(pipe: tuple[int, TextIO]) -> None:
    """A closed pipe or a full disk: no loop of reports about reports."""
    reading, stream = pipe
    os.close(reading)
    queue = open_queue(stream)
    for _ in range(5):
        queue.write(LINE)
    assert queue.drain()
    assert queue.dropped == queue._unreported == 5
    queue.close()


def test_a_disk_that_has_room_again_gets_the_number_of_lost_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, is_full = io.StringIO(), True

    def open_writer(stream: TextIO, encoding: str) -> Callable[[bytes], object]:
        def write(data: bytes) -> None:
            if is_full:
                raise OSError
            stream.write(data.decode(encoding))

        return write

    monkeypatch.setattr(line_queue, "open_writer", open_writer)
    queue = open_queue(stream)
    queue.write(LINE)
    queue.write(LINE)
    assert queue.drain()
    is_full = False
    queue.write(LINE)
    queue.close()
    queue._thread.join()
    assert stream.getvalue() == LINE + SENTENCE.format(2)


def test_a_line_that_is_too_long_by_itself_takes_no_other_with_it() -> None:
    stream = io.StringIO()
    queue = open_queue(stream)
    queue.write("x" * line_queue.QUEUED_CHARS)
    assert queue.dropped == 1
    queue.write(LINE)
    queue.close()
    queue._thread.join()
    assert stream.getvalue() == LINE + SENTENCE.format(1)


def test_a_descriptor_that_does_not_block_is_tried_again(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    os.set_blocking(stream.fileno(), False)
    queue = open_queue(stream)
    for _ in range(1 << 12):
        queue.write(LINE)
    threading.Thread(target=queue.write, args=("the last\n",)).start()
    assert len(read_until(reading, lambda content: content.endswith(b"last\n"))) == (1 << 12) + 1
    assert not queue.dropped
    queue.close()
    os.close(reading)


def test_lines_after_the_end_are_counted(pipe: tuple[int, TextIO]) -> None:
    _, stream = pipe
    queue = LineQueue(stream, "{} dropped\n".format)
    queue.close()
    queue._thread.join()
    queue.write("late\n")
    assert queue.dropped == 1
    assert not queue.drain(0.1)

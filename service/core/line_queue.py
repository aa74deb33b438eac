"""A bounded queue of lines in front of a file descriptor, and the thread that writes them.

A pipe whose reader stops blocks who writes to it, and with an event loop everything on it.  So only this thread writes:
others put their lines into the queue, and what does not fit is dropped and counted.
"""

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TextIO

QUEUED_CHARS = 1 << 20  # of lines that are not written yet, with LINE_OVERHEAD for each
LINE_OVERHEAD = 100  # bytes of a line beside its characters
DRAIN_SECONDS = 2.0  # in which lines that were queued are still written at the end of the process
RETRY_SECONDS = 0.05  # between two attempts to write to a descriptor that does not block, and is full


class LineQueue:
    """Writes lines to `stream` on a thread of its own, in the order in which they came.

    Once a line does not fit, all are dropped until what is queued is written; then the line that `describe_dropped`
    makes of their number follows, so a gap in the log has one place and one line.  Any thread may call it, and so may a
    signal handler while it interrupts a call: the lock and the queue are reentrant.
    """

    def __init__(self, stream: TextIO, describe_dropped: Callable[[int], str]) -> None:
        self.dropped = 0  # lines that were not written, since the start
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self._write_bytes = open_writer(stream, self._encoding)
        self._describe_dropped = describe_dropped
        self._lock = threading.RLock()
        self._lines: SimpleQueue[str | threading.Event | None] = SimpleQueue()
        self._queued_chars = self._unreported = 0
        self._is_dropping = False
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Queue `text`, one or more whole lines, or drop it; never waits."""
        size = len(text) + LINE_OVERHEAD
        with self._lock:
            if not self._thread.is_alive():  # it was closed, or this process was forked from that of the thread
                self._count_dropped()
                return
            if self._is_dropping or self._queued_chars + size > QUEUED_CHARS:
                self._is_dropping = self._queued_chars > 0  # not for a line that is too long by itself
                self._count_dropped()
                return
            self._queued_chars += size
            self._lines.put(text)

    def drain(self, seconds: float = DRAIN_SECONDS) -> bool:
        """Wait until the lines that are queued now are written, so many seconds at most.  Returns whether they are."""
        written = threading.Event()
        self._lines.put(written)
        return self._thread.is_alive() and written.wait(seconds)

    def close(self) -> None:
        """Write what is queued, as `drain` does, and end the thread."""
        self.drain()
        self._lines.put(None)

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
            else:
                self._write_line(line)

    def _write_line(self, line: str) -> None:
        is_written = self._try_write(line)
        with self._lock:
            self._queued_chars -= len(line) + LINE_OVERHEAD
            if not is_written:
                self._count_dropped()
            if self._queued_chars:
                return
            self._is_dropping = False
            unreported = self._unreported
        if is_written and unreported and self._try_write(self._describe_dropped(unreported)):
            with self._lock:
                self._unreported -= unreported

    def _count_dropped(self) -> None:
        self.dropped += 1
        self._unreported += 1

    def _try_write(self, text: str) -> bool:
        """Write `text`, for as long as that takes.  Returns whether that worked: a disk may be full, a pipe closed."""
        try:
            self._write_bytes(text.encode(self._encoding, "backslashreplace"))
        except (OSError, ValueError, RuntimeError, AttributeError):  # a stream that is closed, or none
            return False
        return True


def open_writer(stream: TextIO, encoding: str) -> Callable[[bytes], object]:
    """A function that writes to the descriptor of `stream`, or to `stream` where it has none.

    A stream of Python has a lock, which the interpreter needs to end: it must not be held by a thread that waits.
    """
    try:
        descriptor = stream.fileno()
    except (OSError, AttributeError):
        return lambda data: stream.write(data.decode(encoding))
    stream.flush()  # what was written before comes before
    return lambda data: write_all(descriptor, data)


def write_all(descriptor: int, data: bytes) -> None:
    """Write `data`, for as long as that takes.  Raises OSError."""
    rest = memoryview(data)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            time.sleep(RETRY_SECONDS)

"""A process that answers each line with a line, asked with a bound on the time that takes."""

import os
import select
import subprocess
import time
from collections.abc import Sequence

START_TIMEOUT_S = 60.0  # of the clock, for a process to start


def start_child(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A process that has said that it is ready.  TimeoutError and BrokenPipeError if it doesn't.

    A signal to the server's group is not for it, and it ends when the server has.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)  # a child that does not read must not block this thread
    try:
        exchange_lines(process, b"", START_TIMEOUT_S)
    except (TimeoutError, BrokenPipeError):
        kill_child(process)
        raise
    return process


def exchange_lines(process: subprocess.Popen[bytes], question: bytes, patience: float) -> bytes:
    """The line that comes back within `patience` seconds of the clock.  TimeoutError if it doesn't; BrokenPipeError if
    nothing will."""
    assert process.stdin is not None
    assert process.stdout is not None
    until, line = time.monotonic() + patience, b""
    left = memoryview(question)  # of which nothing is copied while it is written, however long it is
    while not line.endswith(b"\n"):
        asking = [process.stdin] if left else []
        heard, open_, _ = select.select([process.stdout], asking, [], max(until - time.monotonic(), 0))
        if not heard and not open_:
            raise TimeoutError
        if open_:
            left = left[os.write(process.stdin.fileno(), left[: 1 << 16]) :]
        if heard:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise BrokenPipeError
            line += part
    return line


def kill_child(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()

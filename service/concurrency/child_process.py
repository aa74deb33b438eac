"""Child processes that answer each line with a line, within a time limit."""

import os
import select
import subprocess
import time
from collections.abc import Sequence

START_TIMEOUT_S = 60.0  # wall-clock time for a process to start


def start_child(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process and wait for its first line.  Raises TimeoutError or BrokenPipeError if none comes.

    The process does not receive signals to the server's process group.  It ends when the server's end of the pipe
    closes.
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


def exchange_lines(process: subprocess.Popen[bytes], question: bytes | bytearray, timeout_s: float) -> bytes:
    """Send `question` and return the line that answers it, within `timeout_s` seconds.

    Raises TimeoutError where none comes, BrokenPipeError where the process has closed its output.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    unsent = memoryview(question)  # slices of a view copy nothing, however long it is
    while not line.endswith(b"\n"):
        writers = [process.stdin] if unsent else []
        readable, writable, _ = select.select([process.stdout], writers, [], max(deadline - time.monotonic(), 0))
        if not readable and not writable:
            raise TimeoutError
        if writable:
            unsent = unsent[os.write(process.stdin.fileno(), unsent[: 1 << 16]) :]
        if readable:
            part = os.read(process.stdout.fileno(), 1 << 16)
            if not part:
                raise BrokenPipeError
            line += part
    return line


def kill_child(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()

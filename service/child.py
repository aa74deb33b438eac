"""A line to a process that answers with a line."""

import os
import select
import subprocess
import time


def exchanged(process: subprocess.Popen[bytes], question: bytes, patience: float) -> bytes:
    """The line that comes back within `patience` seconds of the clock.  TimeoutError if it doesn't; BrokenPipeError if
    nothing will."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(question)
    process.stdin.flush()
    until, line = time.monotonic() + patience, b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(until - time.monotonic(), 0))
        if not ready:
            raise TimeoutError
        part = os.read(process.stdout.fileno(), 1 << 16)
        if not part:
            raise BrokenPipeError
        line += part
    return line

"""Child processes that answer each line with a line, within a time limit."""

import os
import selectors
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack

START_TIMEOUT_S = 60.0  # wall-clock time for a process to start
END_TIMEOUT_S = 5.0  # wall-clock time for one to end that has closed its pipe
PART_BYTES = 1 << 16  # that are read or written in one call


class ChildEndedError(Exception):
    """The child has ended before it answered, with the exit status `code`; -N where signal N ended it."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process has ended with status {code}")
        self.code = code


class AnsweringChild:
    """A child process that is started when it is first asked, and again when it is asked after it has ended."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes | bytearray, timeout_s: float) -> bytes:
        """The line that answers `question`.

        Raises TimeoutError where none comes in time, ChildEndedError where the child ends instead, BrokenPipeError
        where it ends before it is ready, another OSError where the system has no room for a process or its pipes.
        Whatever is raised, the child is ended: its answer would be taken for that of the next question.
        """
        if self._process is not None and self._process.poll() is not None:  # it has ended or was killed
            self.kill()
        process = self._process = self._process or start_child(self._command)
        with ExitStack() as on_error:
            on_error.callback(self.kill)
            try:
                line = exchange_lines(process, question, timeout_s)
            except BrokenPipeError:
                raise ChildEndedError(end_of_child(process)) from None
            on_error.pop_all()
        return line

    def kill(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            kill_child(process)


def end_of_child(process: subprocess.Popen[bytes]) -> int:
    """The exit status of a child that has closed its pipe.  One that goes on without it is killed."""
    try:
        return process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def start_child(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a process and wait for its first line.  Raises TimeoutError or BrokenPipeError if none comes.

    The process does not receive signals to the server's process group.  It ends when the server's end of the pipe
    closes, and whatever is raised here.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    )
    with ExitStack() as on_error:
        on_error.callback(kill_child, process)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)  # a child that does not read must not block this thread
        exchange_lines(process, b"", START_TIMEOUT_S)
        on_error.pop_all()
    return process


def exchange_lines(process: subprocess.Popen[bytes], question: bytes | bytearray, timeout_s: float) -> bytes:
    """Send `question` and return the line that answers it, within `timeout_s` seconds.

    Raises TimeoutError where none comes, BrokenPipeError where the process has closed its output.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    deadline, line = time.monotonic() + timeout_s, b""
    unsent = memoryview(question)  # slices of a view copy nothing, however long it is
    with selectors.PollSelector() as pipes:  # takes descriptors of any number, and needs none itself
        pipes.register(process.stdout, selectors.EVENT_READ)
        if unsent:
            pipes.register(process.stdin, selectors.EVENT_WRITE)
        while not line.endswith(b"\n"):
            ready = pipes.select(max(deadline - time.monotonic(), 0))
            if not ready:
                raise TimeoutError
            for key, _ in ready:
                if key.fileobj is process.stdin:
                    unsent = unsent[os.write(key.fd, unsent[:PART_BYTES]) :]
                    if not unsent:
                        pipes.unregister(process.stdin)
                    continue
                part = os.read(key.fd, PART_BYTES)
                if not part:
                    raise BrokenPipeError
                line += part
    return line


def kill_child(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes its pipes, and waits for its end
        pass

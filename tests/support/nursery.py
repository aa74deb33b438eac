"""Where servers for tests come from: a process that has imported what one is made of, and has done nothing.

What imports cost is paid once, not by each of dozens of servers.  One is forked for whoever asks, becomes its child
(prctl(2): it takes in its descendants' orphans) and is from there on what `polyhead serve` is.  Linux alone.
"""

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
MOST = 1 << 20  # bytes of a wish


class Born:
    """A server, as `subprocess.Popen` would have it."""

    def __init__(self, pid: int, errors: int) -> None:
        self.pid, self.stderr = pid, os.fdopen(errors)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float = 120.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """`bear` is called by one thread at a time: an answer is only a process id, not whose wish it grants."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self.wishes, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def bear(self, program: str, arguments: Sequence[str]) -> Born:
        """`program`: "serve", or "faulty" for that of tests/support/faulty.py, whose first argument is its file."""
        wish = {
            "program": program,
            "arguments": list(arguments),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        ours, theirs = os.pipe()
        socket.send_fds(self.wishes, [json.dumps(wish).encode()], [theirs])
        os.close(theirs)
        return Born(int(self.wishes.recv(64)), ours)


turn = threading.Lock()
started: list[Nursery] = []


def born(program: str, arguments: Sequence[str]) -> Born:
    """From this process's own nursery, which the first call starts; any thread may call it."""
    with turn:
        if not started:
            started.append(Nursery())
        return started[0].bear(program, arguments)


def main(wishes: socket.socket) -> None:
    """Grants wishes until nobody is left to make any.  Returns in children only when they have ended."""
    from polyhead.service.config import settings

    settings.set_library_defaults()
    import polyhead.service.server.assembly  # noqa: F401
    from polyhead.service.cli.main import app
    from tests.support import (
        faults,  # noqa: F401
        faulty,
    )

    while True:
        content, fds, _, _ = socket.recv_fds(wishes, MOST, 1)
        if not content:
            return
        if (between := os.fork()) == 0:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.001)
            wish = json.loads(content)
            wishes.send(str(os.getpid()).encode())
            wishes.close()
            become(wish, fds[0])
            if wish["program"] == "faulty":
                faults_file, *flags = wish["arguments"]
                sys.exit(faulty.main(Path(faults_file), flags))
            app()
        os.close(fds[0])
        os.waitpid(between, 0)


def become(wish: dict[str, Any], errors: int) -> None:
    """What a process is told by whoever starts it."""
    os.environ.clear()
    os.environ.update(wish["environment"])
    os.chdir(wish["folder"])
    os.dup2(errors, 2)
    os.close(errors)
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(wish["files"]))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which a shell may ignore for what it runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["polyhead", "serve", *wish["arguments"]]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

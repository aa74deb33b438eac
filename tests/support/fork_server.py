"""Starts servers for tests from a process that has imported their modules already.

So the imports are paid for once, not by each of dozens of servers. Each server is forked from that process, becomes
a child of the process that asked for it (prctl(2), PR_SET_CHILD_SUBREAPER: it adopts orphans of its descendants),
and then runs as `polyhead serve`. Linux only."""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import resource

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER
MOST = 1 << 20  # bytes of a message


class ForkedProcess:
    """A forked server, with the interface of `subprocess.Popen`."""

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


class ForkServer:
    """`fork_server` is called by one thread at a time: an answer is a process id, without the request it belongs to."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(SUBREAPER, 1, 0, 0, 0)
        self.requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()]
            )

    def fork_server(self, program: str, arguments: Sequence[str], open_files: int = 0) -> ForkedProcess:
        """`program`: "serve", or "faulty" for that of tests/support/fault_server.py, whose first argument is its
        file. `open_files`: how many files it may have open; 0: as many as this process."""
        request = {
            "program": program,
            "arguments": list(arguments),
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": (open_files, open_files) if open_files else resource.getrlimit(resource.RLIMIT_NOFILE),
        }
        ours, theirs = os.pipe()
        socket.send_fds(self.requests, [json.dumps(request).encode()], [theirs])
        os.close(theirs)
        return ForkedProcess(int(self.requests.recv(64)), ours)


turn = threading.Lock()
started: list[ForkServer] = []


def start_forked(program: str, arguments: Sequence[str], open_files: int = 0) -> ForkedProcess:
    """Fork a server from the fork server of this process, which the first call starts. Any thread may call it."""
    with turn:
        if not started:
            started.append(ForkServer())
        return started[0].fork_server(program, arguments, open_files)


def main(requests: socket.socket) -> None:
    """Serve requests until all clients have closed the socket. In a child it returns when the server has ended."""
    from polyhead.service.config import settings

    settings.set_library_defaults()
    import polyhead.service.server.assembly  # noqa: F401
    from polyhead.service.cli.main import app
    from tests.support import (
        checked_tokenizers,
        fault_server,
        faults,  # noqa: F401
    )

    checked_tokenizers.remember()

    while True:
        content, fds, _, _ = socket.recv_fds(requests, MOST, 1)
        if not content:
            return
        if (child := os.fork()) == 0:
            parent = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == parent:
                time.sleep(0.001)
            request = json.loads(content)
            requests.send(str(os.getpid()).encode())
            requests.close()
            set_up_process(request, fds[0])
            try:
                if request["program"] == "faulty":
                    faults_file, *flags = request["arguments"]
                    sys.exit(fault_server.main(Path(faults_file), flags))
                app()
            except SystemExit as ended:
                end_process(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        os.close(fds[0])
        os.waitpid(child, 0)


def end_process(code: int) -> None:
    """End the process as the interpreter does: threads are waited for, and what was registered is called. But nothing
    is freed first: that takes 0.3 s of a processor. Servers that are started from nothing end without this."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def set_up_process(request: dict[str, Any], errors: int) -> None:
    """Set up the process as its parent would have started it."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    os.dup2(errors, 2)
    os.close(errors)
    resource.setrlimit(resource.RLIMIT_NOFILE, tuple(request["files"]))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a shell may ignore it for background processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["polyhead", "serve", *request["arguments"]]


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))

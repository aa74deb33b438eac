"""The fork server of tests: each call gets the process that it asked for."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import fork_server


class CountingForkServer:
    """A fork server that counts concurrent calls; it answers the first call when a second has come, or after 0.2 s."""

    def __init__(self) -> None:
        self.asking, self.most = 0, 0
        self.second = threading.Event()

    def fork_server(self, program: str, arguments: Sequence[str], open_files: int) -> None:
        self.asking += 1
        self.most = max(self.most, self.asking)
        if self.asking > 1:
            self.second.set()
        self.second.wait(0.2)
        self.asking -= 1


def test_one_server_is_started_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is only a process id: with two concurrent calls each could get the process of the other."""
    answering = CountingForkServer()
    monkeypatch.setattr(fork_server, "started", [answering])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: fork_server.start_forked("serve", []), range(2)))
    assert answering.most == 1

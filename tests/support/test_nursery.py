"""Where servers for tests come from: whoever starts one has the process that it reads from."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support import nursery


class Answering:
    """A nursery that counts whom it serves at once; it answers the first when a second has come, or none came."""

    def __init__(self) -> None:
        self.asking, self.most = 0, 0
        self.second = threading.Event()

    def bear(self, program: str, arguments: Sequence[str]) -> None:
        self.asking += 1
        self.most = max(self.most, self.asking)
        if self.asking > 1:
            self.second.set()
        self.second.wait(0.2)
        self.asking -= 1


def test_one_server_is_started_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer is a process id alone: with two wishes on their way each could have the other's process."""
    answering = Answering()
    monkeypatch.setattr(nursery, "started", [answering])
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: nursery.born("serve", []), range(2)))
    assert answering.most == 1

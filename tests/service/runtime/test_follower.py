"""The processes that follow a leader: they end with it, and by no signal that a whole group gets."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from polyhead.service.runtime import follower


class JoinedError(Exception):
    """The follower has come as far as joining the others."""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_that_begins_a_drain_ends_no_follower(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal sends SIGHUP to all processes of its group: the leader could finish no request without them."""
    handlers = dict[int, Any]()

    def join() -> None:
        raise JoinedError

    config: Any = SimpleNamespace(threads=1, join_group=join)
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setattr("torch.set_num_threads", lambda _: None)
    with pytest.raises(JoinedError):
        follower.run_follower(config)
    assert handlers[getattr(signal, name)] is signal.SIG_IGN

"""A system that starts no more threads, as where `pids.max` is reached."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def no_new_threads() -> Iterator[None]:
    """Starting a thread fails in this block, as it does in the interpreter; those that run go on."""

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", fail)
        yield

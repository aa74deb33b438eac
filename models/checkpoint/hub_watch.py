"""Ends requests to a hub that take too long, or whose load was cancelled, from a thread beside them.

The library limits the time without a byte. A hub that sends a byte of a header now and then, or one interim answer
after the other, would keep the thread that waits for it, and the file that it has locked, for ever.
"""

import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from typing import Any

from ..core.errors import CheckpointError

CHECK_SECONDS = 1.0  # between two looks at the time and at whether the request is wanted

CheckWanted = Callable[[], None]


def always_wanted() -> None:
    """The default check: the request is not cancelled."""


class TooSlowError(CheckpointError):
    """A hub's answer does not come in time."""


class RequestWatch:
    """Shuts the connection of a request down when its time is over, or `check_wanted` raises. `error` is then why.

    Only the time in which this process runs counts: what came while it was paused is read.
    """

    def __init__(self, check_wanted: CheckWanted) -> None:
        self.error: Exception | None = None
        self._check_wanted, self._lock, self._ended = check_wanted, Lock(), Event()
        self._seconds_left, self._message = math.inf, ""
        self._socket: socket.socket | None = None

    def allow(self, seconds: float, message: str) -> None:
        """Let the request take `seconds` from now on; `message` is the error if it takes longer."""
        with self._lock:
            self._seconds_left, self._message = seconds, message

    def on_event(self, _: str, info: Mapping[str, Any]) -> None:
        """Remember the connection; the library calls this with all that it does (its extension `trace`)."""
        stream: Any = info.get("return_value")
        if hasattr(stream, "get_extra_info"):
            self._socket = stream.get_extra_info("socket")

    def run(self) -> None:
        while not self._ended.wait(CHECK_SECONDS):
            with self._lock:
                if not self._ended.is_set():
                    self._seconds_left -= CHECK_SECONDS
                    self.error = self.error or self._find_error()
                    self._shut_down()

    def end(self) -> None:
        with self._lock:
            self._ended.set()

    def _find_error(self) -> Exception | None:
        try:
            self._check_wanted()
        except Exception as error:  # noqa: BLE001 - whatever it raises is raised by the request
            return error
        return TooSlowError(self._message) if self._seconds_left < 0 else None

    def _shut_down(self) -> None:
        """Again each time, since a connection may be made meanwhile. A thread that reads from it goes on at once."""
        if self.error is not None and self._socket is not None:
            with suppress(OSError):  # it is closed
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of TLS too, without its own farewell


@contextmanager
def watch_request(check_wanted: CheckWanted, errors: tuple[type[Exception], ...]) -> Iterator[RequestWatch]:
    """Watch a request until the end of the block. Raises what ended it in place of `errors`, which the library raises
    then."""
    check_wanted()
    watch = RequestWatch(check_wanted)
    Thread(target=watch.run, name="hub request", daemon=True).start()
    try:
        yield watch
    except errors:
        if watch.error is not None:
            raise watch.error from None
        raise
    finally:
        watch.end()
    if watch.error is not None:  # a content without a length ends with its connection
        raise watch.error


def wait_for_lock(lock: Callable[[], None], check_wanted: CheckWanted) -> None:
    """Call `lock`, which raises BlockingIOError while another holds it, until it succeeds or `check_wanted` raises."""
    while True:
        try:
            return lock()
        except BlockingIOError:
            check_wanted()
            time.sleep(CHECK_SECONDS)

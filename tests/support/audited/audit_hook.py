"""Detects what no process of the tests may do: connect to another machine, resolve its name, or unpickle an object.

It uses Python's audit events (PEP 578). They come before each such operation, of a library too, and nothing is
mocked."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

HERE = ("127.", "::1", "localhost", "0.0.0.0", "::ffff:127.")
LOCAL_NAMES = frozenset({"", "None", "testserver"})
# Files whose code is allowed to do it, with the reason.
KNOWN: dict[str, str] = {
    "/huggingface_hub/inference/": "a client in the tests: it asks its own hub which models are for a task",
}


def is_remote(host: Any) -> bool:
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return name not in LOCAL_NAMES and not name.startswith(HERE)


def violation(event: str, arguments: tuple[Any, ...]) -> str:
    """The violation as text; empty if the event is allowed."""
    if event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple) and is_remote(arguments[1][0]):
        return f"{event} {arguments[1]}"
    if event in ("socket.getaddrinfo", "socket.gethostbyname") and is_remote(arguments[0]):
        return f"{event} {arguments[0]}"
    if event == "pickle.find_class":
        return f"{event} {arguments[0]}.{arguments[1]}"
    return ""


def install(report: Callable[[str], object]) -> None:
    """Call `report` for each violation, with the files of the call stack, until the process ends."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event[:7] in ("socket.", "pickle.") and (found := violation(event, arguments)):
            files = [frame.filename for frame in traceback.extract_stack()]
            if not any(place in file for file in files for place in KNOWN):
                report(f"{found} by {' < '.join(file.rpartition(os.sep)[2] for file in reversed(files[-12:-1]))}")

    sys.addaudithook(hook)

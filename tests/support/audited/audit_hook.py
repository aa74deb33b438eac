"""What no process of ours may do: connect to another machine, look up its name, or unpickle anything.

Python itself tells of each such event, whoever causes it (PEP 578).  The one idea: nothing is replaced or pretended,
so what a library does is heard like what we do.
"""

import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

HERE = ("127.", "::1", "localhost", "0.0.0.0", "::ffff:127.")
OURS = frozenset({"", "None", "testserver"})
# Whose files may do it all the same, and why.
KNOWN: dict[str, str] = {
    "/huggingface_hub/inference/": "a client in the tests: it asks its own hub which models are for a task",
}


def outward(host: Any) -> bool:
    name = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return name not in OURS and not name.startswith(HERE)


def wrong(event: str, arguments: tuple[Any, ...]) -> str:
    """What is wrong about it; empty if nothing is."""
    if event in ("socket.connect", "socket.sendto") and isinstance(arguments[1], tuple) and outward(arguments[1][0]):
        return f"{event} {arguments[1]}"
    if event in ("socket.getaddrinfo", "socket.gethostbyname") and outward(arguments[0]):
        return f"{event} {arguments[0]}"
    if event == "pickle.find_class":
        return f"{event} {arguments[0]}.{arguments[1]}"
    return ""


def install(tell: Callable[[str], object]) -> None:
    """From now on, for as long as the process lives, `tell` hears of it, and who did it."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event[:7] in ("socket.", "pickle.") and (found := wrong(event, arguments)):
            files = [frame.filename for frame in traceback.extract_stack()]
            if not any(place in file for file in files for place in KNOWN):
                tell(f"{found} by {' < '.join(file.rpartition(os.sep)[2] for file in reversed(files[-12:-1]))}")

    sys.addaudithook(hook)

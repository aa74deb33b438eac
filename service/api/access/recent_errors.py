"""The most recent requests that ended with an error, without any text of theirs and without their keys."""

import time
from collections import deque
from typing import Any

from ...config.keys import Key
from .access_log import RequestRecord

KEPT_ERRORS = 50
ERROR_OUTCOMES = frozenset({"failed", "rejected", "expired"})


class RecentErrors:
    """The last KEPT_ERRORS of them.  Used on the event loop thread only."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, str, dict[str, Any]]] = deque(maxlen=KEPT_ERRORS)  # time, key's name, row

    def add(self, record: RequestRecord) -> None:
        """Keep a finished request if it ended with an error.  `route` is the template, since a path may have a text."""
        if record.reason and record.outcome in ERROR_OUTCOMES:
            row = {
                "request_id": record.context.id,
                "method": record.method,
                "route": record.route,
                "status": record.status,
                "outcome": record.outcome,
                "code": record.reason,
                "model": record.context.model,
            }
            self._kept.append((time.monotonic(), record.context.owner, row))

    def read(self, key: Key) -> list[dict[str, Any]]:
        """The newest first, each with its age in seconds; without those of models that `key` may not use.

        A key that may use some models only sees its own of the errors without a model: clients choose request ids.
        """
        now = time.monotonic()
        return [
            {"seconds_ago": round(now - at, 1), **row}
            for at, owner, row in reversed(self._kept)
            if (key.allows_model(row["model"]) if row["model"] else not key.models or owner == key.name)
        ]

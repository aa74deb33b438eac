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
        self._kept: deque[tuple[float, dict[str, Any]]] = deque(maxlen=KEPT_ERRORS)

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
            self._kept.append((time.monotonic(), row))

    def read(self, key: Key) -> list[dict[str, Any]]:
        """The newest first, each with its age in seconds; without those of models that `key` may not use."""
        now = time.monotonic()
        return [
            {"seconds_ago": round(now - at, 1), **row}
            for at, row in reversed(self._kept)
            if not row["model"] or key.allows_model(row["model"])
        ]

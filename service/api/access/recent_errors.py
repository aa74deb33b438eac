"""The most recent requests that ended with an error, without any text of theirs and without their keys.

Requests without a valid key, of foreign hosts and origins, and for paths that do not exist are only counted and logged:
anybody can send thousands of them.  What was refused does not push out what failed.
"""

import time
from collections import deque
from operator import itemgetter
from typing import Any

from ...config.keys import Key
from ...core.errors import ForeignOrigin, MisdirectedRequest, NotFound, Unauthorized
from .access_log import RequestRecord

KEPT_ERRORS = 50  # refused requests, and as many that failed
STRANGERS_ERRORS = frozenset({Unauthorized.code, ForeignOrigin.code, MisdirectedRequest.code})
ERROR_OUTCOMES = frozenset({"failed", "rejected", "expired"})


Kept = tuple[float, str, dict[str, Any]]  # time, key's name, row


class RecentErrors:
    """The last KEPT_ERRORS of each kind.  Used on the event loop thread only."""

    def __init__(self) -> None:
        self._refused: deque[Kept] = deque(maxlen=KEPT_ERRORS)
        self._failed: deque[Kept] = deque(maxlen=KEPT_ERRORS)

    def add(self, record: RequestRecord) -> None:
        """Keep a finished request if it ended with an error.  `route` is the template, since a path may have a text."""
        if record.reason and record.outcome in ERROR_OUTCOMES and not is_of_stranger(record):
            kept = self._refused if record.outcome == "rejected" else self._failed
            row = {
                "request_id": record.context.id,
                "method": record.method,
                "route": record.route,
                "status": record.status,
                "outcome": record.outcome,
                "code": record.reason,
                "model": record.context.model,
            }
            kept.append((time.monotonic(), record.context.owner, row))

    def read(self, key: Key) -> list[dict[str, Any]]:
        """The newest first, each with its age in seconds; without those of models that `key` may not use.

        A key that may use some models only sees its own of the errors without a model: clients choose request ids.
        """
        now = time.monotonic()
        return [
            {"seconds_ago": round(now - at, 1), **row}
            for at, owner, row in sorted((*self._refused, *self._failed), key=itemgetter(0), reverse=True)
            if (key.allows_model(row["model"]) if row["model"] else not key.models or owner == key.name)
        ]


def is_of_stranger(record: RequestRecord) -> bool:
    """Whether anybody can cause this error without a key, or by a path that does not exist."""
    return record.reason in STRANGERS_ERRORS or (record.reason == NotFound.code and not record.route)

"""How much each key may ask in a minute: requests, and tokens of prompts and answers.

Knows no header of a request and no model.  The one idea: a bucket that fills evenly and holds a minute's worth.  Nobody
can know beforehand how long an answer will be, so who has anything left may ask, what was spent is taken when it is
known, and a debt is waited for.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

from ...config.keys import Key
from ...core.errors import RateLimited
from ...core.request import Generate, Request
from ...engine.worker import RequestEnd

TimeSource = Callable[[], float]
MINUTE = 60.0
ROUNDING_S = 1e-6  # seconds that sums of parts of a bucket may be off


class RateBucket:
    """`most` a minute, and at once after a minute of rest; 0: as many as one likes."""

    def __init__(self, most: int, clock: TimeSource) -> None:
        self.capacity, self._clock = most, clock
        self._level, self._at = float(most), clock()

    @property
    def level(self) -> float:
        """What is left; below zero, what is owed."""
        now = self._clock()
        self._level = min(self._level + (now - self._at) * self.capacity / MINUTE, self.capacity)
        self._at = now
        return self._level

    @property
    def remaining(self) -> int:
        return max(int(self.level), 0)

    def spend(self, amount: int) -> None:
        if self.capacity:
            self._level = self.level - amount

    def wait_seconds(self, level: float = 1.0) -> int:
        """Whole seconds until so much is left."""
        return max(math.ceil((level - self.level) * MINUTE / self.capacity - ROUNDING_S), 0) if self.capacity else 0


class Quota:
    """One key's two buckets."""

    def __init__(self, key: Key, clock: TimeSource) -> None:
        self.key = key
        self.requests = RateBucket(key.requests_per_minute, clock)
        self.tokens = RateBucket(key.tokens_per_minute, clock)

    def take_request(self) -> None:
        """One request more.  Raises RateLimited if there is nothing left for it."""
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            if wait := bucket.wait_seconds():
                most = f"the key {self.key.name!r} may spend {bucket.capacity} {what} a minute"
                raise RateLimited(f"{most}, and has none left; there are some in {wait} s", retry_after=wait)
        self.requests.spend(1)

    def headers(self, spell: "HeaderFormat") -> dict[str, str]:
        """Headers that say what is left."""
        buckets = (("requests", self.requests), ("tokens", self.tokens))
        return {
            name: value for what, bucket in buckets if bucket.capacity for name, value in spell(what, bucket).items()
        }


class Quotas:
    """Of all keys that have limits: only of those is anything remembered.  Lives on the event loop thread."""

    def __init__(self, clock: TimeSource = time.monotonic) -> None:
        self._clock = clock
        self._quotas: dict[str, Quota] = {}

    def quota_of(self, key: Key) -> Quota:
        """What `key` has left.  One whose limits have changed begins anew."""
        if not key.requests_per_minute and not key.tokens_per_minute:
            return Quota(key, self._clock)
        found = self._quotas.get(key.name)
        if found is None or key_limits(found.key) != key_limits(key):
            found = self._quotas[key.name] = Quota(key, self._clock)
        return found

    def add_submitted(self, owner: str, requests: Sequence[Request]) -> None:
        """Prompts and texts of one call were given to the engine."""
        self._spend(owner, count_spent_tokens(requests))

    def add_ended(self, ended: RequestEnd) -> None:
        """An answer is over, however it ended."""
        self._spend(ended.terms.owner, ended.completion_tokens)

    def _spend(self, owner: str, tokens: int) -> None:
        if owner in self._quotas:
            self._quotas[owner].tokens.spend(tokens)


def key_limits(key: Key) -> tuple[int, int]:
    return key.requests_per_minute, key.tokens_per_minute


def count_spent_tokens(requests: Sequence[Request]) -> int:
    """Tokens of prompts and texts; several answers to one prompt read it once."""
    groups = {request.group: request for request in requests if isinstance(request, Generate) and request.group}
    alone = [request for request in requests if not (isinstance(request, Generate) and request.group)]
    return sum(request.prompt_tokens for request in (*groups.values(), *alone))


def openai_headers(what: str, bucket: RateBucket) -> Mapping[str, str]:
    said = {
        "limit": f"{bucket.capacity}",
        "remaining": f"{bucket.remaining}",
        "reset": f"{bucket.wait_seconds(bucket.capacity)}s",
    }
    return {f"x-ratelimit-{name}-{what}": value for name, value in said.items()}


def anthropic_headers(what: str, bucket: RateBucket) -> Mapping[str, str]:
    full = datetime.now(UTC) + timedelta(seconds=bucket.wait_seconds(bucket.capacity))
    said = {
        "limit": f"{bucket.capacity}",
        "remaining": f"{bucket.remaining}",
        "reset": full.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {f"anthropic-ratelimit-{what}-{name}": value for name, value in said.items()}


HeaderFormat = Callable[[str, RateBucket], Mapping[str, str]]

"""Rate limits of each key: requests and tokens per minute.

Each limit is a bucket that fills evenly and holds one minute's worth.  The length of an answer is not known beforehand,
so a request is accepted while anything is left.  Tokens are taken when they are known, which may leave a debt; later
requests wait until it is refilled.
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
ROUNDING_S = 1e-6  # seconds of rounding error that are ignored


class RateBucket:
    """Fills at `capacity` per minute and holds at most `capacity`; 0: unlimited."""

    def __init__(self, capacity: int, clock: TimeSource) -> None:
        self.capacity, self._clock = capacity, clock
        self._level, self._at = float(capacity), clock()

    @property
    def level(self) -> float:
        """What is left; negative if more was spent than there was."""
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
        """Whole seconds until `level` is left."""
        return max(math.ceil((level - self.level) * MINUTE / self.capacity - ROUNDING_S), 0) if self.capacity else 0


class Quota:
    """The two buckets of one key."""

    def __init__(self, key: Key, clock: TimeSource) -> None:
        self.key = key
        self.requests = RateBucket(key.requests_per_minute, clock)
        self.tokens = RateBucket(key.tokens_per_minute, clock)

    def take_request(self) -> None:
        """Take one request.  Raises RateLimited if a bucket is empty."""
        for bucket, kind in ((self.requests, "requests"), (self.tokens, "tokens")):
            if wait := bucket.wait_seconds():
                limit = f"the key {self.key.name!r} may spend {bucket.capacity} {kind} a minute"
                raise RateLimited(f"{limit}, and has none left; there are some in {wait} s", retry_after=wait)
        self.requests.spend(1)

    def headers(self, header_format: "HeaderFormat") -> dict[str, str]:
        """Response headers with what is left, in the format `header_format`."""
        buckets = (("requests", self.requests), ("tokens", self.tokens))
        return {
            name: value
            for kind, bucket in buckets
            if bucket.capacity
            for name, value in header_format(kind, bucket).items()
        }


class Quotas:
    """The quotas of all keys that have limits; nothing is kept for other keys.  Lives on the event loop thread."""

    def __init__(self, clock: TimeSource = time.monotonic) -> None:
        self._clock = clock
        self._quotas: dict[str, Quota] = {}

    def quota_of(self, key: Key) -> Quota:
        """The quota of `key`.  A key whose limits have changed starts with full buckets."""
        if not key.requests_per_minute and not key.tokens_per_minute:
            return Quota(key, self._clock)
        found = self._quotas.get(key.name)
        if found is None or key_limits(found.key) != key_limits(key):
            found = self._quotas[key.name] = Quota(key, self._clock)
        return found

    def add_submitted(self, owner: str, requests: Sequence[Request]) -> None:
        """Take the prompt tokens of a call that was submitted to the engine."""
        self._spend(owner, count_spent_tokens(requests))

    def add_ended(self, ended: RequestEnd) -> None:
        """Take the generated tokens of a request that ended in any way."""
        self._spend(ended.terms.owner, ended.completion_tokens)

    def _spend(self, owner: str, tokens: int) -> None:
        if owner in self._quotas:
            self._quotas[owner].tokens.spend(tokens)


def key_limits(key: Key) -> tuple[int, int]:
    return key.requests_per_minute, key.tokens_per_minute


def count_spent_tokens(requests: Sequence[Request]) -> int:
    """Prompt tokens of `requests`; requests of one group share one prompt, which counts once."""
    groups = {request.group: request for request in requests if isinstance(request, Generate) and request.group}
    single = [request for request in requests if not (isinstance(request, Generate) and request.group)]
    return sum(request.prompt_tokens for request in (*groups.values(), *single))


def openai_headers(kind: str, bucket: RateBucket) -> Mapping[str, str]:
    values = {
        "limit": f"{bucket.capacity}",
        "remaining": f"{bucket.remaining}",
        "reset": f"{bucket.wait_seconds(bucket.capacity)}s",
    }
    return {f"x-ratelimit-{name}-{kind}": value for name, value in values.items()}


def anthropic_headers(kind: str, bucket: RateBucket) -> Mapping[str, str]:
    full = datetime.now(UTC) + timedelta(seconds=bucket.wait_seconds(bucket.capacity))
    values = {
        "limit": f"{bucket.capacity}",
        "remaining": f"{bucket.remaining}",
        "reset": full.strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
    return {f"anthropic-ratelimit-{kind}-{name}": value for name, value in values.items()}


HeaderFormat = Callable[[str, RateBucket], Mapping[str, str]]

"""Responses that are kept in memory, so that requests can continue their conversations and clients can read them again.

What is kept is bounded in bytes and in number, for all keys together and for each key.  Where there is no room for a
response, the oldest of its key are removed, or those of the key that has most of what is short.  Where memory for
requests is short, the oldest of the key with most bytes are removed, too: what is kept never refuses a request.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heapreplace
from threading import RLock

from ....core.errors import NotFound
from ....resources.key_share import KeyShare
from ....resources.request_memory import UNBOUNDED_HEADROOM, Headroom, whole_mib

MAX_RESPONSES = 10_000  # of all keys
MAX_REMOVED = 10_000  # ids of removed responses that are remembered
RESPONSE_BYTES, TURN_BYTES, ITEM_BYTES = 1024, 256, 64  # of each, beside its JSON
MEMORY_PART = 4  # at most a fourth of the memory for requests is used for responses
CLEANUP_S = 60.0  # between two searches for expired responses
NO_MEMORY = "was not kept: the server had no memory for it"
TOO_LARGE = "was not kept: with its conversation it is larger than the room of a key (responses_mib)"
REPLACED = "was removed, because newer ones needed its room (responses_mib)"
EVICTED = "was removed, because requests needed its memory"

log = logging.getLogger("polyhead")


class Turn:
    """The items of one request and of its response, as JSON.  `parent` is the turn whose conversation it continues.

    Conversations share their first turns.  `users` counts kept responses and turns that need this one.
    """

    def __init__(self, inputs: Sequence[bytes], outputs: Sequence[bytes], parent: "Turn | None") -> None:
        self.inputs, self.outputs, self.parent, self.users = tuple(inputs), tuple(outputs), parent, 0
        items = (*self.inputs, *self.outputs)
        self.size = TURN_BYTES + sum(ITEM_BYTES + len(item) for item in items)  # in bytes
        self.total_size: int = self.size + (parent.total_size if parent else 0)  # with those before it

    def conversation(self) -> list[bytes]:
        """All items, those of earlier turns first."""
        turns = reversed(list(self.line()))
        return [item for turn in turns for item in (*turn.inputs, *turn.outputs)]

    def line(self) -> Iterator["Turn"]:
        """This turn, the one before it, and so on."""
        turn: Turn | None = self
        while turn:
            yield turn
            turn = turn.parent


@dataclass(frozen=True)
class StoredResponse:
    id: str
    owner: str
    content: Sequence[bytes]  # the response, as JSON in chunks
    turn: Turn
    kept_at: float = 0.0  # by the store's clock

    @property
    def size(self) -> int:
        """The bytes that it takes without its turns."""
        return RESPONSE_BYTES + sum(map(len, self.content))

    def input_items(self) -> list[bytes]:
        """The items from which it was generated: the conversation before it, and its request's."""
        before = self.turn.parent.conversation() if self.turn.parent else []
        return [*before, *self.turn.inputs]


@dataclass(frozen=True)
class ResponseLimits:
    """`share` is the part of bytes and responses that one key may have, where there are several."""

    bytes: int
    seconds: float
    share: float = 1.0
    responses: int = MAX_RESPONSES


class ResponseStore:
    """Lives on the event loop thread, but any thread that claims memory may call `evict`.

    `owners` are the names of the keys; the collection may change.
    """

    def __init__(
        self,
        limits: ResponseLimits,
        owners: Collection[str] = (),
        headroom: Headroom = UNBOUNDED_HEADROOM,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self._share, self._headroom, self._clock = KeyShare(owners, limits.share), headroom, clock
        self._lock = RLock()  # taken before that of `headroom`, never within it
        # by owner and id, the oldest first; the first item of a dict is found by a search through all that were removed
        self._kept: dict[str, OrderedDict[str, StoredResponse]] = {}
        self._bytes = Counter[str]()  # by owner
        self._removed = OrderedDict[str, tuple[str, str]]()  # by id: owner, and why it is not kept
        headroom.evict_kept = self.evict

    @property
    def is_enabled(self) -> bool:
        return self.limits.bytes > 0

    @property
    def size(self) -> int:
        """The bytes that all responses take."""
        return self._bytes.total()

    @property
    def max_bytes(self) -> int:
        """The bytes that all responses may take: not more than a part of the memory for requests."""
        return int(min(self.limits.bytes, self._headroom.total / MEMORY_PART))

    def warn_of_less_room(self) -> None:
        """Log it if responses have less room than the settings give them."""
        if self.max_bytes < self.limits.bytes:
            log.warning(
                "responses_mib %d is more than 1/%d of the %d MiB for requests; %d MiB of responses are kept",
                self.limits.bytes >> 20,
                MEMORY_PART,
                whole_mib(self._headroom.total),
                whole_mib(self.max_bytes),
            )

    def find(self, response_id: str, owner: str) -> StoredResponse:
        """Raises NotFound, which says why a response is not there any more."""
        with self._lock:
            self.remove_expired()
            found = self._kept[owner].get(response_id) if owner in self._kept else None
            if found is None:
                removed_owner, reason = self._removed.get(response_id, ("", ""))
                if reason and removed_owner == owner:
                    raise NotFound(f"the response {response_id[:60]!r} {reason}")
                raise NotFound(f"there is no response {response_id[:60]!r}")
            return found

    def keep(self, response: StoredResponse) -> None:
        """Keep a response, if there is room and memory for it; `find` says if there was none."""
        with self._lock:
            self.remove_expired()
            owner, turn = response.owner, response.turn
            if response.size + turn.total_size > self._share.of(self.max_bytes):
                self.note_removed(response.id, owner, TOO_LARGE)
                return
            size = response.size + hold_turns(turn)
            if not self._headroom.reserve_kept(size):  # before others are removed, which would be lost for nothing
                release_turns(turn)
                self.note_removed(response.id, owner, NO_MEMORY)
                return
            self._bytes[owner] += size
            self._make_room(owner)
            self._kept.setdefault(owner, OrderedDict())[response.id] = replace(response, kept_at=self._clock())

    def delete(self, response_id: str, owner: str) -> None:
        """Raises NotFound.  Responses that continue its conversation keep what they need of it."""
        with self._lock:
            self._remove(self.find(response_id, owner), "was deleted")

    def evict(self, size: float) -> bool:
        """Remove the oldest responses, each time of the key with most bytes, until `size` bytes are free.

        Returns False, and removes none, if all have fewer bytes together.
        """
        with self._lock:
            if self.size < size:
                return False
            most = [(-self._bytes[owner], owner) for owner in self._kept]
            heapify(most)
            while size > 0:
                _, owner = most[0]
                size -= self._remove_oldest(owner, EVICTED)
                if owner in self._kept:
                    heapreplace(most, (-self._bytes[owner], owner))
                else:
                    heappop(most)
            return True

    def remove_expired(self) -> None:
        with self._lock:
            latest = self._clock() - self.limits.seconds
            for kept in list(self._kept.values()):
                while kept and (oldest := next(iter(kept.values()))).kept_at <= latest:
                    limit = f"responses are kept for {self.limits.seconds:g} s (responses_seconds)"
                    self._remove(oldest, f"has expired: {limit}")

    async def remove_expired_forever(self) -> None:
        while True:
            await asyncio.sleep(CLEANUP_S)
            self.remove_expired()

    def note_removed(self, response_id: str, owner: str, reason: str) -> None:
        """Remember why a response cannot be found."""
        with self._lock:
            self._removed[response_id] = (owner, reason)
            if len(self._removed) > MAX_REMOVED:
                self._removed.popitem(last=False)

    def _make_room(self, owner: str) -> None:
        """Remove responses until there is room for one more of `owner`, whose bytes are counted already."""
        while self._kept.get(owner) and self._is_full(owner):
            self._remove_oldest(owner, REPLACED)
        while self._kept and self.size > self.max_bytes:
            self._remove_oldest(self._owner_with_most(self._bytes), REPLACED)
        while self._kept and sum((counts := self._counts()).values()) >= self.limits.responses:
            self._remove_oldest(self._owner_with_most(counts), REPLACED)

    def _is_full(self, owner: str) -> bool:
        is_over = self._bytes[owner] > self._share.of(self.max_bytes)
        return is_over or len(self._kept[owner]) >= self._share.of(self.limits.responses)

    def _counts(self) -> dict[str, int]:
        """Responses by owner."""
        return {owner: len(kept) for owner, kept in self._kept.items()}

    def _owner_with_most(self, taken: Mapping[str, int]) -> str:
        """The owner that has most of what is `taken`, of those with a response."""
        return max(self._kept, key=taken.__getitem__)

    def _remove_oldest(self, owner: str, reason: str) -> int:
        return self._remove(next(iter(self._kept[owner].values())), reason)

    def _remove(self, response: StoredResponse, reason: str) -> int:
        """Returns the bytes that are free now."""
        owner = response.owner
        del self._kept[owner][response.id]
        if not self._kept[owner]:
            del self._kept[owner]
        freed = response.size + release_turns(response.turn)
        self._bytes[owner] -= freed
        self._headroom.release(freed)
        self.note_removed(response.id, owner, reason)
        return freed


def hold_turns(turn: Turn) -> int:
    """Count one more user of `turn`.  Returns the bytes of turns that nothing else needs: a response that was continued
    may have been removed since.
    """
    size = 0
    for each in turn.line():
        each.users += 1
        if each.users > 1:
            break
        size += each.size
    return size


def release_turns(turn: Turn) -> int:
    """Count one user less.  Returns the bytes of turns that nothing needs any more."""
    size = 0
    for each in turn.line():
        each.users -= 1
        if each.users:
            break
        size += each.size
    return size

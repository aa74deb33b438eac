"""Memory for requests: bodies, texts while they are tokenised, tokens and answers.

Models are loaded within a budget.  The rest of the memory is for requests, and a call that needs more than is left is
refused before it is read: otherwise a few large calls would have the system kill the process.
"""

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock

import orjson

from ..core.errors import BodyTooLarge, Expired, Overloaded
from .key_share import NO_SHARES, KeyShare

ALLOCATOR_BYTES = 96 << 20  # bytes that libraries and the allocator may still take
MIN_REQUEST_BYTES = 32 << 20  # for requests, whatever models use: small ones are always answered
BYTES_PER_BODY_BYTE = 3  # bytes for each byte of a body: itself, the values parsed from it, and a copy during parsing
BYTES_PER_VALUE = 64  # bytes for each value of a JSON body: a number or a short string, and its slot
BYTES_PER_CONTAINER = 32  # the same for a list or an object, beyond that
# Lists and objects of all JSON bodies in flight together, at most: a full garbage collection examines each of them, in
# one piece that takes 0.1 s of a processor for so many.
MAX_CONTAINERS = 1 << 21
BYTES_PER_MEMBER = 256  # bytes for each member of an object: its key, its slot, and a field of a wire object
BYTES_PER_CHARACTER = 160  # bytes for each character of a text during tokenisation, at worst one token each
BYTES_PER_TOKEN = 40  # bytes for each token in flight
BYTES_PER_SHARED_TOKEN = 16  # bytes for each token of a prompt whose tokens others have, too: its slots
BYTES_PER_NUMBER = 40  # bytes for each number of an answer: a Python float, its slot in a list, and a copy as float32
BYTES_PER_WRITTEN_BYTE = 8  # bytes for each byte of a text as JSON: 4 as text, and the JSON in parts while it is joined
BYTES_PER_LISTED_TOKEN = 96  # bytes for each token of a list of ids and names, without the names
BYTES_PER_TEXT = 1536  # bytes for each text of a call: its request, its entry in the queue, its result
BYTES_PER_OFFSET = 300  # bytes for each token whose position in the text is kept
MEASURED_CHARACTERS = 1 << 16  # of a text whose size as JSON is found at a time
INVALID_BYTE = re.compile("[\udc80-\udcff]")  # what "surrogateescape" makes of a byte that is no text
ANSWER_CLAIM_STEP = 1 << 20  # bytes claimed at a time while an answer is written


class Headroom:
    """The memory for requests.  `free` bytes were free before models were loaded; models and tokens use
    `model_bytes()`.

    An owner, the name of a key, may have its share.  What belongs to no key has the owner "", which may have all.
    `evict_kept(size)` frees at least `size` bytes of what is kept only while no request needs them, or nothing; it
    returns whether it did.  Any thread may call it.
    """

    def __init__(
        self, free: float = math.inf, model_bytes: Callable[[], int] = lambda: 0, share: KeyShare = NO_SHARES
    ) -> None:
        self._free_bytes, self._model_bytes, self._share = free, model_bytes, share
        self._reserved, self._lock = 0, RLock()  # a finalizer may release while this thread reserves
        self._reserved_of: dict[str, int] = {}  # by owner: those that have something
        self.evict_kept: Callable[[float], bool] = lambda _: False

    @property
    def total(self) -> float:
        """Bytes for all requests together."""
        return max(self._free_bytes - ALLOCATOR_BYTES - self._model_bytes(), MIN_REQUEST_BYTES)

    @property
    def container_bytes(self) -> int:
        """Bytes to claim for a list or an object, beside its values: what it takes, and at least its part of all memory
        for requests where MAX_CONTAINERS have all of it.
        """
        part = self.total / MAX_CONTAINERS
        return BYTES_PER_CONTAINER if math.isinf(part) else max(BYTES_PER_CONTAINER, int(part))

    def share_of(self, owner: str) -> float:
        """Bytes for all requests of `owner` together."""
        return self._share.of(self.total) if owner else self.total

    def reserve(self, size: int, what: str, before: int = 0, owner: str = "") -> None:
        """Reserve `size` bytes for `what`; `before` bytes are already reserved for the same request of `owner`.

        Raises BodyTooLarge where it needs more than all requests of its owner may have, Overloaded where other requests
        have it now.  What is kept is evicted first.
        """
        missing = self._reserve(size, what, before, owner)
        if missing and self.evict_kept(missing):  # without the lock: what evicts has one of its own
            missing = self._reserve(size, what, before, owner)
        if missing:
            left = whole_mib(size - missing)
            raise Overloaded(f"{what} takes about {whole_mib(size)} MiB, and {left} are left by others", retry_after=1)

    def reserve_kept(self, size: int) -> bool:
        """Reserve `size` bytes for something that `evict_kept` removes.  Returns False where there is no room."""
        with self._lock:
            if self.shortfall(size):
                return False
            self._reserved += size
            return True

    def shortfall(self, size: int) -> float:
        """How many bytes of `size` cannot be reserved now, by any owner."""
        with self._lock:
            return max(self._reserved + size - self.total, 0)

    def share_shortfall(self, size: int, owner: str) -> float:
        """How many bytes of `size` other requests of `owner` leave no room for in its share."""
        with self._lock:
            return max(self._reserved_of.get(owner, 0) + size - self.share_of(owner), 0) if owner else 0

    def release(self, size: int, owner: str = "") -> None:
        with self._lock:
            self._reserved -= size
            if owner:
                self._count(owner, -size)

    def move(self, size: int, owner: str, other: str) -> None:
        """Count `size` bytes that are reserved for `owner` as those of `other`, whatever its share."""
        with self._lock:
            for name, change in ((owner, -size), (other, size)):
                if name:
                    self._count(name, change)

    def _reserve(self, size: int, what: str, before: int, owner: str) -> float:
        """Reserve `size` bytes, or return how many are missing because of others.  Raises as `reserve` does."""
        with self._lock:
            whole, share = self.total, self.share_of(owner)
            if before + size > share:
                need, room = whole_mib(before + size - 1) + 1, f"{whole_mib(whole)} for requests"
                room = (
                    f"the server has {room}"
                    if share == whole
                    else f"a key has {whole_mib(share)} of {room} (key_share)"
                )
                rest = " with the rest of its request" if before else ""
                raise BodyTooLarge(f"{what} takes about {need} MiB{rest}, and {room}")
            if missing := self.share_shortfall(size, owner):
                left = f"{whole_mib(size - missing)} are left by other requests of this key"
                most = f"which may have {whole_mib(share)} (key_share)"
                raise Overloaded(f"{what} takes about {whole_mib(size)} MiB, and {left}, {most}", retry_after=1)
            if missing := self.shortfall(size):
                return missing
            self._reserved += size
            if owner:
                self._count(owner, size)
            return 0

    def _count(self, owner: str, size: int) -> None:
        """Count `size` bytes more of `owner`; the lock is held."""
        held = self._reserved_of.get(owner, 0) + size
        self._reserved_of[owner] = held
        if not held:
            del self._reserved_of[owner]


class MemoryClaim:
    """The memory reserved for one request of `owner`, until it is released.  Any thread may let it grow.

    What a request has already counts where it needs more: what can never fit beside it is refused for good, since it
    would wait for itself.
    """

    def __init__(self, headroom: Headroom, owner: str = "") -> None:
        self._headroom, self._owner, self._size = headroom, owner, 0
        self._working = 0  # bytes for work on threads
        self._wholes: tuple[MemoryClaim, ...] = ()  # the claims that this one is a part of
        self._is_closed, self._lock = False, RLock()

    @property
    def owner(self) -> str:
        return self._owner

    @property
    def size(self) -> int:
        return self._size

    @property
    def held(self) -> int:
        """Bytes that its request has, without those of other parts, which are released before it ends."""
        return sum(claim._size + claim._working for claim in (self, *self._wholes))

    def set_owner(self, owner: str) -> None:
        """The request is that of `owner`.  Call it before anything is claimed."""
        assert not self._size, "what is claimed has been counted for another owner"
        self._owner = owner

    def grow(self, size: int, what: str) -> None:
        """Reserve `size` bytes more.  Raises as `Headroom.reserve` does, and Expired after `close`."""
        if not self._is_closed:
            self._headroom.reserve(size, what, self.held, self._owner)
            with self._lock:
                if not self._is_closed:
                    self._size += size
                    return
            self._headroom.release(size, self._owner)
        raise Expired(f"{what} is not needed any more: its request has ended")

    def grow_by_containers(self, count: int, size: int, what: str) -> None:
        """The same for `count` lists and objects, and `size` bytes beside them."""
        self.grow(count * self._headroom.container_bytes + size, what)

    def shrink(self, size: int) -> None:
        """Release `size` bytes of it, or all where it has less since it was released."""
        with self._lock:
            size = min(size, self._size)
            self._size -= size
        self._headroom.release(size, self._owner)

    @contextmanager
    def reserved(self, size: int, what: str) -> Iterator[None]:
        """Reserve `size` bytes more for work on a thread, which may end after the request.  Raises as `grow` does."""
        if self._is_closed:
            raise Expired(f"{what} is not needed any more: its request has ended")
        self._headroom.reserve(size, what, self.held, self._owner)
        self._work(size)
        try:
            yield
        finally:
            self._work(-size)
            self._headroom.release(size, self._owner)

    def _work(self, size: int) -> None:
        with self._lock:
            self._working += size

    def open_part(self) -> "MemoryClaim":
        """A claim of its own for a part of the request, which is released before the request ends."""
        part = MemoryClaim(self._headroom, self._owner)
        part._wholes = self, *self._wholes
        return part

    def release(self) -> None:
        """Release all; the claim may grow again."""
        with self._lock:
            size, self._size = self._size, 0
        self._headroom.release(size, self._owner)

    def close(self) -> None:
        """Release all when the request has ended: a thread that still works for it claims nothing more."""
        with self._lock:
            self._is_closed = True
        self.release()


UNBOUNDED_HEADROOM = Headroom()


def whole_mib(size: float) -> int:
    return max(int(size), 0) >> 20


def json_size(text: str) -> int:
    """Bytes of `text` in a JSON string; a control character has six."""
    starts = range(0, len(text), MEASURED_CHARACTERS)
    return sum(len(orjson.dumps(text[start : start + MEASURED_CHARACTERS])) - 2 for start in starts)


def max_token_size(data: bytes) -> int:
    """Bytes of a token's text in a JSON string, at most: each byte that is no text may become U+FFFD, of three."""
    return json_size(INVALID_BYTE.sub("\ufffd", data.decode("utf-8", "surrogateescape")))

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

from ..core.errors import BodyTooLarge, Overloaded

ALLOCATOR_BYTES = 96 << 20  # bytes that libraries and the allocator may still take
MIN_REQUEST_BYTES = 32 << 20  # for requests, whatever models use: small ones are always answered
BYTES_PER_BODY_BYTE = 3  # bytes for each byte of a body: itself, the values parsed from it, and a copy during parsing
BYTES_PER_VALUE = 64  # bytes for each value of a JSON body: a number or a short string, and its slot
BYTES_PER_CONTAINER = 32  # the same for a list or an object, beyond that
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

    Any thread may call it.
    """

    def __init__(self, free: float = math.inf, model_bytes: Callable[[], int] = lambda: 0) -> None:
        self._free_bytes, self._model_bytes = free, model_bytes
        self._reserved, self._lock = 0, RLock()  # a finalizer may release while this thread reserves

    @property
    def total(self) -> float:
        """Bytes for all requests together."""
        return max(self._free_bytes - ALLOCATOR_BYTES - self._model_bytes(), MIN_REQUEST_BYTES)

    def reserve(self, size: int, what: str, before: int = 0) -> None:
        """Reserve `size` bytes for `what`; `before` bytes are already reserved for the same request.

        Raises BodyTooLarge where it needs more than all requests may have, Overloaded where others have it now.
        """
        with self._lock:
            whole = self.total
            if before + size > whole:
                need = whole_mib(before + size)
                raise BodyTooLarge(f"{what} takes about {need} MiB, and the server has {whole_mib(whole)} for requests")
            if self._reserved + size > whole:
                left = whole_mib(whole - self._reserved)
                raise Overloaded(
                    f"{what} takes about {whole_mib(size)} MiB, and {left} are left by others", retry_after=1
                )
            self._reserved += size

    def shortfall(self, size: int) -> float:
        """How many bytes of `size` cannot be reserved now."""
        with self._lock:
            return max(self._reserved + size - self.total, 0)

    def release(self, size: int) -> None:
        with self._lock:
            self._reserved -= size

    @contextmanager
    def reserved(self, size: int, what: str) -> Iterator[None]:
        self.reserve(size, what)
        try:
            yield
        finally:
            self.release(size)


class MemoryClaim:
    """The memory reserved for one request, until it is released."""

    def __init__(self, headroom: Headroom) -> None:
        self._headroom, self._size = headroom, 0

    def grow(self, size: int, what: str) -> None:
        """Reserve `size` bytes more.  Raises as `Headroom.reserve` does."""
        self._headroom.reserve(size, what, before=self._size)
        self._size += size

    def open_part(self) -> "MemoryClaim":
        """A claim of its own for a part of the request, which is released before the request ends."""
        return MemoryClaim(self._headroom)

    def release(self) -> None:
        self._headroom.release(self._size)
        self._size = 0


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

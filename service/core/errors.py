"""Errors that are reported to users, each with its HTTP status, its code and its message.

PolyheadError
├── BadRequest          400  the request is invalid; `param` names the field
│   ├── EmptyInput      400  the input is empty
│   ├── TooLong         400  more tokens than the model takes; the message names both lengths
│   ├── TooMany         400  more texts than one call may have
│   ├── TooComplex      400  a grammar is too costly to compile or to follow, or a text to tokenise
│   └── WrongTask       400  the model has another task; the message says which
├── Unauthorized        401  no key, or an unknown one
├── Forbidden           403  a known key that may not do this; the message says what it may
│   └── ForeignOrigin   403  a web page of another origin, which `cors_origins` does not name
├── NotFound            404  no such route or model
├── MethodNotAllowed    405  the route exists, for another verb
├── BodyTooLarge        413  the body exceeds the limit
├── AnswerTooLarge      413  the answer would exceed what is written, or computed, at once
├── SlowBody            408  the body took longer than the limit
├── UnsupportedType     415  the body has a type that any web page can send, or an unknown coding; it must be JSON
├── MisdirectedRequest  421  the header Host names another server; see the setting `allowed_hosts`
├── UnreadableRequest   ...  the bytes are no HTTP request, or one that is not supported; has its own status
├── Conflict            409  another change of the served models is going on, or it contradicts what is served
├── Cancelled           409  an administrator has cancelled the load
├── Overloaded          429  over the admission bound; `retry_after` seconds
│   └── RateLimited     429  over the limit of this key for a minute; `retry_after` seconds
├── ClientGone          499  the client left before its request reached the engine; never sent
├── StepFailed          500  the step that carried this request failed
├── Unavailable         503  loading, draining or broken; `retry_after` seconds
├── Stopped             503  the engine ended before this request did
├── Expired             504  the deadline passed
├── InsufficientMemory  507  a model does not fit in the free memory
└── InsufficientStorage 507  a file does not fit where files are kept, or the disk cannot be used
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import PurePath
from typing import Self

from .names import join_names

MAX_MESSAGE_CHARS, MAX_PARAM_CHARS = 4000, 500  # of an error, whatever a client's values or a file's have in them

# A path with all folders before the last name, and a URL.
PATH_PATTERN = re.compile(r"(?<![\w.)\]])(?:~\w*|\.{1,2})?/(?:[^\s/:;,'\"()]+/)*(?P<name>[^\s/:;,'\"()]*)")
URL_PATTERN = re.compile(r"\b[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


class PolyheadError(Exception):
    """`status` is the HTTP status, `code` a stable identifier, `param` the field at fault (empty if none).

    `model` and `task` are those of the model concerned, once it is known; `names` are model names that the message ends
    with.  A long message or `param` is cut: it is written into answers, logs and records, for which no memory is
    claimed.
    """

    status = 500
    code = "internal_error"
    model = ""
    task = ""

    def __init__(self, message: str, *, param: str = "", retry_after: int = 0) -> None:
        message = cut_text(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.message, self.param, self.retry_after = message, cut_text(param, MAX_PARAM_CHARS), retry_after
        self.names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.message

    def with_names(self, names: Iterable[str]) -> Self:
        """The same error with these model names at the end of its message, the first 20 of them."""
        self.names = tuple(names)
        self.message = f"{self.args[0]} {join_names(self.names)}"
        return self


class BadRequest(PolyheadError):
    status, code = 400, "invalid_request"


class EmptyInput(BadRequest):
    code = "empty_input"


class TooLong(BadRequest):
    code = "context_length_exceeded"


class TooMany(BadRequest):
    code = "too_many"


class TooComplex(BadRequest):
    code = "too_complex"


class WrongTask(BadRequest):
    code = "wrong_task"


class NoSuchResponse(BadRequest):
    code = "previous_response_not_found"  # OpenAI's code


class Unauthorized(PolyheadError):
    status, code = 401, "invalid_api_key"


class Forbidden(PolyheadError):
    status, code = 403, "permission_denied"


class ForeignOrigin(Forbidden):
    code = "origin_not_allowed"


class NotFound(PolyheadError):
    status, code = 404, "not_found"


class MethodNotAllowed(PolyheadError):
    status, code = 405, "method_not_allowed"


class BodyTooLarge(PolyheadError):
    status, code = 413, "body_too_large"


class AnswerTooLarge(PolyheadError):
    status, code = 413, "answer_too_large"


class SlowBody(PolyheadError):
    status, code = 408, "request_timeout"


class UnsupportedType(PolyheadError):
    status, code = 415, "unsupported_media_type"


class MisdirectedRequest(PolyheadError):
    status, code = 421, "misdirected_request"


class UnreadableRequest(PolyheadError):
    """Raised by the connection while it reads the head or the body of a request."""

    CODES: Mapping[int, str] = {
        400: "malformed_request",
        408: "request_timeout",
        413: "body_too_large",
        414: "uri_too_long",
        417: "expectation_failed",
        431: "header_too_large",
        501: "not_implemented",
        503: "too_many_connections",
        505: "http_version_not_supported",
    }

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, self.CODES[status]


class Conflict(PolyheadError):
    status, code = 409, "conflict"


class Cancelled(PolyheadError):
    status, code = 409, "cancelled"


class Overloaded(PolyheadError):
    status, code = 429, "overloaded"


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"  # OpenAI's code


class ClientGone(PolyheadError):
    status, code = 499, "client_gone"  # as nginx logs it


class StepFailed(PolyheadError):
    status, code = 500, "step_failed"


class Unavailable(PolyheadError):
    status, code = 503, "unavailable"


class Stopped(PolyheadError):
    status, code = 503, "stopped"


class Expired(PolyheadError):
    status, code = 504, "expired"


class InsufficientMemory(PolyheadError):
    status, code = 507, "insufficient_memory"


class InsufficientStorage(PolyheadError):
    status, code = 507, "insufficient_storage"


def cut_text(text: str, most: int) -> str:
    """The first `most` characters of `text`, with "..." where there are more."""
    return text if len(text) <= most else f"{text[:most]}..."


def redact_locations(text: str, *folders: str) -> str:
    """`text` without what only users of this machine may see: of paths the last name is left, of URLs nothing.

    `folders` are paths whose names may contain spaces, which the pattern would miss.
    """
    for folder in folders:
        text = text.replace(f"{folder}/", "") if folder not in (".", "/") else text
    return PATH_PATTERN.sub(lambda found: found["name"], URL_PATTERN.sub("a URL", text))


def first_line(error: BaseException) -> str:
    """The first line of the error's message; libraries add hints and stacks below it."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__


def client_message(error: Exception) -> str:
    """The first line of the error's message, redacted for clients."""
    shown = cut_text(first_line(error), MAX_MESSAGE_CHARS)
    message = redact_locations(shown, str(PurePath(getattr(error, "file", "")).parent))
    return message.encode("utf-8", "backslashreplace").decode()  # JSON has no halves of characters

"""Requests to a hub, whose answers are not trusted: the library's client sends them; what comes back is bounded here.

The library reads answers of any length into memory and decompresses them, those of errors and redirects too: a few
kilobytes become gigabytes. So answers are asked for as they are, compressed ones are refused, the content of a redirect
is never read, and that of an error or of a description has a limit. Each request has a time, and ends when it is not
wanted any more (see `hub_watch`).
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.cookiejar import DefaultCookiePolicy
from importlib.util import find_spec
from typing import Any

from ..core.errors import CheckpointError, show_value
from ..core.json_files import JsonLimit, count_values, parse_json
from .hub_watch import CheckWanted, RequestWatch, TooSlowError, always_wanted, watch_request

if find_spec("huggingface_hub") is not None:
    import huggingface_hub

TIMEOUT_SECONDS = 30.0  # without a byte
HEAD_SECONDS = 60.0  # from the first request to the end of the headers of its answer, redirects included
CONTENT_SECONDS = 60.0  # between two pieces of a content
ANSWER_SECONDS = 120.0  # for a whole description
ERROR_SECONDS = 10.0  # for the content of an error; what has not come then is left out
ANSWER_LIMIT = JsonLimit(8 << 20, 1 << 18)  # of a description; one of 20,000 files has 5 MB and 160,000 values
MAX_ERROR_BYTES = 1 << 16  # bytes of an error; the rest is left out
MAX_REDIRECTS = 10
NO_COOKIES = DefaultCookiePolicy(allowed_domains=[])
OTHER_ERRORS = (OSError, ValueError, RuntimeError)  # that the library raises, beside those of its HTTP client


def library_part(name: str) -> Any:
    """A module of huggingface_hub. Naming a class of the library imports them, and an HTTP client with them, so it is
    done here and not at the top."""
    _ = huggingface_hub.HfApi
    return getattr(huggingface_hub, name)


def request_headers() -> dict[str, str]:
    """The headers of each request: contents as they are, and the user's token. The library's own headers would name
    further programs on this machine, for which it asks the hub first. Each request has a connection of its own, which
    ends with it: the socket of a connection that is used again is not known."""
    headers = {"User-Agent": "polyhead", "Accept-Encoding": "identity", "Connection": "close"}
    token = None if library_part("constants").HF_HUB_DISABLE_IMPLICIT_TOKEN else huggingface_hub.get_token()
    return headers | ({"Authorization": f"Bearer {token}"} if token else {})


@dataclass(frozen=True)
class Answer:
    """An answer of the hub whose content is not read yet."""

    status_code: int
    response: Any  # the library's
    watch: RequestWatch

    def pieces(self) -> Iterator[bytes]:
        """The content as it comes: pieces of a fixed size are lost if the connection ends. Raises TooSlowError."""
        message = f"the hub sends nothing of it for {CONTENT_SECONDS:g} s; load it again"
        self.watch.allow(CONTENT_SECONDS, message)
        for piece in self.response.iter_raw():
            self.watch.allow(math.inf, "")  # what is done with it does not count
            yield piece
            self.watch.allow(CONTENT_SECONDS, message)


@contextmanager
def open_answer(url: str, start: int = 0, check_wanted: CheckWanted = always_wanted) -> Iterator[Answer]:
    """The answer to a request, from byte `start` on, whose content is not read yet. Redirects are followed. Raises the
    library's errors, what `check_wanted` raises, and CheckpointError for an answer that is compressed, comes too slowly
    or leads to ever more redirects."""
    with watch_request(check_wanted, (library_part("errors").HTTPError, CheckpointError, *OTHER_ERRORS)) as watch:
        watch.allow(HEAD_SECONDS, f"the hub's answer does not begin within {HEAD_SECONDS:g} s")
        headers = request_headers() | ({"Range": f"bytes={start}-"} if start else {})
        session, watched = huggingface_hub.get_session(), {"trace": watch.on_event}
        session.cookies.jar.set_policy(NO_COOKIES)  # the library keeps one client, and its cookies, for ever
        request: Any = session.build_request("GET", url, headers=headers, timeout=TIMEOUT_SECONDS, extensions=watched)
        for _ in range(MAX_REDIRECTS):
            response = session.send(request, stream=True, follow_redirects=False)
            try:
                request = response.next_request
                if request is not None:
                    check_scheme(request)
                    continue
                check_encoding(response)
                raise_for_status(response)
                yield Answer(response.status_code, response, watch)
                return
            finally:
                response.close()
    raise CheckpointError(f"the hub redirects more than {MAX_REDIRECTS} times")


def check_scheme(request: Any) -> None:
    """CheckpointError for a redirect to anything but a server. It is no error of the connection, so that no further
    attempt is made."""
    if request.url.scheme not in ("http", "https"):
        raise CheckpointError(f"the hub redirects to {show_value(str(request.url))}, which is no address of a server")


def check_encoding(answer: Any) -> None:
    """CheckpointError for a compressed answer."""
    encoding = answer.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise CheckpointError(f"the hub answers in the encoding {show_value(encoding)}; it was asked for none")


def raise_for_status(answer: Any) -> None:
    """Raise the library's error for an answer that is one, with the beginning of its content."""
    if answer.is_error:
        content, end = bytearray(), time.monotonic() + ERROR_SECONDS
        for chunk in answer.iter_raw():
            content += chunk[: MAX_ERROR_BYTES - len(content)]
            if len(content) >= MAX_ERROR_BYTES or time.monotonic() > end:
                break
        answer = type(answer)(
            answer.status_code, headers=answer.headers, content=bytes(content), request=answer.request
        )
    library_part("utils").hf_raise_for_status(answer)


def read_description(url: str, check_wanted: CheckWanted = always_wanted) -> dict[str, Any]:
    """The JSON object at a URL. Raises as `open_answer` does, and CheckpointError for one that is too large, comes too
    slowly, or is none."""
    content, end = bytearray(), time.monotonic() + ANSWER_SECONDS
    with open_answer(url, check_wanted=check_wanted) as answer:
        for chunk in answer.pieces():
            content += chunk
            if len(content) > ANSWER_LIMIT.bytes:
                raise CheckpointError(f"the hub's answer is longer than {ANSWER_LIMIT.bytes >> 20} MiB")
            if time.monotonic() > end:
                raise TooSlowError(f"the hub's answer takes more than {ANSWER_SECONDS:g} s")
    if (count := count_values(content)) > ANSWER_LIMIT.values:
        raise CheckpointError(f"the hub's answer has {count} values; {ANSWER_LIMIT.values} are the most")
    check_wanted()
    try:
        found = parse_json(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the hub's answer is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"the hub's answer should be an object, not a {type(found).__name__}")
    return found

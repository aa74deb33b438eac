"""The HTTP client of the command line.  Every failure is raised as a ClientError with one sentence.

A server may be anybody's: an answer has a bound, is not compressed, and is read as UTF-8 whatever it says.
"""

import json
from collections.abc import AsyncIterator, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from polyhead.models.core.errors import ModelError

TIMEOUT = httpx.Timeout(5.0, read=600.0)  # seconds; a long answer on a slow machine takes minutes
# Bytes of an answer, and so of a line of it. A piece of an answer that is written as it is generated has some 200, an
# explanation 16 MiB by default.
MAX_ANSWER_BYTES = 64 << 20


class ClientError(ModelError):
    """A failure whose message is shown to the user as it is."""


class ApiClient:
    """A client of the server at `url`, by HTTP unless it says otherwise.  If `key` is empty, none is sent."""

    def __init__(self, url: str, key: str) -> None:
        self.url = complete_url(url)
        self.finish = ""  # why the last answer ended, once it has
        self._http = httpx.Client(
            base_url=self.url, headers=request_headers(key), timeout=TIMEOUT, event_hooks={"response": [bound_answer]}
        )

    def find_model(self, task: str) -> str:
        """Return the name of the first ready model for `task`."""
        with expected_form(self.url):
            served = self._request("GET", "/v1/models")["data"]
            names = [read_text(model["id"]) for model in served if model["task"] == task]
            others = ", ".join(read_text(model["id"]) for model in served) or "none is ready yet"
        if not names:
            raise ClientError(f"{self.url} serves no model to {task}; it serves: {others}")
        return names[0]

    def chat(self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]) -> Generator[str]:
        """Yield the answer as it is generated. Closing the generator ends the request on the server, too. `fields` are
        the other fields of the request: the model, and sampling options.
        """
        body, self.finish = {**fields, "messages": list(messages), "stream": True}, ""
        with self._convert_errors(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise ClientError(error_message(response))
            for line in response.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    with expected_form(self.url):
                        chunk = json.loads(line.removeprefix("data: "))
                        texts = chunk_texts(chunk)
                        self.finish = next((each.get("finish_reason") or "" for each in chunk["choices"]), self.finish)
                    yield from texts

    def classify(self, model: str, text: str) -> list[tuple[str, float]]:
        """Return labels and scores, the highest score first."""
        with expected_form(self.url):
            answer = self._request("POST", f"/models/{model}/predict", {"inputs": text})
            found = [(read_text(prediction["label"]), float(prediction["score"])) for prediction in answer]
            if not found:
                raise ValueError("no label")
        return found

    def embed(self, model: str, text: str) -> list[float]:
        with expected_form(self.url):
            answer = self._request("POST", "/v1/embeddings", {"model": model, "input": text})
            return [float(number) for number in answer["data"][0]["embedding"]]

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        with self._convert_errors():
            response = self._http.request(method, path, json=body)
        if response.is_error:
            raise ClientError(error_message(response))
        return response.json()

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ClientError(f"{self.url} does not answer: {reason}; is the server running? See --url") from None


class BoundedBody(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a server's answer. Raises ClientError if it has more than MAX_ANSWER_BYTES."""

    def __init__(self, body: Any, url: str) -> None:
        self._body, self._url, self._bytes = body, url, 0

    def __iter__(self) -> Iterator[bytes]:
        for part in self._body:
            yield self._counted(part)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield self._counted(part)

    def _counted(self, part: bytes) -> bytes:
        self._bytes += len(part)
        if self._bytes > MAX_ANSWER_BYTES:
            raise ClientError(f"{self._url} answered with more than {MAX_ANSWER_BYTES} bytes, which are not read")
        return part

    def close(self) -> None:
        self._body.close()

    async def aclose(self) -> None:
        await self._body.aclose()


def request_headers(key: str) -> dict[str, str]:
    """The headers of every request.  If `key` is empty, none is sent."""
    return {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})


def bound_answer(response: httpx.Response) -> None:
    """Bound the body of an answer before it is read.  Raises ClientError if it is compressed: a few bytes would become
    any number.
    """
    if (encoding := response.headers.get("content-encoding", "identity")).lower() != "identity":
        message = f"with Content-Encoding {encoding[:40]!r}, which was not asked for"
        raise ClientError(f"{response.url} answered {message}")
    response.stream = BoundedBody(response.stream, str(response.url))
    response.encoding = "utf-8"  # a charset may name a compression, too


async def bound_async_answer(response: httpx.Response) -> None:
    """`bound_answer` for an asynchronous client."""
    bound_answer(response)


def open_async_client(url: str, key: str, **options: Any) -> httpx.AsyncClient:
    """A client of the server at `url`, by HTTP unless it says otherwise, with httpx's `options`."""
    known: dict[str, Any] = {"headers": request_headers(key), "event_hooks": {"response": [bound_async_answer]}}
    return httpx.AsyncClient(base_url=complete_url(url), **known, **options)


@contextmanager
def expected_form(url: object) -> Iterator[None]:
    """Raises ClientError if what is read of an answer has another form than that of a Polyhead server."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise ClientError(f"{url} answers in another form than a Polyhead server ({reason})") from None


def read_text(value: Any) -> str:
    """A text of an answer.  Raises TypeError for another value, ValueError for text that cannot be written."""
    if not isinstance(value, str):
        raise TypeError(f"a {type(value).__name__} stands where a text belongs")
    value.encode()
    return value


def complete_url(url: str) -> str:
    """`url` with http:// before it if it names no scheme."""
    return url if "://" in url else f"http://{url}"


def chunk_texts(chunk: Mapping[str, Any]) -> list[str]:
    """The texts in one chunk of a stream.  Raises ClientError if the chunk is an error."""
    if "error" in chunk:
        raise ClientError(str(chunk["error"]["message"]))
    return [read_text(choice["delta"].get("content") or "") for choice in chunk["choices"]]


def error_message(response: httpx.Response) -> str:
    """Return the error message of a response, in any of the server's dialects."""
    try:
        error = response.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return f"{response.url} answered {response.status_code}, and it is no error of a Polyhead server"

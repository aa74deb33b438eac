"""The HTTP client of the command line.  Every failure is raised as a ClientError with one sentence."""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

TIMEOUT = httpx.Timeout(5.0, read=600.0)  # seconds; a long answer on a slow machine takes minutes


class ClientError(Exception):
    """A failure whose message is shown to the user as it is."""


class ApiClient:
    """A client of the server at `url`, by HTTP unless it says otherwise.  If `key` is empty, none is sent."""

    def __init__(self, url: str, key: str) -> None:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.url = complete_url(url)
        self.finish = ""  # why the last answer ended, once it has
        self._http = httpx.Client(base_url=self.url, headers=headers, timeout=TIMEOUT)

    def find_model(self, task: str) -> str:
        """Return the name of the first ready model for `task`."""
        served = self._request("GET", "/v1/models")["data"]
        names = [model["id"] for model in served if model["task"] == task]
        if not names:
            others = ", ".join(model["id"] for model in served) or "none is ready yet"
            raise ClientError(f"{self.url} serves no model to {task}; it serves: {others}")
        return str(names[0])

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
                    chunk = json.loads(line.removeprefix("data: "))
                    yield from chunk_texts(chunk)
                    self.finish = next((each.get("finish_reason") or "" for each in chunk["choices"]), self.finish)

    def classify(self, model: str, text: str) -> list[tuple[str, float]]:
        """Return labels and scores, the highest score first."""
        answer = self._request("POST", f"/models/{model}/predict", {"inputs": text})
        return [(prediction["label"], prediction["score"]) for prediction in answer]

    def embed(self, model: str, text: str) -> list[float]:
        answer = self._request("POST", "/v1/embeddings", {"model": model, "input": text})
        return list(answer["data"][0]["embedding"])

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


def complete_url(url: str) -> str:
    """`url` with http:// before it if it names no scheme."""
    return url if "://" in url else f"http://{url}"


def chunk_texts(chunk: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts in one chunk of a stream.  Raises ClientError if the chunk is an error."""
    if "error" in chunk:
        raise ClientError(str(chunk["error"]["message"]))
    for choice in chunk["choices"]:
        yield choice["delta"].get("content") or ""


def error_message(response: httpx.Response) -> str:
    """Return the error message of a response, in any of the server's dialects."""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answered {response.status_code}, and it is no error of a Polyhead server"
    return str(error["message"] if isinstance(error, dict) else error)

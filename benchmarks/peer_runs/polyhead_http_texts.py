"""Polyhead over HTTP, by the client of the standard library, on the same cores; the memory is the server's."""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

from benchmarks.peer_runs.text_workload import Answer, reading
from benchmarks.peer_runs.workload import Run, asked, print_figures
from benchmarks.serving import serve

NAME = "measured"
PREDICT = f"/models/{NAME}/predict"


class Client:
    """One connection, kept open."""

    def __init__(self, url: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=300)

    def get(self, path: str) -> Any:
        self._connection.request("GET", path)
        return json.loads(self._connection.getresponse().read())

    def post(self, path: str, body: object, accept: str = "application/json") -> http.client.HTTPResponse:
        """The answer, its body unread.  SystemExit if it is an error."""
        headers = {"Content-Type": "application/json", "Accept": accept}
        self._connection.request("POST", path, json.dumps(body), headers)
        response = self._connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"{path} answered {response.status}: {response.read()[:200]!r}")
        return response

    def embed(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = json.loads(self.post("/embed", {"inputs": texts}).read())
        return vectors

    def label(self, texts: list[str]) -> list[tuple[str, float]]:
        answers = json.loads(self.post(PREDICT, {"inputs": [[text] for text in texts]}).read())
        return [(likeliest["label"], likeliest["score"]) for likeliest, *_ in answers]


def flags(run: Run) -> tuple[str, ...]:
    """What `polyhead serve` is told."""
    how = ("--precision", run.precision, "--threads", str(run.threads), "--log-level", "warning")
    return (f"{NAME}={run.model}", *how)


def main() -> None:
    run = asked()
    with serve(*flags(run)) as server:
        client = Client(server.url)
        classifies = "classifier" in client.get("/info")["model_type"]
        answer: Answer = client.label if classifies else client.embed
        print_figures(reading(answer, pid=server.pid))


if __name__ == "__main__":
    main()

"""The requests of README and the guides, sent to tiny networks under the names of the quick start: each is accepted,
and its answer has the fields that the page shows. `make docs-check` compares whole answers with the real networks."""

import json
import re
import shlex

import httpx
import pytest

from docs.site_build.command_blocks import Command, runnable
from tests.support.places import ROOT
from tests.support.processes import PATIENCE, Process

PAGES = (
    "README.md",
    "docs/get-started.md",
    "docs/guides/classify.md",
    "docs/guides/embed-and-rerank.md",
    "docs/guides/chat.md",
    "docs/decisions-api.md",
)
SHOWN_ADDRESS = "http://127.0.0.1:8000"
REQUESTS = {
    f"{page}:{command.line}": command
    for page in PAGES
    for command in runnable((ROOT / page).read_text("utf-8"))
    if command.text.startswith("curl ")
}


def send(url: str, command: Command) -> httpx.Response:
    """What `curl -s URL` or `curl -s URL -H HEADER -d BODY` sends."""
    words = shlex.split(command.text.replace("\\\n", " "))
    assert words[:2] == ["curl", "-s"]
    assert words[2].startswith(SHOWN_ADDRESS)
    address = words[2].replace(SHOWN_ADDRESS, url)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    if not options:
        return httpx.get(address, timeout=PATIENCE, verify=False)
    assert options.keys() == {"-H", "-d"}
    header = dict([options["-H"].split(": ")])
    return httpx.post(address, headers=header, content=options["-d"], timeout=PATIENCE, verify=False)


@pytest.mark.parametrize("place", REQUESTS)
def test_a_request_of_a_page_is_answered_as_shown(place: str, tiny_quick_start: Process) -> None:
    command = REQUESTS[place]
    shown = command.output or ""
    answer = send(tiny_quick_start.url, command)
    assert answer.is_success is not shown.startswith('{"error"'), answer.text
    assert isinstance(answer.json(), list) is shown.startswith("[")
    for field in re.findall(r'"(\w+)":', shown):
        assert f'"{field}":' in answer.text


def test_every_kind_of_request_is_in_readme() -> None:
    sent = [shlex.split(command.text)[2] for place, command in REQUESTS.items() if place.startswith("README")]
    ends = (
        "/v1/chat/completions",
        "/predict",
        "/v1/systemone",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/explain",
        "/models/minilm/similarity",
    )
    assert sent == [SHOWN_ADDRESS + end for end in ends]
    bodies = [shlex.split(command.text)[-1] for command in REQUESTS.values() if " -d " in command.text]
    assert all(json.loads(body) for body in bodies)

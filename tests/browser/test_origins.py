"""Pages of other origins in a real browser: what is blocked, and what `cors_origins` permits.

A page of another origin is served on another port of this machine.  A page after DNS rebinding has the name and the
port of the server itself as its origin; the browser resolves that name to 127.0.0.1.
"""

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.support.processes import Process

KEY = "open-sesame"
TIMEOUT_MS = 60_000  # milliseconds
PAGE = b"<!doctype html><title>Another page</title><h1>Another page</h1>"
# Attacks of a page. Each script receives the server's address and returns how it ended.
GET = """async (server) => {
  try { return (await fetch(`${server}/v1/models`)).status; } catch (error) { return error.name; }
}"""
JSON = """async (server) => {
  const headers = { "Content-Type": "application/json" };
  const body = JSON.stringify({ inputs: "Good." });
  try { return (await fetch(`${server}/predict`, { method: "POST", headers, body })).status; }
  catch (error) { return error.name; }
}"""
BLIND = """async (server) => {
  const sent = [JSON.stringify({ inputs: "Good." }), new Blob([JSON.stringify({ inputs: "Good." })])];
  const ends = [];
  for (const body of [...sent, new TextEncoder().encode(sent[0])]) {
    ends.push((await fetch(`${server}/predict`, { method: "POST", mode: "no-cors", body })).type);
  }
  navigator.sendBeacon(`${server}/predict`, sent[0]);
  return ends.join(" ");
}"""
PICTURE = """(server) => new Promise((done) => {
  const image = new Image();
  image.onload = () => done("load");
  image.onerror = () => done("error");
  image.src = `${server}/web/icon.svg`;
})"""
SCRIPT = """(server) => new Promise((done) => {
  const script = document.createElement("script");
  script.type = "module";
  script.onload = () => done("load");
  script.onerror = () => done("error");
  script.src = `${server}/web/dom.js`;
  document.head.append(script);
})"""
STREAM = """(server) => new Promise((done) => {
  const source = new EventSource(`${server}/readyz`);
  source.onopen = () => done("open");
  source.onerror = () => done("error");
})"""
FORM = """(server) => {
  const form = document.createElement("form");
  Object.assign(form, { method: "POST", action: `${server}/predict`, enctype: "text/plain" });
  const field = document.createElement("input");
  Object.assign(field, { name: '{"inputs": "Good.", "x', value: '": 1}' });
  form.append(field);
  document.body.append(form);
  form.submit();
}"""
ATTACKS = {
    "fetch": (GET, "TypeError"),
    "fetch with a preflight": (JSON, "TypeError"),
    "blind requests": (BLIND, "opaque opaque opaque"),
    "a picture": (PICTURE, "error"),
    "a script": (SCRIPT, "error"),
    "a stream of events": (STREAM, "error"),
}


class ForeignPage(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(PAGE)))
        self.end_headers()
        self.wfile.write(PAGE)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@pytest.fixture(scope="module")
def other_origins() -> Iterator[list[str]]:
    """Two origins that are not the server's."""
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), ForeignPage) for _ in range(2)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}" for server in servers]
    for server in servers:
        server.shutdown()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Callable[[str], Page]]:
    contexts = []

    def go(address: str) -> Page:
        contexts.append(browser.new_context())
        contexts[-1].set_default_timeout(TIMEOUT_MS)
        page = contexts[-1].new_page()
        page.goto(address)
        return page

    yield go
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def open_server(tiny_classifier: Path) -> Iterator[Process]:
    yield from serving(f"judge={tiny_classifier}")


@pytest.fixture(scope="module")
def shared(tiny_classifier: Path, tiny_generator: Path, other_origins: list[str]) -> Iterator[Process]:
    """A server with a key; `cors_origins` permits the first of the two other origins."""
    yield from serving(
        f"judge={tiny_classifier}", f"chat={tiny_generator}", "--api-key", KEY, "--cors-origins", other_origins[0]
    )


def serving(*flags: str) -> Iterator[Process]:
    process = Process(*flags)
    try:
        process.ready()
        yield process
    finally:
        process.stop()


def answered_count(server: Process) -> float:
    """The number of requests that a model has answered."""
    return server.rest().total("requests_total", outcome="done")


def refused_count(server: Process) -> float:
    codes = ("origin_not_allowed", "misdirected_request", "unsupported_media_type")
    return sum(server.page.total("rejections_total", code=code) for code in codes)


@pytest.mark.parametrize("name", ATTACKS)
def test_attacks_of_a_page_of_another_origin_fail(
    opened: Callable[[str], Page], open_server: Process, other_origins: list[str], name: str
) -> None:
    attack, end = ATTACKS[name]
    before, refusals = answered_count(open_server), refused_count(open_server)
    assert opened(other_origins[0]).evaluate(attack, open_server.url) == end
    open_server.until(lambda: refused_count(open_server) > refusals)
    assert answered_count(open_server) == before


def test_a_form_of_another_origin_is_refused(
    opened: Callable[[str], Page], open_server: Process, other_origins: list[str]
) -> None:
    before, page = answered_count(open_server), opened(other_origins[0])
    with page.expect_response(f"{open_server.url}/predict") as answer:
        page.evaluate(FORM, open_server.url)
    assert answer.value.status == 403
    assert answered_count(open_server) == before


def test_no_page_is_framed_by_another(
    opened: Callable[[str], Page], open_server: Process, other_origins: list[str]
) -> None:
    for path in ("/", "/docs"):
        page = opened(other_origins[0])
        with page.expect_response(f"{open_server.url}{path}") as answer:
            page.evaluate(
                "(address) => document.body.append(Object.assign(document.createElement('iframe'), { src: address }))",
                open_server.url + path,
            )
        assert answer.value.status == 403
        assert answer.value.request.frame != page.main_frame
        page.frames[1].wait_for_load_state()
        assert not page.frames[1].locator("#main").count()


def test_a_link_on_another_page_leads_to_the_playground(
    opened: Callable[[str], Page], open_server: Process, other_origins: list[str]
) -> None:
    page = opened(other_origins[0])
    page.evaluate(
        """(address) => document.body.append(Object.assign(document.createElement("a"),
             { href: address, textContent: "There" }))""",
        open_server.url,
    )
    page.get_by_role("link", name="There").click()
    expect(page.locator("#tabs")).to_be_visible()


def test_dns_rebinding_fails(browser: Browser, open_server: Process) -> None:
    """The page has the origin that it requests, so only the header Host distinguishes it from the server's pages."""
    rebound = open_server.url.replace("127.0.0.1", "rebound.example")
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{rebound}/livez")  # whatever the answer is, scripts that run here have its origin
    assert page.evaluate("() => location.origin") == rebound
    before = answered_count(open_server)
    assert page.evaluate(GET, rebound) == 421
    assert page.evaluate(JSON, rebound) == 421
    assert page.evaluate(BLIND, rebound) == "basic basic basic"
    assert [page.evaluate(attack, rebound) for attack in (PICTURE, SCRIPT, STREAM)] == ["error"] * 3
    assert page.goto(f"{rebound}/").status == 421  # type: ignore[union-attr]
    assert answered_count(open_server) == before
    context.close()


# What cors_origins allows

ALLOWED = """async ([server, key]) => {
  const headers = { "Content-Type": "application/json", Authorization: `Bearer ${key}`, "X-Request-Id": "from-a-page" };
  const called = (path, body) => fetch(server + path, { method: "POST", headers, body: JSON.stringify(body) });
  const models = await (await fetch(`${server}/v1/models`, { headers })).json();
  const predicted = await called("/predict", { inputs: "Good." });
  const chat = { model: "chat", messages: [{ role: "user", content: "Hello" }], max_tokens: 4, stream: true };
  const streamed = await called("/v1/chat/completions", chat);
  const pieces = [];
  const reader = streamed.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) pieces.push(value);
  const wrong = await called("/v1/completions", { model: "chat" });
  headers.Authorization = "Bearer wrong";
  const unknown = await called("/predict", { inputs: "Good." });
  return {
    models: models.data.map((each) => each.id),
    statuses: [predicted, streamed, wrong, unknown].map((each) => each.status),
    id: predicted.headers.get("x-request-id"),
    labels: (await predicted.json()).length,
    stream: pieces.join(""),
    sentences: [(await wrong.json()).error.message, (await unknown.json()).error],
  };
}"""


def test_a_page_of_an_allowed_origin_uses_everything(
    opened: Callable[[str], Page], shared: Process, other_origins: list[str]
) -> None:
    found = opened(other_origins[0]).evaluate(ALLOWED, [shared.url, KEY])
    assert found["models"] == ["judge", "chat"]
    assert found["statuses"] == [200, 200, 400, 401]
    assert found["id"] == "from-a-page"
    assert found["labels"] > 1
    assert found["stream"].endswith("data: [DONE]\n\n")
    assert found["sentences"][0].startswith("prompt: ")
    assert found["sentences"][1] == "the key in the header Authorization is not this server's"
    assert any(line["message"].startswith("OPTIONS /predict 204") for line in shared.lines), "a preflight"


def test_a_page_of_an_origin_that_is_not_allowed_is_refused(
    opened: Callable[[str], Page], shared: Process, other_origins: list[str]
) -> None:
    page = opened(other_origins[1])
    assert page.evaluate(GET, shared.url) == "TypeError"
    assert page.evaluate(JSON, shared.url) == "TypeError"
    before = answered_count(shared)
    assert page.evaluate(BLIND, shared.url) == "opaque opaque opaque"
    assert answered_count(shared) == before

"""The playground in a real browser with real servers: `make browser`.

Chromium is that of the system, or the one that POLYHEAD_CHROMIUM names. Networks with heads that the quick start
lacks are those that recipes left under runs/, or else results of the same recipes in their smoke form. Messages on
the console of a page and addresses of its requests are checked after its test."""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playground import Visit
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, sync_playwright

from polyhead.service.config.settings import default_model_dir
from polyhead.service.runtime import quickstart
from tests.support import checkpoints
from tests.support.processes import Process
from tests.support.recipes import tried

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.pop("POLYHEAD_CHROMIUM", "")  # no setting of a server
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP rebound.example 127.0.0.1",  # a name that resolves to this machine
)
SIZE = {"width": 1100, "height": 760}
PATIENCE_MS = 60_000
LARGEST_PICTURE = 150_000  # bytes
# The served models, and the recipe of each.
RECIPES = {
    "tags": "bert-tags",
    "span": "bert-span",
    "pair": "bert-pair",
    "fill": "bert",
    "translator": "transformer",
    "recurrent": "luong-dot",
    "writer": "gpt",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pictures", default="", help="folder that screenshots are written to")


@dataclass
class Watch:
    """Errors and foreign requests of a page; `expected` may be on its console."""

    origin: str
    expected: str = ""
    said: list[str] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)

    def record_message(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.said.append(message.text)

    def record_error(self, error: object) -> None:
        self.said.append(str(error))

    def record_request(self, request: Request) -> None:
        self.asked.append(request)

    def check(self) -> None:
        unexpected = [said for said in self.said if not (self.expected and re.search(self.expected, said))]
        assert not unexpected, "unexpected messages on the console"
        places = {"{0.scheme}://{0.netloc}".format(urlsplit(request.url)) for request in self.asked}
        assert places == {self.origin}, "a request left the origin"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = CHROMIUM or next(filter(None, map(shutil.which, NAMES)), "")
    if not Path(found or "missing").exists():
        pytest.exit("no Chromium: install the system's (chromium), or let POLYHEAD_CHROMIUM be the path of one", 3)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=FLAGS)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages of a server; `expected` is a pattern of allowed messages on the console."""
    opened: list[tuple[Page, Watch]] = []

    def go(server: Process, path: str = "/", *, expected: str = "", scheme: str = "light") -> Page:
        context = browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        page, watch = context.new_page(), Watch(server.url, expected)
        page.on("console", watch.record_message)
        page.on("pageerror", watch.record_error)
        page.on("request", watch.record_request)
        opened.append((page, watch))
        page.goto(server.url + path)
        return page

    yield go
    for page, watch in opened:
        page.context.close()
        watch.check()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with a model of every head."""
    folder = tmp_path_factory.mktemp("runs")
    models = quickstart.sources(default_model_dir()) | {
        name: trained(recipe, folder) for name, recipe in RECIPES.items()
    }
    models["ranker"] = str(checkpoints.ranker(folder / "ranker"))
    yield from serving(*(f"{name}={source}" for name, source in models.items()), "--cache-tokens", "8192")


@pytest.fixture(scope="session")
def locked(tiny_classifier: Path, tiny_embedder: Path) -> Iterator[Process]:
    """A server that requires keys: `open-sesame`, and `master` for administration."""
    keys = ("--api-key", "open-sesame", "--admin-key", "master", "--model-root", str(tiny_embedder.parent))
    yield from serving(f"judge={tiny_classifier}", *keys)


def serving(*flags: str) -> Iterator[Process]:
    process = Process(*flags)
    try:
        process.ready()
        yield process
    finally:
        process.stop()


def trained(recipe: str, folder: Path) -> str:
    """The result of a complete run of the recipe, or else of a smoke run."""
    whole = ROOT / "runs" / recipe / "model"
    return str(whole if whole.is_dir() else tried([recipe], folder) / recipe / "model")


@pytest.fixture(scope="session")
def picture(request: pytest.FixtureRequest) -> Callable[[Page, str], None]:
    """Saves a screenshot, if a folder for them is set."""
    folder = str(request.config.getoption("--pictures"))

    def take(page: Page, name: str) -> None:
        if folder:
            Path(folder).mkdir(parents=True, exist_ok=True)
            taken = page.screenshot(path=Path(folder) / f"{name}.png")
            assert len(taken) < LARGEST_PICTURE

    return take

"""The playground in a real browser, with real servers: `make browser`.

Chromium is the system's, or the one that POLYHEAD_CHROMIUM names.  Networks with heads that the quick start does not
have are those that recipes wrote to runs/, or else those of the same recipes' smoke runs.  The console messages of
every page and the origins of its requests are checked when its test ends.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

from polyhead.service.config.settings import default_model_dir
from polyhead.service.runtime import quickstart
from tests.browser.playground import Visit
from tests.support import checkpoints, label_models
from tests.support.calibrations import MEASURES, one_map, write_calibration
from tests.support.processes import Process
from tests.support.recipes import tried

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.pop("POLYHEAD_CHROMIUM", "")  # removed, since the servers would reject it as an unknown setting
NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--host-resolver-rules=MAP rebound.example 127.0.0.1",  # a name that resolves to this machine after DNS rebinding
)
SIZE = {"width": 1100, "height": 760}
PATIENCE_MS = 60_000
expect.set_options(timeout=PATIENCE_MS)  # a busy machine is slow
LARGEST_PICTURE = 150_000  # bytes
# Served models, and the recipe that trains each.
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
class PageLog:
    """Console messages, errors and requests of a page; `expected` is a pattern of permitted console messages."""

    origin: str
    expected: str = ""
    messages: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)

    def on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.messages.append(message.text)

    def on_error(self, error: object) -> None:
        self.messages.append(str(error))

    def on_request(self, request: Request) -> None:
        self.requests.append(request)

    def check(self) -> None:
        unexpected = [text for text in self.messages if not (self.expected and re.search(self.expected, text))]
        assert not unexpected, "unexpected messages on the console"
        origins = {"{0.scheme}://{0.netloc}".format(urlsplit(request.url)) for request in self.requests}
        assert origins == {self.origin}, "a request left the origin"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    found = CHROMIUM or next(filter(None, map(shutil.which, NAMES)), "")
    if not Path(found or "missing").exists():
        pytest.exit("no Chromium: install the system's (chromium), or let POLYHEAD_CHROMIUM be the path of one", 3)
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=found, args=FLAGS)


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens pages of a server; `expected` is a pattern of permitted console messages."""
    opened: list[tuple[Page, PageLog]] = []

    def go(server: Process, path: str = "/", *, expected: str = "", scheme: str = "light") -> Page:
        context = browser.new_context(viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
        context.set_default_timeout(PATIENCE_MS)
        context.grant_permissions(["clipboard-read", "clipboard-write"], origin=server.url)
        page, log = context.new_page(), PageLog(server.url, expected)
        page.on("console", log.on_console)
        page.on("pageerror", log.on_error)
        page.on("request", log.on_request)
        opened.append((page, log))
        page.goto(server.url + path)
        return page

    yield go
    for page, log in opened:
        page.context.close()
        log.check()


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with one model for each kind of head."""
    folder = tmp_path_factory.mktemp("runs")
    models = quickstart.sources(default_model_dir()) | {
        name: trained(recipe, folder) for name, recipe in RECIPES.items()
    }
    models["ranker"] = str(checkpoints.ranker(folder / "ranker"))
    models |= {name: str(label_models.make_variant(name, folder / name)) for name in ("texts", "spans")}
    yield from serving(*(f"{name}={source}" for name, source in models.items()), "--cache-tokens", "8192")


@pytest.fixture(scope="session")
def calibrated(tiny_classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server with a model `judge`, whose choices and predicates are calibrated; the measures of the latter have no
    bins.
    """
    maps = one_map(), one_map(kind="predicate", before=MEASURES, after=MEASURES)
    path = write_calibration(tmp_path_factory.mktemp("calibration") / "judge.json", tiny_classifier, *maps)
    yield from serving(f"judge={tiny_classifier}", "--calibrations", f"judge={path}")


@pytest.fixture(scope="session")
def locked(tiny_classifier: Path, tiny_embedder: Path) -> Iterator[Process]:
    """A server with the API key `open-sesame` and the admin key `master`."""
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
    """The model folder of a full run where there is one, else of a smoke run."""
    return str(full_run(recipe) if full_run(recipe).is_dir() else tried([recipe], folder) / recipe / "model")


def full_run(recipe: str) -> Path:
    return ROOT / "runs" / recipe / "model"


@pytest.fixture(scope="session")
def picture(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Takes a screenshot if --pictures names a folder.  `recipe`: of the model on it, whose smoke run answers nonsense,
    which is no picture for docs/.
    """
    folder = str(request.config.getoption("--pictures"))

    def take(page: Page, name: str, recipe: str = "") -> None:
        if folder and (not recipe or full_run(recipe).is_dir()):
            Path(folder).mkdir(parents=True, exist_ok=True)
            taken = page.screenshot(path=Path(folder) / f"{name}.png")
            assert len(taken) < LARGEST_PICTURE

    return take

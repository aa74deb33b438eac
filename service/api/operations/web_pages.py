"""The playground at `/` with its files under `/web`, and the reference of routes at `/docs` with its own under `/docs`.

Knows no model and no key: whatever the page shows it asks of the API, as anybody would.  The one idea: what may be
served is a table of the files that were there at the start, so no path of a request ever reaches the disk.
"""

import asyncio
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from ...concurrency.outcome import run_on_thread
from ...core.errors import NotFound
from .health import app_state

WEB_FOLDER = Path(__file__).parents[2] / "web"
INDEX, REFERENCE = "index.html", "docs.html"
# What the reference is made of; it stays where the playground is switched off.
REFERENCE_FILES = frozenset(
    {"docs.js", "schema.js", "docs.css", "style.css", "api.js", "copy.js", "dom.js", "theme.js", "icon.svg"}
)
MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing that a model or a user writes can become a script, and nothing of the page leads to another origin.
CONTENT_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",  # kept, and asked for again: a newer server has newer files
    "Content-Security-Policy": CONTENT_POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
QUALITY = re.compile(r"q\s*=\s*([01](?:\.\d{0,3})?)")
router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class Page:
    """A file as it is sent; `tag` is another whenever its content is."""

    content: bytes
    media_type: str
    etag: str


class CachedDocument:
    """The page of what `make` returns as JSON: made once, on a thread, since it takes a tenth of a second and more."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._lock = make, asyncio.Lock()
        self._page: Page | None = None

    async def page(self) -> Page:
        async with self._lock:
            if self._page is None:
                self._page = await run_on_thread(lambda: make_page(orjson.dumps(self._make()), "application/json"))
            return self._page


def make_page(content: bytes, kind: str) -> Page:
    return Page(content, kind, f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def read_pages(folder: Path) -> Mapping[str, Page]:
    """Those of `folder` that a browser is to have, by name."""
    found = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in MEDIA_TYPES:
            found[path.name] = make_page(path.read_bytes(), MEDIA_TYPES[path.suffix])
    return found


PAGES = read_pages(WEB_FOLDER)


@router.head("/")
@router.get("/")
async def index(request: Request) -> Response:
    """The playground for whoever would rather have HTML; for all others where to begin."""
    if app_state(request).settings.playground and prefers_html(request.headers.get("accept", "")):
        return page_response(request, PAGES[INDEX], "Accept")
    links = {"name": "polyhead", "docs": "/docs", "openapi": "/openapi.json", "health": "/readyz"}
    return JSONResponse(links, headers={"Vary": "Accept"})


@router.head("/web/{name}")
@router.get("/web/{name}")
async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if not app_state(request).settings.playground:
        raise NotFound("this server has no playground: its setting playground is off")
    if name not in PAGES:
        raise NotFound(f"the playground has no file {name[:60]!r}")
    return page_response(request, PAGES[name])


@router.head("/docs")
@router.get("/docs")
async def reference(request: Request) -> Response:
    """Needs no key: it says nothing that is not in the package.  It reads /openapi.json, which does."""
    return page_response(request, PAGES[REFERENCE])


@router.head("/openapi.json")
@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The description of all routes for programs, made when it is first asked for."""
    return page_response(request, await request.app.state.description.page())


@router.head("/docs/{name}")
@router.get("/docs/{name}")
async def reference_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in REFERENCE_FILES:
        raise NotFound(f"the reference of routes has no file {name[:60]!r}")
    return page_response(request, PAGES[name])


def page_response(request: Request, page: Page, vary: str = "") -> Response:
    """The file, or that the one that the browser has is still the same (RFC 9110, 13.1.2)."""
    headers = {**SECURITY_HEADERS, "ETag": page.etag} | ({"Vary": vary} if vary else {})
    if page.etag in read_etags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(page.content, headers=headers, media_type=page.media_type)


def read_etags(given: str) -> set[str]:
    """Of a header If-None-Match; weak ones count as they are, which is how it compares."""
    return {tag.strip().removeprefix("W/") for tag in given.split(",")}


def prefers_html(accepted: str) -> bool:
    """Whether a header Accept names HTML, and no JSON that it would rather have; `*/*` names nothing."""
    weights = {}
    for part in accepted.lower().split(","):
        kind, _, options = part.partition(";")
        weight = QUALITY.search(options)
        weights[kind.strip()] = float(weight[1]) if weight else 1.0
    return weights.get("text/html", 0.0) > weights.get("application/json", 0.0)

"""The playground at `/` with its files under `/web`, and the API reference at `/docs` and `/redoc` with its
files under `/docs`.

The pages use the public API like any other client.  Only files that were read at the start are served, so no request
path ever reaches the disk.
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
# Files of the API reference, which is served even if the playground is switched off.
REFERENCE_FILES = frozenset(
    {"docs.js", "schema.js", "docs.css", "style.css", "api.js", "copy.js", "dom.js", "theme.js", "icon.svg"}
)
MEDIA_TYPES: Mapping[str, str] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# No text of a model or a user can run as a script, and the page loads nothing from another origin.
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
    "Cache-Control": "no-cache",  # cached, but revalidated: a newer server has newer files
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
    """A file as it is sent; `etag` changes with its content."""

    content: bytes
    media_type: str
    etag: str


class CachedDocument:
    """A page with the JSON of what `make` returns.  It is made once, on a thread, since it takes more than 0.1 s."""

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
    """The files of `folder` and of the folders in it that browsers may load, by their paths in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            found[path.relative_to(folder).as_posix()] = make_page(path.read_bytes(), MEDIA_TYPES[path.suffix])
    return found


PAGES = read_pages(WEB_FOLDER)


@router.head("/")
@router.get("/")
async def index(request: Request) -> Response:
    """The playground for clients that prefer HTML; for all others JSON with the addresses to begin with."""
    if app_state(request).settings.playground and prefers_html(request.headers.get("accept", "")):
        return page_response(request, PAGES[INDEX], "Accept")
    links = {"name": "polyhead", "docs": "/docs", "openapi": "/openapi.json", "health": "/readyz"}
    return JSONResponse(links, headers={"Vary": "Accept"})


@router.head("/web/{name:path}")
@router.get("/web/{name:path}")
async def file(request: Request) -> Response:
    name = request.path_params["name"]
    if not app_state(request).settings.playground:
        raise NotFound("this server has no playground: its setting playground is off")
    if name not in PAGES:
        raise NotFound(f"the playground has no file {name[:60]!r}")
    return page_response(request, PAGES[name])


@router.head("/docs")
@router.get("/docs")
@router.head("/redoc")
@router.get("/redoc")
async def reference(request: Request) -> Response:
    """Needs no key: it contains nothing that is not in the package.  It reads /openapi.json, which may need one."""
    return page_response(request, PAGES[REFERENCE])


@router.head("/openapi.json")
@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """The OpenAPI document, made at the first request."""
    return page_response(request, await request.app.state.description.page())


@router.head("/docs/{name}")
@router.get("/docs/{name}")
async def reference_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in REFERENCE_FILES:
        raise NotFound(f"the reference of routes has no file {name[:60]!r}")
    return page_response(request, PAGES[name])


def page_response(request: Request, page: Page, vary: str = "") -> Response:
    """The file, or 304 if the browser has the same version (RFC 9110, section 13.1.2)."""
    headers = {**SECURITY_HEADERS, "ETag": page.etag} | ({"Vary": vary} if vary else {})
    if page.etag in read_etags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    return Response(page.content, headers=headers, media_type=page.media_type)


def read_etags(given: str) -> set[str]:
    """The tags of a header If-None-Match; weak tags are compared like strong ones."""
    return {tag.strip().removeprefix("W/") for tag in given.split(",")}


def prefers_html(accepted: str) -> bool:
    """Whether a header Accept names HTML with a higher weight than JSON; `*/*` names neither."""
    weights = {}
    for part in accepted.lower().split(","):
        kind, _, options = part.partition(";")
        weight = QUALITY.search(options)
        weights[kind.strip()] = float(weight[1]) if weight else 1.0
    return weights.get("text/html", 0.0) > weights.get("application/json", 0.0)

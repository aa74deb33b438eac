"""How the web pages are served: which files, with which headers, to which clients.  tests/browser tests the pages."""

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi import FastAPI

from polyhead.service.api.operations.web_pages import (
    PAGES,
    REFERENCE_FILES,
    WEB_FOLDER,
    CachedDocument,
    Page,
    prefers_html,
    read_pages,
)
from tests.service.api.test_app import call
from tests.support.scripted import Registry, application, echo, model

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
KEY = {"Authorization": "Bearer s3cret"}
USED = re.compile(r"""(?:from\s+"\./|(?:src|href)="(?:web|docs)/)([^"]+)""")
ADDRESS = re.compile(r"""https?://[^"'\s]+|(?<=["'(])//[^"'\s]+""")
STYLE = re.compile(r"\sstyle\s*=\s*[\"']|<style|javascript:|\son\w+\s*=\s*[\"']")


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return application(Registry([], echo))


def test_browsers_get_the_page_and_programs_get_json(app: FastAPI) -> None:
    page = call(app, "GET", "/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.content == (WEB_FOLDER / "index.html").read_bytes()
    assert page.headers["vary"] == "Accept"
    for accepted in ("*/*", "application/json", "", "text/plain, */*"):
        answer = call(app, "GET", "/", headers={"Accept": accepted})
        assert answer.json()["docs"] == "/docs"
        assert answer.headers["vary"] == "Accept"
    assert call(app, "HEAD", "/", headers=BROWSER).headers["content-type"] == "text/html; charset=utf-8"


@pytest.mark.parametrize(
    ("accepted", "html"),
    [
        ("text/html", True),
        ("text/html;q=0.5, application/json", False),
        ("application/json;q=0.5, TEXT/HTML ; q=0.9", True),
        ("text/html, application/json", False),
        ("text/html;q=0", False),
        ("text/*", False),
        ("*/*", False),
    ],
)
def test_html_is_sent_if_it_is_preferred(accepted: str, html: bool) -> None:
    assert prefers_html(accepted) is html


def test_every_file_has_its_type_and_is_cached(app: FastAPI) -> None:
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for path in (path for path in WEB_FOLDER.rglob("*") if path.is_file() and path.suffix != ".txt"):
        name = path.relative_to(WEB_FOLDER).as_posix()
        answer = call(app, "GET", f"/web/{name}")
        assert answer.content == path.read_bytes()
        assert answer.headers["content-type"] == (kinds | {".html": "text/html; charset=utf-8"})[path.suffix]
        assert answer.headers["cache-control"] == "no-cache"
        tag = answer.headers["etag"]
        for given in (tag, f'"other", W/{tag}'):
            again = call(app, "GET", f"/web/{name}", headers={"If-None-Match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert call(app, "GET", f"/web/{name}", headers={"If-None-Match": '"other"'}).status_code == 200
        assert call(app, "HEAD", f"/web/{name}").headers["etag"] == tag
    assert len({page.etag for page in PAGES.values()}) == len(PAGES)


def test_the_content_security_policy_allows_own_files_only(app: FastAPI) -> None:
    for path in ("/", "/web/index.html", "/web/main.js", "/docs", "/docs/docs.js"):
        headers = call(app, "GET", path, headers=BROWSER).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "img-src": "'self' data:",
            "connect-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
        }
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["x-frame-options"] == "DENY"
        assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapi%2fweb.py", "%2e%2e/settings.py", "index.html/", "main.js%00"])
def test_other_files_are_not_found(app: FastAPI, name: str) -> None:
    answer = call(app, "GET", f"/web/{name}")
    assert answer.status_code == 404
    assert "import" not in answer.text


def test_the_playground_can_be_disabled() -> None:
    app = application(Registry([], echo), playground=False)
    assert call(app, "GET", "/", headers=BROWSER).json()["docs"] == "/docs"
    for name in PAGES:
        answer = call(app, "GET", f"/web/{name}")
        assert answer.status_code == 404
        assert "playground" in answer.json()["error"]["message"]


def test_the_reference_page_uses_files_of_the_package_only() -> None:
    """It loads nothing from another origin, needs no key, and is served even if the playground is switched off."""
    app = application(Registry([], echo), playground=False, api_key="s3cret")
    page = call(app, "GET", "/docs", headers=BROWSER)
    assert page.content == (WEB_FOLDER / "docs.html").read_bytes()
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert call(app, "HEAD", "/docs").headers["etag"] == page.headers["etag"]
    for name in REFERENCE_FILES:
        assert call(app, "GET", f"/docs/{name}").content == (WEB_FOLDER / name).read_bytes()
        assert set(ADDRESS.findall((WEB_FOLDER / name).read_text("utf-8"))) <= {"http://www.w3.org/2000/svg"}, name
    for path in ("/docs/main.js", "/docs/index.html", "/docs/oauth2-redirect", "/docs/..%2fapi%2fweb.py"):
        assert call(app, "GET", path).status_code == 404
    assert call(app, "GET", "/redoc").content == page.content
    assert call(app, "GET", "/openapi.json").status_code == 401
    assert "/v1/rerank" in call(app, "GET", "/openapi.json", headers=KEY).json()["paths"]


def test_the_description_is_made_once() -> None:
    made = list[int]()

    async def ask() -> list[Page]:
        description = CachedDocument(lambda: {"made": made.append(1)})
        return await asyncio.gather(*(description.page() for _ in range(10)))

    assert len({page.etag for page in asyncio.run(ask())}) == len(made) == 1
    app = application(Registry([], echo))
    first = call(app, "GET", "/openapi.json")
    assert first.headers["content-type"] == "application/json"
    assert call(app, "GET", "/openapi.json", headers={"If-None-Match": first.headers["etag"]}).status_code == 304
    assert call(app, "HEAD", "/openapi.json").headers["etag"] == first.headers["etag"]


def test_only_files_for_browsers_are_served(tmp_path: Path) -> None:
    for name in ("a.js", "b.py", ".c", "d.css"):
        (tmp_path / name).write_text("x")
    (tmp_path / "inner").mkdir()
    for name in ("e.js", "LICENSE.txt"):
        (tmp_path / "inner" / name).write_text("x")
    assert read_pages(tmp_path).keys() == {"a.js", "d.css", "inner/e.js"}


def test_every_model_describes_its_form(tiny_generator: Path, tiny_classifier: Path) -> None:
    models = [
        model(tiny_generator, "talker", "generate"),
        model(tiny_generator, "writer", "generate", chat=None),
        model(tiny_classifier, "judge", "classify", labels=("entails", "not")),
        model(tiny_classifier, "order", "rank"),
        model(tiny_classifier, "words", "fill"),
        model(tiny_classifier, "texts", "label_texts"),
    ]
    data = call(application(Registry(models, echo)), "GET", "/v1/models").json()["data"]
    known = {one["id"]: (one["task"], one["tasks"][-2:], one["chat"], one["pairs"], one["mask"]) for one in data}
    assert known == {
        "talker": ("generate", ["text-generation", "decisions"], True, "none", ""),
        "writer": ("generate", ["text-generation", "decisions"], False, "none", ""),
        "judge": ("classify", ["zero-shot-classification", "decisions"], False, "possible", ""),
        "order": ("rank", ["text-classification", "decisions"], False, "needed", ""),
        "words": ("fill", ["fill-mask"], False, "none", "[MASK]"),
        "texts": ("label_texts", ["zero-shot-classification", "decisions"], False, "none", ""),
    }
    explained = {one["id"]: (len(one["explain"]), len(one["explain_decisions"])) for one in data}
    assert explained == {
        **dict.fromkeys(("talker", "writer", "judge", "order"), (6, 4)),
        "words": (6, 0),
        "texts": (0, 4),
    }
    assert {tuple(one["labels"]) for one in data} == {(), ("entails", "not")}
    assert {one["max_tokens"] for one in data} == {64}


# Contents of the files


def test_files_are_short_and_name_only_each_other() -> None:
    for path in (path for path in WEB_FOLDER.iterdir() if path.is_file()):
        text = path.read_text("utf-8")
        assert len(text.splitlines()) <= 400, path.name
        assert not STYLE.search(text), f"{path.name} has a style or a script of its own"
        assert "innerHTML" not in text
        assert "insertAdjacentHTML" not in text
        for name in re.findall(USED, text):
            assert name in PAGES, f"{path.name} wants {name}"


def test_the_vendored_library_has_its_licence_and_loads_nothing() -> None:
    [library] = (WEB_FOLDER / "vendor").glob("*.js")
    assert "MIT" in library.read_text("utf-8")[:300]
    assert "Permission is hereby granted" in library.with_suffix(".LICENSE.txt").read_text("utf-8")
    assert not re.search(r"^import|import\(|fetch\(|sourceMappingURL", library.read_text("utf-8"), re.MULTILINE)


def reached(page: str) -> set[str]:
    """The files that `page` uses, including itself."""
    found, left = set[str](), [page]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += re.findall(USED, (WEB_FOLDER / name).read_text("utf-8"))
    return found


def test_every_module_is_reached_from_a_page() -> None:
    assert reached("index.html") | reached("docs.html") == PAGES.keys()
    assert reached("docs.html") == {*REFERENCE_FILES, "docs.html"}


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node")
@pytest.mark.parametrize(("part", "text"), [("a%2Fb", "a/b"), ("%", "%"), ("%zz", "%zz"), ("%ff", "%ff"), ("", "")])
def test_an_address_with_escapes_that_are_not_valid_is_read_as_it_is(part: str, text: str) -> None:
    source = PAGES["dom.js"].content.decode()
    script = f"{source}\nconsole.log(JSON.stringify(decodePart({json.dumps(part)})));"
    ran = subprocess.run(["node", "--input-type=module"], input=script, capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout) == text


def test_pages_decode_no_address_in_another_way() -> None:
    found = [name for name, page in PAGES.items() if b"decodeURI" in page.content]
    assert found == ["dom.js"]
